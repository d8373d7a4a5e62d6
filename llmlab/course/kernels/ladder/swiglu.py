"""SwiGLU's activation: silu(gate) · up, where silu(x) = x · sigmoid(x) (Shazeer, arXiv 2002.05202, eq. 6).

    n  values of gate (and of up)     b  bytes per value

Bytes moved by the forward pass, if nothing stays in a cache, and the tensors saved for backward:

    0  8·n·b: sigmoid 2, multiply 3, multiply 3                                saves gate, sigmoid, silu and up: 4·n·b
    1  5·n·b: silu 2, multiply 3                                               saves gate, silu and up: 3·n·b
    2  3·n·b: rung 0 in one kernel, because Inductor fuses such chains well    saves gate and up: 2·n·b
    3  3·n·b                                                                   saves gate and up; backward: 11 kernels
    4  3·n·b; backward 5·n·b in one kernel, which computes the sigmoid again   saves gate and up
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....base.errors import SpecError
from ..rungs import choose, jit, launch, run, tl, triton

BLOCK = 1024  # values per program; each value is computed alone, so any number will do


def swiglu(gate: Tensor, up: Tensor, *, rung: int | None = None, inplace: bool = False) -> Tensor:
    """Return silu(gate) · up, in their dtype; rungs 3 and 4 round once, at the end. gate, up: one shape, one dtype.

    `inplace` (rung 4): backward writes the gradients over gate and up, so a second backward is refused. Raises
    SpecError if shapes or dtypes differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        inputs = f"gate is {gate.dtype} {tuple(gate.shape)}, up is {up.dtype} {tuple(up.shape)}"
        raise SpecError(f"{inputs}; give both one shape and one dtype")
    return run(choose(rung, gate, up), swiglu0, swiglu1, SwiGLU, gate, up, inplace=inplace)


def swiglu0(gate: Tensor, up: Tensor) -> Tensor:
    """Rung 0: the formula, one operator per line."""
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return silu * up


def swiglu1(gate: Tensor, up: Tensor) -> Tensor:
    """Rung 1: silu is one operator, which saves only its input for backward."""
    return F.silu(gate) * up


class SwiGLU(torch.autograd.Function):
    """Saves gate and up, the results of matmuls: the sigmoid costs less to compute again than to read."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, fused: bool, inplace: bool) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        launch(forward_kernel, triton.cdiv(y.numel(), BLOCK), y, gate, up, y, y.numel(), BLOCK)
        ctx.save_for_backward(gate, up)
        ctx.fused, ctx.inplace = fused, inplace
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        if not ctx.fused:
            x, u, g = gate.float(), up.float(), dy.float()
            sigmoid = torch.sigmoid(x)
            dgate = g * u * sigmoid * (1 + x * (1 - sigmoid))
            return dgate.to(gate.dtype), (g * x * sigmoid).to(up.dtype), None, None
        dy = dy.contiguous()
        dgate, dup = (gate, up) if ctx.inplace else (torch.empty_like(gate), torch.empty_like(up))
        if ctx.inplace:  # tells autograd, which cannot see what a kernel writes, to refuse a second backward
            torch.autograd.graph.increment_version((gate, up))
        launch(backward_kernel, triton.cdiv(dy.numel(), BLOCK), gate, dy, gate, up, dgate, dup, dy.numel(), BLOCK)
        return dgate, dup, None, None


@jit
def forward_kernel(GATE, UP, Y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(GATE + at, mask=at < count, other=0.0).to(tl.float32)
    up = tl.load(UP + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(Y + at, gate * tl.sigmoid(gate) * up, mask=at < count)


@jit
def backward_kernel(DY, GATE, UP, DGATE, DUP, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(DY + at, mask=at < count, other=0.0).to(tl.float32)
    gate = tl.load(GATE + at, mask=at < count, other=0.0).to(tl.float32)
    up = tl.load(UP + at, mask=at < count, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    tl.store(DUP + at, dy * gate * sigmoid, mask=at < count)
    tl.store(DGATE + at, dy * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=at < count)
