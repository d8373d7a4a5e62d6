"""The drawings of FlashAttention show the states, tiles and seconds that they are given."""

from dataclasses import replace

import llmlab as lab
from llmlab.course.figures.flash_attention import (
    draw_backward,
    draw_causal_tiles,
    draw_online_softmax,
    draw_steps,
    draw_tile_loop,
)
from llmlab.course.job import GPU, MODEL, job


def test_a_causal_mask_skips_the_tiles_above_the_diagonal():
    alt = draw_causal_tiles(8, 64).alt
    assert "512 tokens in tiles of 64 × 64: 28 skipped, 8 computed, then masked, 28 computed" in alt


def test_the_states_of_online_softmax_are_those_given():
    alt = draw_online_softmax([1.0, 2.0, 0.0, 3.0], [(2.0, 1.368), (3.0, 1.553)]).alt
    assert "in tiles of 2" in alt and "2.00 and 1.368, 3.00 and 1.553" in alt


def test_scores_are_not_saved():
    assert "never in memory" in draw_backward().alt and "never reach the memory" in draw_tile_loop().alt


def test_the_bars_are_the_seconds_of_the_estimates():
    run = job("10-flash-attention")
    reports = {name: lab.estimate(MODEL, replace(run, attention=name), GPU) for name in ("eager", "efficient")}
    alt = draw_steps(reports).alt
    assert all(f"= {report.step_seconds:.2f} s" in alt for report in reports.values())
