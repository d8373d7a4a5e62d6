"""What CUDA's kernels that sort, index and draw take besides their outputs (torch 2.13, aten/src/ATen/native/cuda).

Each has cub's scratch too. Of a radix sort of pairs that is a second set of keys and values, which is counted, and
some counters a block of threads, which are not: how many depends on cub's tuning for the architecture.

    n  elements
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .engine import Extra

aten = torch.ops.aten

INDEX = 8  # bytes of an int64
SMALL_SORT, LARGE_SORT, FEW_SEGMENTS = 4096, 1_000_000, 128  # Sort.h, should_use_small_sort; Sort.cu


def indices_sorted(
    out: Any, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *rest: Any
) -> list[int]:
    """Indexing.cu, index_put_with_sort_kernel, where values are added: the linear index, sorted, where each was, their
    range and the sort's scratch; before them a dense copy of values that are not. Masks are counted as read in full."""
    if not accumulate:
        return []
    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return []  # how many there are only values say
    n = prod(torch.broadcast_shapes(*(index.shape for index in given)))
    dense = values.is_contiguous() and values.numel() >= n
    copied = [] if dense else [max(values.numel(), n) * values.element_size()]
    return [n * INDEX, *copied, *(n * INDEX,) * 3, 2 * n * INDEX]


def sorted_pairs(out: Any, x: Tensor, *given: Any, **named: Any) -> list[int]:
    """Sort.cpp, sort_cuda_kernel: a range of indices for up to 4096 elements; Sort.cu, launch_stable_sort_kernel: one
    long segment a time with its range, few by sorting all and then by segment, with pairs of int32 twice."""
    dims = [each for each in (*given, named.get("dim")) if type(each) is int]
    size = x.shape[dims[0] if dims else -1] if x.dim() else 1
    n, item = x.numel(), x.element_size()
    if size <= 1:
        return []
    if size <= SMALL_SORT:
        return [size * INDEX]
    if n == size or size >= LARGE_SORT:
        return [size * INDEX, size * (item + INDEX)]
    if n // size < FEW_SEGMENTS:
        return [n * INDEX, n * INDEX, n * item, n * (item + INDEX)]
    return [n * INDEX, n * (item + INDEX)]


def drawn(out: Any, x: Tensor, samples: int, replacement: bool = False, **named: Any) -> list[int]:
    """native/Distributions.cpp, multinomial_out: a draw of an exponential an element; MultinomialKernel.cu, where more
    than one is drawn with replacement: the distribution, normalized, and its sums."""
    size = x.numel() * x.element_size()
    return [size] if samples == 1 or not replacement else [size] * 3


def mask_positions(out: Any, x: Tensor, mask: Tensor, source: Tensor) -> list[int]:
    """Indexing.cu, masked_scatter__cuda: the mask's prefix sum in int64; IndexKernel.cu: a dense mask, if it is not."""
    dense = mask.shape == x.shape and mask.is_contiguous()
    return [x.numel() * INDEX] + ([] if dense else [x.numel()])


def log_sum_exp(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> list[int]:
    """native/ReduceOps.cpp, logsumexp_out_impl: the largest of each row, and exp(x - largest), all of it."""
    chosen = {dim % x.dim() for dim in ([dims] if isinstance(dims, int) else dims)} if x.dim() else set()
    rows = prod(size for dim, size in enumerate(x.shape) if dim not in chosen)
    item = x.element_size() if x.is_floating_point() else 4
    return [rows * item, x.numel() * item]


INDEXING = {
    aten.index_put_.default: Extra(after=indices_sorted),
    aten.index_put.default: Extra(after=indices_sorted),
    aten._index_put_impl_.default: Extra(after=indices_sorted),
    aten.sort.default: Extra(after=sorted_pairs),
    aten.sort.stable: Extra(after=sorted_pairs),
    aten.multinomial.default: Extra(after=drawn),
    aten.masked_scatter_.default: Extra(after=mask_positions),
    aten.masked_scatter.default: Extra(after=mask_positions),
    aten.logsumexp.default: Extra(before=log_sum_exp),
}
