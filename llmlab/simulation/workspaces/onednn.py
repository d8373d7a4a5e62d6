"""Workspaces of 16-bit matmuls and convolutions on this CPU, which we measure by running them.

Which kernel runs, and how much scratch it needs to reorder its operands, depends on the CPU (AMX, AVX-512; a processor
without bf16 unfolds a convolution's input), the shapes and the number of threads. Large ones are not run: their scratch
is small compared with the memory of a step that contains them, and a simulation should finish within seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.compat import disable_current_modes
from ...recording.events import CPUEvents
from .registry import CPU_WORKSPACES, OUTPUTS, Operator, Step, workspace

aten = torch.ops.aten
LARGEST = 1 << 20  # elements of the largest tensor in a matmul that we run; a convolution computes less with each


class Layout(NamedTuple):
    """The layout of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


@workspace(
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution,
    source="mkldnn/Matmul.cpp, mkldnn/Conv.cpp, ConvolutionMM3d.cpp", table=CPU_WORKSPACES,
)  # fmt: skip
def cpu_kernel(op: Operator, gpu: None) -> Iterator[Step]:
    """The scratchpad of the kernel that this CPU chooses for these operands."""
    yield OUTPUTS
    sizes = [op.out.numel(), *(arg.numel() for arg in op.args if isinstance(arg, Tensor))]
    largest = 4 * LARGEST if op.func is aten.convolution.default else LARGEST
    if op.out.dtype not in (torch.bfloat16, torch.float16) or max(sizes) > largest:
        return
    arguments = tuple(
        Layout(tuple(arg.shape), arg.stride()) if isinstance(arg, Tensor)
        else tuple(arg) if isinstance(arg, (list, tuple)) else arg
        for arg in op.args
    )  # fmt: skip
    yield _measured_scratch(op.func, op.out.dtype, arguments, torch.get_num_threads(), torch.backends.mkldnn.enabled)


@cache
def _measured_scratch(func: Any, dtype: torch.dtype, arguments: tuple[Any, ...], threads: int, enabled: bool) -> int:
    """Return the peak of the bytes that `func` allocates for these `arguments`, without its output.

    `threads` and `enabled` are settings of torch; the cached result is valid for them only.
    """
    source = CPUEvents()
    with disable_current_modes(), torch.no_grad():
        operands = [
            torch.empty_strided(arg.shape, arg.strides, dtype=dtype, device="cpu") if isinstance(arg, Layout) else arg
            for arg in arguments
        ]
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
