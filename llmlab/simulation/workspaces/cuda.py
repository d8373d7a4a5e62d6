"""Workspaces of CUDA's kernels by operator: data, which the engine reads.

Each entry names the torch file it follows (of torch 2.13, under aten/src/ATen/native unless it says otherwise).

    B  batch    H  heads    T  query positions    S  key positions    D  head size
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...hardware.gpu import GPU
from ..devices import HOST
from .composed import COMPOSED
from .cub import sort_scratch
from .extra import GIVE_BACK, Extra
from .indexing import indexing_extras
from .matmul import PRODUCTS, grouped_arguments
from .reductions import reduction_extras
from .sorting import sorting_extras

aten = torch.ops.aten


def _bytes(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    return tensor.numel() * (dtype or tensor.dtype).itemsize


# ---- softmax


def softmax_backward(out: Tensor, grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Iterator[int]:
    """cuda/SoftMax.cu, softmax_backward_cuda_out: `Tensor tmp = grad * output`, in the gradient's dtype."""
    yield _bytes(output, torch.promote_types(grad.dtype, output.dtype))
    if not grad.is_contiguous() and not output.is_contiguous():  # tmp takes their layout, and is made contiguous
        yield _bytes(output, torch.promote_types(grad.dtype, output.dtype))


# ---- normalization


def _written_out(tensor: Tensor) -> list[int]:
    """Return the bytes of the copy that `tensor.contiguous()` makes, if it makes one."""
    return [] if tensor.is_contiguous() else [_bytes(tensor)]


def norm_input(x: Tensor, *rest: Any) -> list[int]:
    """cuda/layer_norm_kernel.cu: `input.expect_contiguous()`, before the outputs."""
    return _written_out(x)


def norm_gradient_input(grad: Tensor, x: Tensor, *rest: Any) -> list[int]:
    """The same in backward; the gradient's copy comes after the outputs."""
    return _written_out(x)


def layer_norm(func: Any, x: Tensor, shape: list[int], weight: Tensor, bias: Tensor, eps: float) -> tuple:
    """cuda/layer_norm_kernel.cu, layer_norm_cuda: mean and 1/std in fp32 also for half inputs."""
    out, mean, rstd = func(x, shape, weight, bias, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    return out, mean.new_empty(mean.shape, dtype=wide), rstd.new_empty(rstd.shape, dtype=wide)


WIDE_ROWS, PARTIAL_GRIDS, WARP = 64 * 1024, 32 * 1024, 32  # layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel


def _norm_partials(grad: Tensor, shape: list[int], weight: Tensor | None, multiprocessors: int) -> int:
    """cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: for many short rows, the gradients of weight and
    bias are summed in parts of 32 rows or more, which are written out. Return the bytes for one of them."""
    columns = prod(shape)
    rows, blocks = grad.numel() // columns, -(-columns // WARP)
    if weight is None or rows <= WIDE_ROWS or columns // WARP >= multiprocessors // 2:
        return 0
    return min(PARTIAL_GRIDS // blocks, -(-rows // WARP)) * columns * weight.element_size()


def layer_norm_backward(multiprocessors: int) -> Any:
    """Return what native_layer_norm_backward takes on a card of so many multiprocessors."""

    def taken(
        out: Any, grad: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, weight: Tensor | None,
        *rest: Any, **named: Any,
    ) -> list[int]:  # fmt: skip
        return [*_written_out(grad), *[_norm_partials(grad, shape, weight, multiprocessors)] * 2]

    return taken


def rms_norm_gradients(multiprocessors: int) -> Any:
    """Return what _fused_rms_norm_backward takes on a card of so many multiprocessors."""

    def taken(
        out: Any, grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, *rest: Any
    ) -> list[int]:
        return [*_written_out(grad), _norm_partials(grad, shape, weight, multiprocessors)]

    return taken


def group_norm(func: Any, x: Tensor, weight: Tensor | None, bias: Any, N: int, C: int, *rest: Any) -> tuple:
    """native/group_norm.cpp: mean and 1/std in the dtype of the weight."""
    out, mean, rstd = func(x, weight, bias, N, C, *rest)
    dtype = x.dtype if weight is None else weight.dtype
    return out, mean.new_empty(mean.shape, dtype=dtype), rstd.new_empty(rstd.shape, dtype=dtype)


def group_norm_factors(out: Any, x: Tensor, weight: Any, bias: Any, N: int, C: int, *rest: Any) -> list[int]:
    """cuda/group_norm_kernel.cu, GroupNormKernelImplInternal: scale and shift of each channel in fp32."""
    return [4 * N * C] * 2


def group_norm_gradients(
    out: Any, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, N: int, C: int, HxW: int,
    groups: int, mask: list[bool],
) -> list[int]:  # fmt: skip
    """cuda/group_norm_kernel.cu, GroupNormBackwardKernelImplInternal: sums of each channel, then the factors of dX, of
    each group and channel, in fp32."""
    channels, grouped = 4 * N * C, [4 * N * groups] * 2
    if HxW == 1:  # GroupNorm1dBackward
        return grouped if mask[0] else []
    factors = [*grouped, *([channels] if weight is not None else [])]
    return [channels, channels, *(factors if mask[0] else [])]


def rms_norm(func: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """cuda/layer_norm_kernel.cu, _fused_rms_norm_cuda: one kernel; 1/rms of each row in fp32 also for half inputs."""
    rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.promote_types(x.dtype, torch.float32))


def rms_norm_backward(
    func: Any, grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """cuda/layer_norm_kernel.cu, _fused_rms_norm_backward_cuda: the gradients of input and weight, nothing besides."""
    wanted = zip((x, weight), mask, strict=True)
    dx, dweight = (torch.empty_like(each) if each is not None and wants else None for each, wants in wanted)
    return dx, dweight


# ---- norms of lists


NORM_CHUNK = 65536  # elements; kChunkSize, cuda/MultiTensorApply.cuh


def foreach_norm(tensors: list[Tensor], *rest: Any, **named: Any) -> list[int]:
    """cuda/ForeachReduceOp.cu, foreach_tensor_norm_cuda: a partial norm of each chunk, as many as the largest has."""
    chunks = max(-(-each.numel() // NORM_CHUNK) for each in tensors)
    return [len(tensors) * chunks * max(tensors[0].element_size(), 4)]


# ---- mixtures of experts


def grouped_mm(
    func: Any, a: Tensor, b: Tensor, offs: Any = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """GroupedMMUtils.h, create_grouped_gemm_output_tensor: rows of whole 16 B. Other dtypes than bf16, which the fake
    kernel refuses, are multiplied group by group into the same output (_grouped_mm_fallback)."""
    dtype = out_dtype or a.dtype
    if a.dim() == 2:
        shape = (a.shape[0], b.shape[-1]) if b.dim() == 3 else (offs.shape[0], a.shape[0], b.shape[1])
    else:
        shape = (a.shape[1], b.shape[1]) if b.dim() == 2 else (a.shape[0], a.shape[1], b.shape[-1])
    aligned = 16 // dtype.itemsize
    row = -(-shape[-1] // aligned) * aligned
    strides = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device=a.device)


# ---- embedding


SORTS_ABOVE, ROWS_A_PARTIAL = 3072, 10  # indices; cuda/Embedding.cu; NROWS_PER_THREAD, cuda/EmbeddingBackwardKernel.cu


def _embedding_sorts(indices: Tensor, scale_grad_by_freq: bool) -> bool:
    return indices.numel() > SORTS_ABOVE or scale_grad_by_freq


def embedding_sorted(gpu: GPU) -> Any:
    """Return what embedding_dense_backward takes on `gpu` before its output."""

    def taken(
        grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
    ) -> Iterator[int]:
        """cuda/Embedding.cu, embedding_dense_backward_cuda: the indices sorted, where each came from, and how often it
        is; a range and the sort's scratch, which are gone before anything else is made."""
        if not grad.is_contiguous():
            yield _bytes(grad)
        if _embedding_sorts(indices, scale_grad_by_freq):
            item = indices.element_size()
            yield from (_bytes(indices), _bytes(indices))
            yield from (_bytes(indices), sort_scratch(indices.numel(), item, item, gpu), GIVE_BACK, GIVE_BACK)
            if scale_grad_by_freq:
                yield _bytes(indices)

    return taken


def embedding_sums(
    out: Tensor, grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Iterator[int]:
    """cuda/EmbeddingBackwardKernel.cu, embedding_backward_cuda_kernel: sums of up to 10 rows, then of those, in fp32.

    A segment is one index that occurs; there are at most as many as indices, and as weights.
    """
    if not _embedding_sorts(indices, scale_grad_by_freq):
        return
    n, item = indices.numel(), indices.element_size()
    segments = min(n, num_weights)
    partials = n // ROWS_A_PARTIAL + segments
    yield n * item  # segment_offsets
    yield 8  # num_of_segments_tensor
    yield from (segments * item, segments * item)  # partials_per_segment, and their offsets
    yield 8  # num_of_partial_segments_tensor
    yield partials * item  # partial_segment_offset
    yield partials * grad.shape[-1] * max(grad.element_size(), 4)  # grad_weight_per_segment


# ---- histogram


def histogram(func: Any, x: Tensor, bins: int = 100, *bounds: Any, **named: Any) -> Tensor:
    """cuda/SummaryOps.cu, _histc_cuda: also of integers, which mixtures of experts count tokens by."""
    return x.new_empty(bins)


# ---- attention


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile)


def efficient_forward(
    out: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *rest: Any, **named: Any
) -> list[int]:
    """transformers/cuda/mem_eff_attention/kernel_forward.h, kNeedsOutputAccumulatorBuffer: (B, T, H, Dv) in fp32.

    Half kernels keep up to 128 columns of the output in registers; fp32 ones accumulate in the output itself.
    """
    elements = query.numel() // query.shape[-1] * value.shape[-1]
    return [elements * 4] if query.element_size() == 2 and value.shape[-1] > 128 else []


def efficient_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, bandwidth: int) -> list[int]:
    """Return delta and the workspace of transformers/cuda/mem_eff_attention/kernel_backward.h, Params::workspace_size.

    `bandwidth` is the kernel's kMaxK-dependent row tile (kBlockSizeI). dQ is summed in fp32 in tiles of 64 × 64 with
    16 B of locks each; dK and dV too where a tile does not fit the registers.
    """
    B, H, T, D = query.shape
    S, Dv = key.shape[2], value.shape[3]
    half = query.dtype in (torch.float16, torch.bfloat16)
    in_registers = half and max(D, Dv) <= bandwidth
    tiles = _tiles(T, bandwidth) * _tiles(D, 64)
    elements = tiles * (bandwidth * 64 + 4)
    if not in_registers and half:  # fp32 gradients are their own accumulators
        elements += _tiles(S, 64) * 64 * (_tiles(D, bandwidth) + _tiles(Dv, bandwidth)) * bandwidth
    delta = B * H * T * 4
    return [delta, B * H * (-(-elements // 4) * 4) * 4]


def efficient_outputs(func: Any, *args: Any, **named: Any) -> tuple[Tensor, ...]:
    """transformers/cuda/attention.cu, _efficient_attention_forward: seed and offset of the dropout are on the host."""
    out, logsumexp, *_ = func(*args, **named)
    return out, logsumexp, *(torch.empty((), dtype=torch.int64, device=HOST) for _ in range(2))


def kv_splits(blocks: int, multiprocessors: int, key_blocks: int) -> int:
    """flash_api.cpp, num_splits_heuristic: in how many parts the keys are split where `blocks`, the batch's heads times
    its tiles of 64 queries, leave multiprocessors idle (of which two thread blocks share one): the fewest that keep
    them as busy as 85 % of the best."""
    slots = 2 * multiprocessors
    if blocks >= 0.8 * slots:
        return 1
    most = min(128, slots, key_blocks)
    # As many key blocks a part as with one part fewer: no use.
    useful = [n for n in range(1, most + 1) if n == 1 or _tiles(key_blocks, n) != _tiles(key_blocks, n - 1)]
    busy = {n: blocks * n / slots / _tiles(blocks * n, slots) for n in useful}
    return next((n for n in useful if busy[n] >= 0.85 * max(busy.values())), 1)


def flash_forward(multiprocessors: int) -> Any:
    """Return what FlashAttention's forward takes on a card of so many multiprocessors (transformers/cuda/flash_attn/
    flash_api.cpp, mha_fwd and set_params_splitkv)."""

    def taken(
        out: Any, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, causal: bool = False,
        *rest: Any, **named: Any,
    ) -> list[int]:  # fmt: skip
        """Of split keys each part's log-sum-exp and output in fp32."""
        B, H, T, D = query.shape
        shared = key.shape[1]
        if dropout:  # FlashAttention never splits keys then
            return []
        if T == 1 and shared < H:  # the queries that share keys become rows of one head
            T, H = H // shared, shared
        key_blocks = _tiles(key.shape[2], 256 if D <= 64 else 128 if D <= 128 else 64)
        splits = kv_splits(B * H * _tiles(T, 64), multiprocessors, key_blocks)
        if splits == 1:
            return []
        columns = _tiles(D, 32) * 32 if D <= 128 else _tiles(D, 64) * 64
        return [4 * splits * B * H * T, 4 * splits * B * H * T * columns]

    return taken


def flash_backward(
    out: Any, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any
) -> list[int]:
    """transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: the softmax's row sums, dQ summed in fp32, both with rows
    rounded up to 128 and heads to 32 or 64; dK and dV of each query head where heads share keys."""
    B, H, T, D = query.shape
    rows, columns = _tiles(T, 128) * 128, _tiles(D, 32) * 32 if D <= 128 else _tiles(D, 64) * 64
    sums = [4 * B * H * rows, 4 * B * rows * H * columns]
    return sums if key.shape[1] == H else [*sums, *(B * key.shape[2] * H * D * key.element_size(),) * 2]


# Operators of libraries that choose an algorithm, and with it a workspace, at run time.
LIBRARIES = {
    "cuDNN": (
        aten.convolution.default, aten.convolution_backward.default,
        aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_cudnn_attention_backward.default,
        aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default,  # what an LSTM is on this CPU
    ),
    "cuFFT": (aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default),
    "cuSOLVER": (
        aten.linalg_qr.default, aten._linalg_svd.default, aten._linalg_eigh.default, aten.linalg_cholesky_ex.default,
    ),
}  # fmt: skip


def cuda_extras(gpu: GPU) -> dict[Any, Extra]:
    """Return by operator what its CUDA kernel takes on `gpu`."""
    capability = gpu.compute_capability

    def efficient_attention_backward(
        out: Any, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any
    ) -> list[int]:
        # transformers/cuda/mem_eff_attention/kernels/cutlassB.h: 64-row tiles, 128 rows for wider heads from sm_80 on.
        wide = capability is not None and capability >= (8, 0) and max(query.shape[-1], value.shape[-1]) > 64
        return efficient_backward(grad_out, query, key, value, 128 if wide else 64)

    extras = {func: Extra(library=library) for library, funcs in LIBRARIES.items() for func in funcs}
    extras |= reduction_extras(gpu) | PRODUCTS | COMPOSED | indexing_extras(gpu) | sorting_extras(gpu)
    extras[aten._softmax_backward_data.default] = Extra(after=softmax_backward)
    extras[aten.histc.default] = Extra(outputs=histogram)
    extras[aten.native_layer_norm.default] = Extra(outputs=layer_norm, before=norm_input)
    extras[aten.native_layer_norm_backward.default] = Extra(
        before=norm_gradient_input, after=layer_norm_backward(gpu.sms)
    )
    extras[aten.native_group_norm.default] = Extra(outputs=group_norm, after=group_norm_factors)
    extras[aten.native_group_norm_backward.default] = Extra(after=group_norm_gradients)
    extras[aten.embedding_dense_backward.default] = Extra(before=embedding_sorted(gpu), after=embedding_sums)
    extras[aten._fused_rms_norm.default] = Extra(outputs=rms_norm, before=norm_input)
    extras[aten._fused_rms_norm_backward.default] = Extra(
        outputs=rms_norm_backward, before=norm_gradient_input, after=rms_norm_gradients(gpu.sms)
    )
    extras[aten._foreach_norm.Scalar] = Extra(before=foreach_norm)
    extras[aten._grouped_mm.default] = Extra(
        outputs=grouped_mm, after=grouped_arguments(gpu), matmul=True,
        library="CUTLASS" if capability == (10, 0) else None,
    )  # fmt: skip
    extras[aten._scaled_dot_product_flash_attention.default] = Extra(after=flash_forward(gpu.sms))
    extras[aten._scaled_dot_product_flash_attention_backward.default] = Extra(after=flash_backward)
    extras[aten._scaled_dot_product_efficient_attention.default] = Extra(
        outputs=efficient_outputs, after=efficient_forward
    )
    extras[aten._scaled_dot_product_efficient_attention_backward.default] = Extra(after=efficient_attention_backward)
    return extras
