"""RMSNorm's forward pass in CUDA C++: PyTorch compiles and calls `rms_norm.cu`, and nvcc reports what it uses.

    python -m llmlab.kernels.cuda        # registers and spills for sm_75, sm_80 and sm_90; needs nvcc, no GPU
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ..base.errors import NotAvailable
from .ptx import ARCHITECTURES, registers_and_spills
from .rungs import as_rows

FOLDER = Path(__file__).parent
DTYPES = {"fp32": "float", "fp16": "__half", "bf16": "__nv_bfloat16"}


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


def resources(arch: int, dtype: str = "fp16") -> tuple[int, int]:
    """Return registers per thread and bytes spilled of the kernel compiled for sm_`arch`; NotAvailable without nvcc."""
    if (nvcc := shutil.which("nvcc")) is None:
        raise NotAvailable("compiling CUDA C++ needs nvcc, of the CUDA toolkit, on the PATH")
    kind = DTYPES[dtype]
    arguments = f"const {kind}*, const {kind}*, {kind}*, float*, long long, int, float"
    program = f"#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n{source()}\n"
    program += f"template __global__ void rms_norm_forward<{kind}>({arguments});\n"
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "rms_norm.cu")).write_text(program, encoding="utf-8")
        command = [nvcc, "-cubin", f"-arch=sm_{arch}", "-Xptxas=-v", str(path), "-o", str(path.with_suffix(".cubin"))]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise NotAvailable(f"nvcc does not compile for sm_{arch}: {(result.stderr or result.stdout).strip()[-300:]}")
    return registers_and_spills(result.stderr)


def main() -> int:
    try:
        for arch in ARCHITECTURES:
            for dtype in DTYPES if arch >= 80 else ("fp32", "fp16"):
                registers, spilled = resources(arch, dtype)
                print(f"rms_norm.cu, {dtype}, sm_{arch}: {registers} registers, {spilled} bytes spilled")
    except NotAvailable as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
