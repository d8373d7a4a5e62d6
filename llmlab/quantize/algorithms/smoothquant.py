"""SmoothQuant: move the outliers' difficulty from the activations, which cannot take it, into the weights, which can.

Xiao et al., arXiv 2211.10438, equations 3 and 4: X Wᵀ = (X / s)(W s)ᵀ for any s > 0 a feature. Then both sides are
rounded to int8: weights a row at a time, activations a token at a time as they come (W8A8).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...base.errors import SpecError
from ..checks import as_matrix, layer
from ..formats import affine
from ..formats.affine import Quantized


def smoothing(weight: Tensor, inputs: Tensor, alpha: float = 0.5) -> Tensor:
    """Return s (I,) = max|x|^α / max|w|^(1-α): α = 0 leaves the difficulty in the activations, 1 moves all of it."""
    if not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
        raise SpecError(f"alpha={alpha!r} is no share 0 <= alpha <= 1 of the difficulty to move; 0.5 is the usual one")
    weight, inputs = layer(weight, inputs)
    x = inputs.abs().amax(dim=0).clamp(min=1e-5)
    w = weight.abs().amax(dim=0).clamp(min=1e-5)
    return (x**alpha / w ** (1 - alpha)).clamp(min=1e-5)


def smoothquant(weight: Tensor, inputs: Tensor, alpha: float = 0.5, bits: int = 8) -> Quantized:
    """Return `weight` (O, I) · s, one scale a row; `input_scale` is s, chosen on the calibration `inputs`."""
    s = smoothing(weight, inputs, alpha)
    return replace(affine.quantize(as_matrix(weight) * s, bits), input_scale=s)


def linear_w8a8(inputs: Tensor, quantized: Quantized) -> Tensor:
    """Return (tokens, O): the product of int8 activations and int8 weights, summed as whole numbers, then scaled.

    inputs (tokens, I) are divided by `input_scale` and rounded with one scale a token; `quantized` has one a row.
    """
    inputs = as_matrix(inputs, "inputs")
    if quantized.scale.shape[1] != 1:
        raise SpecError("a group's scale cannot be taken out of the sum over a row; quantize per='channel' or 'tensor'")
    x = affine.quantize(inputs if quantized.input_scale is None else inputs / quantized.input_scale, quantized.bits)
    # float64 holds every sum of products of int8 exactly, on every device; int8 matrix products exist on few
    sums = (x.codes.double() - x.zero) @ (quantized.codes.double() - quantized.zero).T
    return (sums * x.scale.double() * quantized.scale.double().T).to(inputs.dtype)


def activation_range(inputs: Tensor, s: Tensor | None = None) -> Tensor:
    """Return max|x| (I,) a feature, before or after smoothing: the picture that explains the method."""
    inputs = as_matrix(inputs, "inputs")
    return (inputs if s is None else inputs / s).abs().amax(dim=0).to(torch.float32)
