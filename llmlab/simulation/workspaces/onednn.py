"""Workspaces of oneDNN's 16-bit matmuls on this CPU, which we measure by running them.

Which kernel runs, and how much scratch it needs to reorder its operands, depends on the CPU (AMX, AVX-512), the shapes
and the number of threads (aten/src/ATen/native/mkldnn/Matmul.cpp). Large matmuls are not run: their scratch is small
compared with the memory of a step that contains them, and a simulation should finish within seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...base.compat import disable_current_modes
from ...recording.events import CPUEvents
from .registry import CPU_WORKSPACES, OUTPUTS, Operator, Step, workspace

aten = torch.ops.aten
LARGEST = 1 << 20  # elements of the largest tensor in a matmul that we run

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


@workspace(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, source="mkldnn/Matmul.cpp", table=CPU_WORKSPACES)
def cpu_matmul(op: Operator, gpu: None) -> Iterator[Step]:
    """mkldnn_matmul: the scratchpad of the kernel that this CPU chooses for these operands."""
    yield OUTPUTS
    operands = [arg for arg in op.args if isinstance(arg, Tensor)]
    if op.out.dtype not in (torch.bfloat16, torch.float16) or any(x.numel() > LARGEST for x in (op.out, *operands)):
        return
    layouts = tuple((tuple(operand.shape), operand.stride()) for operand in operands)
    yield _measured_scratch(op.func, op.out.dtype, layouts, torch.get_num_threads(), torch.backends.mkldnn.enabled)


@cache
def _measured_scratch(func: Any, dtype: torch.dtype, layouts: tuple[Layout, ...], threads: int, enabled: bool) -> int:
    """Return the peak of the bytes that `func` allocates for operands of these `layouts`, without its output.

    `threads` and `enabled` are settings of torch; the cached result is valid for them only.
    """
    source = CPUEvents()
    with disable_current_modes(), torch.no_grad():
        operands = [torch.empty_strided(*layout, dtype=dtype, device="cpu") for layout in layouts]
        func(*operands)  # the first call compiles the kernel
        source.start()
        try:
            out = func(*operands)
        finally:
            events = source.stop()
    size = peak = 0
    for event in events:
        size += event.size
        peak = max(peak, size)
    return peak - out.nbytes
