"""Layouts of tensors in memory: their bytes, whether they are dense, and the copies of those that are not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def contiguous_copies(*tensors: Tensor | None) -> Iterator[int]:
    """Yield the bytes of the copy that `tensor.contiguous()` makes of each tensor that is not contiguous."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            yield nbytes(tensor)


def casts(dtype: torch.dtype, *tensors: Tensor) -> Iterator[int]:
    """Yield the bytes of the copy in `dtype` of each tensor of another dtype."""
    for tensor in tensors:
        if tensor.dtype != dtype:
            yield tensor.numel() * dtype.itemsize


def is_dense(tensor: Tensor) -> bool:
    """is_non_overlapping_and_dense: sorted by stride, the dimensions are those of a contiguous tensor."""
    expected = 1
    for stride, size in sorted(pair for pair in zip(tensor.stride(), tensor.shape, strict=True) if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True
