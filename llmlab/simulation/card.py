"""The simulated card: its allocator, the engine that asks it for memory, and what it answers to torch.cuda."""

from __future__ import annotations

from typing import Any

from ..hardware.gpu import GPU
from .allocator.caching import Allocator
from .devices import GPU_DEVICE
from .engine.engine import Engine
from .engine.real_host import RealHost
from .profile.snapshot import History, snapshot


class Card:
    """One simulated card with `memory`, beside a real `host` or, without one, beside a simulated one.

    `hidden`: from libraries that would load a driver. `local_ranks`: the cards of its node, of which it is the first.
    `ranks`: those of the process group that the code made.
    """

    local_ranks = ranks = 1

    def __init__(self, gpu: GPU, memory: Allocator, host: RealHost | None = None) -> None:
        self.gpu, self.memory, self.hidden = gpu, memory, False
        self.engine = Engine(GPU_DEVICE, memory, gpu, host=host)
        self.history = History()
        self.kept_files: dict[str, Any] = {}  # checkpoints that were not written, by path
        self.peaks_before = 0, 0  # bytes allocated and reserved at most before the peaks were last reset

    @property
    def free(self) -> int:
        """Bytes that the driver has left: what mem_get_info shows."""
        return self.memory.driver.left

    @property
    def peaks(self) -> tuple[int, int]:
        """Bytes allocated and reserved at most, also before a script reset torch's peaks."""
        allocated, reserved = self.peaks_before
        return max(allocated, self.memory.peak_allocated), max(reserved, self.memory.peak_reserved)

    def reset_peak(self) -> None:
        """torch.cuda.reset_peak_memory_stats."""
        self.peaks_before = self.peaks
        self.memory.reset_peak()

    def snapshot(self) -> dict[str, Any]:
        """Return what torch.cuda.memory._snapshot returns."""
        return snapshot(self.memory, self.history)
