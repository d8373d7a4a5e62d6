"""Workspaces of bitsandbytes: backends/cuda/ops.py, and backends/default/ops.py for operators without a CUDA kernel.

    M  tokens    K  inputs of a linear layer    N  its outputs
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.errors import NotAvailable
from ...hardware.gpu import GPU
from ...hardware.this_machine import installed
from .layout import contiguous_copies, nbytes
from .matmul import CUBLASLT, cublas
from .registry import CPU_WORKSPACES, FREE, OUTPUTS, Operator, Outputs, Step, workspace

CUDA, DEFAULT = "bitsandbytes/backends/cuda/ops.py", "bitsandbytes/backends/default/ops.py"


@cache
def multiplies_packed(gpu: GPU, dtype: torch.dtype, rows: int, shape: tuple[int, int], blocksize: int) -> bool:
    """Return whether `gpu` multiplies `rows` of `dtype` by a packed weight of `shape` (N, K) in one kernel; else it
    unpacks the weight first. The rule is that of bitsandbytes (backends/cuda/ops.py, gemm_4bit), and depends on
    architecture, multiprocessors and shape. On a T4 the limit lies between 32 and 320 rows."""
    rule, (N, K) = _rule_of_bitsandbytes(), shape
    if rows > rule["_gemm_4bit_custom_max_m"] or K % blocksize:
        return False
    assert gpu.compute_capability  # every NVIDIA GPU has one
    return rule["_gemm_4bit_use_custom_cuda"]((gpu.sms, *gpu.compute_capability), dtype, rows, N, K)


@cache
def _rule_of_bitsandbytes() -> dict[str, Any]:
    """Return the function and the constants of the rule. They are cut out of their module, because importing it would
    register kernels for CUDA. The rule passes a device index to _gpu_dispatch_props; here that function returns its
    argument, so a caller passes the properties themselves."""
    names = ("_gemm_4bit_use_custom_cuda", "_GEMM_4BIT_CUSTOM_FLOOR_M", "_gemm_4bit_custom_max_m")
    module = find_spec("bitsandbytes.backends.cuda.ops")
    assert module and module.origin
    source = Path(module.origin).read_text(encoding="utf-8")
    attributes: dict[str, Any] = {}
    for node in ast.walk(ast.parse(source)):
        name = getattr(node, "name", None) if isinstance(node, ast.FunctionDef) else None
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        if name in names:
            attributes.setdefault(name, node)  # the first limit is for CUDA, the second for ROCm
    if missing := set(names) - attributes.keys():
        raise NotAvailable(
            f"bitsandbytes {installed('bitsandbytes')} has no {', '.join(sorted(missing))}, of which it is read when "
            "4-bit weights are multiplied packed: take the version in constraints.txt"
        )
    attributes[names[0]].decorator_list = []
    rule: dict[str, Any] = {"torch": torch, "_gpu_dispatch_props": lambda properties: properties}
    exec(compile(ast.Module([attributes[name] for name in names], []), "bitsandbytes", "exec"), rule)
    return rule


@workspace("bitsandbytes::gemm_4bit", source=CUDA)
def gemm_4bit(op: Operator, gpu: GPU) -> Iterator[Step]:
    """_dequant_linear_fallback: the whole weight in A's dtype. With double quantization the scales in fp32 come first,
    without and with the offset. F.linear follows, which uses cuBLASLt if there is a bias."""
    A, (N, K) = op.A, op.shapeB
    if multiplies_packed(gpu, A.dtype, A.numel() // A.shape[-1], (N, K), op.blocksize):
        yield from contiguous_copies(A)
    else:
        if op.absmax_8bit is not None:
            scales = 4 * op.absmax_8bit.numel()
            yield from (scales, scales)
        yield N * K * A.element_size()
    yield OUTPUTS
    yield cublas(gpu)
    if op.bias is not None:
        yield CUBLASLT


@workspace("bitsandbytes::quantize_4bit", "bitsandbytes::quantize_blockwise", source=CUDA)
def quantize(op: Operator, gpu: GPU) -> Iterator[Step]:
    """The scales are allocated first, and returned last."""
    yield Outputs(order=(1, 0))


def _int8_values(op: Operator) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return int8 values and a scale per row; we assume that no value reaches `threshold`."""
    A = op.A
    outlier_columns = A.new_empty(0, dtype=torch.int64) if op.threshold else None
    scales = A.new_empty(A.numel() // A.shape[-1], dtype=torch.float32)
    return A.new_empty(A.shape, dtype=torch.int8), scales, outlier_columns


@workspace("bitsandbytes::int8_vectorwise_quant", source=CUDA)
def int8_quantize(op: Operator, gpu: GPU) -> Iterator[Step]:
    """The scales are allocated first, then the values; `A.abs() >= threshold` needs two temporaries."""
    yield Outputs(order=(1, 0, 2), fake=_int8_values)
    if op.threshold:
        yield from (nbytes(op.A), op.A.numel())


def _int8_matmul_outputs(op: Operator) -> tuple[Tensor, Tensor]:
    """int8_mixed_scaled_mm without outliers: the result (M, N), and no columns of A."""
    return op.A.new_empty((*op.CA.shape[:-1], op.CB.shape[0])), op.A.new_empty(0)


def _int8_elements(op: Operator) -> int:
    return op.CA.numel() // op.CA.shape[-1] * op.CB.shape[0]


@workspace("bitsandbytes::int8_mixed_scaled_mm", source=CUDA)
def int8_matmul(op: Operator, gpu: GPU) -> Iterator[Step]:
    """int8_linear_matmul: the result in int32, by bitsandbytes' own cuBLASLt handle, which allocates nothing.
    int8_mm_dequant: the result in fp16, which is cast afterwards if A has another dtype."""
    yield _int8_elements(op) * 4
    if op.A.dtype != torch.float16:
        yield _int8_elements(op) * 2
    yield Outputs(fake=_int8_matmul_outputs)


# ---- on a CPU


@workspace("bitsandbytes::quantize_4bit", source=DEFAULT, table=CPU_WORKSPACES)
def cpu_quantize_4bit(op: Operator, gpu: None) -> Iterator[Step]:
    """The values and the scaled values in fp32, the index of each among the 16 levels in int32 and in uint8, and the
    half of the indices that is shifted."""
    yield OUTPUTS
    n = op.A.numel()
    if op.A.dtype != torch.float32:
        yield 4 * n
    yield from (4 * n, 4 * n, n, n // 2)


@workspace("bitsandbytes::int8_vectorwise_quant", source=DEFAULT, table=CPU_WORKSPACES)
def cpu_int8_quantize(op: Operator, gpu: None) -> Iterator[Step]:
    """The mask of outliers, the largest value and the factor of each row, a copy of A in fp32, and the scaled values in
    fp32, which are then rounded."""
    n = op.A.numel()
    rows = n // op.A.shape[-1]
    if op.threshold:
        yield n
    yield from (4 * rows, 4 * rows, 4 * n, 4 * n, FREE)
    yield Outputs(fake=_int8_values)


@workspace("bitsandbytes::int8_mixed_scaled_mm", source=DEFAULT, table=CPU_WORKSPACES)
def cpu_int8_matmul(op: Operator, gpu: None) -> Iterator[Step]:
    """int8_mm_dequant: the matmul's result in int32, its cast to fp32, the scales of rows times those of columns, and
    the scaled result."""
    size = 4 * _int8_elements(op)
    yield from (size, size, size, size, FREE, FREE)
    yield Outputs(fake=_int8_matmul_outputs)


@workspace(
    "bitsandbytes::optimizer_update_32bit", "bitsandbytes::optimizer_update_8bit_blockwise",
    source="bitsandbytes/backends/cpu/ops.py", table=CPU_WORKSPACES,
)  # fmt: skip
def cpu_optimizer(op: Operator, gpu: None) -> Iterator[Step]:
    """_optimizer_update_32bit_cpu: the gradient, the update and a part of it in fp32, and a copy of a parameter that is
    not in fp32. _optimizer_update_8bit_blockwise_cpu: the same, and both unpacked moments."""
    yield OUTPUTS
    buffers = (3 if op.p.dtype == torch.float32 else 4) + (2 if op.has("absmax1") else 0)
    yield from (4 * op.g.numel() for _ in range(buffers))
