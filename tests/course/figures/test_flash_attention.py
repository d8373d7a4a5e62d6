"""The drawings of FlashAttention show the states and tiles that they are given."""

from llmlab.course.figures.flash_attention import (
    draw_backward,
    draw_causal_tiles,
    draw_online_softmax,
    draw_tile_loop,
)


def test_a_causal_mask_skips_the_tiles_above_the_diagonal():
    alt = draw_causal_tiles(8, 64).alt
    assert "512 tokens in tiles of 64 × 64: 28 skipped, 8 computed, then masked, 28 computed" in alt


def test_the_states_of_online_softmax_are_those_given():
    alt = draw_online_softmax([1.0, 2.0, 0.0, 3.0], [(2.0, 1.368), (3.0, 1.553)]).alt
    assert "in tiles of 2" in alt and "2.00 and 1.368, 3.00 and 1.553" in alt


def test_scores_are_not_saved():
    assert "never in memory" in draw_backward().alt and "never reach the memory" in draw_tile_loop().alt
