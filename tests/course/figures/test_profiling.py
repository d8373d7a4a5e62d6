"""The drawings of the page on profiles add up: self times to the outer call, and launches to the end of the kernels."""

import re

import pytest

from llmlab.course.figures.profiling import Call, Lanes, draw_calls, draw_lanes


def test_the_self_times_add_up_to_the_duration_of_the_outer_call():
    calls = [Call("a", 0, 10, 0), Call("b", 0, 4, 1), Call("c", 1, 3, 2), Call("d", 6, 9, 1)]
    own = [float(size) for size in re.findall(r"self ([\d.]+)", draw_calls(calls).alt)]
    assert own == [3, 2, 2, 3] and sum(own) == 10


@pytest.mark.parametrize("waits", [(), (0,)])
def test_the_alternative_text_has_the_times_of_the_kernels(waits):
    alt = draw_lanes([Lanes("two", [1, 1], [(1, 4), (5, 8)], waits)]).alt
    assert "two: kernels run from 1 to 4, 5 to 8" in alt
