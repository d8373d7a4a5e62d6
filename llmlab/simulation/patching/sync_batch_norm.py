"""Fake kernels of SyncBatchNorm's operators, which torch implements for CUDA alone; they return the right shapes.

Source: aten/src/ATen/native/cuda/Normalization.cu. A statistic is one number per channel, in fp32 for half inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _per_channel(x: Tensor) -> Tensor:
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return x.new_empty(x.shape[1], dtype=dtype)


def _stats(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _per_channel(x), _per_channel(x)


def _like_input(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def _reduce(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any,
    input_mask: bool, weight_mask: bool, bias_mask: bool,
) -> tuple[Any, ...]:  # fmt: skip
    empty = x.new_empty(0)
    parameter_sum = x.new_empty(x.shape[1], dtype=(x if weight is None else weight).dtype)
    sums = _stats(x) if input_mask else (empty, empty)
    return *sums, *(torch.empty_like(parameter_sum) if mask else empty for mask in (weight_mask, bias_mask))


FAKE_KERNELS = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _stats,
    "batch_norm_elemt": _like_input,
    "batch_norm_backward_reduce": _reduce,
    "batch_norm_backward_elemt": _like_input,
}
