"""GPTQ without its shortcut, which the tests of single layers and of the whole model compare it with."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llmlab.course.quantize.algorithms.gptq import damped_hessian
from llmlab.course.quantize.checks import layer
from llmlab.course.quantize.formats.affine import Quantized, scale_and_zero, to_codes


@pytest.fixture(scope="session")
def gptq_direct() -> Callable[..., Quantized]:
    return solved_anew


def solved_anew(
    weight: Tensor, inputs: Tensor, bits: int = 4, group: int | None = 128, *, symmetric: bool = False,
    damping: float = 0.01,
) -> Quantized:  # fmt: skip
    """Return the result of `gptq` by a direct method: solve for the free columns after each rounding. O(I⁴), for tests.

    With d the change of the rounded columns F, the loss is least when the remaining columns R change by
    -d H_FR H_RR⁻¹: the normal equations (Optimal Brain Quantization, arXiv 2208.11580, section 4).
    """
    weight, inputs = layer(weight, inputs)
    rows, columns = weight.shape
    group = group or columns
    hessian = damped_hessian(inputs.double(), damping)
    W = weight.double()
    free, codes = W.clone(), torch.empty_like(W)
    scale, zero = W.new_empty(rows, columns // group), W.new_empty(rows, columns // group)
    for i in range(columns):
        g = i // group
        if i % group == 0:
            scale[:, g : g + 1], zero[:, g : g + 1] = scale_and_zero(free[:, i : i + group], bits, symmetric)
        codes[:, i] = to_codes(free[:, i], scale[:, g], zero[:, g], bits)
        free[:, i] = (codes[:, i] - zero[:, g]) * scale[:, g]
        F, R = slice(0, i + 1), slice(i + 1, columns)
        if i + 1 < columns:
            free[:, R] = W[:, R] - torch.linalg.solve(hessian[R, R], hessian[R, F] @ (free[:, F] - W[:, F]).T).T
    return Quantized(codes.to(torch.uint8), scale, zero, bits)
