"""AWQ, activation-aware quantization: before rounding, scale up the columns with large inputs, and the inputs down.

Lin et al., arXiv 2306.00978, section 3.2. If a column is multiplied by s and its input divided by s, its rounding error
counts 1/s as much; the group's step gets larger only if that column has the group's largest weight. The inputs, not the
weights, say which columns matter; how strongly to scale is found by a search.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ....base.errors import SpecError, check_counts
from ..checks import layer
from ..formats.affine import Quantized
from .rtn import rtn


def awq(
    weight: Tensor, inputs: Tensor, bits: int = 4, group: int | None = 128, *, symmetric: bool = False, grid: int = 20
) -> Quantized:
    """Return `weight` (O, I) with its columns scaled, then quantized; the scales (I,) are its `input_scale`.

    s = mean|x|^α for each feature (equation 5); of `grid` values of α from 0 (round to nearest) to below 1 it is the
    one that changes the outputs for `inputs` (tokens, I) least. In a model s is folded into the norm or layer before,
    so it costs nothing. Raises SpecError for sizes that do not match, a group that does not divide I, and values that
    are not finite.
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
    return min(trials, key=error)


def column_scale(sizes: Tensor, alpha: float) -> Tensor:
    """Return size^α of each feature's `sizes` (I,), mean|x| over tokens, so that the largest times the smallest is 1.

    The division only keeps the scales in the range of fp16. A feature that is always 0 gets 1e-4 before it, not 0.
    """
    scale = sizes.pow(alpha).clamp(min=1e-4)
    return scale / (scale.max() * scale.min()).sqrt()
