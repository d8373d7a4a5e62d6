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
COUNT = 4  # bytes of an int32: how many are not zero
MASKS = (torch.bool, torch.uint8)


def _index_copies(indices: list[Tensor | None]) -> Iterator[int]:
    """make_info and AdvancedIndex: int32 indices in int64; two or more that do not lie alike once they are broadcast,
    as (batch, 1) beside (tokens), each written out in full."""
    given = [index for index in indices if index is not None]
    if any(index.dtype in MASKS for index in given):
        return  # each is first made into indices, and the operator runs again with those
    for index in given:
        if index.dtype == torch.int32:
            yield INDEX * index.numel()
    if len(given) < 2:
        return
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    spread = [index.expand(shape) for index in given]
    if len({index.stride() for index in spread}) > 1:
        for index in spread:
            if not index.is_contiguous():
                yield INDEX * prod(shape)


@workspace(aten.index.Tensor, source="TensorAdvancedIndexing.cpp")
def index(op: Operator, gpu: GPU) -> Iterator[Step]:
    """index_out: the indices as its kernel wants them."""
    yield from _index_copies(op.indices)
    yield OUTPUTS


@workspace(aten.index_put, aten.index_put_, aten._index_put_impl_, source="TensorAdvancedIndexing.cpp")
def index_put(op: Operator, gpu: GPU) -> Iterator[Step]:
    """_index_put_impl_: the indices are sorted where values are added, or where each run must give the same."""
    if op.accumulate or torch.are_deterministic_algorithms_enabled():
        yield OUTPUTS
        yield from _sorted_indices(op, gpu)
    else:
        yield from _index_copies(op.indices)
        yield OUTPUTS


def _sorted_indices(op: Operator, gpu: GPU) -> Iterator[int]:
    """cuda/Indexing.cu, index_put_with_sort_kernel: the linear index, sorted, where each was, their range and the
    sort's scratch, by as many bits as the greatest index has; before them a dense copy of values that are not. Masks
    are counted as read in full."""
    x, values = op.self, op.values
    places = [place for place, index in enumerate(op.indices) if index is not None]
    given = [index for index in op.indices if index is not None]
    if any(index.dtype in MASKS for index in given):
        return  # only values say how many there are
    n = prod(torch.broadcast_shapes(*(index.shape for index in given)))
    adjacent = places == list(range(places[0], places[-1] + 1))
    sizes = x.shape[places[-1] + 1 :] if adjacent else [size for i, size in enumerate(x.shape) if i not in places]
    bits = ((x.numel() - 1) // max(1, prod(sizes))).bit_length() or 1
    yield n * INDEX
    if not values.is_contiguous() or values.numel() < n:
        yield max(values.numel(), n) * values.element_size()
    yield from (n * INDEX, n * INDEX, n * INDEX, sort_scratch(n, INDEX, INDEX, gpu, bits))


@workspace(aten.multinomial, source="Distributions.cpp")
def multinomial(op: Operator, gpu: GPU) -> Iterator[Step]:
    """multinomial_out: an exponential draw per element; cuda/MultinomialKernel.cu, where more than one is drawn with
    replacement: the distribution, normalized, and its sums."""
    yield OUTPUTS
    yield nbytes(op.self)
    if op.num_samples != 1 and op.replacement:
        yield from (nbytes(op.self), nbytes(op.self))


@workspace(aten.masked_scatter, aten.masked_scatter_, source="cuda/Indexing.cu")
def masked_scatter(op: Operator, gpu: GPU) -> Iterator[Step]:
    """masked_scatter__cuda: the mask's prefix sum in int64; cuda/IndexKernel.cu, launch_masked_scatter_kernel: a dense
    mask, if it is not, and the sum's scratch."""
    yield OUTPUTS
    n = op.self.numel()
    yield n * INDEX
    if op.mask.shape != op.self.shape or not op.mask.is_contiguous():
        yield n
    yield scan_scratch(n, INDEX)


@workspace(aten.nonzero, source="cuda/Nonzero.cu")
def nonzero(op: Operator, gpu: GPU) -> Iterator[Step]:
    """nonzero_cuda_out_impl: how many there are, and the scratch that counts them, which are gone when the output
    comes; then, beside it, the scratch that finds them."""
    x, n = op.self, op.self.numel()
    counted = [*contiguous_copies(x), COUNT, reduce_scratch(n, gpu, slots(gpu)[1])]
    yield from counted
    yield from (FREE for _ in counted)
    yield OUTPUTS
    yield COUNT
    if x.dim():
        yield select_scratch(n, gpu)


@workspace(aten.repeat_interleave.Tensor, source="Repeat.cpp")
def repeat_interleave(op: Operator, gpu: GPU) -> Iterator[Step]:
    """repeat_interleave_common: where each begins, and the scratch of that sum."""
    yield OUTPUTS
    n = op.repeats.numel()
    if n:
        yield from (INDEX * n, scan_scratch(n, INDEX))
