"""Affine quantization: weight ≈ scale · (code - zero), with a scale per tensor, per row (output channel) or per group.

Jacob et al., arXiv 1712.05877, equation 1; Nagel et al., arXiv 2106.08295, section 2. Asymmetric codes span minimum to
maximum, symmetric ones -absmax to absmax with zero in the middle. Shapes: weight and codes (O, I); scale and zero
(O, G) with G groups per row, (O, 1) with one scale per row, (1, 1) with one per tensor.

>>> import torch
>>> weight = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
>>> q = quantize(weight, bits=2, symmetric=False)
>>> q.codes, q.dequantize()
(tensor([[1, 2, 3, 0]], dtype=torch.uint8), tensor([[ 0.,  1.,  2., -1.]]))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ....base.errors import SpecError
from ..checks import as_matrix, check_bits, check_group

Per = Literal["tensor", "channel", "group"]


@dataclass(frozen=True)
class Quantized:
    """A quantized weight: codes and scales, the result of every algorithm here.

    `group_of` (I,) is each column's group if columns were reordered (GPTQ's act-order); else each group is a run of
    columns. `input_scale` (I,) divides the inputs or, equivalently, the columns (AWQ and SmoothQuant).
    """

    codes: Tensor  # (O, I) uint8, 0 … 2^bits - 1
    scale: Tensor  # (O or 1, G)
    zero: Tensor  # (O or 1, G); the code of weight 0, a whole number except with HQQ
    bits: int
    group_of: Tensor | None = None
    input_scale: Tensor | None = None

    def dequantize(self) -> Tensor:
        """Return the weight (O, I) that the layer multiplies its inputs by."""
        group_of = self.group_of
        if group_of is None:
            columns = self.codes.shape[1]
            group_of = torch.arange(columns, device=self.codes.device) // (columns // self.scale.shape[1])
        weight = (self.codes.to(self.scale.dtype) - self.zero[:, group_of]) * self.scale[:, group_of]
        return weight if self.input_scale is None else weight / self.input_scale

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight when packed: its code, and its share of its group's fp16 scale and of the zero.

        A zero takes `bits` bits, or 16 if zeros are not whole numbers (HQQ).
        """
        zero = self.bits if (self.zero == self.zero.round()).all() else 16
        return self.bits + (16 + zero) * self.scale.numel() / self.codes.numel()


def scale_and_zero(x: Tensor, bits: int, symmetric: bool, clip: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Return scale and zero (…, 1) for the runs x (…, n), with the share `clip` of each run's range.

    The range always contains 0, so that 0 has a code: padding, ReLU's zeros and pruned weights stay exact.
    """
    levels = 2**bits - 1
    if symmetric:
        top = x.abs().amax(dim=-1, keepdim=True) * clip
        scale, zero = top / (levels // 2), torch.full_like(top, levels // 2 + 1)
    else:
        low = x.amin(dim=-1, keepdim=True).clamp(max=0) * clip
        scale = (x.amax(dim=-1, keepdim=True).clamp(min=0) * clip - low) / levels
        zero = (-low / scale).round()
    empty = scale == 0  # a run of zeros: any scale will do
    return torch.where(empty, torch.ones_like(scale), scale), torch.where(empty, torch.zeros_like(zero), zero)


def to_codes(x: Tensor, scale: Tensor, zero: Tensor, bits: int, generator: torch.Generator | None = None) -> Tensor:
    """Return codes as floats: x / scale + zero, rounded and clipped to 0 … 2^bits - 1.

    With a `generator` rounding is stochastic: up with the fraction as probability, so right on average (Gupta et al.,
    arXiv 1502.02551, section 3.1), but with a larger error in each single pass.
    """
    exact = x / scale + zero
    if generator is None:
        rounded = exact.round()
    else:
        rounded = (exact + torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype)).floor()
    return rounded.clamp(0, 2**bits - 1)


def best_clip(x: Tensor, bits: int, symmetric: bool, grid: int = 80) -> Tensor:
    """Return, for each run of x (…, n), the share (…, 1) of its range that gives the least mean squared error.

    Clipping makes a few large weights wrong and the steps for all others finer; it helps more with fewer bits. The
    shares tried are 1 down to 0.2, so the result is never worse than without clipping.
    """
    best = torch.ones_like(x[..., :1])
    least = torch.full_like(best, float("inf"))
    for share in torch.linspace(1.0, 0.2, grid).tolist():
        scale, zero = scale_and_zero(x, bits, symmetric, share)
        restored = (to_codes(x, scale, zero, bits) - zero) * scale
        error = (restored - x).square().mean(dim=-1, keepdim=True)
        best = torch.where(error < least, torch.full_like(best, share), best)
        least = torch.minimum(error, least)
    return best


def quantize(
    weight: Tensor,
    bits: int = 8,
    per: Per = "channel",
    group: int | None = None,
    symmetric: bool = True,
    clip: float | Literal["mse"] = 1.0,
    generator: torch.Generator | None = None,
) -> Quantized:
    """Return `weight` (O, I) rounded to 2^bits levels, one scale per tensor, channel (row) or `group` columns of a row.

    `clip` is the share of the range that is kept, or "mse" for the share with the least squared error. Raises SpecError
    for bits outside 2 … 8, a group that does not divide I, and weights that are not finite floats.
    """
    matrix = as_matrix(weight)
    check_bits(bits)
    if per not in ("tensor", "channel", "group") or (per == "group") != (group is not None):
        raise SpecError(f"per={per!r} with group={group!r}; give per='tensor' or 'channel', or per='group' and a group")
    if clip != "mse" and not (isinstance(clip, (int, float)) and 0 < clip <= 1):
        raise SpecError(f"clip={clip!r} is neither a share 0 < clip <= 1 of the range nor 'mse'")
    rows, columns = matrix.shape
    run = columns if per == "channel" else matrix.numel() if per == "tensor" else check_group(group, columns)
    runs = matrix.reshape(-1, run)
    share = best_clip(runs, bits, symmetric) if clip == "mse" else clip
    scale, zero = scale_and_zero(runs, bits, symmetric, share)
    codes = to_codes(runs, scale, zero, bits, generator).to(torch.uint8).reshape(rows, columns)
    shape = (1, 1) if per == "tensor" else (rows, columns // run)
    return Quantized(codes, scale.reshape(shape), zero.reshape(shape), bits)
