"""FlashAttention from scratch: exact attention, tile by tile, without the whole matrix of scores in memory.

Online softmax is from Milakov and Gimelshein, arXiv 1805.02867, algorithm 3, tiling from FlashAttention-2, Dao, arXiv
2307.08691, algorithms 1 (forward) and 2 (backward). In plain PyTorch it saves memory and no time: the tiles still pass
through the GPU's memory. The same algorithm as Triton kernels is in `llmlab/course/kernels/ladder/attention.py`.

    B  batch    H  query heads    K  key and value heads    G  H / K, query heads per key head    D  head size
    T  tokens    t, s  query and key rows of a tile    m  maximum so far    l  Σ exp(score − m) so far
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from ...base.compat import symbol
from ...base.errors import SpecError, check_counts


def online_softmax(x_N: Tensor, tile: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (m, l) after each tile of `tile` values: in the end softmax is exp(x − m) / l.

    x_N is 1-D. A larger maximum makes the old sum too large by exp(new m − old m); one
    product corrects it, so no earlier value is read again.
    """
    if x_N.dim() != 1 or not len(x_N) or not x_N.is_floating_point() or not tile >= 1:
        given = f"got {x_N.dtype}, shape {tuple(x_N.shape)}, tile={tile}"
        raise SpecError(f"online_softmax takes 1-D floats and tile >= 1; {given}")
    # Finite, because a first tile of nothing but −inf (masked) would give −inf − (−inf), a NaN.
    m, total = x_N.new_tensor(torch.finfo(x_N.dtype).min), x_N.new_tensor(0.0)
    for values in x_N.split(tile):
        m_new = torch.maximum(m, values.max())
        total = total * torch.exp(m - m_new) + torch.exp(values - m_new).sum()
        m = m_new
        yield m, total


def check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise SpecError unless q is (B, H, T, D), k and v (B, K, T, D), floats of one dtype, D >= 1, and K divides H."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or (k.shape[0], *k.shape[2:]) != (q.shape[0], *q.shape[2:]):
        raise SpecError(f"{shapes} do not fit; give q (B, H, T, D), k and v (B, K, T, D)")
    if not q.shape[-1]:
        raise SpecError(f"{shapes}: the heads have no channels; give D >= 1")
    if k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise SpecError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads; K must divide H")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise SpecError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; give one floating-point dtype")


def standard_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Return softmax(q·kᵀ / √D)·v by the formula: several tensors of T² scores per head."""
    check_attention(q, k, v)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores_BHTT = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        shape = scores_BHTT.shape[-2:]
        later = torch.ones(shape, dtype=torch.bool, device=q.device).triu(1)
        scores_BHTT = scores_BHTT.masked_fill(later, -math.inf)
    return torch.softmax(scores_BHTT, dim=-1) @ v


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, tile: int = 64) -> Tensor:
    """Return softmax(q·kᵀ / √D)·v, (B, H, T, D). q: (B, H, T, D), k, v: (B, K, T, D). `tile`: rows of a tile.

    Saves q, k, v, the output and one logsumexp per row for backward: O(T) memory; the FLOPs remain O(T²). Raises
    SpecError for shapes, dtypes or tiles that do not fit.
    """
    check_attention(q, k, v)
    check_counts(tile=tile)
    return FlashAttention.apply(q, k, v, causal, tile)


class FlashAttention(torch.autograd.Function):
    """Saves q, k, v, the output and logsumexp. Backward recomputes each tile of probabilities."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, tile: int) -> Tensor:
        out, lse = flash_forward(q, k, v, causal, tile)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.tile = causal, tile
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        return *flash_backward(q, k, v, out, lse, dout, ctx.causal, ctx.tile), None, None


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, tile: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output in q's dtype, and logsumexp of the scaled scores, (B, H, T),
    in fp32 (fp64 for fp64)."""
    (q_BKGTD, k_BKTD, v_BKTD), scale = by_group(q, k, v), 1 / math.sqrt(q.shape[-1])
    out, lse = torch.empty_like(q_BKGTD), torch.empty_like(q_BKGTD[..., 0])
    for rows in tiles(q.shape[2], tile):  # on a GPU each tile is one program
        q_t = q_BKGTD[..., rows, :] * scale
        o_t, l_t = torch.zeros_like(q_t), torch.zeros_like(q_t[..., 0])
        m_t = torch.full_like(l_t, -math.inf)
        for columns in tiles(q.shape[2], tile):
            if causal and columns.start >= rows.stop:
                break  # from here on every key comes after every query
            s_ts = masked(q_t @ k_BKTD[:, :, None, columns].mT, rows, columns, causal)
            m_new = torch.maximum(m_t, s_ts.amax(-1))
            p_ts = torch.exp(s_ts - m_new[..., None])
            shrink = torch.exp(m_t - m_new)  # corrects the sums under the old maximum
            l_t = l_t * shrink + p_ts.sum(-1)
            o_t = o_t * shrink[..., None] + p_ts @ v_BKTD[:, :, None, columns]
            m_t = m_new
        out[..., rows, :] = o_t / l_t[..., None]
        lse[..., rows] = m_t + torch.log(l_t)
    return out.view(q.shape).to(q.dtype), lse.view(q.shape[:3])


def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    causal: bool, tile: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk, dv in the dtypes of q, k, v. p = exp(s − lse) needs no second sum."""
    (q_BKGTD, k_BKTD, v_BKTD), scale = by_group(q, k, v), 1 / math.sqrt(q.shape[-1])
    out_BKGTD, dout_BKGTD = by_group(out, k, v)[0], by_group(dout, k, v)[0]
    lse_BKGT = lse.view(q_BKGTD.shape[:-1])
    delta_BKGT = (dout_BKGTD * out_BKGTD).sum(-1)  # = Σ p·dp over a row of scores
    dq, dk, dv = (torch.zeros_like(t) for t in (q_BKGTD, k_BKTD, v_BKTD))
    for columns in tiles(q.shape[2], tile):  # one program: it alone writes its dk and dv
        k_s, v_s = k_BKTD[:, :, None, columns], v_BKTD[:, :, None, columns]
        for rows in tiles(q.shape[2], tile):
            if causal and columns.start >= rows.stop:
                continue
            q_t, dout_t = q_BKGTD[..., rows, :], dout_BKGTD[..., rows, :]
            s_ts = masked(q_t @ k_s.mT * scale, rows, columns, causal)
            p_ts = torch.exp(s_ts - lse_BKGT[..., rows, None])
            dv[:, :, columns] += (p_ts.mT @ dout_t).sum(2)  # over the G heads
            ds_ts = p_ts * (dout_t @ v_s.mT - delta_BKGT[..., rows, None]) * scale
            dq[..., rows, :] += ds_ts @ k_s
            dk[:, :, columns] += (ds_ts.mT @ q_t).sum(2)
    return dq.view(q.shape).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def by_group(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q as (B, K, G, T, D), grouped by key head, and k and v; half precision becomes fp32."""
    B, H, T, D = q.shape
    K = k.shape[1]
    q, k, v = (t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in (q, k, v))
    return q.reshape(B, K, H // K, T, D), k, v


def sdpa_backend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> str:
    """Return what F.scaled_dot_product_attention would run on these tensors, on their device: "math",
    "flash_attention", "efficient_attention" or "cudnn_attention" (torch.nn.attention.SDPBackend)."""
    grouped = q.shape[1] != k.shape[1]
    choice = symbol("torch._fused_sdp_choice")(q, k, v, mask, 0.0, causal, enable_gqa=grouped)
    return SDPBackend(choice).name.lower()


def tiles(length: int, tile: int) -> list[slice]:
    """Return the slices that cut `length` rows into tiles; the last one may be shorter."""
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]


def masked(s_ts: Tensor, rows: slice, columns: slice, causal: bool) -> Tensor:
    """Return the tile of scores with −inf where the key comes after the query, which happens on the diagonal only."""
    if not causal or columns.stop <= rows.start + 1:
        return s_ts
    query, key = (torch.arange(one.start, one.stop, device=s_ts.device) for one in (rows, columns))
    return s_ts.masked_fill(key > query[:, None], -math.inf)
