"""Fake kernels of SyncBatchNorm's operators, which torch has for CUDA alone: their outputs' shapes.

Source: aten/src/ATen/native/cuda/Normalization.cu. Statistics are one number per channel, in fp32 for half inputs.
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
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, of_input: bool, of_weight: bool, of_bias: bool
) -> tuple[Any, ...]:
    nothing = x.new_empty(0)
    of_parameter = x.new_empty(x.shape[1], dtype=(x if weight is None else weight).dtype)
    sums = _stats(x) if of_input else (nothing, nothing)
    return *sums, *(torch.empty_like(of_parameter) if wanted else nothing for wanted in (of_weight, of_bias))


FAKE_KERNELS = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _stats,
    "batch_norm_elemt": _like_input,
    "batch_norm_backward_reduce": _reduce,
    "batch_norm_backward_elemt": _like_input,
}
