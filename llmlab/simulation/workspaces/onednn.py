"""Workspaces of oneDNN's 16-bit products on this CPU: its kernels say so only when they run, so they are run.

Which kernel runs, and how much scratch it wants to lay operands out anew, depends on the CPU (AMX, AVX-512), the shapes
and the number of threads (aten/src/ATen/native/mkldnn/Matmul.cpp). Large products are not tried: their scratch is small
beside the memory of a step that has such products, and a simulation should end within seconds.
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
LARGEST = 1 << 20  # elements of a tensor of a product that is tried

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


@workspace(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, source="mkldnn/Matmul.cpp", table=CPU_WORKSPACES)
def cpu_product(op: Operator, gpu: None) -> Iterator[Step]:
    """mkldnn_matmul: the scratchpad of the kernel that this CPU chooses for such operands."""
    yield OUTPUTS
    operands = [arg for arg in op.args if isinstance(arg, Tensor)]
    if op.out.dtype not in (torch.bfloat16, torch.float16) or any(x.numel() > LARGEST for x in (op.out, *operands)):
        return
    layouts = tuple((tuple(operand.shape), operand.stride()) for operand in operands)
    yield _tried(op.func, op.out.dtype, layouts, torch.get_num_threads(), torch.backends.mkldnn.enabled)


@cache
def _tried(func: Any, dtype: torch.dtype, layouts: tuple[Layout, ...], threads: int, enabled: bool) -> int:
    """Return the peak of the bytes that `func` of tensors of `layouts` allocates, without its output.

    `threads` and `enabled` are the settings of torch for which a cached answer is valid.
    """
    source = CPUEvents()
    with disable_current_modes(), torch.no_grad():
        operands = [torch.empty_strided(*layout, dtype=dtype, device="cpu") for layout in layouts]
        func(*operands)  # the first call makes the kernel
        source.start()
        try:
            out = func(*operands)
        finally:
            events = source.stop()
    now = most = 0
    for event in events:
        now += event.size
        most = max(most, now)
    return most - out.nbytes
