"""Recording of a simulated step: the engine's events, where each belongs, and marks that say what was alive and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...hardware.gpu import GPU
from ...recording.phases import Mark, Marks
from ..allocator.memory import AllocatorOutOfMemory
from ..engine.engine import Engine
from .attribution import Place, Places
from .operator_log import Operators

Labelled = Callable[[Callable[..., Any], str], Callable[..., Any]]


class Recording(Places, Marks):
    """Marks on the events of `engine`, which knows the module that each belongs to."""

    def __init__(self, engine: Engine) -> None:
        Places.__init__(self, engine)
        Marks.__init__(self, engine.now, engine.address)

    def _workspaces(self) -> dict[int, str]:
        return dict.fromkeys(self.engine.handles.values(), "workspace")


class StepRecording(Recording):
    """The recording of `lab.simulate`'s step, which says itself when its phases begin."""

    def __init__(
        self, engine: Engine, gpu: GPU | None, on_phase: Callable[[str | None], None] | None = None
    ) -> None:
        super().__init__(engine)
        self.on_phase = on_phase  # called as a phase begins; None is what does not count
        self.operators = Operators(gpu)  # of the step that counts
        self.loaded: int | None = None  # bytes allocated when loading was done
        self.peak_reserved: int | None = None
        self.reserved_before = 0  # bytes: the most while loading and warming up
        self.failed: tuple[AllocatorOutOfMemory, Place] | None = None

    def enter(self, phase: str, **alive: Any) -> None:
        """Mark that `phase` begins; `alive`: tensors by part that only the step knows of."""
        self.operators.phase = phase
        self.engine.watch = self.operators if self.counting and phase != "load" else None
        # Optimizers scale by norms they read (Adafactor's clipping); no memory depends on them.
        self.engine.placeholder = 1.0 if phase == "optimizer" else None
        super().enter(phase, **alive)
        if self.on_phase:
            self.on_phase(self._counted())

    def labelled(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return `function`, what it allocates being known as `part`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            since = len(self.engine.events)
            try:
                return function(*args, **kwargs)
            finally:
                made = {event.address: part for event in self.engine.events[since:] if event.size > 0}
                if made:
                    now = self.now()
                    self.marks.append(Mark(now, self._counted(), made, now))

        return call

    def _alive(self, named: dict[str, Any]) -> dict[int, str]:
        if self.step:
            self.own(self.step.model, self.step.optimizer)
        return self._workspaces() | super()._alive(named)
