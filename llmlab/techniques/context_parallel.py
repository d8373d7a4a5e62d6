"""Context parallelism from scratch: each rank has some of the tokens, and keys and values travel around a ring.

Ring attention (Liu et al., arXiv 2310.01889, algorithm 1): all but attention works on a token at a time, so a rank
needs just its own tokens. In attention it needs everybody's keys and values: they arrive a chunk at a time, and the
pieces are put together as FlashAttention puts its tiles together, by their log-sum-exp.

With a causal mask, the rank that has the last tokens would do most of the work. Cut into 2 N chunks, of which rank r
takes r and 2 N − 1 − r, all ranks do the same (Llama 3, arXiv 2407.21783, section 3.3.2).

    B  batch    H  query heads    K  key and value heads    T  tokens of all ranks    N  ranks    t  tokens of a rank
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import SpecError
from .data_parallel import pass_on
from .flash_attention import check_attention, flash_backward, flash_forward


def chunks_of(rank: int, ranks: int, balanced: bool = True) -> tuple[int, ...]:
    """Return which chunks of the text `rank` has: of 2 N where `balanced`, else of N."""
    return (rank, 2 * ranks - 1 - rank) if balanced else (rank,)


def positions(seq_len: int, rank: int, ranks: int, balanced: bool = True) -> Tensor:
    """Return the places in the text of the tokens of `rank`, int64 (t,); raises SpecError where they are not equal."""
    mine = chunks_of(rank, ranks, balanced)
    chunks = ranks * len(mine)
    if seq_len % chunks:
        raise SpecError(f"seq_len={seq_len} is not a multiple of {chunks}: cp={ranks} cuts it into so many chunks")
    return torch.cat([torch.arange(seq_len).tensor_split(chunks)[chunk] for chunk in mine])


def work(rank: int, ranks: int, balanced: bool = True) -> float:
    """Return the share of all score products of causal attention that `rank` computes: 1 / N of them is fair."""
    mine = chunks_of(rank, ranks, balanced)
    done = sum(chunk + 0.5 for chunk in mine)  # earlier chunks whole, and half of its own
    return done / sum(chunk + 0.5 for chunk in range(ranks * len(mine)))


def ring_attention(q: Tensor, k: Tensor, v: Tensor, balanced: bool = True, tile: int = 64) -> Tensor:
    """Return this rank's rows of causal attention over all ranks' tokens, (B, H, t, D).

    q: (B, H, t, D); k, v: (B, K, t, D), the tokens that `positions` names. Sends (N − 1) / N of the keys and values of
    all tokens forward; backward sends them again, with their gradients. Raises SpecError.
    """
    check_attention(q, k, v)
    if q.shape[2] % len(chunks_of(0, 1, balanced)):
        raise SpecError(f"{q.shape[2]} tokens a rank cannot be cut into two chunks; give an even number")
    return RingAttention.apply(q, k, v, balanced, tile)


Piece = tuple[slice, slice, bool]  # of scores: its rows, its columns, and whether it lies on the diagonal


class RingAttention(torch.autograd.Function):
    """Saves what FlashAttention saves: this rank's q, k, v, output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, balanced: bool, tile: int) -> Tensor:
        out = torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        lse = torch.full(q.shape[:3], -torch.inf, dtype=out.dtype, device=q.device)
        for passing, pairs in _around(torch.stack((k, v)), balanced):
            for rows, columns, causal in pairs:
                keys, values = passing[..., columns, :]
                o, o_lse = flash_forward(q[:, :, rows], keys, values, causal, tile)
                both = torch.logaddexp(lse[..., rows], o_lse)
                # Each piece was divided by its own sum of exponentials; weigh it by that sum's share of the whole.
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
        # The gradients of keys and values travel with them, and after N steps they are home.
        travelling = torch.cat((keys_and_values, torch.zeros_like(keys_and_values)))  # k, v, dk, dv
        for passing, pairs in _around(travelling, ctx.balanced, home=True):
            for rows, columns, causal in pairs:
                keys, values = passing[:2, ..., columns, :]
                queries, known = q[:, :, rows], (out[:, :, rows], lse[..., rows].contiguous(), dout[:, :, rows])
                of_q, of_k, of_v = flash_backward(queries, keys, values, *known, causal, ctx.tile)
                dq[:, :, rows] += of_q
                passing[2, ..., columns, :] += of_k
                passing[3, ..., columns, :] += of_v
            travelling = passing
        return dq, *_passed_on(travelling)[2:], None, None


def _around(mine: Tensor, balanced: bool, home: bool = False) -> Iterator[tuple[Tensor, list[Piece]]]:
    """Yield what passes by, N times, with the (rows, columns, causal) pieces of scores that it makes.

    What is yielded may be changed before it is passed on where `home`; else the next is under way meanwhile.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(ranks):
        source = (rank - step) % ranks
        queries, keys = chunks_of(rank, ranks, balanced), chunks_of(source, ranks, balanced)
        t = mine.shape[-2] // len(queries)
        cut = [slice(i * t, (i + 1) * t) for i in range(len(queries))]
        pairs = [
            (cut[i], cut[j], query == key)
            for i, query in enumerate(queries)
            for j, key in enumerate(keys)
            if key <= query  # a later chunk is masked as a whole
        ]
        last = step == ranks - 1
        if home or last:
            yield mine, pairs
            mine = mine if last else _passed_on(mine)
        else:
            arriving = torch.empty_like(mine)
            requests = pass_on(mine, arriving)
            yield mine, pairs  # computed while the next arrives
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
