"""Recording of a simulated step: the engine's events, and marks that say what was alive, and for what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..hardware.gpu import GPU
from ..recording.phases import Mark
from ..step.step import Step
from .allocator.caching import AllocatorOutOfMemory
from .engine.engine import Engine
from .profile.attribution import Place, Places
from .profile.operator_log import Operators


class Recording:
    """A simulated step: the engine's events, and between them marks that say which phase begins and what is alive."""

    def __init__(self, engine: Engine, gpu: GPU | None) -> None:
        self.engine = engine
        self.places = Places(engine)
        self.marks: list[Mark] = []
        self.operators = Operators(gpu)  # of the step that counts
        self.step: Step | None = None
        self.phase = "load"
        self.counting = True
        self.loaded: int | None = None  # bytes held when loading was done
        self.peak_reserved: int | None = None
        self.reserved_before = 0  # bytes: the most while loading and warming up
        self.failed: tuple[AllocatorOutOfMemory, Place] | None = None

    def enter(self, phase: str, **alive: Any) -> None:
        """Mark that `phase` begins; `alive`: tensors by part that only the step knows of."""
        self.phase = self.operators.phase = phase
        self.engine.watch = self.operators if self.counting and phase != "load" else None
        # Optimizers scale by norms they read (Adafactor's clipping); no memory depends on them.
        self.engine.placeholder = 1.0 if phase == "optimizer" else None
        self.marks.append(Mark(self.engine.now(), phase if self.counting else None, self._alive(alive)))

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Mark what happens inside as the recomputation of a checkpointed block."""
        since = self.engine.now()
        try:
            yield
        finally:
            self.marks.append(Mark(self.engine.now(), self.phase if self.counting else None, {}, since))

    def labelled(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return `function`, what it allocates being known as `part`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            since = len(self.engine.events)
            try:
                return function(*args, **kwargs)
            finally:
                made = {event.address: part for event in self.engine.events[since:] if event.size > 0}
                if made:
                    now = self.engine.now()
                    self.marks.append(Mark(now, self.phase if self.counting else None, made, now))

        return call

    def _alive(self, named: dict[str, Any]) -> dict[int, str]:
        if self.step:
            self.places.own(self.step.model, self.step.optimizer)
        found = dict.fromkeys(self.engine.handles.values(), "workspace")
        held = self.step.tensors() if self.step else {}
        for part, tensors in [*named.items(), *held.items()]:
            for tensor in [tensors] if isinstance(tensors, Tensor) else tensors or []:
                if address := self.engine.address(tensor):
                    found[address] = part
        return found
