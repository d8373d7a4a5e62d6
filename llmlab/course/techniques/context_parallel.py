"""Context parallelism from scratch: each rank has some of the tokens, and keys and values travel around a ring.

Ring attention (Liu et al., arXiv 2310.01889, algorithm 1): every layer but attention works on each token separately,
so a rank needs only its own tokens. Attention needs the keys and values of all ranks: they arrive from one rank after
another, and the partial outputs are combined as FlashAttention combines its tiles, by their log-sum-exp.

With a causal mask, the rank with the last tokens would do most of the work. When the sequence is cut into 2 N chunks
and rank r takes chunks r and 2 N − 1 − r, all ranks do equal work (Llama 3, arXiv 2407.21783, section 3.3.2).

    B  batch    H  query heads    K  key and value heads    T  tokens of all ranks    N  ranks    t  tokens per rank
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.errors import SpecError
from .data_parallel import pass_on
from .flash_attention import check_attention, flash_backward, flash_forward


def chunks_of(rank: int, ranks: int, balanced: bool = True) -> tuple[int, ...]:
    """Return the numbers of the chunks that `rank` has: two of 2 N if `balanced`, else one of N."""
    return (rank, 2 * ranks - 1 - rank) if balanced else (rank,)


def positions(seq_len: int, rank: int, ranks: int, balanced: bool = True) -> Tensor:
    """Return the positions in the text of the tokens of `rank`, int64 (t,); SpecError if chunks would be unequal."""
    mine = chunks_of(rank, ranks, balanced)
    chunks = ranks * len(mine)
    if seq_len % chunks:
        raise SpecError(f"seq_len={seq_len} is not a multiple of {chunks}, the number of chunks for cp={ranks}")
    return torch.cat([torch.arange(seq_len).tensor_split(chunks)[chunk] for chunk in mine])


def work(rank: int, ranks: int, balanced: bool = True) -> float:
    """Return the fraction of causal attention's scores that `rank` computes; 1 / N is balanced."""
    mine = chunks_of(rank, ranks, balanced)
    computed = sum(chunk + 0.5 for chunk in mine)  # all of the earlier chunks, and half of its own
    return computed / sum(chunk + 0.5 for chunk in range(ranks * len(mine)))


def ring_attention(q: Tensor, k: Tensor, v: Tensor, balanced: bool = True, tile: int = 64) -> Tensor:
    """Return this rank's rows of causal attention over the tokens of all ranks, (B, H, t, D).

    q: (B, H, t, D); k, v: (B, K, t, D), of the tokens at `positions`. In forward a rank sends (N − 1) / N of the keys
    and values of all tokens; backward sends them again, with their gradients. SpecError for shapes that do not fit.
    """
    check_attention(q, k, v)
    if q.shape[2] % len(chunks_of(0, 1, balanced)):
        raise SpecError(f"{q.shape[2]} tokens per rank cannot be cut into two chunks; give an even number")
    return RingAttention.apply(q, k, v, balanced, tile)


Piece = tuple[slice, slice, bool]  # of the scores: rows, columns, and whether it is on the diagonal (needs the mask)


class RingAttention(torch.autograd.Function):
    """Saves what FlashAttention saves: this rank's q, k, v, output and log-sum-exp."""

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
        # The gradients of keys and values travel with them, and are back on their own rank after N steps.
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
    """Yield the tensor of each rank in turn, N times, with the pieces of the scores to compute with it.

    With `overlap` the next one arrives while the caller computes; without, the caller may change it before it is sent.
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
