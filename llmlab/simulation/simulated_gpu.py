"""The simulated GPU: its allocator, the engine that allocates from it, and its answers to torch.cuda."""

from __future__ import annotations

from typing import Any

from ..hardware.gpu import GPU
from .allocator.caching import Allocator
from .devices import GPU_DEVICE
from .engine.engine import Engine
from .engine.real_host import RealHost
from .profile.snapshot import History, snapshot


class SimulatedGPU:
    """One simulated GPU with `memory`, and a real `host`, or a simulated host if `host` is None.

    If `hidden`, libraries that would load a driver do not see the GPU. `local_ranks` is the number of GPUs in its node,
    of which it is the first, and `ranks` the size of the process group that the code created.
    """

    local_ranks = ranks = 1

    def __init__(self, gpu: GPU, memory: Allocator, host: RealHost | None = None) -> None:
        self.gpu, self.memory, self.hidden = gpu, memory, False
        self.engine = Engine(GPU_DEVICE, memory, gpu, host=host)
        self.history = History()
        self.kept_files: dict[str, Any] = {}  # checkpoints kept in memory instead of on disk, by path
        self.peaks_before = 0, 0  # peaks of allocated and reserved bytes before the last reset

    @property
    def free(self) -> int:
        """Bytes that the driver has left, as mem_get_info reports."""
        return self.memory.driver.left

    @property
    def peaks(self) -> tuple[int, int]:
        """Peaks of allocated and reserved bytes, including those before a script reset torch's peaks."""
        allocated, reserved = self.peaks_before
        return max(allocated, self.memory.peak_allocated), max(reserved, self.memory.peak_reserved)

    def reset_peak(self) -> None:
        """torch.cuda.reset_peak_memory_stats."""
        self.peaks_before = self.peaks
        self.memory.reset_peak()

    def snapshot(self) -> dict[str, Any]:
        """Return what torch.cuda.memory._snapshot returns."""
        return snapshot(self.memory, self.history)
