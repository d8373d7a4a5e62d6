"""Context parallelism from scratch: each rank has some of the tokens of every sequence.

All layers except attention process each token separately, so a rank needs only its own tokens. Attention needs the
keys and values of all ranks. There are two ways to get them:

    ring       keys and values arrive from one rank after another. Partial outputs are merged by their log-sum-exp, as
               FlashAttention merges its tiles (Liu et al., arXiv 2310.01889, algorithm 1)
    Ulysses    an all-to-all exchanges tokens for heads: a rank then attends to all tokens with some of the heads, and
               a second all-to-all returns its outputs (Jacobs et al., arXiv 2309.14509)

Under a causal mask, the ring's rank with the last tokens would compute most of the scores. If the sequence is cut into
2 cp chunks and rank r has chunks r and 2 cp − 1 − r, all ranks compute equally many (Llama 3, arXiv 2407.21783,
section 3.3.2).

    B  sequences    a  query heads    k  key and value heads    d  head size    S  tokens per sequence    cp  ranks
    T  tokens of a rank, S / cp of each sequence
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...base.errors import SpecError
from .data_parallel import pass_on
from .flash_attention import check_attention, flash_backward, flash_forward


def chunks_of(rank: int, ranks: int, balanced: bool = True) -> tuple[int, ...]:
    """Return the numbers of the chunks that `rank` has: two of 2 cp if `balanced`, otherwise one of cp."""
    return (rank, 2 * ranks - 1 - rank) if balanced else (rank,)


def positions(seq_len: int, rank: int, ranks: int, balanced: bool = True) -> Tensor:
    """Return the positions of the tokens of `rank`, int64 (T,). Raises SpecError if chunks would be unequal."""
    mine = chunks_of(rank, ranks, balanced)
    chunks = ranks * len(mine)
    if seq_len % chunks:
        raise SpecError(f"seq_len={seq_len} is not a multiple of {chunks}, the number of chunks for cp={ranks}")
    return torch.cat([torch.arange(seq_len).tensor_split(chunks)[chunk] for chunk in mine])


def work(rank: int, ranks: int, balanced: bool = True) -> float:
    """Return the fraction of the causal scores that `rank` computes. It is 1 / cp if the work is balanced."""
    mine = chunks_of(rank, ranks, balanced)
    computed = sum(chunk + 0.5 for chunk in mine)  # all of the earlier chunks, and half of its own
    return computed / sum(chunk + 0.5 for chunk in range(ranks * len(mine)))


def ring_attention(q: Tensor, k: Tensor, v: Tensor, balanced: bool = True, tile: int = 64) -> Tensor:
    """Return the outputs of this rank's tokens, (B, a, T, d), of causal attention over the tokens of all ranks.

    q: (B, a, T, d); k, v: (B, k, T, d), of the tokens at `positions`. In the forward pass, a rank sends cp − 1 tensors
    of keys and values. The backward pass sends them again, with their gradients. Raises SpecError for shapes that do
    not fit.
    """
    check_attention(q, k, v)
    if q.shape[2] % len(chunks_of(0, 1, balanced)):
        raise SpecError(f"{q.shape[2]} tokens per rank cannot be cut into two chunks; give an even number")
    return RingAttention.apply(q, k, v, balanced, tile)


Piece = tuple[slice, slice, bool]  # of the scores: rows, columns, and whether it is on the diagonal (needs the mask)


class RingAttention(torch.autograd.Function):
    """Saves the same tensors as FlashAttention: q, k, v, the output and the log-sum-exp of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, balanced: bool, tile: int) -> Tensor:
        out = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        lse = torch.full(q.shape[:3], -torch.inf, dtype=out.dtype, device=q.device)
        for passing, pieces in _around(torch.stack((k, v)), balanced):
            for rows, columns, causal in pieces:
                keys, values = passing[..., columns, :]
                o, o_lse = flash_forward(q[:, :, rows], keys, values, causal, tile)
                both = torch.logaddexp(lse[..., rows], o_lse)
                # Each output is divided by its own sum of exponentials: weight it by its share of the total sum.
                old, new = torch.exp(lse[..., rows] - both)[..., None], torch.exp(o_lse - both)[..., None]
                out[:, :, rows] = out[:, :, rows] * old + o.to(out.dtype) * new
                lse[..., rows] = both
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.balanced, ctx.tile = balanced, tile
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, keys_and_values = torch.zeros_like(q), torch.stack((k, v))
        # The gradients of keys and values travel with them, and are back on their own rank after cp steps.
        travelling = torch.cat((keys_and_values, torch.zeros_like(keys_and_values)))  # k, v, dk, dv
        for passing, pieces in _around(travelling, ctx.balanced, overlap=False):
            for rows, columns, causal in pieces:
                keys, values = passing[:2, ..., columns, :]
                queries, saved = q[:, :, rows], (out[:, :, rows], lse[..., rows].contiguous(), dout[:, :, rows])
                dq_piece, dk_piece, dv_piece = flash_backward(queries, keys, values, *saved, causal, ctx.tile)
                dq[:, :, rows] += dq_piece
                passing[2, ..., columns, :] += dk_piece
                passing[3, ..., columns, :] += dv_piece
            travelling = passing
        return dq, *_passed_on(travelling)[2:], None, None


def _around(mine: Tensor, balanced: bool, overlap: bool = True) -> Iterator[tuple[Tensor, list[Piece]]]:
    """Yield the tensors of all ranks, one after the other, with the pieces of the scores to compute with each.

    With `overlap`, the next tensor arrives while the caller computes. Without, the caller may change a tensor before it
    is sent.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(ranks):
        source = (rank - step) % ranks
        queries, keys = chunks_of(rank, ranks, balanced), chunks_of(source, ranks, balanced)
        t = mine.shape[-2] // len(queries)
        cut = [slice(i * t, (i + 1) * t) for i in range(len(queries))]
        pieces = [
            (cut[i], cut[j], query == key)
            for i, query in enumerate(queries)
            for j, key in enumerate(keys)
            if key <= query  # a later chunk is masked entirely
        ]
        last = step == ranks - 1
        if last or not overlap:
            yield mine, pieces
            mine = mine if last else _passed_on(mine)
        else:
            arriving = torch.empty_like(mine)
            requests = pass_on(mine, arriving)
            yield mine, pieces  # the caller computes while the next tensor arrives
            for request in requests:
                request.wait()
            mine = arriving


def _passed_on(mine: Tensor) -> Tensor:
    if dist.get_world_size() == 1:
        return mine
    arriving = torch.empty_like(mine)
    for request in pass_on(mine, arriving):
        request.wait()
    return arriving


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the outputs of this rank's tokens, (B, a, T, d), of causal attention over the tokens of all ranks.

    q: (B, a, T, d); k, v: (B, k, T, d). Rank r has the r-th part of each sequence. Raises SpecError if the number of
    ranks does not divide the number of key heads.
    """
    ranks = dist.get_world_size()
    if k.shape[1] % ranks:
        raise SpecError(f"cp={ranks} does not divide the {k.shape[1]} key heads, and Ulysses moves whole heads")
    q, k, v = (Exchange.apply(x, 1, 2) for x in (q, k, v))  # all tokens of 1 / cp of the heads
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return Exchange.apply(out, 2, 1)  # all heads of 1 / cp of the tokens


class Exchange(torch.autograd.Function):
    """An all-to-all that splits dimension `split` over the ranks, and joins their parts along dimension `join`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int) -> Tensor:
        ctx.split, ctx.join = split, join
        parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), split)]
        arriving = [torch.empty_like(part) for part in parts]
        dist.all_to_all(arriving, parts)
        return torch.cat(arriving, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Exchange.apply(grad, ctx.join, ctx.split), None, None
