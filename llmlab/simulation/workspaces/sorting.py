"""Workspaces of sorts, selections, scans and shuffles (torch 2.13).

Source: aten/src/ATen/native/cuda. CUB's scratch (`cub`) is counted with them.

    n  elements    k  of them that are selected
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, log, log2

import torch
from torch import Tensor

from ...hardware.gpu import GPU
from .cub import pieces, scan_scratch, sort_scratch, sum_by_key_scratch
from .layout import is_dense, nbytes
from .registry import FREE, OUTPUTS, Operator, Step, workspace

aten = torch.ops.aten

INDEX = 8  # bytes of an int64
SMALL_SORT, LARGE_SORT, FEW_SEGMENTS = 4096, 1_000_000, 128  # Sort.h, should_use_small_sort; SortStable.cu


@workspace(aten.sort, aten.sort.stable, source="cuda/Sort.cpp")
def sort(op: Operator, gpu: GPU) -> Iterator[Step]:
    """sort_cuda_kernel, beside values and indices."""
    yield OUTPUTS
    yield from sort_buffers(op.self, op.dim, gpu)


def sort_buffers(x: Tensor, dim: int, gpu: GPU) -> list[int]:
    """Sort.cpp, sort_cuda_kernel: a range of indices for up to 4096 elements; else, where the sorted dimension is not
    the innermost, a copy of the input, the values and the indices in that order. SortStable.cu,
    launch_stable_sort_kernel: one long segment at a time with its range, few by sorting all and then by segment, with
    pairs of int32 twice."""
    size = x.shape[dim] if x.dim() else 1
    n, item = x.numel(), x.element_size()
    if size <= 1 or not n:
        return []
    if size <= SMALL_SORT:
        return [size * INDEX]
    copied = [] if is_dense(x) and x.stride(dim) == 1 else [n * item, n * item, n * INDEX]
    if n == size or size >= LARGE_SORT:
        return [*copied, size * INDEX, sort_scratch(size, item, INDEX, gpu)]
    if n // size < FEW_SEGMENTS:
        return [*copied, n * INDEX, n * INDEX, n * item, sort_scratch(n, item, INDEX, gpu)]
    return [*copied, n * INDEX, pieces(n * item, n * INDEX)]  # dispatch_segmented_radix_sort.cuh: both a second time


# ---- topk


THREADS, DIGITS = 256, 256  # TensorTopK.cu, mbtopk: BLOCK_THREADS, RADIX_DIGITS
ITEMS_PER_THREAD = 4, 64  # MIN_ITEMS_PER_THREAD, MAX_ITEMS_PER_THREAD
BLOCKS_PER_MULTIPROCESSOR = 65536 // (40 * THREADS)  # get_items_per_thread: 40 registers per thread
# should_use_multiblock: from how many elements a slice on, by the number of slices at most.
MULTIBLOCK = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800), (2**32, 400))


@workspace(aten.topk, source="cuda/TensorTopK.cpp")
def topk(op: Operator, gpu: GPU) -> Iterator[Step]:
    """topk_out_with_sort: what selects, and where more than 4096 are selected what sorts them, after it."""
    yield OUTPUTS
    x, (values, indices) = op.self, op.out
    if not op.k or not x.numel():
        return
    chosen = [] if x.is_contiguous() else [nbytes(x)]
    chosen += select_buffers(x, op.dim, gpu)
    if op.sorted and op.k > SMALL_SORT:
        copies = [indices.numel() * INDEX, nbytes(values)]
        chosen = max(chosen, [*copies, *sort_buffers(values, op.dim, gpu)], key=sum)
    yield from chosen


def select_buffers(x: Tensor, dim: int, gpu: GPU) -> list[int]:
    """TensorTopK.cu, mbtopk::launch, where a slice is long: the k-th values, how many are still to be found, the digits
    found, counts of digits by block and by slice, counts of values by block and their sums."""
    size, item = x.shape[dim] if x.dim() else 1, x.element_size()
    slices = x.numel() // size
    if size < next(least for most, least in MULTIBLOCK if slices <= most):
        return []
    least, most = ITEMS_PER_THREAD
    items = max(least, min(most, -(-x.numel() // (gpu.sms * BLOCKS_PER_MULTIPROCESSOR * THREADS))))
    blocks = slices * -(-size // (items * THREADS))
    return [
        slices * item, 2 * slices * 4, 2 * slices * max(4, item), blocks * DIGITS * 2, slices * DIGITS * 4, blocks * 4,
        blocks * 4, sum_by_key_scratch(blocks, gpu),
    ]  # fmt: skip


# ---- distinct values, scans, shuffles


@workspace(aten._unique2, source="cuda/UniqueCub.cu")
def unique(op: Operator, gpu: GPU) -> Iterator[Step]:
    """UniqueCub: the values, sorted, and where each was; CUB's scratch. Outputs hold as much as the input, for which
    they were made; here they come, in their final size, when these buffers are gone."""
    x, n, item = op.self, op.self.numel(), op.self.element_size()
    if n and x.dtype != torch.bool:
        places = [n * INDEX, n * INDEX] if op.return_inverse else []
        taken = [n * item, *places, sort_scratch(n, item, INDEX if places else 0, gpu)]
        yield from taken
        yield from (FREE for _ in taken)
    yield OUTPUTS


@workspace(aten.cumsum, aten.cumprod, aten.logcumsumexp, source="cuda/ScanUtils.cuh")
def scan(op: Operator, gpu: GPU) -> Iterator[Step]:
    """ReduceOps.cpp, impl_func_cum_ops: a copy in the output's dtype. scan_dim: one in the order of the dimensions, and
    where all elements are one row CUB's scratch."""
    yield OUTPUTS
    x, item = op.self, op.out.element_size()
    if not x.dim() or not x.numel():
        return
    if op.out.dtype != x.dtype:
        yield x.numel() * item
    if not x.is_contiguous():
        yield x.numel() * item
    if x.numel() == x.shape[op.dim]:
        yield scan_scratch(x.numel(), item)


@workspace(aten.randperm, aten.randperm.generator, source="cuda/Randperm.cu")
def randperm(op: Operator, gpu: GPU) -> Iterator[Step]:
    """randperm_out_cuda: the range, random keys, sorted ones. Of so many bits that two are the same with a probability
    of 10 %."""
    yield OUTPUTS
    if n := op.n:
        bits = min(64, ceil(log2(n - (6 * n * n + 1) / (12 * log(0.9)))))
        key, item = (4 if bits <= 32 else 8), op.out.element_size()
        yield from (n * item, n * key, n * key, sort_scratch(n, key, item, gpu, bits))
