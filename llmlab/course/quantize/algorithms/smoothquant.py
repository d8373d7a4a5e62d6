"""SmoothQuant: scale outlier features down in the activations and up in the weights, then quantize both (W8A8).

Xiao et al., arXiv 2211.10438, equations 3 and 4: X Wᵀ = (X / s)(W s)ᵀ for any s > 0 per feature. Activations have
outliers that int8 rounds badly; weights have room for them. Then both sides are rounded to int8, weights with one scale
per row, activations with one scale per token, at run time.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from ....base.errors import SpecError
from ..checks import as_matrix, layer
from ..formats import affine
from ..formats.affine import Quantized


def smoothing(weight: Tensor, inputs: Tensor, alpha: float = 0.5) -> Tensor:
    """Return s (I,) = max|x|^α / max|w|^(1-α): α = 1 gives all features of the inputs range 1, α = 0 those of W."""
    if not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
        raise SpecError(f"alpha={alpha!r} is not a number from 0 to 1; 0.5 is usual")
    weight, inputs = layer(weight, inputs)
    x = inputs.abs().amax(dim=0).clamp(min=1e-5)
    w = weight.abs().amax(dim=0).clamp(min=1e-5)
    return (x**alpha / w ** (1 - alpha)).clamp(min=1e-5)


def smoothquant(weight: Tensor, inputs: Tensor, alpha: float = 0.5, bits: int = 8) -> Quantized:
    """Return `weight` (O, I) · s quantized with one scale per row; `input_scale` is s, from calibration `inputs`."""
    s = smoothing(weight, inputs, alpha)
    return replace(affine.quantize(as_matrix(weight) * s, bits), input_scale=s)


def linear_w8a8(inputs: Tensor, quantized: Quantized) -> Tensor:
    """Return (tokens, O): the product of int8 activations and int8 weights, summed as integers, then scaled.

    inputs (tokens, I) are divided by `input_scale` and rounded with one scale per token; `quantized` has one per row.
    """
    inputs = as_matrix(inputs, "inputs")
    if quantized.scale.shape[1] != 1:
        raise SpecError("a row's sum cannot be scaled by a group's scale; quantize with per='channel' or 'tensor'")
    x = affine.quantize(inputs if quantized.input_scale is None else inputs / quantized.input_scale, quantized.bits)
    # float64 represents every sum of int8 products exactly, on every device; few devices have int8 matrix products
    sums = (x.codes.double() - x.zero) @ (quantized.codes.double() - quantized.zero).T
    return (sums * x.scale.double() * quantized.scale.double().T).to(inputs.dtype)


class SmoothLinear(nn.Module):
    """SmoothQuant: W8A8 after outliers moved from activations to weights, by calibration `inputs` (tokens, I)."""

    def __init__(self, linear: nn.Linear, inputs: Tensor, alpha: float = 0.5) -> None:
        super().__init__()
        self.quantized = smoothquant(linear.weight.detach(), inputs, alpha)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = linear_w8a8(x.reshape(-1, x.shape[-1]), self.quantized).reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias
