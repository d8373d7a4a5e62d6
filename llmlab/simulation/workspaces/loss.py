"""Workspaces of softmax, dropout and losses: temporaries, and contiguous inputs (torch 2.13, aten/src/ATen/native)."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from ...hardware.gpu import GPU
from .layout import contiguous_copies
from .reductions import SUM, buffers, slots
from .registry import OUTPUTS, Operator, Outputs, Step, workspace

aten = torch.ops.aten
SCALAR = 4  # bytes of a single number


@workspace(aten._softmax, aten._log_softmax, aten._log_softmax_backward_data, source="cuda/SoftMax.cu")
def softmax(op: Operator, gpu: GPU) -> Iterator[Step]:
    """host_softmax: input.contiguous(). host_softmax_backward: grad.contiguous(), output.contiguous()."""
    yield OUTPUTS
    yield from contiguous_copies(*((op.grad_output, op.output) if op.has("grad_output") else (op.self,)))


@workspace(aten._softmax_backward_data, source="cuda/SoftMax.cu")
def softmax_backward(op: Operator, gpu: GPU) -> Iterator[Step]:
    """softmax_backward_cuda_out: `Tensor tmp = grad * output`, in the gradient's dtype."""
    yield OUTPUTS
    grad, output = op.grad_output, op.output
    nbytes = output.numel() * torch.promote_types(grad.dtype, output.dtype).itemsize
    yield nbytes
    if not grad.is_contiguous() and not output.is_contiguous():  # tmp has their layout too, so it is copied
        yield nbytes


@workspace(aten._safe_softmax, source="transformers/attention.cpp")
def safe_softmax(op: Operator, gpu: GPU) -> Iterator[Step]:
    """_safe_softmax, with which the math backend of attention sets fully masked rows to 0: a mask of -inf elements and
    a mask of rows, one byte per entry, and the scalar 0."""
    yield OUTPUTS
    x = op.self
    marks = [x.numel(), x.numel() // max(1, x.shape[op.dim]) if x.dim() else 1, SCALAR]
    yield from max(list(contiguous_copies(x)), marks, key=sum)


@workspace(aten.logsumexp, source="ReduceOps.cpp")
def logsumexp(op: Operator, gpu: GPU) -> Iterator[Step]:
    """logsumexp_out_impl: the largest element of each row, and exp(x - largest) in full."""
    x, dims = op.self, [op.dim] if isinstance(op.dim, int) else op.dim
    chosen = {dim % x.dim() for dim in dims} if x.dim() else set()
    item = x.element_size() if x.is_floating_point() else 4
    yield prod(size for dim, size in enumerate(x.shape) if dim not in chosen) * item
    yield x.numel() * item
    yield OUTPUTS


@workspace(aten.native_dropout, source="cuda/Dropout.cu")
def dropout(op: Operator, gpu: GPU) -> Iterator[Step]:
    """dropout_cuda: the mask is allocated before the output."""
    yield Outputs(order=(1, 0))


@workspace(aten.log_sigmoid_forward, source="cuda/ActivationLogSigmoidKernel.cu")
def log_sigmoid(op: Operator, gpu: GPU) -> Iterator[Step]:
    """log_sigmoid_forward_cuda: the buffer of the CPU kernel is empty on CUDA."""
    yield Outputs(fake=lambda op: (torch.empty_like(op.self), op.self.new_empty(0)))


@workspace(aten.nll_loss_forward, aten.nll_loss_backward, source="cuda/Loss.cu")
def nll_loss(op: Operator, gpu: GPU) -> Iterator[Step]:
    """nll_loss_forward_out_cuda_template copies input, target and weight if they are not contiguous;
    nll_loss_backward_out_cuda_template copies target and weight."""
    yield OUTPUTS
    if not op.has("grad_output"):
        yield from contiguous_copies(op.self)
    yield from contiguous_copies(op.target, op.weight)


@workspace(aten.mse_loss, aten.smooth_l1_loss, source="Loss.cpp")
def elementwise_loss(op: Operator, gpu: GPU) -> Iterator[Step]:
    """mse_loss_out and smooth_l1_loss_out: the loss of each element, then its mean or sum."""
    yield OUTPUTS
    count = prod(torch.broadcast_shapes(op.self.shape, op.target.shape))
    if op.reduction and count:
        item = torch.result_type(op.self, op.target).itemsize
        yield count * item
        yield from buffers([count], [item], [True], item, item, SUM, slots(gpu))
