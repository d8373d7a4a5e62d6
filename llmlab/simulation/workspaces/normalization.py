"""Workspaces of normalization: LayerNorm, RMSNorm and GroupNorm (torch 2.13, aten/src/ATen/native)."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from ...hardware.gpu import GPU
from .layout import contiguous_copies
from .registry import OUTPUTS, Operator, Outputs, Step, workspace

aten = torch.ops.aten
LAYER_NORM, GROUP_NORM = "cuda/layer_norm_kernel.cu", "cuda/group_norm_kernel.cu"
WIDE_ROWS, PARTIAL_GRIDS, WARP = 64 * 1024, 32 * 1024, 32  # layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel


def _with_statistics(op: Operator, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the output, and mean and 1/std in `dtype`. A LayerNorm has them in fp32 even for half inputs
    (layer_norm_cuda), a GroupNorm in the dtype of its weight (native/group_norm.cpp)."""
    out, *statistics = op.run()
    return out, *(statistic.new_empty(statistic.shape, dtype=dtype) for statistic in statistics)


@workspace(aten.native_layer_norm, source=LAYER_NORM)
def layer_norm(op: Operator, gpu: GPU) -> Iterator[Step]:
    """layer_norm_cuda: `input.expect_contiguous()`, before the outputs."""
    yield from contiguous_copies(op.input)
    wide = torch.promote_types(op.input.dtype, torch.float32)
    yield Outputs(fake=lambda op: _with_statistics(op, wide))


def partial_gradients(op: Operator, gpu: GPU) -> int:
    """LaunchGammaBetaBackwardCUDAKernel: for many short rows, the gradients of weight and bias are summed in parts of
    32 rows or more, which are stored. Return the bytes for one of the two gradients."""
    columns = prod(op.normalized_shape)
    rows, blocks = op.grad_out.numel() // columns, -(-columns // WARP)
    if op.weight is None or rows <= WIDE_ROWS or columns // WARP >= gpu.sms // 2:
        return 0
    return min(PARTIAL_GRIDS // blocks, -(-rows // WARP)) * columns * op.weight.element_size()


@workspace(aten.native_layer_norm_backward, source=LAYER_NORM)
def layer_norm_backward(op: Operator, gpu: GPU) -> Iterator[Step]:
    """layer_norm_backward_cuda makes the input contiguous before it allocates the outputs, and the gradient after."""
    yield from contiguous_copies(op.input)
    yield OUTPUTS
    yield from contiguous_copies(op.grad_out)
    partial = partial_gradients(op, gpu)
    yield from (partial, partial)


def _rms_norm_outputs(op: Operator) -> tuple[Tensor, Tensor]:
    """_fused_rms_norm_cuda: one kernel, which stores 1/rms of each row in fp32 even for half inputs."""
    x, shape = op.input, op.normalized_shape
    rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.promote_types(x.dtype, torch.float32))


@workspace(aten._fused_rms_norm, source=LAYER_NORM)
def rms_norm(op: Operator, gpu: GPU) -> Iterator[Step]:
    """_fused_rms_norm_cuda: as layer_norm_cuda, without a mean."""
    yield from contiguous_copies(op.input)
    yield Outputs(fake=_rms_norm_outputs)


def _rms_norm_gradients(op: Operator) -> tuple[Tensor | None, ...]:
    """_fused_rms_norm_backward_cuda: the gradients of input and weight, and nothing else."""
    inputs = zip((op.input, op.weight), op.output_mask, strict=True)
    return tuple(torch.empty_like(x) if x is not None and needs_grad else None for x, needs_grad in inputs)


@workspace(aten._fused_rms_norm_backward, source=LAYER_NORM)
def rms_norm_backward(op: Operator, gpu: GPU) -> Iterator[Step]:
    """_fused_rms_norm_backward_cuda: as layer_norm_backward_cuda, without a bias."""
    yield from contiguous_copies(op.input)
    yield Outputs(fake=_rms_norm_gradients)
    yield from contiguous_copies(op.grad_out)
    yield partial_gradients(op, gpu)


@workspace(aten.native_group_norm, source=GROUP_NORM)
def group_norm(op: Operator, gpu: GPU) -> Iterator[Step]:
    """GroupNormKernelImplInternal: scale and shift of each channel in fp32."""
    dtype = op.input.dtype if op.weight is None else op.weight.dtype
    yield Outputs(fake=lambda op: _with_statistics(op, dtype))
    yield from (4 * op.N * op.C, 4 * op.N * op.C)


@workspace(aten.native_group_norm_backward, source=GROUP_NORM)
def group_norm_backward(op: Operator, gpu: GPU) -> Iterator[Step]:
    """GroupNormBackwardKernelImplInternal: two sums per channel, then the factors of the input's gradient per group and
    channel, all in fp32."""
    yield OUTPUTS
    channels, grouped = 4 * op.N * op.C, 4 * op.N * op.group
    if op.HxW != 1:  # else GroupNorm1dBackward
        yield from (channels, channels)
    if op.output_mask[0]:
        yield from (grouped, grouped)
        if op.HxW != 1 and op.weight is not None:
            yield channels
