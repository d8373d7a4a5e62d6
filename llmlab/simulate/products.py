"""Matrix products on CUDA: which need cuBLASLt besides cuBLAS, and which operands are copied for them.

Source: aten/src/ATen/native/cuda/Blas.cpp and cuBlasCommonArgs.h (torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .engine import Extra
from .in_place import is_dense

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


PRODUCTS = {
    aten.mm.default: Extra(after=product_copies, matmul=True),
    aten.addmm.default: Extra(after=added_product_copies, matmul=True, fused=has_bias_row),
    aten.bmm.default: Extra(after=batched_product_copies, matmul=True),
    aten.baddbmm.default: Extra(after=added_batched_product_copies, matmul=True),
    aten.addmv.default: Extra(matmul=True),
}
