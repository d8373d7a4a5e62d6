"""Kernels in CUDA C++, which PyTorch compiles and calls: the forward pass of RMSNorm, and two matmuls."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ...base.errors import NotAvailable, SpecError
from .rungs import as_rows

FOLDER = Path(__file__).parent
DECLARED = {
    "rms_norm": "torch::Tensor rms_norm(torch::Tensor, torch::Tensor, double);",
    "matmul": "torch::Tensor matmul(torch::Tensor, torch::Tensor, bool);",
}


class Resources(NamedTuple):
    """Resources of a compiled kernel: registers and spilled bytes per thread, bytes of shared memory per block."""

    registers: int
    shared: int
    spills: int


def source(name: str = "rms_norm") -> str:
    """Return the text of a .cu file of this folder: "rms_norm", "matmul", or the code that calls them, "*_binding"."""
    return (FOLDER / f"{name}.cu").read_text(encoding="utf-8")


def missing() -> str | None:
    """Return the tool or device that this machine lacks to compile and run the kernels, or None."""
    from torch.utils.cpp_extension import CUDA_HOME

    if not torch.cuda.is_available():
        return "a CUDA GPU"
    if CUDA_HOME is None:
        return "nvcc, of the CUDA toolkit (set CUDA_HOME)"
    return None


@cache
def extension(name: str = "rms_norm") -> ModuleType:
    """Compile `name`.cu and return the module with the function `name`. This takes a minute, once per machine.

    Raises NotAvailable if nvcc or a GPU is missing.
    """
    if lacking := missing():
        raise NotAvailable(f"CUDA C++ needs {lacking}; rungs 0 to 4 of kernels.rms_norm and torch.matmul do the same")
    from torch.utils.cpp_extension import load_inline

    return load_inline(
        name=f"llmlab_{name}",
        cpp_sources=f"#include <torch/extension.h>\n{DECLARED[name]}",
        cuda_sources=source(name) + source(f"{name}_binding"),
        functions=[name],
        with_cuda=True,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return the result of `llmlab.course.kernels.rms_norm`, forward only, by the CUDA kernel.

    x: (..., N), weight: (N,).
    """
    return extension().rms_norm(as_rows(x), weight.to(x.dtype).contiguous(), eps).view(x.shape)


def matmul(x: Tensor, weight: Tensor, tiled: bool = True) -> Tensor:
    """Return x · weight for x (T, p) and weight (p, q) in fp32, by the CUDA kernel with shared tiles or the naive one.

    Raises SpecError for other shapes and dtypes, which the kernel would misread.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[0] or {x.dtype, weight.dtype} != {torch.float32}:
        inputs = f"{tuple(x.shape)} {x.dtype} and {tuple(weight.shape)} {weight.dtype}"
        raise SpecError(f"matmul was given {inputs}; allowed are (T, p) and (p, q), both float32")
    return extension("matmul").matmul(x.contiguous(), weight.contiguous(), tiled)


def resources(name: str, arch: int = 80) -> dict[str, Resources]:
    """Compile `name`.cu for sm_`arch`, which needs no GPU, and return the resources that ptxas reports per kernel.

    The kernels of the file must not be templates. Raises NotAvailable without nvcc.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise NotAvailable("compiling CUDA C++ needs nvcc, of the CUDA toolkit, on the PATH; it needs no GPU")
    with tempfile.TemporaryDirectory() as folder:
        path, binary = FOLDER / f"{name}.cu", Path(folder, "kernel.cubin")
        command = [nvcc, "-cubin", f"-arch=sm_{arch}", "--ptxas-options=-v", str(path), "-o", str(binary)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    resources_by_kernel = {}
    for section in report.split("Compiling entry function")[1:]:
        # C++ mangles the name of a function: _Z, the length of the name, the name, and the types of its arguments.
        length, mangled = re.findall(r"_Z(\d+)(\w+)", section)[0]
        (registers,) = re.findall(r"Used (\d+) registers", section)
        shared = sum(map(int, re.findall(r"(\d+) bytes smem", section)))
        spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", section)))
        resources_by_kernel[mangled[: int(length)]] = Resources(int(registers), shared, spills)
    return resources_by_kernel
