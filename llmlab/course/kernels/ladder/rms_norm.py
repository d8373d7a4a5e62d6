"""RMSNorm: x / √(mean(x²) + eps) · weight over the last dimension (Zhang and Sennrich, arXiv 1910.07467, eq. 4).

    R  rows (tokens)     N  columns (the hidden size)     P  programs of the backward pass     b  bytes per value

Bytes moved by the forward pass, if nothing stays in a cache; the weight's N·b are left out:

    0  7·R·N·4: square 2, mean 1, normalize 2, scale 2, in fp32; casts from half precision and back 2·(b + 4)·R·N more
    1  2·R·N·b              one kernel: reads x, writes y
    2  2·R·N·b              the same kernel, generated from rung 0 by Inductor
    3  2·R·N·b + 4·R        one program per row; 1/rms, one number per row, is for backward
    4  2·R·N·b + 4·R        backward is one kernel: 3·R·N·b, it reads x and dy and writes dx; and P partial sums of
                            dweight, 8·P·N, written and added up: no two programs write one element
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....base.errors import SpecError
from ..rungs import MAX_ROW, as_rows, check_columns, choose, jit, launch, run, tl, triton, warps

PROGRAMS = 256  # the most partial sums of dweight: one per multiprocessor, and no GPU has more


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, rung: int | None = None, inplace: bool = False) -> Tensor:
    """Return x / √(mean(x²) + eps) · weight, in x's dtype, computed in fp32. x: (..., N), weight: (N,).

    `inplace` (rung 4): the gradient of x overwrites the gradient of the result, so nothing else, such as a residual
    branch, may need the latter. Raises SpecError if weight is not (N,) or eps not a number >= 0, and in rungs 3 and 4
    for rows over 65,536 columns.
    """
    check_columns(x)
    if weight.shape != x.shape[-1:]:
        raise SpecError(f"weight has shape {tuple(weight.shape)}; x of shape {tuple(x.shape)} needs ({x.shape[-1]},)")
    if not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:  # None means "the dtype's epsilon" in PyTorch
        raise SpecError(f"eps={eps!r}; give a number >= 0, as a model's config names it (rms_norm_eps)")
    return run(choose(rung, x, weight), rms_norm0, rms_norm1, RMSNorm, x, weight, eps, inplace=inplace)


def rms_norm0(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rung 0: the formula, one operator per line."""
    values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean_square = values.square().mean(-1, keepdim=True)
    normalized = values * torch.rsqrt(mean_square + eps)
    return (normalized * weight).to(x.dtype)


def rms_norm1(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rung 1: PyTorch's operator: one kernel in recent versions, rung 0 in C++ in older ones."""
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


class RMSNorm(torch.autograd.Function):
    """Saves x, weight and 1/rms, 4 bytes per row; backward normalizes x again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, fused: bool, inplace: bool) -> Tensor:
        x_RN, weight = as_rows(x), weight.contiguous()
        rows, columns = x_RN.shape
        if columns > MAX_ROW:
            raise SpecError(f"a row of {columns} columns does not fit in registers ({MAX_ROW} do); take rung 1")
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        inverse_rms = torch.empty(rows, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(columns)
        arguments = x_RN, weight, y, inverse_rms, x_RN.stride(0), columns, eps, block
        launch(forward_kernel, rows, x, *arguments, num_warps=warps(block))
        ctx.save_for_backward(x, weight, inverse_rms)
        ctx.fused, ctx.inplace = fused, inplace
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        x_RN, dy_RN = as_rows(x), as_rows(dy)
        if not ctx.fused:
            normalized, dy_fp32 = x_RN.float() * inverse_rms[:, None], dy_RN.float()
            scaled = dy_fp32 * weight
            dx = inverse_rms[:, None] * (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True))
            return dx.view(x.shape).to(x.dtype), (dy_fp32 * normalized).sum(0).to(weight.dtype), None, None, None
        rows, columns = x_RN.shape
        overwrite = ctx.inplace and dy.is_contiguous()
        dx = dy if overwrite else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        partial_PN = torch.empty(min(rows, programs(x)), columns, dtype=torch.float32, device=x.device)
        block, strides = triton.next_power_of_2(columns), (dy_RN.stride(0), x_RN.stride(0))
        sizes = rows, columns, block, stages(block, x.element_size())
        arguments = dy_RN, x_RN, weight, inverse_rms, dx, partial_PN, *strides, *sizes
        launch(backward_kernel, len(partial_PN), x, *arguments, num_warps=warps(2 * block))
        return dx, partial_PN.sum(0).to(weight.dtype), None, None, None


def programs(x: Tensor) -> int:
    """Return how many programs share the rows of backward: one per multiprocessor, as in Liger."""
    return min(PROGRAMS, torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else PROGRAMS)


def stages(block: int, itemsize: int) -> int:
    """Return the pipeline's stages in backward: with 2 a program fetches its next row while it computes this one.

    A program runs alone on its multiprocessor, so nothing else is fetched while its threads wait for each other's sums.
    The prefetched rows of x and dy need shared memory, of which a T4 has 64 KiB.
    """
    return 2 if 2 * block * itemsize <= 64 * 1024 else 1


@jit
def forward_kernel(X, W, Y, INVERSE_RMS, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    x = tl.load(X + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(W + columns, mask=inside, other=0.0).to(tl.float32)
    inverse_rms = 1.0 / tl.sqrt(tl.sum(x * x, 0) / N + eps)
    tl.store(INVERSE_RMS + row, inverse_rms)
    tl.store(Y + row * N + columns, x * inverse_rms * weight, mask=inside)


@jit
def backward_kernel(DY, X, W, INVERSE_RMS, DX, PARTIAL, stride_dy, stride_x, R, N, BLOCK: tl.constexpr,
                    STAGES: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    weight = tl.load(W + columns, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    for index in tl.range(program, R, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(index, tl.int64)
        inverse_rms = tl.load(INVERSE_RMS + row)
        normalized = tl.load(X + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32) * inverse_rms
        dy = tl.load(DY + row * stride_dy + columns, mask=inside, other=0.0).to(tl.float32)
        dweight += dy * normalized
        scaled = dy * weight
        dx = inverse_rms * (scaled - normalized * (tl.sum(scaled * normalized, 0) / N))
        tl.store(DX + row * N + columns, dx, mask=inside)
    tl.store(PARTIAL + program * N + columns, dweight, mask=inside)
