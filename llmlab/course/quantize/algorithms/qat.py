"""Quantization-aware training (QAT): round weights in the forward pass, ignore the rounding in the backward pass.

The straight-through estimator (Bengio et al., arXiv 1308.3432, section 3.1; Jacob et al., arXiv 1712.05877, section 3):
rounding has slope 0 almost everywhere, so 1 is used as its gradient inside the range, and 0 where values were clipped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import check_bits, check_group
from ..formats.affine import scale_and_zero, to_codes


class FakeQuantize(torch.autograd.Function):
    """Rounds to codes and back to floats; the gradient passes unchanged, except where values were clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
        whole = (x / scale + zero).round()
        ctx.save_for_backward((whole >= 0) & (whole <= 2**bits - 1))
        return (to_codes(x, scale, zero, bits) - zero) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inside,) = ctx.saved_tensors
        return gradient * inside, None, None, None


def fake_quantize(x: Tensor, bits: int = 4, group: int | None = None, symmetric: bool = True) -> Tensor:
    """Return `x` (…, I) rounded to its codes' values, differentiable; `group` columns of a row share a scale.

    The scale is computed from the values in every call, so almost nothing is clipped and the gradient is 1.
    """
    check_bits(bits)
    runs = x.reshape(-1, check_group(group, x.shape[-1]))
    scale, zero = scale_and_zero(runs.detach(), bits, symmetric)
    return FakeQuantize.apply(runs, scale, zero, bits).reshape(x.shape)
