"""Workspaces of sorts, selections, scans and shuffles (torch 2.13).

Source: aten/src/ATen/native/cuda. The scratch of CUB (`cub`) is included.

    n  elements    k  selected elements
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
    """sort_cuda_kernel, in addition to values and indices."""
    yield OUTPUTS
    yield from sort_buffers(op.self, op.dim, gpu)


def sort_buffers(x: Tensor, dim: int, gpu: GPU) -> list[int]:
    """Sort.cpp, sort_cuda_kernel: up to 4096 elements need a range of indices. Longer dimensions that are not innermost
    need copies of the input, the values and the indices with that dimension innermost. SortStable.cu,
    launch_stable_sort_kernel: long segments are sorted one at a time, each with its range. Few segments are sorted all
    together, and then by segment, with two buffers of int32 pairs."""
    size = x.shape[dim] if x.dim() else 1
    n, item = x.numel(), x.element_size()
    if size <= 1 or not n:
        return []
    if size <= SMALL_SORT:
        return [size * INDEX]
    copies = [] if is_dense(x) and x.stride(dim) == 1 else [n * item, n * item, n * INDEX]
    if n == size or size >= LARGE_SORT:
        return [*copies, size * INDEX, sort_scratch(size, item, INDEX, gpu)]
    if n // size < FEW_SEGMENTS:
        return [*copies, n * INDEX, n * INDEX, n * item, sort_scratch(n, item, INDEX, gpu)]
    return [*copies, n * INDEX, pieces(n * item, n * INDEX)]  # dispatch_segmented_radix_sort.cuh: both a second time


# ---- topk


THREADS, DIGITS = 256, 256  # TensorTopK.cu, mbtopk: BLOCK_THREADS, RADIX_DIGITS
ITEMS_PER_THREAD = 4, 64  # MIN_ITEMS_PER_THREAD, MAX_ITEMS_PER_THREAD
BLOCKS_PER_MULTIPROCESSOR = 65536 // (40 * THREADS)  # get_items_per_thread: 40 registers per thread
# should_use_multiblock: pairs of the largest number of slices, and the smallest size of a slice for it.
MULTIBLOCK = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800), (2**32, 400))


@workspace(aten.topk, source="cuda/TensorTopK.cpp")
def topk(op: Operator, gpu: GPU) -> Iterator[Step]:
    """topk_out_with_sort: the buffers of the selection, then those of the sort if more than 4096 are selected."""
    yield OUTPUTS
    x, (values, indices) = op.self, op.out
    if not op.k or not x.numel():
        return
    sizes = [] if x.is_contiguous() else [nbytes(x)]
    sizes += select_buffers(x, op.dim, gpu)
    if op.sorted and op.k > SMALL_SORT:
        copies = [indices.numel() * INDEX, nbytes(values)]
        sizes = max(sizes, [*copies, *sort_buffers(values, op.dim, gpu)], key=sum)
    yield from sizes


def select_buffers(x: Tensor, dim: int, gpu: GPU) -> list[int]:
    """TensorTopK.cu, mbtopk::launch, which handles long slices: the k-th values, the number of values still to find,
    the known digits, counts of digits per block and per slice, and counts of values per block with their sums."""
    size, item = x.shape[dim] if x.dim() else 1, x.element_size()
    slices = x.numel() // size
    if size < next(fewest for largest, fewest in MULTIBLOCK if slices <= largest):
        return []
    fewest, largest = ITEMS_PER_THREAD
    items = max(fewest, min(largest, -(-x.numel() // (gpu.sms * BLOCKS_PER_MULTIPROCESSOR * THREADS))))
    blocks = slices * -(-size // (items * THREADS))
    return [
        slices * item, 2 * slices * 4, 2 * slices * max(4, item), blocks * DIGITS * 2, slices * DIGITS * 4, blocks * 4,
        blocks * 4, sum_by_key_scratch(blocks, gpu),
    ]  # fmt: skip


# ---- distinct values, scans, shuffles


@workspace(aten._unique2, source="cuda/UniqueCub.cu")
def unique(op: Operator, gpu: GPU) -> Iterator[Step]:
    """UniqueCub: the sorted values, the position of each, and CUB's scratch. On CUDA the outputs are allocated in the
    size of the input; here they are allocated in their final size, after these buffers are freed."""
    x, n, item = op.self, op.self.numel(), op.self.element_size()
    if n and x.dtype != torch.bool:
        positions = [n * INDEX, n * INDEX] if op.return_inverse else []
        sizes = [n * item, *positions, sort_scratch(n, item, INDEX if positions else 0, gpu)]
        yield from sizes
        yield from (FREE for _ in sizes)
    yield OUTPUTS


@workspace(aten.cumsum, aten.cumprod, aten.logcumsumexp, source="cuda/ScanUtils.cuh")
def scan(op: Operator, gpu: GPU) -> Iterator[Step]:
    """ReduceOps.cpp, impl_func_cum_ops: a copy in the output's dtype. scan_dim: a contiguous copy, and the scratch of
    CUB if all elements are one row."""
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
    """randperm_out_cuda: the range, the random keys, and the sorted keys. They have enough bits that two keys are equal
    with a probability of 10 %."""
    yield OUTPUTS
    if n := op.n:
        bits = min(64, ceil(log2(n - (6 * n * n + 1) / (12 * log(0.9)))))
        key, item = (4 if bits <= 32 else 8), op.out.element_size()
        yield from (n * item, n * key, n * key, sort_scratch(n, key, item, gpu, bits))
