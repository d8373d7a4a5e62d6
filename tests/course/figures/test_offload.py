"""The drawings on offloading show the numbers that they are given."""

from itertools import pairwise

import pytest

from llmlab.course.figures.offload import activation_schedule, draw_activations


@pytest.mark.parametrize("backward", [2, 3])
def test_copies_that_are_shorter_than_a_block_hide(backward):
    works = [work for work, _ in activation_schedule(0.5, backward)]
    assert max(end for _, _, end, _ in works) == 4 * (1 + backward)


def test_a_slow_link_decides_when_the_activations_are_back():
    works = activation_schedule(copied=6, backward=2)
    assert max(end for (_, _, end, _), _ in works) == 1 + 6 * 6 + 2  # three blocks leave and return
    for lane in ("GPU", "PCIe"):
        spans = [(start, end) for (where, start, end, _), _ in works if where == lane]
        assert all(first[1] <= second[0] for first, second in pairwise(spans))


def test_the_last_block_does_not_leave():
    assert {block for (lane, *_), block in activation_schedule(1, 2) if lane == "PCIe"} == {0, 1, 2}
    assert "all: 39.0 forwards" in draw_activations({"all": (6, 2)}).alt
