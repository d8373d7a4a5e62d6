"""Cross entropy: the mean of logsumexp(logits) − logits[target] over rows whose target is not −100.

    R  rows (tokens)     V  vocabulary     b  bytes per logit

Bytes moved by the forward pass, if nothing stays in a cache, and the extra memory for backward:

    0  cast, max, subtract, exp, sum, subtract the log: (b + 4 + 4 + 8 + 8 + 4 + 8)·R·V     saves log-softmax, 4·R·V
    1  cast, log_softmax: (b + 4 + 4 + 4)·R·V                                               saves log-softmax, 4·R·V
    2  b·R·V: rung 0 as one kernel with the cast in it, so no fp32 copy (it reads very long rows again)
    3  b·R·V: one program reads a row once, tile by tile, and writes its loss and logsumexp     saves only the logits
    4  the same; backward is one kernel, 2·b·R·V, and with inplace=True its result overwrites the logits: no new memory
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....base.errors import SpecError
from ..rungs import LOWEST, absorb, check_columns, choose, jit, launch, reduced, run, tl, triton, warps

IGNORE = -100  # the target that PyTorch and Hugging Face leave out
TILE = 8192  # columns that are in a program's registers at a time


def cross_entropy(logits: Tensor, targets: Tensor, *, rung: int | None = None, inplace: bool = False) -> Tensor:
    """Return the mean loss in nats, an fp32 scalar (fp64 for fp64 logits). logits: (..., V), targets: (...), int64.

    A target of −100 is left out; if all are, the mean is NaN, as in PyTorch. Any other target outside 0 … V − 1 gives
    NaN in rungs 3 and 4, an error in the others. `inplace` (rung 4): backward writes the gradient over the logits, so
    they are lost, and a second backward is refused. Raises SpecError if shapes do not fit.
    """
    check_columns(logits)
    if targets.shape != logits.shape[:-1] or targets.dtype != torch.int64:
        actual = f"targets are {targets.dtype} {tuple(targets.shape)}"
        raise SpecError(f"{actual}; logits {tuple(logits.shape)} need torch.int64 {tuple(logits.shape[:-1])}")
    if targets.device != logits.device:
        raise SpecError(f"targets are on {targets.device}, logits on {logits.device}; put them on one device")
    rung = choose(rung, logits)
    if inplace and not logits.is_contiguous():
        raise SpecError("inplace=True is for contiguous logits; leave it out")
    logits_RV, targets_R = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    return run(rung, cross_entropy0, cross_entropy1, CrossEntropy, logits_RV, targets_R, inplace=inplace)


def cross_entropy0(logits_RV: Tensor, targets_R: Tensor) -> Tensor:
    """Rung 0: the formula, one operator per line, in fp32: a sum of 128,256 terms needs more bits than bf16 has."""
    values = logits_RV.float() if logits_RV.dtype in (torch.float16, torch.bfloat16) else logits_RV
    shifted = values - values.amax(-1, keepdim=True)
    log_softmax = shifted - torch.exp(shifted).sum(-1, keepdim=True).log()
    counted = targets_R != IGNORE
    picked = log_softmax.gather(-1, targets_R.where(counted, 0)[:, None])[:, 0]
    return -picked.where(counted, 0).sum() / counted.sum()


def cross_entropy1(logits_RV: Tensor, targets_R: Tensor) -> Tensor:
    """Rung 1: PyTorch's two operators (log_softmax, nll_loss); the fp32 copy of half-precision logits remains."""
    half = logits_RV.dtype in (torch.float16, torch.bfloat16)
    return F.cross_entropy(logits_RV.float() if half else logits_RV, targets_R, ignore_index=IGNORE)


class CrossEntropy(torch.autograd.Function):
    """Saves the logits and logsumexp; log-softmax, as large as the logits, is never in memory."""

    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, targets_R: Tensor, fused: bool, inplace: bool) -> Tensor:
        logits_RV = logits_RV if logits_RV.stride(-1) == 1 else logits_RV.contiguous()
        losses_R, lse_R = loss_rows(logits_RV, targets_R)
        count = (targets_R != IGNORE).sum()  # stays on the device: .item() would make the CPU wait
        ctx.save_for_backward(logits_RV, targets_R, lse_R, count)
        ctx.fused, ctx.inplace = fused, inplace
        return losses_R.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits_RV, targets_R, lse_R, count = ctx.saved_tensors
        scale = (gradient / count).float()
        if ctx.fused:
            out = logits_RV if ctx.inplace else torch.empty_like(logits_RV)
            if ctx.inplace:  # tells autograd, which cannot see what a kernel writes, to refuse a second backward
                torch.autograd.graph.increment_version(logits_RV)
            return gradient_rows(logits_RV, targets_R, lse_R, scale, out), None, None, None
        return gradient_in_pytorch(logits_RV, targets_R, lse_R, scale), None, None, None


def gradient_in_pytorch(logits_RV: Tensor, targets_R: Tensor, lse_R: Tensor, scale: Tensor) -> Tensor:
    """Return (softmax − one-hot) · scale in the logits' dtype, by way of one fp32 tensor of their size."""
    counted = targets_R != IGNORE
    d_RV = logits_RV.to(torch.float32, copy=True).sub_(lse_R[:, None]).exp_()
    d_RV.scatter_add_(1, targets_R.where(counted, 0)[:, None], torch.full_like(lse_R, -1.0)[:, None])
    scale_R = scale.where(counted, 0)  # not scale · counted: with no row counted, scale is inf
    return d_RV.mul_(scale_R[:, None]).to(logits_RV.dtype)


def loss_rows(logits_RV: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return loss and logsumexp of each row, fp32, (R,) each; the loss of an ignored row is 0."""
    R, V = logits_RV.shape
    losses_R, lse_R = (torch.empty(R, dtype=torch.float32, device=logits_RV.device) for _ in range(2))
    block = min(triton.next_power_of_2(V), TILE)
    strides = logits_RV.stride(0), targets_R.stride(0)
    arguments = logits_RV, targets_R, losses_R, lse_R, *strides, V, IGNORE, block
    launch(loss_kernel, R, logits_RV, *arguments, num_warps=warps(block))
    return losses_R, lse_R


def gradient_rows(logits_RV: Tensor, targets_R: Tensor, lse_R: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Write (softmax − one-hot) · scale to `out`, which may be the logits themselves. scale: fp32, one value."""
    R, V = logits_RV.shape
    block = min(triton.next_power_of_2(V), TILE)
    strides = logits_RV.stride(0), targets_R.stride(0), out.stride(0)
    arguments = logits_RV, targets_R, lse_R, scale, out, *strides, V, IGNORE, block
    launch(gradient_kernel, R, logits_RV, *arguments, num_warps=warps(block))
    return out


@jit
def loss_kernel(X, TARGETS, LOSSES, LSE, stride_x, stride_t, V, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int64: R·V passes 2^31 at 16,744 rows of Llama 3's vocabulary
    highest, total = tl.full((BLOCK,), LOWEST, tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * stride_x + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
        highest, total = absorb(highest, total, x)
    highest, total = reduced(highest, total)
    lse = highest + tl.log(total)
    target = tl.load(TARGETS + row * stride_t)
    known = (target >= 0) & (target < V)  # a wrong target must not read another row's memory
    picked = tl.load(X + row * stride_x + target, mask=known, other=float("nan")).to(tl.float32)
    tl.store(LSE + row, lse)
    tl.store(LOSSES + row, tl.where(target == IGNORED, 0.0, lse - picked))


@jit
def gradient_kernel(X, TARGETS, LSE, SCALE, DX, stride_x, stride_t, stride_dx, V, IGNORED: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(TARGETS + row * stride_t)
    lse = tl.load(LSE + row)
    scale = tl.where(target == IGNORED, 0.0, tl.load(SCALE))
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * stride_x + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
        d = (tl.exp(x - lse) - tl.where(columns == target, 1.0, 0.0)) * scale
        tl.store(DX + row * stride_dx + columns, d, mask=columns < V)
