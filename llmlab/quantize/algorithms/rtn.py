"""Round to nearest: what every other algorithm must beat, and the error that all are judged by."""

from __future__ import annotations

from torch import Tensor

from ..checks import layer
from ..formats import affine
from ..formats.affine import Quantized


def rtn(weight: Tensor, bits: int = 4, group: int | None = 128, *, symmetric: bool = False) -> Quantized:
    """Return `weight` (O, I), each run of `group` weights of a row rounded on its own; None is a row."""
    if group is None or group == -1:
        return affine.quantize(weight, bits, "channel", symmetric=symmetric)
    return affine.quantize(weight, bits, "group", group, symmetric=symmetric)


def layer_error(weight: Tensor, quantized: Quantized | Tensor, inputs: Tensor) -> float:
    """Return |X Wᵀ - X Qᵀ|² / |X Wᵀ|²: what the layer's outputs lose, not its weights.

    weight (O, I), inputs (tokens, I); `quantized` as an algorithm returned it, or the dequantized weight (O, I).
    """
    weight, inputs = layer(weight, inputs)
    restored = (quantized.dequantize() if isinstance(quantized, Quantized) else quantized).to(weight)
    exact = inputs.double() @ weight.double().T
    off = inputs.double() @ (weight - restored).double().T
    lost, whole = off.square().sum().item(), exact.square().sum().item()
    if not whole:  # a weight, or inputs, of zeros
        return float("inf") if lost else 0.0
    return lost / whole
