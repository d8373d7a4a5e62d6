"""A step as it is measured: allocation events, and between them marks that say which phase begins and what is alive."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from ..step.step import Step
from .events import CPUEvents, CUDAEvents, Event

# Of "other", told apart in the report's detail; the last two of a rank among several.
BUFFERS, INPUTS, GATHERED, COMMUNICATION = "buffers", "inputs", "gathered parameters", "communication buffers"
Warmed = TypeVar("Warmed")


class Peaks(Protocol):
    """A device whose allocator keeps its own peaks: it is told when a phase begins."""

    def enter(self, phase: str | None) -> None: ...


class Mark(NamedTuple):
    """The moment `phase` begins; `parts` says of addresses alive then what they hold. `time` is Unix time in ns.

    `phase` None ends the recording of phases: what comes after belongs to no phase until the next mark.
    `recomputed` marks the end of a block's recomputation, which began at Unix time `since`: what was allocated in
    between and lives on is activations, in backward.
    """

    time: int
    phase: str | None
    parts: dict[int, str]
    since: int | None = None


class Recorder:
    """Collects events and marks of one build and its steps; `phase` is the one that runs now."""

    def __init__(self, source: CPUEvents | CUDAEvents | None, peaks: Peaks | None) -> None:
        self.source = source  # None where the device tells no events (MPS)
        self.peaks = peaks  # None where the events tell all (CPU)
        self.marks: list[Mark] = []
        self.events: list[Event] = []
        self.phase = "load"
        self.step: Step | None = None
        self.counting = True
        self.running = False

    def record(self, build: Callable[[], Step], warm_up: Callable[[Step], Warmed]) -> tuple[Step, Warmed]:
        """Record how `build` makes a step, and one run of it after `warm_up`; return it and what `warm_up` returned."""
        if self.source:
            self.source.start()
        self.running = True
        self.enter("load")
        step = self.step = build()
        self.counting = False
        warmed = warm_up(step)
        gc.collect()
        self.counting = True
        step(self.enter)
        self.stop()
        return step, warmed

    def enter(self, phase: str, **alive: Any) -> None:
        """Mark that `phase` begins; `alive`: tensors by part that only the step knows of."""
        self.phase = phase
        counted = phase if self.counting else None
        self.marks.append(Mark(time.time_ns(), counted, self._alive(alive)))
        if self.peaks:
            self.peaks.enter(counted)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Mark what happens inside as the recomputation of a checkpointed block."""
        since = time.time_ns()
        try:
            yield
        finally:
            self.marks.append(Mark(time.time_ns(), self.phase if self.counting else None, {}, since))

    def stop(self) -> None:
        """End the recording; safe to call twice."""
        if not self.running:
            return
        self.counting = self.running = False
        self.enter(self.phase)
        if self.source:
            self.events = self.source.stop()

    def _alive(self, named: dict[str, Any]) -> dict[int, str]:
        # Later entries win: a gradient that is also an input of the step does not exist, a tied weight is one storage.
        groups = [*named.items(), *(self.step.tensors().items() if self.step else ())]
        return {
            tensor.untyped_storage().data_ptr(): part
            for part, tensors in groups
            for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors or [])
        }
