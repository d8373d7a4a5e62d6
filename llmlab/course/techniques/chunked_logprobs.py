"""Log-probabilities of the next tokens without all logits in memory: one tile of them at a time.

Preference and policy-gradient losses use one number per token, log p = z_target - logsumexp(z). All logits of N tokens
would be N · V numbers, and so would their gradient. One tile of TOKENS × WORDS is enough: forward folds each tile into
a running logsumexp, and backward computes the tile again and overwrites it with its gradient. TRL's trainers do the
same with Triton kernels (trl/kernels/chunked_logprob.py).

    N  tokens     h  hidden     V  vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

TOKENS, WORDS = 4096, 32768  # rows and columns of a tile, as in TRL 1.16
ROWS = 64  # rows of a tile that are upcast to fp32 together


@torch.library.custom_op("llmlab::fold_logits", mutates_args=("highest", "total", "chosen"))
def fold_logits(tile: Tensor, targets: Tensor, start: int, highest: Tensor, total: Tensor, chosen: Tensor) -> None:
    """Fold logits (n, width), whose first column is word `start`, into the running maximum, the sum of exponentials
    relative to it, and the target's logit, (n,) each."""
    columns = targets - start
    for rows in torch.arange(len(tile), device=tile.device).split(ROWS):
        z, column = tile[rows].float(), columns[rows]
        top = torch.maximum(highest[rows], z.amax(1))
        total[rows] = total[rows] * (highest[rows] - top).exp() + (z - top[:, None]).exp().sum(1)
        highest[rows] = top
        inside = (column >= 0) & (column < z.shape[1])
        target = z.gather(1, column.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
        chosen[rows] = torch.where(inside, target, chosen[rows])


@torch.library.custom_op("llmlab::logits_gradient", mutates_args=("tile",))
def logits_gradient(tile: Tensor, targets: Tensor, start: int, log_z: Tensor, grad: Tensor) -> None:
    """Overwrite logits (n, width) with their gradient, (1[target] - softmax(z)) · grad."""
    words = torch.arange(start, start + tile.shape[1], device=tile.device)
    for rows in torch.arange(len(tile), device=tile.device).split(ROWS):
        p = (tile[rows].float() - log_z[rows, None]).exp()
        tile[rows] = (((words == targets[rows, None]).float() - p) * grad[rows, None]).to(tile.dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a · b to an fp32 `total`. On a GPU, this neither rounds the product of half matrices nor copies them."""
    if a.dtype != torch.float32 and (a.is_cuda or a.device.index is not None):  # lab.simulate's GPU is "cpu:0"
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        kind = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        total, chosen = (torch.zeros(targets.shape, device=hidden.device) for _ in range(2))
        highest = torch.full_like(total, -torch.inf)
        for rows, words, tile, _, _ in tiles(hidden, weight, ctx.dtype):
            fold_logits(tile, targets[rows], words.start, highest[rows], total[rows], chosen[rows])
        log_z = highest + total.log()
        ctx.save_for_backward(hidden, weight, targets, log_z)
        return chosen - log_z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, targets, log_z = ctx.saved_tensors
        zeros = partial(torch.zeros, dtype=torch.float32, device=hidden.device)
        hidden_gradient = zeros(hidden.shape) if ctx.needs_input_grad[0] else None
        weight_gradient = zeros(weight.shape) if ctx.needs_input_grad[1] else None
        for rows, words, tile, inputs, part in tiles(hidden, weight, ctx.dtype):
            logits_gradient(tile, targets[rows], words.start, log_z[rows], grad[rows])
            if hidden_gradient is not None:
                add_product(hidden_gradient[rows], tile, part)
            if weight_gradient is not None:
                add_product(weight_gradient[words], tile.t(), inputs)
        return (
            None if hidden_gradient is None else hidden_gradient.to(hidden.dtype),
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None,
        )


def tiles(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Yield the rows and words of each tile, its logits, and the parts of `hidden` and `weight` that it is made of."""
    (tokens, _), (vocabulary, _) = hidden.shape, weight.shape
    buffer = torch.empty(min(tokens, TOKENS), WORDS, dtype=dtype, device=hidden.device)
    for first in range(0, tokens, TOKENS):
        rows = slice(first, min(first + TOKENS, tokens))
        inputs = hidden[rows].to(dtype)
        for start in range(0, vocabulary, WORDS):
            words = slice(start, min(start + WORDS, vocabulary))
            part = weight[words].to(dtype)
            tile = buffer[: len(inputs), : len(part)]
            torch.mm(inputs, part.t(), out=tile)
            yield rows, words, tile, inputs, part


def chunked_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return log p(targets), (N,) in fp32, of a head `weight` (V, h) on `hidden` (N, h), differentiable in both."""
    result: Tensor = _ChunkedLogProbs.apply(hidden, weight, targets)
    return result


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        total, chosen = (torch.zeros(targets.shape, device=logits.device) for _ in range(2))
        highest = torch.full_like(total, -torch.inf)
        for row in zip(logits, targets, highest, total, chosen, strict=True):
            fold_logits(*row[:2], 0, *row[2:])
        log_z = highest + total.log()
        ctx.save_for_backward(logits, targets, log_z)
        return chosen - log_z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, targets, log_z = ctx.saved_tensors
        gradient = logits.clone(memory_format=torch.contiguous_format)
        for row in zip(gradient, targets, log_z, grad, strict=True):
            logits_gradient(*row[:2], 0, *row[2:])
        return gradient, None


def log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """Return log p(targets), (B, T) in fp32, from whole logits (B, T, V). The backward pass allocates their gradient,
    and no other copy of them exists (trl/kernels/logprob_entropy.py)."""
    result: Tensor = _LogProbs.apply(logits, targets)
    return result
