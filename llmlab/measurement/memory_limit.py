"""Running out of memory as an outcome: which exceptions mean it, and how a CPU run is made to raise one.

A GPU's allocator raises. A CPU's allocator only does where the system refuses memory; Linux promises more than it has
and then kills the process. So while a run is measured on a CPU, the process's address space is limited to what it has
plus what is available now (RLIMIT_AS), and the allocation that would not fit raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..hardware.this_machine import container_memory
from ..specs.model import ModelSpec
from ..specs.run import Run
from ..step.model import quantization_of, weight_dtype
from ..step.quantized import QUANTIZED_BYTES


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that the device's memory, or this machine's, ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    # CPU: c10/core/impl/alloc_cpu.cpp. MPS: aten/src/ATen/mps/MPSAllocator.mm. cuBLAS: its workspace found no room.
    known = ("can't allocate memory", "not enough memory", "MPS backend out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(words in text for words in known)


def available_memory() -> int | None:
    """Return the bytes of RAM that new allocations can get: the kernel's estimate, or what a container's limit leaves.

    None where the system does not tell (no /proc/meminfo).
    """
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text("utf-8"), re.MULTILINE)
    sizes = [int(match[1]) * 1024] if match else []
    sizes += [max(0, limit - used) for limit, used in container_memory() if used is not None]
    return min(sizes, default=None)


def least_bytes(spec: ModelSpec, run: Run) -> int:
    """Return the bytes of the weights alone: what `run` needs before its first phase."""
    if quantization := quantization_of(run):  # the linears; scales and the rest come on top
        linears = sum(x.count * x.inputs * x.outputs for x in spec.linears if x.part not in ("head", "router"))
        return int(linears * QUANTIZED_BYTES[quantization])
    return spec.parameters * weight_dtype(run).itemsize


@contextmanager
def limited_to_available() -> Iterator[None]:
    """Make allocations beyond the RAM available now raise, until the block ends; does nothing but on Linux."""
    available = available_memory()
    if available is None:
        yield
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text("utf-8").split()[0])
    limit = pages * resource.getpagesize() + available
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    nearest = [limit, *(value for value in (soft, hard) if value != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(nearest), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
