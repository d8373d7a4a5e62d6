"""FlashAttention from scratch: exact attention in tiles, without the whole matrix of scores in memory.

The online softmax is algorithm 3 of Milakov and Gimelshein, arXiv 1805.02867. The tiles are those of FlashAttention-2,
Dao, arXiv 2307.08691, algorithms 1 (forward) and 2 (backward). Plain PyTorch saves memory in this way but no time,
because its tiles still pass through the memory of the GPU. `llmlab/course/kernels/ladder/attention.py` has the same
algorithm as Triton kernels.

    B  sequences    a  query heads    k  key and value heads    g  a / k, query heads per key head    d  head size
    S  tokens per sequence    i, j  query rows and key rows of a tile
    m  maximum so far    l  Σ exp(score − m) so far    lse  m + log l at the end: the log-sum-exp of a row
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


def online_softmax(x: Tensor, tile: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (m, l) after each tile of `tile` values of the 1-D tensor x. At the end, softmax is exp(x − m) / l.

    If the maximum grows, the old sum is too large by the factor exp(new m − old m). One multiplication corrects it
    without reading earlier values again.
    """
    if x.dim() != 1 or not len(x) or not x.is_floating_point() or not tile >= 1:
        actual = f"got {x.dtype}, shape {tuple(x.shape)}, tile={tile}"
        raise SpecError(f"online_softmax takes 1-D floats and tile >= 1; {actual}")
    # Finite, because a fully masked first tile would give −inf − (−inf), which is NaN.
    m, total = x.new_tensor(torch.finfo(x.dtype).min), x.new_tensor(0.0)
    for values in x.split(tile):
        m_new = torch.maximum(m, values.max())
        total = total * torch.exp(m - m_new) + torch.exp(values - m_new).sum()
        m = m_new
        yield m, total


def check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise SpecError unless q is (B, a, S, d), k and v (B, k, S, d), floats of one dtype, d >= 1, and k divides a."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or (k.shape[0], *k.shape[2:]) != (q.shape[0], *q.shape[2:]):
        raise SpecError(f"{shapes} do not fit; give q (B, a, S, d), k and v (B, k, S, d)")
    if not q.shape[-1]:
        raise SpecError(f"{shapes}: the heads have no channels; give d >= 1")
    if k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise SpecError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads; k must divide a")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise SpecError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; give one floating-point dtype")


def standard_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Return softmax(q·kᵀ / √d)·v as the formula says. Several tensors of S² scores per head exist in memory."""
    check_attention(q, k, v)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores_BaSS = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        shape = scores_BaSS.shape[-2:]
        later = torch.ones(shape, dtype=torch.bool, device=q.device).triu(1)
        scores_BaSS = scores_BaSS.masked_fill(later, -math.inf)
    return torch.softmax(scores_BaSS, dim=-1) @ v


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, tile: int = 64) -> Tensor:
    """Return softmax(q·kᵀ / √d)·v for q (B, a, S, d), k and v (B, k, S, d), computed in tiles of `tile` rows.

    For the backward pass it saves q, k, v, the output and one log-sum-exp per row, so its memory is O(S). Its FLOPs are
    O(S²), as before. Raises SpecError for shapes, dtypes or tiles that do not fit.
    """
    check_attention(q, k, v)
    check_counts(tile=tile)
    return FlashAttention.apply(q, k, v, causal, tile)


class FlashAttention(torch.autograd.Function):
    """Saves q, k, v, the output and the log-sum-exp. The backward pass recomputes each tile of probabilities."""

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
    """Return the output in the dtype of q, and the log-sum-exp of the scaled scores with shape (B, a, S), in fp32 (in
    fp64 for fp64 inputs)."""
    (q_BkgSd, k_BkSd, v_BkSd), scale = by_group(q, k, v), 1 / math.sqrt(q.shape[-1])
    out, lse = torch.empty_like(q_BkgSd), torch.empty_like(q_BkgSd[..., 0])
    for rows in tiles(q.shape[2], tile):  # on a GPU each tile is one program
        q_i = q_BkgSd[..., rows, :] * scale
        o_i, l_i = torch.zeros_like(q_i), torch.zeros_like(q_i[..., 0])
        m_i = torch.full_like(l_i, -math.inf)
        for columns in tiles(q.shape[2], tile):
            if causal and columns.start >= rows.stop:
                break  # all remaining keys come after all queries of this tile
            s_ij = masked(q_i @ k_BkSd[:, :, None, columns].mT, rows, columns, causal)
            m_new = torch.maximum(m_i, s_ij.amax(-1))
            p_ij = torch.exp(s_ij - m_new[..., None])
            shrink = torch.exp(m_i - m_new)  # corrects the sums that were computed with the old maximum
            l_i = l_i * shrink + p_ij.sum(-1)
            o_i = o_i * shrink[..., None] + p_ij @ v_BkSd[:, :, None, columns]
            m_i = m_new
        out[..., rows, :] = o_i / l_i[..., None]
        lse[..., rows] = m_i + torch.log(l_i)
    return out.view(q.shape).to(q.dtype), lse.view(q.shape[:3])


def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    causal: bool, tile: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv in the dtypes of q, k and v. Each probability is exp(s − lse), without maximum or sum."""
    (q_BkgSd, k_BkSd, v_BkSd), scale = by_group(q, k, v), 1 / math.sqrt(q.shape[-1])
    out_BkgSd, dout_BkgSd = by_group(out, k, v)[0], by_group(dout, k, v)[0]
    lse_BkgS = lse.view(q_BkgSd.shape[:-1])
    delta_BkgS = (dout_BkgSd * out_BkgSd).sum(-1)  # equals Σ p·dp over a row of scores
    dq, dk, dv = (torch.zeros_like(t) for t in (q_BkgSd, k_BkSd, v_BkSd))
    for columns in tiles(q.shape[2], tile):  # each program writes its own dk and dv
        k_j, v_j = k_BkSd[:, :, None, columns], v_BkSd[:, :, None, columns]
        for rows in tiles(q.shape[2], tile):
            if causal and columns.start >= rows.stop:
                continue
            q_i, dout_i = q_BkgSd[..., rows, :], dout_BkgSd[..., rows, :]
            s_ij = masked(q_i @ k_j.mT * scale, rows, columns, causal)
            p_ij = torch.exp(s_ij - lse_BkgS[..., rows, None])
            dv[:, :, columns] += (p_ij.mT @ dout_i).sum(2)  # over the g query heads that share this key head
            ds_ij = p_ij * (dout_i @ v_j.mT - delta_BkgS[..., rows, None]) * scale
            dq[..., rows, :] += ds_ij @ k_j
            dk[:, :, columns] += (ds_ij.mT @ q_i).sum(2)
    return dq.view(q.shape).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def by_group(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q as (B, k, g, S, d), grouped by key head, and k and v, with half precision cast to fp32."""
    B, a, S, d = q.shape
    kv_heads = k.shape[1]
    q, k, v = (t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in (q, k, v))
    return q.reshape(B, kv_heads, a // kv_heads, S, d), k, v


def sdpa_backend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> str:
    """Return the backend that F.scaled_dot_product_attention chooses for these tensors on their device: "math",
    "flash_attention", "efficient_attention" or "cudnn_attention" (torch.nn.attention.SDPBackend)."""
    grouped = q.shape[1] != k.shape[1]
    choice = symbol("torch._fused_sdp_choice")(q, k, v, mask, 0.0, causal, enable_gqa=grouped)
    return SDPBackend(choice).name.lower()


def tiles(length: int, tile: int) -> list[slice]:
    """Return the slices that cut `length` rows into tiles of `tile` rows. The last one may be shorter."""
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]


def masked(s_ij: Tensor, rows: slice, columns: slice, causal: bool) -> Tensor:
    """Return the tile of scores with −inf where a key comes after its query. Only tiles on the diagonal need it."""
    if not causal or columns.stop <= rows.start + 1:
        return s_ij
    query, key = (torch.arange(part.start, part.stop, device=s_ij.device) for part in (rows, columns))
    return s_ij.masked_fill(key > query[:, None], -math.inf)
