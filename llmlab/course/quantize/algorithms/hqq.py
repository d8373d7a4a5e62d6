"""HQQ, half-quadratic quantization: choose each group's zero for the least error in an outlier-robust norm, no data.

Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023 (mobiusml.github.io/hqq_blog).
The loss |W - W_q|^p with p < 1 gives outliers little weight; half-quadratic splitting turns it into two steps with
closed forms. Errors are measured in steps of the scale here, so that nothing depends on the size of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import as_matrix, check_bits, check_group
from ..formats.affine import Quantized, scale_and_zero, to_codes


def hqq(weight: Tensor, bits: int = 4, group: int | None = 64, *, p: float = 0.7, iterations: int = 20) -> Quantized:
    """Return `weight` (O, I) quantized: each group's scale is from its range, its zero optimized, not a whole number.

    The best zero of all iterations is kept, so the mean |error|^p is never larger than with round to nearest.
    """
    matrix = as_matrix(weight)
    rows, columns = matrix.shape
    group = check_group(group, columns)
    check_bits(bits)
    W = matrix.reshape(-1, group)
    scale, zero = scale_and_zero(W, bits, symmetric=False)
    beta = 10.0  # the penalty on `outliers` differing from the real error; it grows, so that they agree in the end
    best, least = zero, loss(W, scale, zero, bits, p)
    for _ in range(iterations):
        codes = to_codes(W, scale, zero, bits)
        outliers = shrink(W / scale - (codes - zero), beta, p)  # the error's large values
        zero = (codes - (W / scale - outliers)).mean(dim=-1, keepdim=True)  # least squares without them
        beta *= 1.01
        error = loss(W, scale, zero, bits, p)
        better = error < least
        best, least = torch.where(better, zero, best), torch.where(better, error, least)
    codes = to_codes(W, scale, best, bits).to(torch.uint8)
    shape = (rows, columns // group)
    return Quantized(codes.reshape(rows, columns), scale.reshape(shape), best.reshape(shape), bits)


def shrink(error: Tensor, beta: float, p: float) -> Tensor:
    """Return the error made smaller by |error|^(p-1) / β, or 0: small errors vanish, large ones hardly change."""
    size = error.abs()
    return error.sign() * (size - size.clamp(min=1e-8).pow(p - 1) / beta).clamp(min=0)


def loss(W: Tensor, scale: Tensor, zero: Tensor, bits: int, p: float) -> Tensor:
    """Return the mean |error|^p, (groups, 1), of W (groups, n) rounded with these scales and zeros."""
    error = W - (to_codes(W, scale, zero, bits) - zero) * scale
    return error.abs().pow(p).mean(dim=-1, keepdim=True)
