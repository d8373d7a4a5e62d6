"""The drawings on offloading show the numbers that they are given."""

from itertools import pairwise

import pytest

from llmlab.course.figures.offload import (
    activation_schedule,
    draw_activations,
    draw_timelines,
    draw_traffic,
    draw_whole_steps,
)


def test_the_traffic_of_an_update_is_thirty_bytes_per_parameter():
    alt = draw_traffic(10**9).alt
    assert "2 GB of gradients cross PCIe" in alt and "Altogether it moves 30 GB." in alt


def test_timelines_end_with_their_last_work():
    works = [("GPU", 0.0, 1.0, "forward"), ("GPU", 1.0, 3.0, "backward"), ("CPU", 3.0, 7.5, "Adam")]
    alt = draw_timelines({"one step": works}).alt
    assert alt == "one step, 7.5 s: GPU busy for 3.00 s, CPU busy for 4.50 s."


def test_whole_steps_sum_their_parts():
    parts = {"compute": 1.0, "messages": 0.25, "exposed copies": 0.5, "update": 2.0}
    assert "one H100: 1.00 + 0.25 + 0.50 + 2.00 = 3.75 s" in draw_whole_steps({"one H100": parts}).alt


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
