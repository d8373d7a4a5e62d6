"""Workspaces of bitsandbytes: backends/cuda/ops.py, and backends/default/ops.py where CUDA has no kernel of its own.

    M  tokens    K  inputs of a linear    N  its outputs
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.errors import NotAvailable
from ...hardware.gpu import GPU
from ...hardware.this_machine import installed
from .extra import GIVE_BACK, Extra


@cache
def multiplies_packed(gpu: GPU, dtype: torch.dtype, rows: int, shape: tuple[int, int], blocksize: int) -> bool:
    """Whether `gpu` multiplies `rows` of `dtype` with a packed weight of `shape` (N, K) in one kernel; else it unpacks
    the weight first. bitsandbytes' own rule (backends/cuda/ops.py, gemm_4bit), by architecture, multiprocessors and
    shape: on a T4 up to 32 to 320 rows."""
    rule, (N, K) = _rule_of_bitsandbytes(), shape
    if rows > rule["_gemm_4bit_custom_max_m"] or K % blocksize:
        return False
    assert gpu.compute_capability  # an NVIDIA card has one
    return rule["_gemm_4bit_use_custom_cuda"]((gpu.sms, *gpu.compute_capability), dtype, rows, N, K)


@cache
def _rule_of_bitsandbytes() -> dict[str, Any]:
    """Return the rule's function and constants, cut out of their module, which would register kernels for CUDA. What
    it takes for a device's index it hands to _gpu_dispatch_props, and so is given that one's answer."""
    names = ("_gemm_4bit_use_custom_cuda", "_GEMM_4BIT_CUSTOM_FLOOR_M", "_gemm_4bit_custom_max_m")
    module = find_spec("bitsandbytes.backends.cuda.ops")
    assert module and module.origin
    source = Path(module.origin).read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(source)):
        name = getattr(node, "name", None) if isinstance(node, ast.FunctionDef) else None
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        if name in names:
            found.setdefault(name, node)  # the first limit is CUDA's, the other ROCm's
    if missing := set(names) - found.keys():
        raise NotAvailable(
            f"bitsandbytes {installed('bitsandbytes')} has no {', '.join(sorted(missing))}, of which it is read when "
            "4-bit weights are multiplied packed: take the version in constraints.txt"
        )
    found[names[0]].decorator_list = []
    rule: dict[str, Any] = {"torch": torch, "_gpu_dispatch_props": lambda properties: properties}
    exec(compile(ast.Module([found[name] for name in names], []), "bitsandbytes", "exec"), rule)
    return rule


def gemm_4bit(gpu: GPU) -> Callable[..., list[int]]:
    """Return what gemm_4bit takes on `gpu`: bitsandbytes/backends/cuda/ops.py, _dequant_linear_fallback."""

    def taken(
        A: Tensor, B: Tensor, shape: list[int], absmax: Tensor, blocksize: int, kind: str, bias: Tensor | None = None,
        absmax_8bit: Tensor | None = None, *rest: Any, **named: Any,
    ) -> list[int]:  # fmt: skip
        """The whole weight in A's dtype; before it, of double quantization, the scales in fp32, and with the offset."""
        if multiplies_packed(gpu, A.dtype, A.numel() // A.shape[-1], tuple(shape), blocksize):
            return [] if A.is_contiguous() else [A.numel() * A.element_size()]
        scales = [] if absmax_8bit is None else [4 * absmax_8bit.numel()] * 2
        return [*scales, shape[0] * shape[1] * A.element_size()]

    return taken


def has_bias(
    A: Tensor,
    B: Tensor,
    shape: list[int],
    absmax: Tensor,
    blocksize: int,
    kind: str,
    bias: Tensor | None = None,
    *rest: Any,
) -> bool:
    """F.linear of the unpacked weight, which with a bias goes through cuBLASLt."""
    return bias is not None


def int8_quantized(func: Any, A: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """int8_vectorwise_quant: int8 values and a scale a row. That no value reaches `threshold` is an assumption."""
    rows = A.numel() // A.shape[-1]
    outlier_columns = A.new_empty(0, dtype=torch.int64) if threshold else None
    return A.new_empty(A.shape, dtype=torch.int8), A.new_empty(rows, dtype=torch.float32), outlier_columns


def int8_outliers(out: Any, A: Tensor, threshold: float = 0.0) -> list[int]:
    """int8_vectorwise_quant: `A.abs() >= threshold`."""
    return [A.numel() * A.element_size(), A.numel()] if threshold else []


def int8_product(func: Any, A: Tensor, CA: Tensor, CB: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """int8_mixed_scaled_mm without outliers: (M, N), and no columns of A."""
    return A.new_empty((*CA.shape[:-1], CB.shape[0])), A.new_empty(0)


def int8_accumulator(A: Tensor, CA: Tensor, CB: Tensor, *rest: Any, **named: Any) -> list[int]:
    """int8_linear_matmul: the product in int32. int8_mm_dequant: in fp16, cast after that where it is not wanted."""
    elements = CA.numel() // CA.shape[-1] * CB.shape[0]
    return [elements * 4] if A.dtype == torch.float16 else [elements * 4, elements * 2]


def cpu_nf4_scratch(out: Any, A: Tensor, *rest: Any, **named: Any) -> list[int]:
    """bitsandbytes/backends/default/ops.py, quantize_4bit: values and scaled values in fp32, which of 16 each is, in
    four bytes and in one, and the halves that are shifted."""
    n = A.numel()
    return [*([] if A.dtype == torch.float32 else [4 * n]), 4 * n, 4 * n, n, n // 2]


def cpu_int8_scratch(A: Tensor, threshold: float = 0.0) -> list[int]:
    """bitsandbytes/backends/default/ops.py, int8_vectorwise_quant: which values are outliers, each row's largest and
    what to multiply with, then the scaled values in fp32, made of a copy of A in fp32, and rounded."""
    n = A.numel()
    rows = n // A.shape[-1]
    return [*([n] if threshold else []), 4 * rows, 4 * rows, 4 * n, 4 * n, GIVE_BACK]


def cpu_int8_accumulator(A: Tensor, CA: Tensor, CB: Tensor, *rest: Any, **named: Any) -> list[int]:
    """bitsandbytes/backends/default/ops.py, int8_mm_dequant: the product in int32 and cast to fp32, the scales of rows
    times those of columns, and both multiplied."""
    elements = CA.numel() // CA.shape[-1] * CB.shape[0]
    return [4 * elements] * 4 + [GIVE_BACK] * 2


def cpu_optimizer_32bit(out: Any, name: str, grad: Tensor, parameter: Tensor, *rest: Any, **named: Any) -> list[int]:
    """bitsandbytes/backends/cpu/ops.py, _optimizer_update_32bit_cpu: gradient, update and a part of it in fp32, and the
    parameter too where it is not in fp32."""
    return [4 * grad.numel()] * (3 if parameter.dtype == torch.float32 else 4)


def cpu_optimizer_8bit(out: Any, name: str, grad: Tensor, parameter: Tensor, *rest: Any, **named: Any) -> list[int]:
    """bitsandbytes/backends/cpu/ops.py, _optimizer_update_8bit_blockwise_cpu: as above, and both unpacked moments."""
    return [4 * grad.numel()] * (5 if parameter.dtype == torch.float32 else 6)


def cpu_bitsandbytes_extras() -> dict[Any, Extra]:
    """Return by operator what bitsandbytes' CPU kernels take; nothing where it is not installed."""
    if find_spec("bitsandbytes") is None:
        return {}
    import bitsandbytes  # noqa: F401  # defines the operators

    ops = torch.ops.bitsandbytes
    return {
        ops.quantize_4bit.default: Extra(after=cpu_nf4_scratch),
        ops.int8_vectorwise_quant.default: Extra(outputs=int8_quantized, before=cpu_int8_scratch),
        ops.int8_mixed_scaled_mm.default: Extra(outputs=int8_product, before=cpu_int8_accumulator),
        ops.optimizer_update_32bit.default: Extra(after=cpu_optimizer_32bit),
        ops.optimizer_update_8bit_blockwise.default: Extra(after=cpu_optimizer_8bit),
    }


def bitsandbytes_extras(gpu: GPU) -> dict[Any, Extra]:
    """Return by operator what bitsandbytes' kernels take on `gpu`; nothing where it is not installed."""
    if find_spec("bitsandbytes") is None:
        return {}
    import bitsandbytes  # noqa: F401  # defines the operators

    ops = torch.ops.bitsandbytes
    return {
        ops.gemm_4bit.default: Extra(before=gemm_4bit(gpu), matmul=True, fused=has_bias),
        # Their CUDA functions ask for the scales first, and return them last.
        ops.quantize_4bit.default: Extra(order=(1, 0)),
        ops.quantize_blockwise.default: Extra(order=(1, 0)),
        ops.int8_vectorwise_quant.default: Extra(outputs=int8_quantized, order=(1, 0, 2), after=int8_outliers),
        # bitsandbytes multiplies with a cuBLASLt handle of its own, which takes nothing from the allocator.
        ops.int8_mixed_scaled_mm.default: Extra(before=int8_accumulator, outputs=int8_product),
    }
