"""The output layer and its loss in one: cross_entropy(hidden · weightᵀ, targets), without all logits in memory.

    R  rows (tokens)     C  hidden size     V  vocabulary     r  rows of a chunk     b  bytes per value

Memory in addition to hidden, weight and their gradients, and the number of matmuls of a step (2·R·C·V FLOP each):

    0  logits and their gradient in b, and four to five copies in fp32: about (2·b + 16)·R·V     3
    1  a chunk of those, (2·b + 12)·r·V: a row's loss and gradient need only that row, so forward
       computes both and frees the chunk                                                         3
    2  the logits and their gradient, 2·b·R·V: Inductor fuses the loss, not the matmuls          3
    3  a chunk, b·r·V, in backward (2·b + 4)·r·V: saves only logsumexp, recomputes the logits    4
    4  a chunk, b·r·V, which its gradient overwrites                                             3

Rungs 1 and 4 keep the gradients in memory from the forward pass on, so compute a loss without backward under no_grad.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....base.errors import SpecError, check_counts
from ..rungs import as_autocast, check_columns, choose, compiled
from .cross_entropy import IGNORE, cross_entropy0, gradient_in_pytorch, gradient_rows, loss_rows

ROWS = 128  # of a tile of a matrix product: a chunk of 261 rows would compute 384


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, rung: int | None = None, chunk: int | None = None
) -> Tensor:
    """Return the mean loss in nats, an fp32 scalar. hidden: (..., C), weight: (V, C), targets: (...), int64.

    A target of −100 is left out; others outside 0 … V − 1 are as in `cross_entropy`. The logits of `chunk` rows are in
    memory at the same time (rungs 1, 3, 4). By default, they need about as much memory as hidden, in whole tiles of a
    matmul. Raises SpecError if shapes or dtypes do not fit.
    """
    check_columns(hidden)
    hidden, weight = as_autocast(hidden, weight)
    if weight.dim() != 2 or not len(weight) or weight.shape[1] != hidden.shape[-1] or weight.dtype != hidden.dtype:
        actual = f"hidden {hidden.dtype} {tuple(hidden.shape)}, weight {weight.dtype} {tuple(weight.shape)}"
        raise SpecError(f"{actual} do not fit; give one dtype, hidden (..., C) and weight (V, C)")
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64 or targets.device != hidden.device:
        actual = f"targets are {targets.dtype} {tuple(targets.shape)} on {targets.device}"
        raise SpecError(f"{actual}; they must be torch.int64 {tuple(hidden.shape[:-1])} on {hidden.device}")
    hidden_RC, targets_R = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    chunk = max(1, hidden_RC.numel() // weight.shape[0] // ROWS) * ROWS if chunk is None else chunk
    check_counts(chunk=chunk)
    rung = choose(rung, hidden, weight)
    if rung in (1, 4):
        return Gradients.apply(hidden_RC, weight, targets_R, chunk, rung == 4, torch.is_grad_enabled())
    if rung == 3:
        return Recompute.apply(hidden_RC, weight, targets_R, chunk)
    whole = linear_cross_entropy0 if rung == 0 else compiled(linear_cross_entropy0)
    return whole(hidden_RC, weight, targets_R, chunk)


def linear_cross_entropy0(hidden_RC: Tensor, weight_VC: Tensor, targets_R: Tensor, chunk: int) -> Tensor:
    """Rung 0: all the logits, and one operator per line."""
    return cross_entropy0(F.linear(hidden_RC, weight_VC), targets_R)


class Gradients(torch.autograd.Function):
    """Loss and gradients in forward. dweight is summed in weight's dtype, rounded once per chunk, as in accumulation.

    The factor of GradScaler arrives in backward. This is too late for gradients that underflow in fp16 in forward, as
    most of softmax does after the mean's 1/R. Until then, the gradients are therefore R times as large, and dweight
    only √R times, because its sum could overflow.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_RC: Tensor, weight_VC: Tensor, targets_R: Tensor, chunk: int, triton: bool, graded: bool
    ) -> Tensor:
        need_hidden, need_weight = (graded and needed for needed in ctx.needs_input_grad[:2])
        dhidden = torch.empty_like(hidden_RC) if need_hidden else None
        dweight = torch.zeros_like(weight_VC) if need_weight else None
        count = (targets_R != IGNORE).sum().to(torch.float64 if hidden_RC.dtype == torch.float64 else torch.float32)
        bits = round(math.log2(max(len(hidden_RC), 1)))  # powers of 2, which round nothing
        larger, root = 2.0**bits, 2.0 ** (bits // 2)  # about R and √R
        scale, loss = larger / count, torch.zeros_like(count)
        for start in range(0, len(hidden_RC), chunk):
            part = slice(start, start + chunk)
            logits, targets = F.linear(hidden_RC[part], weight_VC), targets_R[part]
            chunk_loss, dlogits = (with_triton if triton else with_pytorch)(
                logits, targets, scale, need_hidden or need_weight
            )
            loss += chunk_loss
            if dlogits is not None and dhidden is not None:
                torch.mm(dlogits, weight_VC, out=dhidden[part])
            if dlogits is not None and dweight is not None:
                dweight.addmm_(dlogits.t(), hidden_RC[part], alpha=1 / root)
        ctx.save_for_backward(dhidden, dweight)
        ctx.larger = larger, larger / root
        return loss / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # In place, because a copy of dweight would need V·C numbers more. Autograd then refuses a second backward.
        pairs = zip(ctx.saved_tensors, ctx.larger, strict=True)
        return *(None if d is None else d.mul_(gradient / larger) for d, larger in pairs), None, None, None, None


def with_pytorch(logits: Tensor, targets: Tensor, scale: Tensor, graded: bool) -> tuple[Tensor, Tensor | None]:
    """Return the summed loss of a chunk, and the gradient of its logits if `graded`."""
    counted = targets != IGNORE
    targets = targets.where(counted, 0)[:, None]
    log_softmax = torch.log_softmax(logits.to(scale.dtype), dim=-1)
    loss = -log_softmax.gather(1, targets)[:, 0].where(counted, 0).sum()
    if not graded:
        return loss, None
    d = log_softmax.exp_()
    d.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=d.dtype))
    return loss, d.mul_(scale.where(counted, 0)[:, None]).to(logits.dtype)


def with_triton(logits: Tensor, targets: Tensor, scale: Tensor, graded: bool) -> tuple[Tensor, Tensor | None]:
    """As `with_pytorch`; the gradient overwrites the logits."""
    losses, lse = loss_rows(logits, targets)
    return losses.sum(), gradient_rows(logits, targets, lse, scale, logits) if graded else None


class Recompute(torch.autograd.Function):
    """Saves hidden, weight and logsumexp, and computes each chunk of logits twice."""

    @staticmethod
    def forward(ctx: Any, hidden_RC: Tensor, weight_VC: Tensor, targets_R: Tensor, chunk: int) -> Tensor:
        pairs = zip(hidden_RC.split(chunk), targets_R.split(chunk), strict=True)
        chunks = [loss_rows(F.linear(hidden, weight_VC), targets) for hidden, targets in pairs]
        losses_R, lse_R = (torch.cat(rows) for rows in zip(*chunks, strict=True))
        count = (targets_R != IGNORE).sum()
        ctx.save_for_backward(hidden_RC, weight_VC, targets_R, lse_R, count)
        ctx.chunk = chunk
        return losses_R.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_RC, weight_VC, targets_R, lse_R, count = ctx.saved_tensors
        scale = (gradient / count).float()
        dhidden, dweight = torch.empty_like(hidden_RC), torch.zeros_like(weight_VC)
        split = (t.split(ctx.chunk) for t in (hidden_RC, targets_R, lse_R, dhidden))
        for hidden, targets, lse, out in zip(*split, strict=True):
            dlogits = gradient_in_pytorch(F.linear(hidden, weight_VC), targets, lse, scale)
            torch.mm(dlogits, weight_VC, out=out)
            dweight.addmm_(dlogits.t(), hidden)
        return dhidden, dweight, None, None
