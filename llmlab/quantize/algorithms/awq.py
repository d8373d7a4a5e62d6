"""AWQ: scale up the columns that meet large inputs before rounding, and the inputs down by as much.

Lin et al., arXiv 2306.00978, section 3.2. A column that is multiplied by s has its rounding error divided by s after
the inputs are; the group's step grows only where that column holds its largest weight. Which columns matter is what
the inputs say, not the weights; how much to scale is searched for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.errors import SpecError
from ..checks import layer

if TYPE_CHECKING:
    from torch import Tensor

    from ..formats.affine import Quantized


def awq(
    weight: Tensor, inputs: Tensor, bits: int = 4, group: int | None = 128, *, symmetric: bool = False, grid: int = 20
) -> Quantized:
    """Return `weight` (O, I) quantized after its columns were scaled; the scales (I,) are the result's `input_scale`.

    s = mean|x|^α a feature (equation 5), α from 0 (round to nearest) up to 1 in `grid` steps, the one that changes the
    outputs for `inputs` (tokens, I) least. In a model s is folded into the norm or the layer before, so it costs
    nothing. Raises SpecError for sizes that do not match or divide, and values that are not finite.
    """
    from dataclasses import replace

    from .rtn import rtn

    if isinstance(grid, bool) or not isinstance(grid, int) or grid < 1:
        raise SpecError(f"grid={grid!r} is not a whole number >= 1")
    weight, inputs = layer(weight, inputs)
    if not inputs.any():
        raise SpecError("inputs are all 0: no column matters more than another; give the layer's real inputs")
    hessian = inputs.double().T @ inputs.double()  # |X Dᵀ|² = sum(D H * D): the tokens are summed once, not each time
    best, least = None, float("inf")
    for step in range(grid):
        scale = column_scale(inputs, step / grid)
        trial = replace(rtn(weight * scale, bits, group, symmetric=symmetric), input_scale=scale)
        off = (trial.dequantize() - weight).double()
        error = ((off @ hessian) * off).sum().item()
        if best is None or error < least:
            best, least = trial, error
    assert best is not None
    return best


def column_scale(inputs: Tensor, alpha: float) -> Tensor:
    """Return mean|x|^α (I,) over the tokens, centred so that the largest and the smallest multiply to 1.

    The centre matters to nothing but the range fp16 has to hold. A feature that is never on gets 1e-4, not 0.
    """
    scale = inputs.abs().mean(dim=0).pow(alpha).clamp(min=1e-4)
    return scale / (scale.max() * scale.min()).sqrt()
