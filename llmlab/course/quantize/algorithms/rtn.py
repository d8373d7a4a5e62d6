"""Round to nearest (RTN), the baseline that every other algorithm must beat, and the errors they are compared by."""

from __future__ import annotations

from torch import Tensor

from ..checks import layer
from ..formats import affine
from ..formats.affine import Quantized


def rtn(weight: Tensor, bits: int = 4, group: int | None = 128, *, symmetric: bool = False) -> Quantized:
    """Return `weight` (O, I) rounded to nearest, with a scale for each `group` weights of a row; None: one per row."""
    if group is None or group == -1:
        return affine.quantize(weight, bits, "channel", symmetric=symmetric)
    return affine.quantize(weight, bits, "group", group, symmetric=symmetric)


def layer_error(weight: Tensor, quantized: Quantized | Tensor, inputs: Tensor) -> float:
    """Return |X Wᵀ - X Qᵀ|² / |X Wᵀ|²: the relative error of the layer's outputs, not of its weights.

    weight (O, I), inputs (tokens, I); `quantized` is the result of an algorithm, or the dequantized weight (O, I).
    """
    weight, inputs = layer(weight, inputs)
    restored = (quantized.dequantize() if isinstance(quantized, Quantized) else quantized).to(weight)
    exact = inputs.double() @ weight.double().T
    difference = inputs.double() @ (weight - restored).double().T
    error, size = difference.square().sum().item(), exact.square().sum().item()
    if not size:  # the weight or the inputs are all 0
        return float("inf") if error else 0.0
    return error / size


def relative_error(restored: Tensor, exact: Tensor) -> float:
    """Return |restored - exact| / |exact|, over all numbers: 0 if nothing is lost, 1 if as wrong as zeros."""
    return ((restored - exact).norm() / exact.norm()).item()
