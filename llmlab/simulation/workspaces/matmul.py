"""Workspaces of matmuls: the handles of cuBLAS and cuBLASLt, and the operands that are copied for them.

Source: aten/src/ATen/native/cuda/Blas.cpp and cuBlasCommonArgs.h (torch 2.13).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from re import findall

import torch
from torch import Tensor

from ...hardware.gpu import GPU
from .layout import is_dense, nbytes
from .registry import CPU_WORKSPACES, OUTPUTS, Handle, Library, Operator, Outputs, Step, workspace

aten = torch.ops.aten
BLAS = "cuda/Blas.cpp"
# aten/src/ATen/cuda/CublasHandlePool.cpp, parseCUDABlasLtWorkspaceSize: 1024 KiB.
CUBLASLT = Handle("cublasLt", 1 << 20)


def cublas(gpu: GPU) -> Handle:
    """Return the handle of cuBLAS on `gpu`."""
    return Handle("cublas", _chosen_workspace() or gpu.cublas_workspace or 0)


def _chosen_workspace() -> int:
    """Return the bytes that CUBLAS_WORKSPACE_CONFIG requests, or 0 if it is not set: ":4096:8" means 8 buffers of
    4096 KiB (cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize). Deterministic runs set it."""
    pairs = findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * int(count) for size, count in pairs) * 1024


def _copies(*operands: Tensor) -> Iterator[int]:
    """prepare_matrix_for_cublas copies a matrix that is neither dense nor has one stride of 1 and a long enough other
    stride; an expanded gradient is an example. prepare_batch_matrix_for_cublas also copies dense batches that are not
    contiguous."""
    for operand in operands:
        (rows, columns), (down, along) = operand.shape[-2:], operand.stride()[-2:]
        strided = (down == 1 and along >= max(1, rows)) or (along == 1 and down >= max(1, columns))
        dense = is_dense(operand) if operand.dim() == 2 else operand.is_contiguous() and down and along
        if not strided and not dense:
            yield nbytes(operand)


@workspace(aten.mm, aten.mm.out, aten.mm.dtype, source=BLAS)
def mm(op: Operator, gpu: GPU) -> Iterator[Step]:
    """mm_out_cuda, addmm_out_cuda_impl."""
    yield OUTPUTS
    yield from _copies(op.self, op.mat2)
    yield cublas(gpu)


@workspace(aten.addmm, aten.addmm.out, aten.addmm.dtype, aten.addmm.dtype_out, aten.addmm_, source=BLAS)
def addmm(op: Operator, gpu: GPU) -> Iterator[Step]:
    """isInputCompliesAddmmCudaLt: a bias of one dimension is added by cuBLASLt's epilogue.

    Its workspace is separate from that of the cuBLAS handle: T4 records of models with biases show 2 × 1 MiB more.
    """
    yield OUTPUTS
    yield from _copies(op.mat1, op.mat2)
    yield cublas(gpu)
    rows, columns = op.mat2.shape
    if op.self.dim() == 1 and op.beta == 1 and op.self.is_contiguous() and rows > 1 and columns > 1:
        yield CUBLASLT


@workspace(aten.bmm, aten.bmm.out, aten.bmm.dtype, aten.baddbmm, aten.baddbmm.out, aten.baddbmm_, source=BLAS)
def bmm(op: Operator, gpu: GPU) -> Iterator[Step]:
    """bmm_out_cuda_impl: for a row-major result, the second operand is copied first."""
    yield OUTPUTS
    first, second = (op.batch1, op.batch2) if op.has("batch1") else (op.self, op.mat2)
    yield from _copies(second, first)
    yield cublas(gpu)


@workspace(
    aten.addmv, aten.mv, aten.dot, aten.vdot, aten.linalg_solve_triangular,
    source="cuda/Blas.cpp, cuda/linalg/BatchLinearAlgebra.cpp",
)  # fmt: skip
def handle_alone(op: Operator, gpu: GPU) -> Iterator[Step]:
    """addmv_out_cuda, dot_cuda, triangular_solve: no copies, only a handle."""
    yield OUTPUTS
    yield cublas(gpu)


def _into_out(op: Operator) -> Tensor:
    """torch has no fake kernel of _scaled_mm.out, which Inductor calls, and would run a real matmul on the host."""
    out: Tensor = op.kwargs["out"]
    aten._scaled_mm.default(*op.args, **{name: value for name, value in op.kwargs.items() if name != "out"})
    return out


@workspace(aten._scaled_mm, source="cuda/ScaledBlas.cpp")
def scaled_mm(op: Operator, gpu: GPU) -> Iterator[Step]:
    """_scaled_mm_cuda: cuBLASLt handles scales for whole tensors, and CUTLASS handles scales by row if it is faster."""
    yield OUTPUTS
    yield CUBLASLT


@workspace(aten._scaled_mm.out, source="cuda/ScaledBlas.cpp")
def scaled_mm_out(op: Operator, gpu: GPU) -> Iterator[Step]:
    """The same with an output buffer, as compiled code calls it."""
    yield Outputs(fake=_into_out)
    yield CUBLASLT


# ---- mixtures of experts


def grouped_mm_output(op: Operator) -> Tensor:
    """GroupedMMUtils.h, create_grouped_gemm_output_tensor: rows are padded to a multiple of 16 B. The fake kernel
    refuses dtypes other than bf16, which are multiplied group by group into the same output (_grouped_mm_fallback)."""
    a, b = op.self, op.mat2
    dtype = op.out_dtype or a.dtype
    if a.dim() == 2:
        shape = (a.shape[0], b.shape[-1]) if b.dim() == 3 else (op.offs.shape[0], a.shape[0], b.shape[1])
    else:
        shape = (a.shape[1], b.shape[1]) if b.dim() == 2 else (a.shape[0], a.shape[1], b.shape[-1])
    aligned = 16 // dtype.itemsize
    row = -(-shape[-1] // aligned) * aligned
    strides = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device=a.device)


TENSOR_MAP, MAPS_PER_MULTIPROCESSOR = 128, 5  # bytes; of A, B, C and, in each of two groups of warps, of the output


@workspace(aten._grouped_mm, source="cuda/GroupMM.cu")
def grouped_mm(op: Operator, gpu: GPU) -> Iterator[Step]:
    """On sm_90 and sm_100 one kernel computes the matmuls of all experts in bf16. It needs three pointers, three
    strides and a shape per group (bf16bf16_grouped_gemm_impl_sm90_sm100). On sm_90 CUTLASS adds the tensor maps of each
    multiprocessor (include/cutlass/gemm/kernel/sm90_gemm_array_tma_warpspecialized_pingpong.hpp, get_workspace_size).
    """
    yield Outputs(fake=grouped_mm_output)
    hopper, blackwell = gpu.compute_capability == (9, 0), gpu.compute_capability == (10, 0)
    if (hopper or blackwell) and op.self.dtype == torch.bfloat16:
        batched = next((tensor for tensor in (op.self, op.mat2) if tensor.dim() == 3), op.offs)
        assert batched is not None  # the operator checks that one operand is batched if `offs` is missing
        groups = batched.shape[0]
        yield -(-groups // 2) * 2 * 3 * 8 + groups * 3 * 4 + 3 * groups * 8
        if hopper:
            yield TENSOR_MAP * MAPS_PER_MULTIPROCESSOR * gpu.sms
    yield cublas(gpu)
    if blackwell:
        yield Library("CUTLASS")


@workspace(aten._grouped_mm, source="GroupedMMUtils.h", table=CPU_WORKSPACES)
def cpu_grouped_mm(op: Operator, gpu: None) -> Iterator[Step]:
    """_grouped_mm_fallback: the CPU multiplies group by group."""
    yield Outputs(fake=grouped_mm_output)
