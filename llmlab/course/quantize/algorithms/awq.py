"""AWQ, activation-aware quantization: before rounding, scale up the columns with large inputs, and the inputs down.

Lin et al., arXiv 2306.00978, section 3.2. If a column is multiplied by s and its input is divided by s, the output does
not change, but the column's rounding error is multiplied by an input that is s times smaller. The group's step grows
only if that column has the group's largest weight. The inputs say which columns matter, and a search over the layer's
outputs says how strongly to scale.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ....base.errors import SpecError, check_counts
from ..checks import check_group, layer
from ..formats import affine
from ..formats.affine import Quantized
from .rtn import rtn

CLIPS = tuple(1 - step / 20 for step in range(10))  # shares of a group's range: those of the authors' code


def awq(
    weight: Tensor, inputs: Tensor, bits: int = 4, group: int | None = 128, *, symmetric: bool = False, grid: int = 20,
    clip: bool = False,
) -> Quantized:  # fmt: skip
    """Return `weight` (O, I) with its columns scaled, then quantized; the scales (I,) are its `input_scale`.

    s = mean|x|^α for each feature (equation 5). Of `grid` values of α, from 0 (round to nearest) to below 1, the search
    takes the one that changes the outputs for `inputs` (tokens, I) least. With `clip`, it then searches, for each group
    of each row, the share of the range that changes the group's part of the outputs least, as the authors' code does
    for all layers but queries and keys. In a model, s is folded into the norm or the layer before, so it costs nothing.
    Raises SpecError for sizes that do not match, a group that does not divide I, and values that are not finite.
    """
    check_counts(grid=grid)
    weight, inputs = layer(weight, inputs)
    if not inputs.any():
        raise SpecError("inputs are all 0: no column matters more than another; give the layer's real inputs")
    hessian = inputs.double().T @ inputs.double()  # |X Dᵀ|² = sum(D H * D): one sum over tokens for all trials

    def error(trial: Quantized) -> float:
        difference = (trial.dequantize() - weight).double()
        return ((difference @ hessian) * difference).sum().item()

    sizes = inputs.abs().mean(dim=0)
    scales = (column_scale(sizes, step / grid) for step in range(grid))
    trials = (replace(rtn(weight * s, bits, group, symmetric=symmetric), input_scale=s) for s in scales)
    best = min(trials, key=error)
    if not clip or best.input_scale is None:
        return best
    s = best.input_scale
    return replace(clipped(weight * s, inputs / s, bits, group, symmetric), input_scale=s)


def clipped(weight: Tensor, inputs: Tensor, bits: int, group: int | None, symmetric: bool) -> Quantized:
    """Return `weight` (O, I) quantized, each group with the share of its range that changes its outputs least."""
    rows, columns = weight.shape
    size = check_group(group, columns)
    groups = columns // size
    runs = weight.reshape(rows, groups, size)
    x = inputs.reshape(-1, groups, size)
    hessian = torch.einsum("tgi,tgj->gij", x, x)  # (G, n, n): that of each group's own inputs
    share, least = torch.ones_like(runs[..., :1]), torch.full_like(runs[..., :1], float("inf"))
    for clip in CLIPS:
        scale, zero = affine.scale_and_zero(runs, bits, symmetric, clip)
        off = (affine.to_codes(runs, scale, zero, bits) - zero) * scale - runs
        error = (torch.einsum("ogi,gij->ogj", off, hessian) * off).sum(dim=-1, keepdim=True)
        share = torch.where(error < least, torch.full_like(share, clip), share)
        least = torch.minimum(error, least)
    scale, zero = affine.scale_and_zero(runs, bits, symmetric, share)
    codes = affine.to_codes(runs, scale, zero, bits).to(torch.uint8)
    return Quantized(codes.reshape(rows, columns), scale[..., 0], zero[..., 0], bits)


def column_scale(sizes: Tensor, alpha: float) -> Tensor:
    """Return size^α of each feature's `sizes` (I,), mean|x| over tokens, so that the largest times the smallest is 1.

    The division only keeps the scales in the range of fp16. A feature that is always 0 gets 1e-4 before it, not 0.
    """
    scale = sizes.pow(alpha).clamp(min=1e-4)
    return scale / (scale.max() * scale.min()).sqrt()
