"""The device that is measured, and what its allocator says of itself."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from ..base.errors import NotAvailable, SpecError


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return `device`, or without one CUDA's current GPU, else Apple's, else the CPU.

    Raises NotAvailable for a device this machine lacks, SpecError for what is not one.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if device is None:
        device = "cuda" if cuda else "mps" if mps else "cpu"
    try:
        picked = torch.device(device)
    except RuntimeError:
        raise SpecError(f"device={device!r} is not one of cuda, cuda:1, mps, cpu") from None
    if picked.type not in ("cuda", "mps", "cpu"):
        raise SpecError(f"device={device!r} is not one of cuda, cuda:1, mps, cpu")
    if picked.type == "cuda" and not cuda:
        built = "" if torch.version.cuda or torch.version.hip else " (this torch is built without CUDA)"
        raise NotAvailable(
            f"device={str(device)!r}: torch sees no GPU{built}; on Colab choose a GPU runtime, elsewhere install "
            "the driver and a CUDA build of torch, or measure small on device='cpu'"
        )
    if picked.type == "cuda" and (picked.index or 0) >= torch.cuda.device_count():
        raise NotAvailable(f"device={str(device)!r}: torch sees {torch.cuda.device_count()} GPU(s), numbered from 0")
    if picked.type == "mps" and not mps:
        raise NotAvailable(f"device={str(device)!r}: torch sees no Apple GPU; measure on device='cpu'")
    if picked.type == "cuda" and picked.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return picked


class Counters(NamedTuple):
    """Bytes by an allocator's own count: now, and the most since `reset_peaks`."""

    allocated: int
    reserved: int | None
    peak_allocated: int
    peak_reserved: int | None


def counters(device: torch.device) -> Counters:
    """Return the counters of a GPU. torch.mps keeps no peaks: what is allocated now stands for them."""
    if device.type == "mps":
        torch.mps.synchronize()
        now = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
        return Counters(*now, *now)
    return Counters(
        torch.cuda.memory_allocated(device),
        torch.cuda.memory_reserved(device),
        torch.cuda.max_memory_allocated(device),
        torch.cuda.max_memory_reserved(device),
    )


def reset_peaks(device: torch.device) -> None:
    """Let a GPU's peaks start again from what is allocated and reserved now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


class Peaks:
    """The highest allocated and reserved bytes of each phase; on MPS those at its end, a higher moment is not seen."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocated: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        self.phase: str | None = None

    def enter(self, phase: str | None) -> None:
        """End the phase that runs, and begin `phase`; None is a stretch that does not count."""
        if self.phase:
            now = counters(self.device)
            for peaks, size in ((self.allocated, now.peak_allocated), (self.reserved, now.peak_reserved or 0)):
                peaks[self.phase] = max(peaks.get(self.phase, 0), size)
        reset_peaks(self.device)
        self.phase = phase


def cuda_context_bytes(device: torch.device) -> int | None:
    """Return the bytes of this process on the GPU beyond the allocator's segments: context, kernels, libraries.

    From the driver (NVML), which knows it by process; in a container, where process numbers differ, only if no other
    process is on the GPU. None where nvidia-ml-py is missing or the driver does not tell.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return None
    own = [p for p in processes if p.pid == os.getpid()] or (processes if len(processes) == 1 else [])
    if not own or own[0].usedGpuMemory is None:
        return None
    return own[0].usedGpuMemory - torch.cuda.memory_reserved(device)
