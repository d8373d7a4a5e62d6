"""The simulated card of `lab.simulator`: engine, memory, history, timeline; patching/install.py puts it in place."""

from __future__ import annotations

from typing import Any

from ..hardware.gpu import GPU
from .allocator.config import AllocatorConfig
from .checkpoints.files import Checkpoints
from .engine.card_engine import CardEngine
from .host_parameters import HostParameters
from .profile.snapshot import History, snapshot
from .profile.timeline import Phases


class Card:
    """One simulated card: its engine and allocator, their history, and what the host keeps for it."""

    def __init__(self, gpu: GPU, config: AllocatorConfig, assume: float | None = None) -> None:
        self.gpu = gpu
        self.hidden = False  # from libraries that would load a driver
        self.engine = CardEngine(gpu, config, assume)
        self.memory = self.engine.memory
        self.phases = Phases(self.engine)
        self.history = History(self.phases.place)
        self.memory.driver.on_event = self.history.record
        self.checkpoints = Checkpoints(self.engine)
        self.parameters = HostParameters(self.engine, self.checkpoints)

    @property
    def free(self) -> int:
        """Bytes that the driver has left: what mem_get_info shows."""
        return self.engine.left

    def snapshot(self) -> dict[str, Any]:
        """Return what torch.cuda.memory._snapshot returns."""
        return snapshot(self.memory, self.history)
