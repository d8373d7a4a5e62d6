"""Casts on a CPU: an elementwise operator copies operands whose dtype is not the common one.

Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::compute_types: on a CPU an operand that is not of the
common dtype is cast into a copy first, and a result of another dtype is computed into one; CUDA's kernels cast as they
read and write.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...base.compat import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

# Elementwise, but with operands of dtypes that stay what they are: a mask, a source.
KEEP_DTYPES = frozenset(("copy_", "copy", "_to_copy", "masked_fill", "masked_fill_", "where"))


def cast_copies(func: Any, args: tuple) -> list[int]:
    """Return the bytes of the copies that `func` makes of its operands, and of its first one's new value."""
    if torch.Tag.pointwise not in func.tags:
        return []
    operands = [each for each in args if isinstance(each, Tensor)]
    if len(operands) < 2 or len({each.dtype for each in operands}) == 1:
        return []
    if func._opname in KEEP_DTYPES:
        return []
    numbers = [each for each in args if isinstance(each, (Tensor, int, float))]
    common = elementwise_dtypes(*numbers, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)[1]
    copied = [each for each in operands if each.dtype != common]
    if func._schema.is_mutable and operands[0].dtype != common:
        copied.append(operands[0])
    return [each.numel() * common.itemsize for each in copied]
