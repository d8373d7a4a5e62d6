"""Workspaces of embeddings: the sorted indices of their gradients, and bags (torch 2.13, aten/src/ATen/native/cuda)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...base.terms import ROWS_PER_PARTIAL, SORTS_ABOVE
from ...hardware.gpu import GPU
from .cub import sort_scratch
from .layout import casts, contiguous_copies
from .registry import FREE, OUTPUTS, Operator, Outputs, Step, workspace

aten = torch.ops.aten


@workspace(aten.embedding_dense_backward, source="cuda/Embedding.cu")
def embedding_backward(op: Operator, gpu: GPU) -> Iterator[Step]:
    """embedding_dense_backward_cuda: one kernel for up to 3072 indices; more are sorted, and rows summed by index."""
    yield from contiguous_copies(op.grad_output)
    if op.indices.numel() > SORTS_ABOVE or op.scale_grad_by_freq:
        yield from summed_by_index(op, op.grad_output, op.indices.element_size(), gpu)
    else:
        yield OUTPUTS


def summed_by_index(op: Operator, grad: Tensor, item: int, gpu: GPU) -> Iterator[Step]:
    """The sorted indices of `item` bytes each, the position that each came from, and its count; a range and the scratch
    of the sort, both freed before the next allocation. Then follow the gradient (EmbeddingBackwardKernel.cu,
    embedding_backward_cuda_kernel), sums of up to 10 rows in fp32, and the sums of these. A segment is a distinct
    index, so there are at most as many segments as indices, and as rows of the weight."""
    n = op.indices.numel()
    yield from (n * item, n * item)
    yield from (n * item, sort_scratch(n, item, item, gpu), FREE, FREE)
    if op.scale_grad_by_freq:
        yield n * item
    yield OUTPUTS
    segments = min(n, op.num_weights)
    partials = n // ROWS_PER_PARTIAL + segments
    yield n * item  # segment_offsets
    yield 8  # num_of_segments_tensor
    yield from (segments * item, segments * item)  # partials_per_segment, and their offsets
    yield 8  # num_of_partial_segments_tensor
    yield partials * item  # partial_segment_offset
    yield partials * grad.shape[-1] * max(grad.element_size(), 4)  # grad_weight_per_segment


# ---- bags: rows that are summed, averaged, or reduced to their maximum


MAX = 2  # EmbeddingBagMode


def _promoted(op: Operator) -> Iterator[int]:
    """promoteIndicesAndOffsets: cast indices and offsets to one dtype."""
    return casts(torch.promote_types(op.indices.dtype, op.offsets.dtype), op.indices, op.offsets)


def _bags(op: Operator) -> tuple[Tensor, ...]:
    """Return the rows of bags, the bag of each index, the size of each bag, and the index of the largest row. The CPU
    kernel, whose shapes torch's fake kernel has here, omits the bags of sums and stores sizes instead of indices."""
    index = torch.promote_types(op.indices.dtype, op.offsets.dtype)
    bags, width = op.offsets.shape[0] - op.include_last_offset, op.weight.shape[1]
    output, indices = op.weight.new_empty(bags, width), op.indices.new_empty(op.indices.shape[0], dtype=index)
    largest = (bags, width) if op.mode == MAX else (0,)
    return output, indices, op.offsets.new_empty(op.offsets.shape, dtype=index), indices.new_empty(largest)


@workspace(aten._embedding_bag, aten._embedding_bag_forward_only, source="cuda/EmbeddingBag.cu")
def embedding_bag(op: Operator, gpu: GPU) -> Iterator[Step]:
    """_embedding_bag_cuda: bag_size first, then offset2bag, output and max_indices, which only mode "max" uses."""
    yield from _promoted(op)
    yield Outputs(order=(2, 1, 0, 3), fake=_bags)


@workspace(aten._embedding_bag_dense_backward, source="cuda/EmbeddingBag.cu")
def embedding_bag_dense_backward(op: Operator, gpu: GPU) -> Iterator[Step]:
    """_embedding_bag_dense_backward_cuda: a contiguous gradient. For sums and means the rows are summed by sorted
    indices, however few there are; for mode "max" they are added into the gradient."""
    yield from contiguous_copies(op.grad)
    if op.mode == MAX or not op.indices.numel():
        yield OUTPUTS
    else:
        yield from summed_by_index(op, op.grad, op.offset2bag.element_size(), gpu)


@workspace(aten._embedding_bag_backward, source="EmbeddingBag.cpp")
def embedding_bag_backward(op: Operator, gpu: GPU) -> Iterator[Step]:
    """_embedding_bag_backward_symint: cast indices and offsets to one dtype, then call the dense backward."""
    yield from _promoted(op)
    yield from embedding_bag_dense_backward(op, gpu)


@workspace(aten._embedding_bag_per_sample_weights_backward, source="cuda/EmbeddingBag.cu")
def embedding_bag_weights_backward(op: Operator, gpu: GPU) -> Iterator[Step]:
    """_embedding_bag_per_sample_weights_backward_cuda: a dot product per index, in one kernel."""
    yield from _promoted(op)
    yield OUTPUTS
