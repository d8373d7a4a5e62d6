"""A step as it is measured: allocation events, and between them marks that say which phase begins and what is alive."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from ..step.step import Step
from .events import CPUEvents, CUDAEvents
from .parts import Event, Mark


class Peaks(Protocol):
    """A device whose allocator keeps its own peaks: it is told when a phase begins."""

    def enter(self, phase: str | None) -> None: ...


class Marks:
    """The marks of one build and its steps; `phase` is the one that runs now.

    `now` is the clock of the events, `address` says where a tensor lies: None where it takes no memory of the device.
    """

    def __init__(self, now: Callable[[], int], address: Callable[[Tensor], int | None]) -> None:
        self.now, self.address = now, address
        self.marks: list[Mark] = []
        self.phase = "load"
        self.step: Step | None = None
        self.counting = True

    def enter(self, phase: str, **alive: Any) -> None:
        """Mark that `phase` begins; `alive`: tensors by part that only the step knows of."""
        self.phase = phase
        self.marks.append(Mark(self.now(), self._counted(), self._alive(alive)))

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Mark what happens inside as the recomputation of a checkpointed block."""
        since = self.now()
        try:
            yield
        finally:
            self.marks.append(Mark(self.now(), self._counted(), {}, since))

    def _counted(self) -> str | None:
        return self.phase if self.counting else None

    def _alive(self, named: dict[str, Any]) -> dict[int, str]:
        # Later entries win: a gradient that is also an input of the step does not exist, a tied weight is one storage.
        return {
            address: part
            for part, tensors in [*named.items(), *self._tensors().items()]
            for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors or [])
            if (address := self.address(tensor)) is not None
        }

    def _tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors that live across phases, by part."""
        return self.step.tensors() if self.step else {}


class Recorder(Marks):
    """Collects the events and marks of a step on a real device."""

    def __init__(self, source: CPUEvents | CUDAEvents | None, peaks: Peaks | None) -> None:
        super().__init__(time.time_ns, lambda tensor: tensor.untyped_storage().data_ptr())
        self.source = source  # None where the device tells no events (MPS)
        self.peaks = peaks  # None where the events tell all (CPU)
        self.events: list[Event] = []
        self.running = False

    def record(self, build: Callable[[], Step], warm_up: Callable[[Step], None]) -> Step:
        """Record how `build` makes a step, and one run of it after `warm_up`; return it."""
        if self.source:
            self.source.start()
        self.running = True
        self.enter("load")
        step = self.step = build()
        self.counting = False
        warm_up(step)
        gc.collect()
        self.counting = True
        step(self.enter)
        self.stop()
        return step

    def enter(self, phase: str, **alive: Any) -> None:
        """Mark that `phase` begins, and tell the device's peaks."""
        super().enter(phase, **alive)
        if self.peaks:
            self.peaks.enter(self._counted())

    def stop(self) -> None:
        """End the recording; safe to call twice."""
        if not self.running:
            return
        self.counting = self.running = False
        self.enter(self.phase)
        if self.source:
            self.events = self.source.stop()
