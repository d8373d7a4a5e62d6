"""Workspaces of sorts, selections, scans and shuffles (torch 2.13).

Source: aten/src/ATen/native/cuda. CUB's scratch (`cub`) is counted with them.

    n  elements    k  of them that are selected
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log, log2
from typing import Any

import torch
from torch import Tensor

from ...hardware.gpu import GPU
from .cub import pieces, scan_scratch, sort_scratch, sum_by_key_scratch
from .extra import Extra, is_dense

aten = torch.ops.aten

INDEX = 8  # bytes of an int64
SMALL_SORT, LARGE_SORT, FEW_SEGMENTS = 4096, 1_000_000, 128  # Sort.h, should_use_small_sort; SortStable.cu


def sorted_pairs(gpu: GPU) -> Callable[..., list[int]]:
    """Return what sort takes on `gpu`."""

    def taken(out: Any, x: Tensor, *given: Any, **named: Any) -> list[int]:
        dims = [each for each in (*given, named.get("dim")) if type(each) is int]
        return sort_buffers(x, dims[0] if dims else -1, gpu)

    return taken


def sort_buffers(x: Tensor, dim: int, gpu: GPU) -> list[int]:
    """Sort.cpp, sort_cuda_kernel: a range of indices for up to 4096 elements; else, where the sorted dimension is not
    the innermost, a copy of the input, the values and the indices in that order. SortStable.cu,
    launch_stable_sort_kernel: one long segment a time with its range, few by sorting all and then by segment, with
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
ITEMS_A_THREAD = 4, 64  # MIN_ITEMS_PER_THREAD, MAX_ITEMS_PER_THREAD
BLOCKS_A_MULTIPROCESSOR = 65536 // (40 * THREADS)  # get_items_per_thread: 40 registers a thread
# should_use_multiblock: from how many elements a slice on, by the number of slices at most.
MULTIBLOCK = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800), (2**32, 400))


def selected(gpu: GPU) -> Callable[..., list[int]]:
    """Return what topk takes on `gpu`."""

    def taken(
        out: Any, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> list[int]:  # fmt: skip
        """TensorTopK.cpp: what selects, and where more than 4096 are selected what sorts them, after it."""
        if not k or not x.numel():
            return []
        values, indices = out
        chosen = [] if x.is_contiguous() else [x.numel() * x.element_size()]
        chosen += select_buffers(x, dim, gpu)
        if not sorted or k <= SMALL_SORT:
            return chosen
        copies = [indices.numel() * INDEX, values.numel() * values.element_size()]
        return max(chosen, [*copies, *sort_buffers(values, dim, gpu)], key=sum)

    return taken


def select_buffers(x: Tensor, dim: int, gpu: GPU) -> list[int]:
    """TensorTopK.cu, mbtopk::launch, where a slice is long: the k-th values, how many are still to be found, the digits
    found, counts of digits by block and by slice, counts of values by block and their sums."""
    size, item = x.shape[dim] if x.dim() else 1, x.element_size()
    slices = x.numel() // size
    if size < next(least for most, least in MULTIBLOCK if slices <= most):
        return []
    least, most = ITEMS_A_THREAD
    items = max(least, min(most, -(-x.numel() // (gpu.sms * BLOCKS_A_MULTIPROCESSOR * THREADS))))
    blocks = slices * -(-size // (items * THREADS))
    return [
        slices * item, 2 * slices * 4, 2 * slices * max(4, item), blocks * DIGITS * 2, slices * DIGITS * 4, blocks * 4,
        blocks * 4, sum_by_key_scratch(blocks, gpu),
    ]  # fmt: skip


# ---- distinct values


def distinct(gpu: GPU) -> Callable[..., list[int]]:
    """Return what unique and unique_consecutive take on `gpu`."""

    def taken(
        x: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
    ) -> list[int]:  # fmt: skip
        """UniqueCub.cu, UniqueCub: the values, sorted, and where each was; CUB's scratch. Outputs hold as much as the
        input, for which they were made."""
        n, item = x.numel(), x.element_size()
        if not n or x.dtype == torch.bool:
            return []
        value = INDEX if return_inverse else 0
        return [n * item, *([n * INDEX] * 2 if return_inverse else []), sort_scratch(n, item, value, gpu)]

    return taken


# ---- scans


def scanned(out: Tensor, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> list[int]:
    """native/ReduceOps.cpp, impl_func_cum_ops: a copy in the output's dtype. ScanUtils.cuh, scan_dim: one in the order
    of the dimensions, and where all elements are one row CUB's scratch."""
    if not x.dim() or not x.numel():
        return []
    item = out.element_size()
    taken = [x.numel() * item] if out.dtype != x.dtype else []
    if not x.is_contiguous():
        taken.append(x.numel() * item)
    return [*taken, scan_scratch(x.numel(), item)] if x.numel() == x.shape[dim] else taken


# ---- shuffles


def shuffled(gpu: GPU) -> Callable[..., list[int]]:
    """Return what randperm takes on `gpu`."""

    def taken(out: Tensor, n: int, *rest: Any, **named: Any) -> list[int]:
        """Randperm.cu, randperm_out_cuda: the range, random keys, sorted ones. Of so many bits that two are the same
        with a probability of 10 %."""
        if not n:
            return []
        bits = min(64, ceil(log2(n - (6 * n * n + 1) / (12 * log(0.9)))))
        key, item = (4 if bits <= 32 else 8), out.element_size()
        return [n * item, n * key, n * key, sort_scratch(n, key, item, gpu, bits)]

    return taken


def sorting_extras(gpu: GPU) -> dict[Any, Extra]:
    """Return by operator what it takes on `gpu`."""
    sorts, scans, shuffles = Extra(after=sorted_pairs(gpu)), Extra(after=scanned), Extra(after=shuffled(gpu))
    return {
        aten.sort.default: sorts, aten.sort.stable: sorts,
        aten.topk.default: Extra(after=selected(gpu)),
        aten.cumsum.default: scans, aten.cumprod.default: scans, aten.logcumsumexp.default: scans,
        aten._unique2.default: Extra(before=distinct(gpu)),
        aten.randperm.default: shuffles, aten.randperm.generator: shuffles,
    }  # fmt: skip
