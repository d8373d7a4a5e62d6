"""Workspaces of matrix products: which need cuBLASLt besides cuBLAS, and which operands are copied for them.

Source: aten/src/ATen/native/cuda/Blas.cpp and cuBlasCommonArgs.h (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...hardware.gpu import GPU
from .extra import Extra, is_dense

aten = torch.ops.aten


def has_bias_row(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, **named: Any) -> bool:
    """addmm, isInputCompliesAddmmCudaLt: a bias of one dimension is added by cuBLASLt's epilogue.

    Its workspace is not the cuBLAS handle's: the T4 records hold 2 × 1 MiB more where a model's linears have biases.
    """
    return bias.dim() == 1 and beta == 1 and bias.is_contiguous() and b.shape[0] > 1 and b.shape[1] > 1


def _copy(matrix: Tensor) -> list[int]:
    """prepare_matrix_for_cublas: what is not dense and has no dimension of stride 1 beside a long enough one, as an
    expanded gradient."""
    if is_dense(matrix):
        return []
    (rows, columns), (down, along) = matrix.shape, matrix.stride()
    strided = (down == 1 and along >= max(1, rows)) or (along == 1 and down >= max(1, columns))
    return [] if strided else [matrix.numel() * matrix.element_size()]


def _batched_copy(matrices: Tensor) -> list[int]:
    """prepare_batch_matrix_for_cublas."""
    (_, rows, columns), (_, down, along) = matrices.shape, matrices.stride()
    if (down == 1 and along >= max(1, rows)) or (along == 1 and down >= max(1, columns)):
        return []
    if matrices.is_contiguous() and down and along:
        return []
    return [matrices.numel() * matrices.element_size()]


def product_copies(out: Tensor, a: Tensor, b: Tensor, *rest: Any, **named: Any) -> list[int]:
    """Copies that mm makes of its operands."""
    return _copy(a) + _copy(b)


def added_product_copies(out: Tensor, c: Tensor, a: Tensor, b: Tensor, *rest: Any, **named: Any) -> list[int]:
    """Copies that addmm makes of its operands."""
    return _copy(a) + _copy(b)


def batched_product_copies(out: Tensor, a: Tensor, b: Tensor, *rest: Any, **named: Any) -> list[int]:
    """Copies that bmm makes of its operands; with a result in rows, the second one first."""
    return _batched_copy(b) + _batched_copy(a)


def added_batched_product_copies(out: Tensor, c: Tensor, a: Tensor, b: Tensor, *rest: Any, **named: Any) -> list[int]:
    """Copies that baddbmm makes of its operands."""
    return _batched_copy(b) + _batched_copy(a)


TENSOR_MAP, MAPS_A_MULTIPROCESSOR = 128, 5  # bytes; of A, B, C and, in each of two groups of warps, of the output


def grouped_arguments(gpu: GPU) -> Callable[..., list[int]]:
    """Return what _grouped_mm takes on `gpu`: on sm_90 and sm_100 all experts' products in bf16 are one kernel."""

    def taken(out: Tensor, a: Tensor, b: Tensor, offs: Tensor | None = None, *rest: Any, **named: Any) -> list[int]:
        """cuda/GroupMM.cu, bf16bf16_grouped_gemm_impl_sm90_sm100: three pointers, strides and a shape a group. CUTLASS,
        include/cutlass/gemm/kernel/sm90_gemm_array_tma_warpspecialized_pingpong.hpp, get_workspace_size: the tensor
        maps of each multiprocessor, on sm_90."""
        if gpu.compute_capability not in ((9, 0), (10, 0)) or a.dtype != torch.bfloat16:
            return []
        batched = next((each for each in (a, b) if each.dim() == 3), offs)
        assert batched is not None  # the operator's own check: without offs one operand is batched
        groups = batched.shape[0]
        arguments = -(-groups // 2) * 2 * 3 * 8 + groups * 3 * 4 + 3 * groups * 8
        maps = TENSOR_MAP * MAPS_A_MULTIPROCESSOR * gpu.sms
        return [arguments, maps] if gpu.compute_capability == (9, 0) else [arguments]

    return taken


_MM = Extra(after=product_copies, matmul=True)
_BMM = Extra(after=batched_product_copies, matmul=True)
_ADDMM = Extra(after=added_product_copies, matmul=True, fused=has_bias_row)
_BADDBMM = Extra(after=added_batched_product_copies, matmul=True)
_HANDLE = Extra(matmul=True)

PRODUCTS = {
    aten.mm.default: _MM, aten.mm.dtype: _MM, aten.bmm.default: _BMM, aten.bmm.dtype: _BMM,
    aten.addmm.default: _ADDMM, aten.addmm_.default: _ADDMM,
    aten.baddbmm.default: _BADDBMM, aten.baddbmm_.default: _BADDBMM,
    # No copies, but a handle: Blas.cpp, addmv_out_cuda and dot_cuda; linalg/BatchLinearAlgebra.cpp, triangular_solve.
    aten.addmv.default: _HANDLE, aten.mv.default: _HANDLE, aten.dot.default: _HANDLE, aten.vdot.default: _HANDLE,
    aten.linalg_solve_triangular.default: _HANDLE,
}  # fmt: skip
