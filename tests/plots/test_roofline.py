"""The roofline picture draws what a GPU was measured to reach, and refuses where nobody measured."""

import pytest

from llmlab.base.errors import NotAvailable, SpecError
from llmlab.hardware.gpu import gpu
from llmlab.plots.roofline import plot_roofline
from llmlab.simulation.profile.operator_log import Operators
from llmlab.traces.kernels import Kernel

PRODUCT = Kernel("aten::mm", "matmul", "fp16", 2 * 4096**3, 3 * 2 * 4096**2, (1, 4096, 4096, 4096), 1, False, "forward")
ADDITION = Kernel("aten::add", "memory", "fp16", 0, 3 * 2 * 10**6, (10**6,), 1, False, "forward")


def step(card):
    operators = Operators(gpu(card) if card else None)
    operators += [PRODUCT, ADDITION, ADDITION]
    return operators


def test_an_operator_that_runs_twice_is_summed_and_adds_one_flop_an_element():
    flop, moved, seconds = step("T4").by_operator()["memory", "add"]
    assert (flop, moved) == (2 * 10**6, 2 * ADDITION.bytes) and seconds > 0


def test_the_picture_says_the_ridge_and_that_products_take_the_time():
    alt = plot_roofline([step("T4")], {"T4": "fp16"}).alt
    assert "T4: ridge at" in alt and "matrix products 99%" in alt


@pytest.mark.parametrize("card", [None, "B200"])
def test_a_card_that_nobody_measured_has_no_roofline(card):
    with pytest.raises(NotAvailable, match="no measured rates"):
        plot_roofline([step(card)], {"B200": "bf16"})


@pytest.mark.parametrize("dtype", [{}, {"T4": "bf16"}])
def test_a_dtype_without_a_roof_is_refused_by_name(dtype):
    with pytest.raises(SpecError, match=r"T4; give .*fp16"):
        plot_roofline([step("T4")], dtype)
