"""Workspaces of indexing and of random draws (torch 2.13, aten/src/ATen/native).

n  elements
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from ...hardware.gpu import GPU
from .cub import reduce_scratch, scan_scratch, select_scratch, sort_scratch
from .layout import contiguous_copies, nbytes
from .reductions import slots
from .registry import FREE, OUTPUTS, Operator, Step, workspace

aten = torch.ops.aten

INDEX = 8  # bytes of an int64
COUNT = 4  # bytes of an int32, the count of nonzero elements
MASKS = (torch.bool, torch.uint8)


def _index_copies(indices: list[Tensor | None]) -> Iterator[int]:
    """make_info and AdvancedIndex: int32 indices are cast to int64. If two or more have different strides after
    broadcasting, such as (batch, 1) and (tokens), each is copied in full."""
    tensors = [index for index in indices if index is not None]
    if any(index.dtype in MASKS for index in tensors):
        return  # masks are converted to indices first, and the operator runs again with these
    for index in tensors:
        if index.dtype == torch.int32:
            yield INDEX * index.numel()
    if len(tensors) < 2:
        return
    shape = torch.broadcast_shapes(*(index.shape for index in tensors))
    spread = [index.expand(shape) for index in tensors]
    if len({index.stride() for index in spread}) > 1:
        for index in spread:
            if not index.is_contiguous():
                yield INDEX * prod(shape)


@workspace(aten.index.Tensor, source="TensorAdvancedIndexing.cpp")
def index(op: Operator, gpu: GPU) -> Iterator[Step]:
    """index_out: the indices in the form that its kernel needs."""
    yield from _index_copies(op.indices)
    yield OUTPUTS


@workspace(aten.index_put, aten.index_put_, aten._index_put_impl_, source="TensorAdvancedIndexing.cpp")
def index_put(op: Operator, gpu: GPU) -> Iterator[Step]:
    """_index_put_impl_: the indices are sorted if values are accumulated, or if the result must be deterministic."""
    if op.accumulate or torch.are_deterministic_algorithms_enabled():
        yield OUTPUTS
        yield from _sorted_indices(op, gpu)
    else:
        yield from _index_copies(op.indices)
        yield OUTPUTS


def _sorted_indices(op: Operator, gpu: GPU) -> Iterator[int]:
    """cuda/Indexing.cu, index_put_with_sort_kernel: the linear index, a dense copy of values that are not dense, the
    sorted index, the position of each, their range, and the scratch of a sort over the bits of the largest index.
    Masks yield nothing, because only their values say how many indices they are."""
    x, values = op.self, op.values
    places = [place for place, index in enumerate(op.indices) if index is not None]
    tensors = [index for index in op.indices if index is not None]
    if any(index.dtype in MASKS for index in tensors):
        return
    n = prod(torch.broadcast_shapes(*(index.shape for index in tensors)))
    adjacent = places == list(range(places[0], places[-1] + 1))
    sizes = x.shape[places[-1] + 1 :] if adjacent else [size for i, size in enumerate(x.shape) if i not in places]
    bits = ((x.numel() - 1) // max(1, prod(sizes))).bit_length() or 1
    yield n * INDEX
    if not values.is_contiguous() or values.numel() < n:
        yield max(values.numel(), n) * values.element_size()
    yield from (n * INDEX, n * INDEX, n * INDEX, sort_scratch(n, INDEX, INDEX, gpu, bits))


@workspace(aten.multinomial, source="Distributions.cpp")
def multinomial(op: Operator, gpu: GPU) -> Iterator[Step]:
    """multinomial_out: an exponential sample per element. If several samples are drawn with replacement, the normalized
    distribution and its prefix sums (cuda/MultinomialKernel.cu)."""
    yield OUTPUTS
    yield nbytes(op.self)
    if op.num_samples != 1 and op.replacement:
        yield from (nbytes(op.self), nbytes(op.self))


@workspace(aten.masked_scatter, aten.masked_scatter_, source="cuda/Indexing.cu")
def masked_scatter(op: Operator, gpu: GPU) -> Iterator[Step]:
    """masked_scatter__cuda: the prefix sum of the mask in int64. cuda/IndexKernel.cu, launch_masked_scatter_kernel: a
    dense copy of a mask that is not dense, and the scratch of the prefix sum."""
    yield OUTPUTS
    n = op.self.numel()
    yield n * INDEX
    if op.mask.shape != op.self.shape or not op.mask.is_contiguous():
        yield n
    yield scan_scratch(n, INDEX)


@workspace(aten.nonzero, source="cuda/Nonzero.cu")
def nonzero(op: Operator, gpu: GPU) -> Iterator[Step]:
    """nonzero_cuda_out_impl: the number of nonzero elements and the scratch to count them, both freed before the output
    is allocated; then the scratch to find them, next to the output."""
    x, n = op.self, op.self.numel()
    count_buffers = [*contiguous_copies(x), COUNT, reduce_scratch(n, gpu, slots(gpu)[1])]
    yield from count_buffers
    yield from (FREE for _ in count_buffers)
    yield OUTPUTS
    yield COUNT
    if x.dim():
        yield select_scratch(n, gpu)


@workspace(aten.repeat_interleave.Tensor, source="Repeat.cpp")
def repeat_interleave(op: Operator, gpu: GPU) -> Iterator[Step]:
    """repeat_interleave_common: the prefix sum of the repeats, and its scratch."""
    yield OUTPUTS
    n = op.repeats.numel()
    if n:
        yield from (INDEX * n, scan_scratch(n, INDEX))
