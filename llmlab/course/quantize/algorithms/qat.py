"""Quantization-aware training (QAT): round weights in the forward pass, ignore the rounding in the backward pass.

The straight-through estimator (Bengio et al., arXiv 1308.3432, section 3.1; Jacob et al., arXiv 1712.05877, section 3):
rounding has slope 0 almost everywhere, so 1 is used as its gradient inside the range, and 0 where values were clipped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..formats.affine import to_codes


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
