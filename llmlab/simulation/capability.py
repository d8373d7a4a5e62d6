"""The compute capability of a simulated GPU, which decides what many CUDA kernels take."""

from __future__ import annotations

from ..base.errors import NotAvailable
from ..hardware.gpu import GPU

Capability = tuple[int, int]


def capability_of(gpu: GPU) -> Capability:
    """Return the compute capability of `gpu`; raises NotAvailable for a GPU without CUDA."""
    if gpu.compute_capability is None:
        raise NotAvailable(f"{gpu.name} runs no CUDA kernels, and simulate knows only those; give an NVIDIA GPU")
    return gpu.compute_capability
