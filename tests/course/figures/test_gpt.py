"""The drawings of the chapter that builds a GPT show the models and the numbers that they are given."""

import torch

from llmlab.course.figures.gpt import (
    Drawn,
    draw_attention,
    draw_groups,
    draw_influence,
    draw_lines,
    draw_mlps,
    draw_model,
    draw_rope,
)

PARTS = {"embedding": "tokens", "norm": "norm", "attention": "heads", "mlp": "MLP", "head": "head"}


def test_a_model_is_drawn_with_and_without_a_position_embedding():
    assert "tokens + positions; then 12 blocks" in draw_model(Drawn("GPT", 12, positions="positions", **PARTS)).alt
    assert "tokens; then 16 blocks" in draw_model(Drawn("Llama", 16, positions="", new=("norm",), **PARTS)).alt


def test_attention_shows_the_weights_of_the_last_row():
    weights = torch.full((4, 4), 0.25)
    assert "last row: 0.25, 0.25, 0.25, 0.25" in draw_attention(torch.zeros(4, 4), weights).alt


def test_influence_counts_pairs():
    alt = draw_influence({"right": torch.ones(3, 3).tril().bool(), "no mask": torch.ones(3, 3).bool()}).alt
    assert "right: 3 pairs with an earlier token, 3 with the same, 0 with a later one" in alt
    assert "no mask: 3 pairs with an earlier token, 3 with the same, 3 with a later one" in alt


def test_mlps_of_two_and_three_matrices():
    assert draw_mlps(768, 3072, 2048).alt.count("4,718,592") == 2


def test_rope_keeps_the_angle_of_a_pair_that_moves_together():
    turns = [10000 ** (-i / 16) for i in range(16)]
    alt = draw_rope(turns, (0, 4, 8), 7, 3, 100).alt
    assert "are 92° apart in pair 4; 100 positions later they are 92° apart" in alt


def test_groups_of_heads():
    assert "shared: 12 query heads, 4 key/value heads" in draw_groups(12, {"shared": 4}).alt


def test_lines_are_means_of_seeds():
    picture = draw_lines({"model": [[4.0, 1.0], [2.0, 3.0]]}, [0, 10], ("bound", 2.5), "step", "loss")
    assert "model: 3 at 0, 2 at 10" in picture.alt and "bound: 2.5 at 0" in picture.alt
