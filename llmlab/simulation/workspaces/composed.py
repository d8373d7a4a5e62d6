"""Workspaces of composed operators, which PyTorch makes of others below a dispatch mode, and of copied inputs.

(torch 2.13, aten/src/ATen/native)

n  elements
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..devices import HOST
from .extra import Extra, is_dense

aten = torch.ops.aten

SCALAR = 4  # bytes of a single number


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _dense(*tensors: Tensor | None) -> list[int]:
    """Return the bytes of a contiguous copy of each tensor that is not."""
    return [_bytes(each) for each in tensors if each is not None and not each.is_contiguous()]


# ---- between host and card


def crossing(to: Tensor, x: Tensor, non_blocking: bool = False) -> list[int]:
    """cuda/Copy.cu, copy_kernel_cuda: what is copied between host and card lies contiguous on both sides and has one
    dtype. A blocking copy converts on the host, a non-blocking one on the card."""
    if to.device == x.device or (to.dtype == x.dtype and to.stride() == x.stride() and is_dense(x)):
        return []
    casts, outward = to.dtype != x.dtype, to.device == HOST
    if not outward:
        wide = x if non_blocking else to
        return [to.numel() * wide.element_size()] if not to.is_contiguous() or (casts and non_blocking) else []
    if non_blocking and casts:
        return [_bytes(to), *([] if x.is_contiguous() else [_bytes(to)])]
    return _dense(x)


def moved(out: Tensor, x: Tensor, *, non_blocking: bool = False, **named: Any) -> list[int]:
    """What _to_copy takes besides its output."""
    return crossing(out, x, non_blocking)


def copied(out: Tensor, to: Tensor, x: Tensor, non_blocking: bool = False) -> list[int]:
    """What copy_ takes."""
    return crossing(to, x, non_blocking)


# ---- softmax and losses


def safe_softmax(out: Tensor, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> list[int]:
    """transformers/attention.cpp, _safe_softmax, by which the math backend of attention leaves fully masked rows at 0:
    which elements are -inf, a byte each, which rows are, and the 0."""
    marks = [x.numel(), x.numel() // max(1, x.shape[dim]) if x.dim() else 1, SCALAR]
    return max(_dense(x), marks, key=sum)


def softmax_input(out: Tensor, x: Tensor, *rest: Any) -> list[int]:
    """cuda/SoftMax.cu, host_softmax: input.contiguous()."""
    return _dense(x)


def softmax_gradients(out: Tensor, grad: Tensor, output: Tensor, *rest: Any) -> list[int]:
    """cuda/SoftMax.cu, host_softmax_backward: grad.contiguous(), output.contiguous()."""
    return _dense(grad, output)


def loss_inputs(out: Any, x: Tensor, target: Tensor, weight: Tensor | None, *rest: Any) -> list[int]:
    """cuda/Loss.cu, nll_loss_forward_out_cuda_template: input, target and weight contiguous."""
    return _dense(x, target, weight)


def loss_gradients(
    out: Tensor, grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, *rest: Any
) -> list[int]:  # fmt: skip
    """cuda/Loss.cu, nll_loss_backward_out_cuda_template: target and weight contiguous."""
    return _dense(target, weight)


def log_sigmoid(func: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """cuda/ActivationLogSigmoidKernel.cu, log_sigmoid_forward_cuda: the buffer that the CPU keeps is empty."""
    return torch.empty_like(x), x.new_empty(0)


# cuda/Dropout.cu, dropout_cuda: the mask is there before what it leaves.
DROPOUT = Extra(order=(1, 0))


# ---- choices and comparisons


def where_casts(condition: Tensor, *options: Tensor) -> list[int]:
    """TensorCompare.cpp, where_self_out: an option of another dtype than the result is cast into a copy, and a number
    on the host comes to the card."""
    wide = torch.result_type(*options)
    moved = [each.numel() * wide.itemsize for each in options if each.dtype != wide or each.device != condition.device]
    return [*moved, *([condition.numel()] if condition.dtype == torch.uint8 else [])]


def members(out: Tensor, elements: Tensor, tests: Tensor, **named: Any) -> list[int]:
    """cuda/TensorCompare.cpp, isin_default_kernel_gpu: each element beside each test, and which found one. More tests
    are sorted (TensorCompare.cpp, isin_Tensor_Tensor_out), which is not counted."""
    if tests.numel() >= int(10 * elements.numel() ** 0.145):
        return []
    return [elements.numel() * tests.numel(), elements.numel()]


def searched(out: Tensor, ordered: Tensor, x: Tensor, **named: Any) -> list[int]:
    """BucketizationUtils.h, searchsorted_maybe_trim_input_tensors: both contiguous, and then of one dtype."""
    wide = torch.result_type(ordered, x)
    return [*_dense(x, ordered), *(each.numel() * wide.itemsize for each in (x, ordered) if each.dtype != wide)]


def magnitudes(x: Tensor) -> list[int]:
    """TensorCompare.cpp, isinf: abs(x) == inf."""
    return [_bytes(x)] if x.is_floating_point() else []


def counted(x: Tensor, dims: Sequence[int] = ()) -> list[int]:
    """TensorAdvancedIndexing.cpp, count_nonzero_cuda: (x != 0).sum(), whose summands are cast to int64."""
    return [8 * x.numel()] if x.dtype == torch.bool else [x.numel(), 8 * x.numel()]


def log_sum_exp(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> list[int]:
    """ReduceOps.cpp, logsumexp_out_impl: the largest of each row, and exp(x - largest), all of it."""
    chosen = {dim % x.dim() for dim in ([dims] if isinstance(dims, int) else dims)} if x.dim() else set()
    rows = prod(size for dim, size in enumerate(x.shape) if dim not in chosen)
    item = x.element_size() if x.is_floating_point() else 4
    return [rows * item, x.numel() * item]


COMPOSED = {
    aten._to_copy.default: Extra(after=moved),
    aten.copy_.default: Extra(after=copied),
    aten._safe_softmax.default: Extra(after=safe_softmax),
    aten._softmax.default: Extra(after=softmax_input),
    aten._log_softmax.default: Extra(after=softmax_input),
    aten._log_softmax_backward_data.default: Extra(after=softmax_gradients),
    aten.nll_loss_forward.default: Extra(after=loss_inputs),
    aten.nll_loss_backward.default: Extra(after=loss_gradients),
    aten.native_dropout.default: DROPOUT,
    aten.log_sigmoid_forward.default: Extra(outputs=log_sigmoid),
    aten.where.self: Extra(before=where_casts),
    aten.isin.Tensor_Tensor: Extra(after=members),
    aten.searchsorted.Tensor: Extra(after=searched),
    aten.bucketize.Tensor: Extra(after=searched),
    aten.isinf.default: Extra(before=magnitudes),
    aten.count_nonzero.default: Extra(before=counted),
    aten.count_nonzero.dim_IntList: Extra(before=counted),
    aten.logsumexp.default: Extra(before=log_sum_exp),
}
