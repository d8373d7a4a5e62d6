"""Attention: softmax(q·kᵀ / √D)·v, causal or not, with grouped heads (FlashAttention-2, Dao, arXiv 2307.08691).

    B  batch    H  query heads    K  key and value heads    G  H / K    T  tokens    D  head size    b  bytes per value
    M, N  query and key rows of a tile

Bytes moved by the forward pass of a head (q, k, v and out are 4·T·D·b), if nothing stays in a cache; tensors it saves:

    0  scores, scale, mask, softmax, product: 4·T·D·b + 10·T²·b     saves T² probabilities per head, and the mask
    1  4·T·D·b at least: SDPA takes the best of its backends        saves q, k, v, out, logsumexp ("math": more)
    2  rung 0 with scale, mask and softmax in one kernel: 4·T·D·b + 4·T²·b     T² still passes between the matmuls,
       unless Inductor recognizes the pattern and calls SDPA
    3  T/M tiles of queries read k and v: 2·T·D·b·(1 + T/M), half of T/M if causal     saves q, k, v, out, logsumexp
    4  the same; backward is three kernels without atomics that recompute the probabilities: no T² in memory

All rungs do O(T²) FLOPs. While k and v of a head fit in the L2 cache, most of the T/M reads come from there.
`llmlab.formulas.time.attention_traffic` counts these bytes, backward too. Rung 4's backward does 7 products, because it
computes the scores twice, where FlashAttention-2 does 5 and adds up dq by atomics.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....base.errors import SpecError
from ...techniques.flash_attention import check_attention, flash_backward, standard_attention
from ..rungs import as_autocast, choose, dot, jit, run, tl, triton

LOG2_E = 1.4426950408889634  # exp(x) = 2^(x·log2 e): the GPU has an instruction for powers of 2
MAX_HEAD = 128


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, *, rung: int | None = None) -> Tensor:
    """Return softmax(q·kᵀ / √D)·v, (B, H, T, D), in q's dtype. q: (B, H, T, D), k and v: (B, K, T, D), K divides H.

    Under torch.autocast it computes in autocast's dtype, as SDPA does. Raises SpecError if the shapes do not fit, and
    in rungs 3 and 4 for heads over 128 channels.
    """
    q, k, v = as_autocast(q, k, v)
    check_attention(q, k, v)
    old = q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0)  # Triton does not use its tensor cores
    if rung is None and (old or q.shape[-1] > MAX_HEAD):
        rung = 1
    return run(choose(rung, q, k, v), standard_attention, attention1, Attention, q, k, v, causal)


def attention1(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Rung 1: PyTorch's SDPA. Key heads are expanded, because not all of its backends take grouped ones."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) if group > 1 else t for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


class Attention(torch.autograd.Function):
    """Saves q, k, v, the output and logsumexp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, fused: bool) -> Tensor:
        B, H, T, D = q.shape
        if D > MAX_HEAD:
            raise SpecError(f"a head of {D} channels; rungs 3 and 4 take up to {MAX_HEAD}; take rung 1")
        q_, k_, v_ = (one_after_another(t) for t in (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
        if q.numel():
            settings = tiles(q, backward=False)
            with torch.cuda.device_of(q):
                forward_kernel[(B * H * triton.cdiv(T, settings["M"]),)](
                    q_, k_, v_, out, lse, *q_.stride()[:3], *k_.stride()[:3], *v_.stride()[:3], T, H, H // k.shape[1],
                    LOG2_E / math.sqrt(D), causal, D, triton.next_power_of_2(D), **settings,
                )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.fused = causal, fused
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        if not ctx.fused:
            return *flash_backward(q, k, v, out, lse, dout, ctx.causal, tile=128), None, None
        (B, H, T, D), K = q.shape, k.shape[1]
        q_, k_, v_, dout_ = (one_after_another(t) for t in (q, k, v, dout))
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        if q.numel():
            delta, settings, width = torch.empty_like(lse), tiles(q, backward=True), triton.next_power_of_2(D)
            strides = *q_.stride()[:3], *k_.stride()[:3], *v_.stride()[:3], *dout_.stride()[:3]
            sizes = T, H, H // K, LOG2_E / math.sqrt(D), 1 / math.sqrt(D), ctx.causal, D, width
            with torch.cuda.device_of(q):
                delta_kernel[(B * H * triton.cdiv(T, 64),)](out, dout_, delta, *dout_.stride()[:3], T, H, D, width, 64)
                keys_kernel[(B * K * triton.cdiv(T, settings["N"]),)](
                    q_, k_, v_, dout_, lse, delta, dk, dv, *strides, *sizes, **settings
                )
                # keys_kernel has sums of N rows, this one of M rows: swap them.
                settings["M"], settings["N"] = settings["N"], settings["M"]
                queries_kernel[(B * H * triton.cdiv(T, settings["M"]),)](
                    q_, k_, v_, dout_, lse, delta, dq, *strides, *sizes, **settings
                )
        return dq, dk, dv, None, None


def one_after_another(x: Tensor) -> Tensor:
    """Return x with the channels of a head adjacent in memory; the kernels receive the other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def tiles(x: Tensor, backward: bool) -> dict[str, int]:
    """Return tile sizes (M, N), warps and pipeline stages for x's device, head size and dtype."""
    capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else (8, 0)
    return tiles_for(x.shape[-1], x.dtype.itemsize, capability, backward)


def tiles_for(head: int, itemsize: int, capability: tuple[int, int], backward: bool) -> dict[str, int]:
    """As `tiles`, from bytes per value and compute capability.

    The tiles fit in shared memory (64 KiB before 8.0, at least 99 KiB from 8.0 on) and the sums in registers; eight
    warps have twice the registers of four. `python -m llmlab.course.kernels.ptx` shows both. For each byte of k and v
    that a program reads, forward computes M FLOP in half precision. With 128 rows, the L2 cache is fast enough.
    """
    wide = head > 64
    if itemsize == 4:  # no tensor cores without TF32: the products themselves take registers
        # With eight warps, backward spills for a head size between these, whose channels are masked.
        warps = 8 if (32 < head <= 64 or head == MAX_HEAD if backward else wide) else 4
        return {"M": 32, "N": 16 if wide else 32, "num_warps": warps, "num_stages": 1}
    if capability < (8, 0):  # Triton's dot does not use these tensor cores: the products take registers too
        rows = 16 if wide else 32
        return {"M": rows, "N": rows, "num_warps": 8, "num_stages": 1}
    warps = 8 if wide else 4
    if backward:  # a program owns N rows: the larger N is, the less often the M rows of other tiles are read
        hopper = capability[0] == 9  # its matmuls read operands from shared memory, those of other GPUs from registers
        columns = 64 if wide and not hopper else 128
        rows = 64 if hopper and not wide else 32  # twice as many would spill
        return {"M": rows, "N": columns, "num_warps": 8, "num_stages": 1 if wide else 2}
    columns = 32 if wide and capability < (9, 0) else 64  # 64 would spill
    return {"M": 128, "N": columns, "num_warps": warps, "num_stages": 3}  # loads tiles while one is multiplied


@jit
def place(H, T, ROWS: tl.constexpr):
    """Return (batch, head, first row) of this program; the last tiles, with the most work if causal, come first."""
    count = tl.cdiv(T, ROWS)
    head = tl.program_id(0) // count
    return (head // H).to(tl.int64), (head % H).to(tl.int64), (count - 1 - tl.program_id(0) % count) * ROWS


@jit
def load_tile(X, start, stride, T, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Return rows start … start + ROWS of a (T, D) matrix, zero outside it."""
    rows, channels = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    X += tl.cast(start, tl.int64) * stride  # one int64; inside the tile int32 is enough, which takes half the registers
    return tl.load(X + rows * stride + channels, mask=(start + rows < T) & (channels < D), other=0.0)


@jit
def store_tile(X, x, start, T, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    rows, channels = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    tl.store(X + tl.cast(start, tl.int64) * D + rows * D + channels, x, mask=(start + rows < T) & (channels < D))


@jit
def forward_tile(out, highest, total, q, K, V, first, start, k_t, v_t, T, scale, CAUSAL: tl.constexpr,
                 D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                 EDGE: tl.constexpr):  # fmt: skip
    """One step of online softmax, in powers of 2: the keys start … start + N. EDGE: the diagonal, or the last tile."""
    k = load_tile(K, start, k_t, T, D, WIDTH, N)
    v = load_tile(V, start, v_t, T, D, WIDTH, N)
    scores = dot(q, tl.trans(k))
    if EDGE:
        rows, columns = first + tl.arange(0, M)[:, None], start + tl.arange(0, N)[None, :]
        visible = columns < T
        if CAUSAL:
            visible = visible & (columns <= rows)
        scores = tl.where(visible, scores, -float("inf"))
    higher = tl.maximum(highest, tl.max(scores, 1) * scale)
    shrink = tl.exp2(highest - higher)
    p = tl.exp2(scores * scale - higher[:, None])  # one instruction scales and subtracts
    total = total * shrink + tl.sum(p, 1)
    out = out * shrink[:, None] + dot(p.to(v.dtype), v)
    return out, higher, total


@jit
def forward_kernel(Q, K, V, OUT, LSE, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, T, H, GROUP, scale,
                   CAUSAL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr,
                   N: tl.constexpr):  # fmt: skip
    b, h, first = place(H, T, M)
    K, V = K + b * k_b + h // GROUP * k_h, V + b * v_b + h // GROUP * v_h
    q = load_tile(Q + b * q_b + h * q_h, first, q_t, T, D, WIDTH, M)
    out = tl.zeros((M, WIDTH), tl.float32)
    total = tl.zeros((M,), tl.float32)
    highest = total - 3.4028234663852886e38
    end = T
    whole = T // N * N  # keys in tiles that need no mask
    if CAUSAL:
        end = tl.minimum(first + M, T)
        whole = first // N * N
    for start in range(0, whole, N):
        out, highest, total = forward_tile(
            out, highest, total, q, K, V, first, start, k_t, v_t, T, scale, CAUSAL, D, WIDTH, M, N, False
        )
    for start in range(whole, end, N):
        out, highest, total = forward_tile(
            out, highest, total, q, K, V, first, start, k_t, v_t, T, scale, CAUSAL, D, WIDTH, M, N, True
        )
    head = (b * H + h) * T
    rows = first + tl.arange(0, M)
    tl.store(LSE + head + rows, (highest + tl.log2(total)) / 1.4426950408889634, mask=rows < T)
    store_tile(OUT + head * D, out / total[:, None], first, T, D, WIDTH, M)


@jit
def delta_kernel(OUT, DOUT, DELTA, do_b, do_h, do_t, T, H, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr):
    """delta = Σ out · dout over a row, which is Σ p · dp: the only sum over a row that softmax's backward needs."""
    b, h, first = place(H, T, M)
    head = (b * H + h) * T
    out = load_tile(OUT + head * D, first, D, T, D, WIDTH, M).to(tl.float32)
    dout = load_tile(DOUT + b * do_b + h * do_h, first, do_t, T, D, WIDTH, M).to(tl.float32)
    rows = first + tl.arange(0, M)
    tl.store(DELTA + head + rows, tl.sum(out * dout, 1), mask=rows < T)


@jit
def statistics(LSE, DELTA, rows, T):
    """Return lse, in powers of 2, and delta of these rows; inf past the last one, so that p is 0 there."""
    lse = tl.load(LSE + rows, mask=rows < T, other=float("inf")) * 1.4426950408889634
    return lse, tl.load(DELTA + rows, mask=rows < T, other=0.0)


@jit
def keys_kernel(Q, K, V, DOUT, LSE, DELTA, DK, DV, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t,
                T, H, GROUP, scale, back, CAUSAL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr,
                N: tl.constexpr):  # fmt: skip
    """Compute dk and dv of N keys: loop over the queries that see them, in all heads that read them."""
    b, kv_head, first = place(H // GROUP, T, N)
    first = (tl.cdiv(T, N) - 1) * N - first  # if causal, the first keys are seen by most queries
    k = load_tile(K + b * k_b + kv_head * k_h, first, k_t, T, D, WIDTH, N)
    v = load_tile(V + b * v_b + kv_head * v_h, first, v_t, T, D, WIDTH, N)
    columns = first + tl.arange(0, N)[:, None]
    dk = tl.zeros((N, WIDTH), tl.float32)
    dv = tl.zeros((N, WIDTH), tl.float32)
    begin = first * 0
    if CAUSAL:
        begin = first // M * M
    for h in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        head = (b * H + h) * T
        for start in range(begin, T, M):
            rows = start + tl.arange(0, M)
            q = load_tile(Q + b * q_b + h * q_h, start, q_t, T, D, WIDTH, M)
            dout = load_tile(DOUT + b * do_b + h * do_h, start, do_t, T, D, WIDTH, M)
            lse, delta = statistics(LSE + head, DELTA + head, rows, T)
            p = tl.exp2(dot(k, tl.trans(q)) * scale - lse[None, :])
            # Only the diagonal is masked: keys past the last one are zeros, and their sums are not stored.
            if CAUSAL:  # noqa: SIM102 - known when it is compiled, unlike the next
                if start < first + N:
                    p = tl.where(columns <= rows[None, :], p, 0.0)
            dv += dot(p.to(dout.dtype), dout)  # before ds: with p and ds at once, sm_75 would spill
            ds = p * (dot(v, tl.trans(dout)) - delta[None, :])
            dk += dot(ds.to(q.dtype), q)
    head = (b * (H // GROUP) + kv_head) * T * D
    store_tile(DK + head, dk * back, first, T, D, WIDTH, N)
    store_tile(DV + head, dv, first, T, D, WIDTH, N)


@jit
def queries_tile(dq, q, dout, lse, delta, rows, K, V, start, k_t, v_t, T, scale, CAUSAL: tl.constexpr,
                 D: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, EDGE: tl.constexpr):  # fmt: skip
    """Add the keys start … start + N to dq. EDGE as in `forward_tile`."""
    k = load_tile(K, start, k_t, T, D, WIDTH, N)
    v = load_tile(V, start, v_t, T, D, WIDTH, N)
    p = tl.exp2(dot(q, tl.trans(k)) * scale - lse[:, None])
    if EDGE:
        columns = start + tl.arange(0, N)[None, :]
        visible = columns < T
        if CAUSAL:
            visible = visible & (columns <= rows[:, None])
        p = tl.where(visible, p, 0.0)  # where, because a masked score may overflow
    ds = p * (dot(dout, tl.trans(v)) - delta[:, None])
    return dq + dot(ds.to(k.dtype), k)


@jit
def queries_kernel(Q, K, V, DOUT, LSE, DELTA, DQ, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t,
                   T, H, GROUP, scale, back, CAUSAL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
                   M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Compute dq of M queries: loop over the keys that they see."""
    b, h, first = place(H, T, M)
    K, V = K + b * k_b + h // GROUP * k_h, V + b * v_b + h // GROUP * v_h
    head = (b * H + h) * T
    rows = first + tl.arange(0, M)
    q = load_tile(Q + b * q_b + h * q_h, first, q_t, T, D, WIDTH, M)
    dout = load_tile(DOUT + b * do_b + h * do_h, first, do_t, T, D, WIDTH, M)
    lse, delta = statistics(LSE + head, DELTA + head, rows, T)
    dq = tl.zeros((M, WIDTH), tl.float32)
    end = T
    whole = T // N * N
    if CAUSAL:
        end = tl.minimum(first + M, T)
        whole = first // N * N
    for start in range(0, whole, N):
        dq = queries_tile(dq, q, dout, lse, delta, rows, K, V, start, k_t, v_t, T, scale, CAUSAL, D, WIDTH, N, False)
    for start in range(whole, end, N):
        dq = queries_tile(dq, q, dout, lse, delta, rows, K, V, start, k_t, v_t, T, scale, CAUSAL, D, WIDTH, N, True)
    store_tile(DQ + head * D, dq * back, first, T, D, WIDTH, M)
