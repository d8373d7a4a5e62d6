"""Softmax over the last dimension.

    R  rows     N  columns     b  bytes per value

Bytes moved by the forward pass, if nothing stays in a cache (backward reads y and its gradient, and writes x's):

    0  8·R·N·4: max 1, subtract 2, exp 2, sum 1, divide 2, each a kernel through memory; with half precision
       2·(b + 4)·R·N more, for the casts to fp32 and back
    1  2·R·N·b                          one kernel: reads x, writes y
    2  2·R·N·b                          rung 0, which Inductor fuses to one kernel (it reads very long rows again)
    3  2·R·N·b                          a row stays in the registers of one program
    4  2·R·N·b, wide rows 3·R·N·b       any width: maximum and sum in one pass (online), then a second to write
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....base.errors import SpecError
from ..rungs import (
    LOWEST,
    MAX_ROW,
    absorb,
    as_rows,
    check_columns,
    choose,
    jit,
    launch,
    reduced,
    run,
    tl,
    triton,
    warps,
)

TILE = 8192  # columns of a wide row that are in a program's registers at a time


def softmax(x: Tensor, *, rung: int | None = None) -> Tensor:
    """Return exp(x) / Σ exp(x) along the last dimension, in x's dtype, computed in fp32. x: (..., N), N >= 1.

    Raises SpecError in rung 3 for rows over 65,536 columns.
    """
    check_columns(x)
    rung = choose(rung, x)
    if rung == 3 and x.shape[-1] > MAX_ROW:
        raise SpecError(f"a row of {x.shape[-1]} columns does not fit in registers ({MAX_ROW} do); take rung 4 or 1")
    return run(rung, softmax0, softmax1, Softmax, x)


def softmax0(x: Tensor) -> Tensor:
    """Rung 0: the formula, one operator per line. The maximum is subtracted, because exp overflows from 89 on."""
    values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    shifted = values - values.amax(-1, keepdim=True)
    e = torch.exp(shifted)
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def softmax1(x: Tensor) -> Tensor:
    """Rung 1: PyTorch's own kernel, which keeps the temporaries in registers."""
    return torch.softmax(x, dim=-1)


class Softmax(torch.autograd.Function):
    """Saves only y: dx = y · (dy − Σ y·dy) does not need x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fused: bool) -> Tensor:
        x_RN = as_rows(x)
        rows, columns = x_RN.shape
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        fits = columns <= MAX_ROW
        kernel, block = (softmax_row, triton.next_power_of_2(columns)) if fits else (softmax_wide, TILE)
        launch(kernel, rows, x, x_RN, y, x_RN.stride(0), columns, block, num_warps=warps(block))
        ctx.save_for_backward(y)
        ctx.fused = fused
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        if not ctx.fused:
            y_fp32, dy_fp32 = y.float(), dy.float()
            return (y_fp32 * (dy_fp32 - (y_fp32 * dy_fp32).sum(-1, keepdim=True))).to(y.dtype), None
        dy_RN, dx = as_rows(dy), torch.empty_like(y)
        rows, columns = dy_RN.shape
        block = min(triton.next_power_of_2(columns), TILE)
        launch(softmax_backward, rows, y, y, dy_RN, dx, dy_RN.stride(0), columns, block, num_warps=warps(block))
        return dx, None


@jit
def softmax_row(X, Y, stride, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int64: R·N passes 2^31 at 16,744 rows of Llama 3's vocabulary
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    x = tl.load(X + row * stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(Y + row * N + columns, e / tl.sum(e, 0), mask=inside)


@jit
def softmax_wide(X, Y, stride, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    highest, total = tl.full((BLOCK,), LOWEST, tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * stride + columns, mask=columns < N, other=-float("inf")).to(tl.float32)
        highest, total = absorb(highest, total, x)
    highest, total = reduced(highest, total)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * stride + columns, mask=columns < N, other=-float("inf")).to(tl.float32)
        tl.store(Y + row * N + columns, tl.exp(x - highest) / total, mask=columns < N)


@jit
def softmax_backward(Y, DY, DX, stride, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    inner = 0.0
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        y = tl.load(Y + row * N + columns, mask=columns < N, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * stride + columns, mask=columns < N, other=0.0).to(tl.float32)
        inner += tl.sum(y * dy, 0)
    for start in range(0, N, BLOCK):  # a narrow row is one tile, and this read comes from the cache
        columns = start + tl.arange(0, BLOCK)
        y = tl.load(Y + row * N + columns, mask=columns < N, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * stride + columns, mask=columns < N, other=0.0).to(tl.float32)
        tl.store(DX + row * N + columns, y * (dy - inner), mask=columns < N)
