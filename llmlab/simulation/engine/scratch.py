"""Scratch: the buffers of one operator's kernel, allocated as its workspace function says, and freed when it ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from ...base.compat import current_graph_task_id
from ..workspaces.registry import FREE, Handle, Operator, Outputs, Step


class Observer(Protocol):
    """Sees an engine's requests. Those between `scratch_begins` and `scratch_ends` are for the scratch of `op`. It is
    allocated in two parts, before and after the outputs, either of which may be empty, and then freed."""

    def allocated(self, address: int, size: int) -> None: ...

    def freed(self, address: int) -> None: ...

    def scratch_begins(self, op: Operator, freeing: bool) -> None: ...

    def scratch_ends(self) -> None: ...


class Scratch:
    """The scratch of `op` in the memory of `engine`."""

    def __init__(self, engine: Any, op: Operator) -> None:  # an Engine, whose module imports this one
        self.engine, self.op = engine, op
        self.addresses: list[int] = []

    def take(self, steps: Iterable[Step]) -> Outputs | None:
        """Allocate the buffers in `steps` up to the outputs, which are returned, or to the end."""
        if self.engine.observer is None:
            return self._take(steps)
        self.engine.observer.scratch_begins(self.op, freeing=False)
        try:
            return self._take(steps)
        finally:
            self.engine.observer.scratch_ends()

    def free(self) -> None:
        """Free all of it, the last buffer first."""
        if self.engine.observer is not None:
            self.engine.observer.scratch_begins(self.op, freeing=True)
        while self.addresses:
            self.engine.free(self.addresses.pop())
        if self.engine.observer is not None:
            self.engine.observer.scratch_ends()

    def _take(self, steps: Iterable[Step]) -> Outputs | None:
        for step in steps:
            if isinstance(step, int):
                if step == FREE:
                    self.engine.free(self.addresses.pop())
                else:
                    self.addresses.append(self.engine.malloc(step))
            elif isinstance(step, Outputs):
                return step
            elif isinstance(step, Handle):
                self._take_handle(step)
            else:
                self.engine.uncounted.setdefault(step.name, str(self.op.func))
        return None

    def _take_handle(self, handle: Handle) -> None:
        # ATen/cuda/CublasHandlePool.cpp: handles belong to a thread, and the backward pass runs in autograd's thread.
        key = handle.library, current_graph_task_id() != -1, self.engine.stream
        if handle.size and key not in self.engine.handles:
            self.engine.handles[key] = self.engine.malloc(handle.size)
