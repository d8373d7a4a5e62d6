"""RMSNorm's forward pass in CUDA C++: PyTorch compiles and calls `rms_norm.cu`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ..base.errors import NotAvailable
from .rungs import as_rows

FOLDER = Path(__file__).parent


def source(name: str = "rms_norm") -> str:
    """Return the text of `rms_norm.cu`, the kernel, or of `rms_norm_binding.cu`, which calls it."""
    return (FOLDER / f"{name}.cu").read_text(encoding="utf-8")


def missing() -> str | None:
    """Return what this machine lacks to compile and run the kernel, None if nothing."""
    from torch.utils.cpp_extension import CUDA_HOME

    if not torch.cuda.is_available():
        return "a CUDA GPU"
    if CUDA_HOME is None:
        return "nvcc, of the CUDA toolkit (set CUDA_HOME)"
    return None


@cache
def extension() -> ModuleType:
    """Compile the kernel and return the module with `rms_norm(x, weight, eps)`: it takes a minute, once per machine.

    Raises NotAvailable if nvcc or a GPU is missing.
    """
    if lacking := missing():
        raise NotAvailable(f"CUDA C++ needs {lacking}; rungs 0 to 4 of kernels.rms_norm do the same")
    from torch.utils.cpp_extension import load_inline

    return load_inline(
        name="llmlab_rms_norm",
        cpp_sources="#include <torch/extension.h>\ntorch::Tensor rms_norm(torch::Tensor, torch::Tensor, double);",
        cuda_sources=source() + source("rms_norm_binding"),
        functions=["rms_norm"],
        with_cuda=True,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return the result of `llmlab.kernels.rms_norm`, forward only, by the CUDA kernel. x: (..., N), weight: (N,)."""
    return extension().rms_norm(as_rows(x), weight.to(x.dtype).contiguous(), eps).view(x.shape)
