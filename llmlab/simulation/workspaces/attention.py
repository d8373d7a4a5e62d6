"""Workspaces of attention: FlashAttention's split keys and fp32 gradients, and the memory-efficient kernels' sums.

(torch 2.13, aten/src/ATen/native/transformers/cuda)

    B  batch    H  heads    T  query positions    S  key positions    D  head size
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...hardware.gpu import GPU
from ..devices import HOST
from .registry import OUTPUTS, Operator, Outputs, Step, workspace

aten = torch.ops.aten
EFFICIENT, FLASH = "transformers/cuda/mem_eff_attention", "transformers/cuda/flash_attn/flash_api.cpp"


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile)


def _deterministic() -> bool:
    """Return whether torch.use_deterministic_algorithms is on, and does more than warn."""
    return torch.get_deterministic_debug_mode() == 2


def _efficient_outputs(op: Operator) -> tuple[Tensor, ...]:
    """attention.cu, _efficient_attention_forward: the seed and the offset of dropout are on the host."""
    out, logsumexp, *_ = op.run()
    return out, logsumexp, *(torch.empty((), dtype=torch.int64, device=HOST) for _ in range(2))


@workspace(aten._scaled_dot_product_efficient_attention, source=f"{EFFICIENT}/kernel_forward.h")
def efficient_attention(op: Operator, gpu: GPU) -> Iterator[Step]:
    """kNeedsOutputAccumulatorBuffer: (B, T, H, Dv) in fp32. Half-precision kernels keep up to 128 columns of the output
    in registers, and fp32 kernels accumulate in the output itself."""
    yield Outputs(fake=_efficient_outputs)
    query, columns = op.query, op.value.shape[-1]
    if query.element_size() == 2 and columns > 128:
        yield query.numel() // query.shape[-1] * columns * 4


@workspace(aten._scaled_dot_product_efficient_attention_backward, source=f"{EFFICIENT}/kernel_backward.h")
def efficient_attention_backward(op: Operator, gpu: GPU) -> Iterator[Step]:
    """delta, and Params::workspace_size: dQ is summed in fp32 in tiles of 64 × 64, each with 16 B of locks. If a tile
    does not fit the registers, dK and dV are summed in fp32 too, once for each part into which the keys are split. The
    more heads a batch has, the fewer the parts (attention_backward.cu, num_splits_key); deterministic mode uses one."""
    yield OUTPUTS
    (B, H, T, D), S, Dv = op.query.shape, op.key.shape[2], op.value.shape[3]
    half = op.query.dtype in (torch.float16, torch.bfloat16)
    rows = _backward_rows(max(D, Dv), half, op.dropout_p, gpu.compute_capability or (0, 0))
    in_registers = half and max(D, Dv) <= rows
    elements = _tiles(T, rows) * _tiles(D, 64) * (rows * 64 + 4)
    if not in_registers and half:  # fp32 gradients are their own accumulators
        splits = 1 if _deterministic() else max(1, min(_tiles(S, 64), 200 // (B * H)))
        elements += splits * _tiles(S, 64) * 64 * (_tiles(D, rows) + _tiles(Dv, rows)) * rows
    yield B * H * T * 4
    yield B * H * (-(-elements // 4) * 4) * 4


def _backward_rows(width: int, half: bool, dropout: float, capability: tuple[int, int]) -> int:
    """Return kBlockSizeI, the rows of a tile, of the first kernel for heads of `width` that fits the shared memory of a
    block (kernels/generate_kernels.py, BwdKernel). Wide heads use 128 rows, and half-precision kernels then keep the
    gradients in registers. GPUs with less shared memory (sm_75, and those with 99 KiB) use 64 rows, except that sm_86
    and sm_89 have a kernel of 128 rows for heads of up to 96."""
    if width <= 64 or capability < (7, 0) or capability == (7, 5):
        return 64
    if not half:
        return 128 if capability >= (8, 0) else 64
    if width > 128 or capability not in ((8, 6), (8, 9), (12, 0), (12, 1)):
        return 128
    return 128 if width <= 96 and not dropout and capability < (12, 0) else 64


def kv_splits(blocks: int, multiprocessors: int, key_blocks: int) -> int:
    """num_splits_heuristic: return the number of parts into which the keys are split. They are split if `blocks`, the
    heads of the batch times the tiles of 64 queries, leave multiprocessors idle, each of which runs two thread blocks.
    The smallest number of parts wins whose utilization reaches 85 % of the best."""
    slots = 2 * multiprocessors
    if blocks >= 0.8 * slots:
        return 1
    most = min(128, slots, key_blocks)
    # A number of parts is useless if one part fewer has as many key blocks per part.
    useful = [n for n in range(1, most + 1) if n == 1 or _tiles(key_blocks, n) != _tiles(key_blocks, n - 1)]
    busy = {n: blocks * n / slots / _tiles(blocks * n, slots) for n in useful}
    return next((n for n in useful if busy[n] >= 0.85 * max(busy.values())), 1)


def _columns(D: int) -> int:
    """head_size_rounded: the columns of a head in a kernel's buffers, a multiple of 32, or of 64 for wide heads."""
    return _tiles(D, 32) * 32 if D <= 128 else _tiles(D, 64) * 64


@workspace(aten._scaled_dot_product_flash_attention, source=FLASH)
def flash_attention(op: Operator, gpu: GPU) -> Iterator[Step]:
    """mha_fwd and set_params_splitkv: if the keys are split, the log-sum-exp and the output of each part in fp32."""
    yield OUTPUTS
    if op.dropout_p:  # with dropout FlashAttention never splits keys
        return
    (B, H, T, D), (_, kv_heads, S, _) = op.query.shape, op.key.shape
    if T == 1 and kv_heads < H:  # the queries that share keys become rows of one head
        T, H = H // kv_heads, kv_heads
    key_blocks = _tiles(S, 256 if D <= 64 else 128 if D <= 128 else 64)
    splits = kv_splits(B * H * _tiles(T, 64), gpu.sms, key_blocks)
    if splits > 1:
        yield 4 * splits * B * H * T
        yield 4 * splits * B * H * T * _columns(D)


@workspace(aten._scaled_dot_product_flash_attention_backward, source=FLASH)
def flash_attention_backward(op: Operator, gpu: GPU) -> Iterator[Step]:
    """mha_bwd: the softmax's row sums, and dQ summed in fp32, both with rows rounded up to 128 and heads to 32 or 64.
    If heads share keys, dK and dV of each query head too. Under torch.use_deterministic_algorithms, unless it only
    warns (attention_backward.cu), the blocks of keys of a head add to several copies of dQ, as many as keep the
    multiprocessors busy."""
    yield OUTPUTS
    (B, H, T, D), (_, kv_heads, S, _) = op.query.shape, op.key.shape
    rows = _tiles(T, 128) * 128
    yield 4 * B * H * rows
    yield 4 * B * rows * H * _columns(D) * (_tiles(gpu.sms, B * H) if _deterministic() else 1)
    if kv_heads != H:
        gradient = B * S * H * D * op.key.element_size()
        yield from (gradient, gradient)


@workspace(aten._flash_attention_backward, source=FLASH)
def packed_flash_attention_backward(op: Operator, gpu: GPU) -> Iterator[Step]:
    """mha_varlen_bwd, for sequences without padding: as mha_bwd, but each sequence adds 128 rows instead of being
    rounded up."""
    yield OUTPUTS
    (total, H, D), (keys, kv_heads, _), sequences = op.query.shape, op.key.shape, op.cum_seq_q.numel() - 1
    rows = total + 128 * sequences
    yield 4 * H * rows
    yield 4 * rows * H * _columns(D) * (_tiles(gpu.sms, sequences * H) if _deterministic() else 1)
    if kv_heads != H:
        gradient = keys * H * D * op.key.element_size()
        yield from (gradient, gradient)
