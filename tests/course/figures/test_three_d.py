"""The drawings on 3D parallelism and on experts show the numbers that they are given."""

import pytest

from llmlab.course.figures import experts
from llmlab.course.figures.three_d import (
    PARTS,
    Choice,
    draw_choices,
    draw_mesh,
    draw_ring_attention,
    draw_steps,
    draw_tokens_and_heads,
)
from llmlab.course.techniques.experts import capacity, route, within_capacity
from llmlab.specs.mesh import ranks_along
from llmlab.specs.run import Training


@pytest.mark.parametrize("sizes", [{"tp": 4, "dp": 32, "pp": 4}, {"tp": 8, "dp": 16, "pp": 4}])
def test_a_mesh_marks_the_groups_of_rank_0(sizes):
    run = Training(**sizes)
    groups = {axis: ranks_along(run, axis) for axis in ("tp", "dp", "pp")}
    alt = draw_mesh(sizes, groups, {axis: f"{axis}: 1 GB" for axis in groups}).alt
    assert "dp: 0 4 8 ... 124" in alt or "dp: 0 8 16 ... 120" in alt
    assert "pp: 0 128 256 384" in alt


def test_choices_name_memory_and_speed():
    choices = {(1, 1): Choice(392.9, 1012, "out of memory"), (1, 2): Choice(74.0, 856, "unknown"),
               (4, 1): Choice(58.1, 823, "fits"), (4, 2): Choice(50.3, 780, "fits")}  # fmt: skip
    assert "tp = 4, pp = 1: 58 GiB, 823 tokens/s, fits" in draw_choices(choices).alt


def test_steps_sum_their_parts():
    step = dict(zip(PARTS, (7.97, 1.0, 0.8, 0.12, 0.05, 0.03), strict=True))
    assert "one: 7.97 + 1.00 + 0.80 + 0.12 + 0.05 + 0.03 = 9.97 s" in draw_steps({"one": step}).alt
    step = dict(zip(experts.PARTS, (741.0, 28.0, 67.0, 13.0, 23.0), strict=True))
    assert "one: 741 + 28 + 67 + 13 + 23 = 872 ms" in experts.draw_steps({"one": step}).alt


def test_context_parallelism_is_drawn():
    assert draw_tokens_and_heads().alt
    ways = {"one chunk": [0, 1, 2, 3], "two chunks": [0, 1, 2, 3, 3, 2, 1, 0]}
    alt = draw_ring_attention({"one chunk": [0.06, 0.19, 0.31, 0.44], "two chunks": [0.25] * 4}, ways).alt
    assert "one chunk: ranks 0 to 3 compute 6% 19% 31% 44%" in alt


def test_tokens_travel_to_the_ranks_of_their_experts():
    alt = experts.draw_routing([1, 3, 3, 1, 0, 2, 1, 1]).alt
    assert "Rank 0 has tokens [0, 3, 1, 2], and its experts receive [0, 3, 4, 6, 7]" in alt


def test_tokens_beyond_the_capacity_are_dropped():
    import torch

    chosen = torch.tensor([[1], [3], [3], [1], [0], [2], [1], [1]])
    served = within_capacity(chosen, 4, capacity(8, 4, 1, 1.0))[:, 0].tolist()
    assert "Dropped: tokens [6, 7]" in experts.draw_capacity(chosen[:, 0].tolist(), served, 2).alt
    assert route(torch.zeros(2, 4), 1)[0].shape == (2, 1)
