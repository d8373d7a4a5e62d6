"""Rotary position embedding: rotates pairs of channels (i, i + D/2) by their position's angle (arXiv 2104.09864).

    B  batch    H  query heads    K  key heads    T  tokens    D  head size    n  values of q and k    b  bytes of each

Hugging Face orders Llama's weights in these pairs, while the paper rotates neighbours. Bytes moved by the forward pass,
if nothing stays in a cache (cos and sin, B·T·D each, are read by each head of rungs 0 and 1, once by 3 and 4):

    0  negate 1, concatenate 2, two products 4, sum 3: 10·n·b     saves cos and sin
    1  four products of halves 4, two sums 3, concatenate 2: 9·n·b
    2  2·n·b: rung 0 as one kernel for q, one for k
    3  2·n·b: one kernel for all heads of q and k of a token, which share cos and sin
    4  the same; backward is the same kernel with the opposite angle
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....base.errors import SpecError
from ..rungs import choose, jit, launch, run, tl, triton


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, rung: int | None = None, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """Return q and k rotated. q: (B, H, T, D), k: (B, K, T, D), cos and sin: (T, D), (1, T, D) or (B, T, D).

    cos and sin get no gradient. `inplace` (rung 4): the results overwrite q and k, and their gradients too, so nothing
    else may need either. Raises SpecError if the shapes do not fit or D is odd.
    """
    fit = q.dim() == k.dim() == 4 and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
    if not fit or not q.shape[1] or not k.shape[1] or not q.shape[-1] or q.shape[-1] % 2:
        raise SpecError(f"q {tuple(q.shape)} and k {tuple(k.shape)} need (B, H, T, D), (B, K, T, D), even D")
    B, _, T, D = q.shape
    if cos.shape != sin.shape or cos.shape[-2:] != (T, D) or cos.shape[:-2] not in ((), (1,), (B,)):
        inputs = f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)}"
        raise SpecError(f"{inputs} do not fit q {tuple(q.shape)}; give ({T}, {D}), (1, {T}, {D}) or ({B}, {T}, {D})")
    shape = (B, T, D)
    cos_BTD, sin_BTD = cos.detach().expand(shape), sin.detach().expand(shape)
    return run(choose(rung, q, k, cos, sin), rope0, rope1, Rope, q, k, cos_BTD, sin_BTD, inplace=inplace)


def rope0(q: Tensor, k: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Rung 0: x · cos + (−right, left) · sin, as in Hugging Face's code."""

    def turn(x_BHTD: Tensor) -> Tensor:
        left, right = x_BHTD.chunk(2, dim=-1)
        turned = torch.cat((-right, left), dim=-1)
        return (x_BHTD * cos_BTD[:, None] + turned * sin_BTD[:, None]).to(x_BHTD.dtype)

    return turn(q), turn(k)


def rope1(q: Tensor, k: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Rung 1: computes each half from both halves, without a negated and joined copy."""
    (cos_left, cos_right), (sin_left, sin_right) = (t[:, None].chunk(2, dim=-1) for t in (cos_BTD, sin_BTD))

    def turn(x_BHTD: Tensor) -> Tensor:
        left, right = x_BHTD.chunk(2, dim=-1)
        halves = left * cos_left - right * sin_left, right * cos_right + left * sin_right
        return torch.cat(halves, dim=-1).to(x_BHTD.dtype)

    return turn(q), turn(k)


class Rope(torch.autograd.Function):
    """Saves cos and sin, and neither q nor k: a rotation's gradient does not depend on its input."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, fused: bool, inplace: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.fused, ctx.inplace = fused, inplace
        if inplace:  # tells autograd, which cannot see what a kernel writes, to refuse q and k saved before
            torch.autograd.graph.increment_version((q, k))
        return turn_heads(q, k, cos, sin, back=False, inplace=inplace)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        if ctx.fused:
            return *turn_heads(dq, dk, cos, sin, back=True, inplace=ctx.inplace), None, None, None, None
        (cos_left, cos_right), (sin_left, sin_right) = (t[:, None].float().chunk(2, dim=-1) for t in (cos, sin))
        turned = []
        for gradient in (dq, dk):
            left, right = gradient.float().chunk(2, dim=-1)
            halves = left * cos_left + right * sin_right, right * cos_right - left * sin_left
            turned.append(torch.cat(halves, dim=-1).to(gradient.dtype))
        return turned[0], turned[1], None, None, None, None


def turn_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool, inplace: bool) -> tuple[Tensor, Tensor]:
    """Launch one program per token; `back` rotates by the negated angle, `inplace` overwrites q and k."""
    if inplace and q.data_ptr() == k.data_ptr():  # the gradients of q + k are one tensor, which must not rotate twice
        k = k.clone()
    q, k, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, cos, sin))
    (B, H, T, D), K = q.shape, k.shape[1]
    # empty_like keeps strides, so a transposed q stays transposed. An expanded one, whose values share memory, cannot
    # be overwritten.
    writable = [all(step for size, step in zip(t.shape, t.stride(), strict=True) if size > 1) for t in (q, k)]
    out_q, out_k = (t if inplace and own else torch.empty_like(t) for t, own in zip((q, k), writable, strict=True))
    strides = [step for t in (q, k, out_q, out_k) for step in t.stride()[:3]]
    blocks = [triton.next_power_of_2(size) for size in (H, K, D // 2)]
    arguments = q, k, cos, sin, out_q, out_k, *strides, *cos.stride()[:2], *sin.stride()[:2], T, H, K, D // 2, back
    launch(rope_kernel, B * T, q, *arguments, *blocks)
    return out_q, out_k


@jit
def turn_tile(X, Y, stride_x, stride_y, cos_l, cos_r, sin_l, sin_r, HEADS, HALF, back, BLOCK_H: tl.constexpr,
              BLOCK_D: tl.constexpr):  # fmt: skip
    heads, channels = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (heads < HEADS) & (channels < HALF)
    left = tl.load(X + heads * stride_x + channels, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(X + heads * stride_x + channels + HALF, mask=inside, other=0.0).to(tl.float32)
    if back:  # the transposed matrix
        new_left, new_right = left * cos_l + right * sin_r, right * cos_r - left * sin_l
    else:
        new_left, new_right = left * cos_l - right * sin_l, right * cos_r + left * sin_r
    tl.store(Y + heads * stride_y + channels, new_left, mask=inside)
    tl.store(Y + heads * stride_y + channels + HALF, new_right, mask=inside)


@jit
def rope_kernel(Q, K, COS, SIN, OUT_Q, OUT_K, q_b, q_h, q_t, k_b, k_h, k_t, oq_b, oq_h, oq_t, ok_b, ok_h, ok_t,
                cos_b, cos_t, sin_b, sin_t, T, HEADS, KV_HEADS, HALF, BACK: tl.constexpr, BLOCK_H: tl.constexpr,
                BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    b, t = (tl.program_id(0) // T).to(tl.int64), (tl.program_id(0) % T).to(tl.int64)
    channels = tl.arange(0, BLOCK_D)[None, :]
    COS, SIN = COS + b * cos_b + t * cos_t + channels, SIN + b * sin_b + t * sin_t + channels
    cos_l = tl.load(COS, mask=channels < HALF, other=0.0).to(tl.float32)
    cos_r = tl.load(COS + HALF, mask=channels < HALF, other=0.0).to(tl.float32)
    sin_l = tl.load(SIN, mask=channels < HALF, other=0.0).to(tl.float32)
    sin_r = tl.load(SIN + HALF, mask=channels < HALF, other=0.0).to(tl.float32)
    Q, OUT_Q = Q + b * q_b + t * q_t, OUT_Q + b * oq_b + t * oq_t
    K, OUT_K = K + b * k_b + t * k_t, OUT_K + b * ok_b + t * ok_t
    turn_tile(Q, OUT_Q, q_h, oq_h, cos_l, cos_r, sin_l, sin_r, HEADS, HALF, BACK, BLOCK_H, BLOCK_D)
    turn_tile(K, OUT_K, k_h, ok_h, cos_l, cos_r, sin_l, sin_r, KV_HEADS, HALF, BACK, BLOCK_K, BLOCK_D)
