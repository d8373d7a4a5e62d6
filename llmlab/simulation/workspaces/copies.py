"""Workspaces of copies, including those between host and GPU, and of comparisons (torch 2.13, aten/src/ATen/native)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...hardware.gpu import GPU
from ..devices import HOST
from .layout import casts, contiguous_copies, is_dense, nbytes
from .registry import OUTPUTS, Operator, Outputs, Step, workspace

aten = torch.ops.aten


def _crossing(to: Tensor, x: Tensor, non_blocking: bool) -> Iterator[int]:
    """A copy between host and GPU needs contiguous tensors of the same dtype on both sides. A blocking copy converts on
    the host, a non-blocking copy on the GPU."""
    if to.device == x.device or (to.dtype == x.dtype and to.stride() == x.stride() and is_dense(x)):
        return
    casts = to.dtype != x.dtype
    if to.device != HOST:
        if not to.is_contiguous() or (casts and non_blocking):
            yield to.numel() * (x if non_blocking else to).element_size()
    elif casts and non_blocking:
        yield nbytes(to)
        if not x.is_contiguous():
            yield nbytes(to)
    else:
        yield from contiguous_copies(x)


@workspace(aten._to_copy, aten.copy_, source="cuda/Copy.cu")
def copy(op: Operator, gpu: GPU) -> Iterator[Step]:
    """copy_kernel_cuda, into a new tensor or an existing one."""
    yield OUTPUTS
    to, x = (op.self, op.src) if op.has("src") else (op.out, op.self)
    yield from _crossing(to, x, op.non_blocking)


@workspace(aten.where.self, source="TensorCompare.cpp")
def where(op: Operator, gpu: GPU) -> Iterator[Step]:
    """where_self_out: an operand whose dtype differs from the result is cast into a copy, and a number on the host is
    copied to the GPU."""
    wide = torch.result_type(op.self, op.other)
    for tensor in (op.self, op.other):
        if tensor.dtype != wide or tensor.device != op.condition.device:
            yield tensor.numel() * wide.itemsize
    yield OUTPUTS


@workspace(aten.isin.Tensor_Tensor, source="cuda/TensorCompare.cpp")
def isin(op: Operator, gpu: GPU) -> Iterator[Step]:
    """isin_default_kernel_gpu: the comparison of each element with each test element, and the results. Larger numbers
    of test elements are sorted instead (TensorCompare.cpp, isin_Tensor_Tensor_out), which is not counted."""
    yield OUTPUTS
    elements, tests = op.elements.numel(), op.test_elements.numel()
    if tests < int(10 * elements**0.145):
        yield from (elements * tests, elements)


@workspace(aten.searchsorted.Tensor, aten.bucketize.Tensor, source="BucketizationUtils.h")
def searchsorted(op: Operator, gpu: GPU) -> Iterator[Step]:
    """searchsorted_maybe_trim_input_tensors: the sequence (or the boundaries) and the values to search for are made
    contiguous, and then cast to one dtype."""
    yield OUTPUTS
    x, ordered = (op.boundaries, op.self) if op.has("boundaries") else (op.self, op.sorted_sequence)
    yield from contiguous_copies(x, ordered)
    yield from casts(torch.result_type(ordered, x), x, ordered)


@workspace(aten.isinf, source="TensorCompare.cpp")
def isinf(op: Operator, gpu: GPU) -> Iterator[Step]:
    """isinf: abs(x) == inf, which stores abs(x)."""
    if op.self.is_floating_point():
        yield nbytes(op.self)
    yield OUTPUTS


@workspace(aten.count_nonzero, aten.count_nonzero.dim_IntList, source="TensorAdvancedIndexing.cpp")
def count_nonzero(op: Operator, gpu: GPU) -> Iterator[Step]:
    """count_nonzero_cuda: (x != 0).sum(), whose summands are cast to int64."""
    if op.self.dtype != torch.bool:
        yield op.self.numel()
    yield 8 * op.self.numel()
    yield OUTPUTS


@workspace(aten.histc, source="cuda/SummaryOps.cu")
def histc(op: Operator, gpu: GPU) -> Iterator[Step]:
    """_histc_cuda, which also accepts integers: mixtures of experts count tokens that way."""
    yield Outputs(fake=lambda op: op.self.new_empty(op.bins))
