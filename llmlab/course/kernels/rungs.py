"""Choice of the rung that runs on this machine, and helpers that the kernels share.

Triton has wheels for Linux only; rungs 0 to 2 do without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...base.errors import NotAvailable, SpecError

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

RUNGS = ("naive PyTorch", "better PyTorch", "torch.compile", "Triton forward", "Triton forward and backward")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # Triton's rungs compute in fp32: fp64 would lose half its bits
FLOATS = (*DTYPES, torch.float64)
MAX_ROW = 65536  # the most columns that one program holds in registers: 16 warps, 128 values per thread

# Triton decides once, when it is imported, whether it compiles or interprets.
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
CAST_BF16 = None if triton is None else tl.constexpr(INTERPRETED)  # a constexpr, because `dot` reads it as a global


def jit(function: Callable[..., Any]) -> Any:
    """Return triton.jit(function), or without Triton the function itself, which never runs because of `choose`."""
    return function if triton is None else triton.jit(function)


@jit
def dot(a, b):
    """a · b in fp32, never in TF32. NumPy has no bf16, and the interpreter would multiply its bits as integers."""
    if CAST_BF16:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


LOWEST = None if triton is None else tl.constexpr(-3.4028234663852886e38)  # finite: -inf would give inf - inf


@jit
def absorb(highest, total, x):
    """Add a tile x of a row: each lane keeps the maximum of its own columns, and Σ exp(x − maximum) so far.

    Begin with LOWEST and 0. At the end of the row, `reduced` combines the pairs of all lanes, so no lane waits for
    another one before that. This is algorithm 3 of arXiv 1805.02867 with one exponential, because its other one is
    exp(0).
    """
    above = x - highest
    e = tl.exp(-tl.abs(above))
    return tl.maximum(highest, x), tl.where(above > 0, total * e + 1, total + e)


@jit
def reduced(highest, total):
    """Return the maximum of a row and Σ exp(x − maximum), from the pairs of its lanes."""
    top = tl.max(highest, 0)
    return top, tl.sum(total * tl.exp(highest - top), 0)


def launch(kernel: Any, programs: int, x: Tensor, *arguments: Any, **options: Any) -> None:
    """Run `programs` programs of a Triton kernel on x's device; with none, there is nothing to launch."""
    if programs:
        with torch.cuda.device_of(x):
            kernel[(programs,)](*arguments, **options)


def here(*tensors: Tensor) -> tuple[int, ...]:
    """Return the rungs that run on these tensors in this process: all five, or the three without Triton."""
    return (0, 1, 2) if missing(tensors) else (0, 1, 2, 3, 4)


def choose(rung: int | None, *tensors: Tensor) -> int:
    """Return the rung to run on these floating-point tensors: the given one, or the best that runs here.

    Raises SpecError for a rung that is not in 0 … 4, for other dtypes and for tensors on different devices;
    NotAvailable, with the rungs that do run, if rung 3 or 4 lacks Triton, the GPU or the dtype.
    """
    if rung is not None and (type(rung) is not int or rung not in range(len(RUNGS))):  # 3.0 and True are in the range
        allowed = ", ".join(f"{number} ({name})" for number, name in enumerate(RUNGS))
        raise SpecError(f"rung={rung!r} is not a rung; allowed: {allowed}")
    for t in tensors:
        if t.dtype not in FLOATS:  # rung 0 would round a softmax of integers to zeros
            raise SpecError(f"a tensor is {t.dtype}; give float32, float16, bfloat16 or float64")
    devices = sorted({str(t.device) for t in tensors})
    if len(devices) > 1:
        raise SpecError(f"the tensors are on {' and '.join(devices)}; put them on one device")
    why_not = missing(tensors)
    if rung is None:
        return 1 if why_not or INTERPRETED else 4
    if rung >= 3 and why_not:
        raise NotAvailable(f"rung {rung} ({RUNGS[rung]}) {why_not}; rungs 0, 1 and 2 run here")
    return rung


def run(
    rung: int,
    naive: Callable[..., Any],
    better: Callable[..., Any],
    fused: type[torch.autograd.Function],
    *inputs: Any,
    inplace: bool | None = None,
) -> Any:
    """Run a kernel's `rung`: `naive` is 0 and, compiled, 2; `better` is 1; `fused` is 3 and 4.

    After the inputs, `fused` takes whether its backward is in Triton too, and `inplace` unless that is None. Raises
    SpecError for inplace=True on another rung than 4, the only one that can overwrite its inputs.
    """
    if inplace and rung != 4:
        raise SpecError(f"inplace=True is for rung 4 (this is rung {rung}); leave it out")
    if rung >= 3:
        return fused.apply(*inputs, rung == 4, *(() if inplace is None else (inplace,)))
    if rung == 2:
        return compiled(naive)(*inputs)
    return (naive, better)[rung](*inputs)


def missing(tensors: tuple[Tensor, ...]) -> str | None:
    """Return the reason why Triton's rungs cannot run on these tensors, None if they can."""
    if triton is None:
        return "needs Triton, which is not installed here and has no wheel for macOS or Windows"
    for t in tensors:
        if t.dtype not in DTYPES:
            return f"takes float32, float16 and bfloat16, not {str(t.dtype).removeprefix('torch.')}"
        if INTERPRETED:
            continue
        if not t.is_cuda:
            return (
                f"needs a CUDA GPU, and the tensors are on {t.device}; TRITON_INTERPRET=1, set before Python starts, "
                "runs it on a CPU, slowly"
            )
        capability = torch.cuda.get_device_capability(t.device)
        if capability < (7, 5) or (t.dtype == torch.bfloat16 and capability < (8, 0)):
            return f"does not compile for {t.dtype} at compute capability {capability[0]}.{capability[1]}"
    return None


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch.compile(function), cached, so that only new shapes are compiled again."""
    return torch.compile(function)


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in autocast's dtype if torch.autocast is on, as for a matmul."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t.dtype in DTYPES else t for t in tensors)


def check_columns(x: Tensor) -> None:
    """Raise SpecError unless x is (..., N) with N >= 1."""
    if not x.dim() or not x.shape[-1]:
        raise SpecError(f"a tensor of shape {tuple(x.shape)} has no columns; give (..., N), N >= 1")


def as_rows(x: Tensor) -> Tensor:
    """Return x as (rows, columns) with adjacent columns in memory: a view if strides allow it, else a copy."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def warps(block: int) -> int:
    """Return how many warps share `block` values: 16 values per thread, within 1 to 16 warps."""
    return min(16, max(1, block // 512))
