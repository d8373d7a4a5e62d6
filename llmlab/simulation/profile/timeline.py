"""Timeline of a simulated GPU's memory by category and by module: `sim.timeline`.

A user's script does not name its phases, so they are inferred: "backward" while autograd runs, "optimizer" while an
optimizer steps, "forward" from a module's call on (without gradients: "no-grad"), "saving" from state_dict() or
torch.save() on, and "load" before the first call. Whenever a phase begins, categories of tensors are read from the
modules that were called and the optimizers that stepped. The others are inferred as in recording/parts.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...base.compat import DisableTorchFunction, current_graph_task_id
from ...recording.parts import BUFFERS, Block, Division, Mark, collapsed, divide
from ..allocator.config import blocks_of
from ..engine.engine import Engine
from .recording import OUTSIDE, Place, Recording, living

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...report import TimelinePoint


class Timeline(tuple):
    """Bytes allocated after each allocation and each free, in order, and their categories.

    `points` are the phase and the bytes of each category at up to 300 of those moments, including the peak. `peak` is
    the most bytes, reached in `phase` at `place`, an operator and its module. `modules` divides the peak by module, and
    `phases` has the peak of each phase.
    """

    points: tuple[TimelinePoint, ...]
    peak: int
    phase: str | None
    phases: dict[str, int]
    place: Place | None
    modules: dict[str, dict[str, int]]
    title: str
    capacity: int | None

    def __new__(cls, division: Division, engine: Engine, title: str = "", capacity: int | None = None) -> Timeline:
        made = super().__new__(cls, accumulate(event.size for event in engine.events))
        made.points, made.peak, made.phase = division.timeline, division.peak, division.phase
        made.phases = division.phases
        made.place = peak_place(division, engine)
        made.modules = by_module(division.blocks, engine.places)
        made.title, made.capacity = title, capacity
        return made

    def plot(self) -> Figure:
        """Plot the live bytes over time, stacked by category; the peak is marked with its operator and module."""
        from ...plots import plot_live_bytes

        return plot_live_bytes(self.points, self.title, self.capacity, str(self.place) if self.place else None)


def peak_place(division: Division, engine: Engine) -> Place | None:
    """Return the origin of the block that was allocated last at the peak; None if nothing was allocated."""
    return engine.places.get(division.blocks[-1].born) if division.blocks else None


def by_module(blocks: Iterable[Block], places: Mapping[int, Place]) -> dict[str, dict[str, int]]:
    """Return the bytes of `blocks` by module and category, with layers combined and the largest module first."""
    modules: dict[str, dict[str, int]] = {}
    for block in blocks:
        place = places.get(block.born)
        parts = modules.setdefault(collapsed(place.module) if place and place.module else OUTSIDE, {})
        assert block.part is not None  # `divide` sets it for each
        parts[block.part] = parts.get(block.part, 0) + block.size
    return dict(sorted(modules.items(), key=lambda item: -sum(item[1].values())))


class Phases(Recording):
    """Infers the phases of a script from the code that runs, and marks the categories of tensors in each phase."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.marks.append(Mark(self.now(), self.phase, {}))
        self.logits: set[int] = set()  # bytes of a logits tensor, in 16-bit and in fp32
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._stepping = False
        self._pass = "forward"  # the phase of the current outermost module call
        self._recomputing: int | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow module calls and optimizer steps until the block ends."""
        handles = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        try:
            with (
                super().watched(),
                mock.patch.object(nn.Module, "state_dict", self._saving(nn.Module.state_dict)),
                mock.patch.object(torch, "save", self._saving(torch.save)),
            ):
                yield
        finally:
            self.enter(self.phase)
            for handle in handles:
                handle.remove()

    def place(self) -> Place:
        """Return where the operator that runs belongs; a new phase begins with its first request for memory."""
        backward = current_graph_task_id() != -1
        now = "backward" if backward else "optimizer" if self._stepping else self._pass if self._stack else self.phase
        if now != self.phase:
            self.enter(now)
        return super().place()

    def timeline(self, title: str, capacity: int | None) -> Timeline:
        """Return the timeline so far."""
        marks = [*self.marks, Mark(self.now(), self.phase, self._alive({}))]
        return Timeline(divide(self.engine.events, marks, blocks_of(self.logits)), self.engine, title, capacity)

    def _alive(self, named: dict[str, Any]) -> dict[int, str]:
        with DisableTorchFunction():  # reading attributes is not part of the user's code
            for root in living(self.roots):
                self.own(root, *living(self._optimizers))
            return super()._alive(named)

    def _tensors(self) -> dict[str, list[Tensor]]:
        roots, optimizers = living(self.roots), living(self._optimizers)
        parameters: list[Tensor] = [parameter for root in roots for parameter in root.parameters()]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        parameters += [parameter for group in groups for parameter in group["params"]]
        states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
        return {
            # Megatron-LM's DistributedDataParallel has an attribute `buffers` of its own.
            BUFFERS: [buffer for root in roots for buffer in nn.Module.buffers(root)],
            "optimizer": [value for value in states if isinstance(value, Tensor)],
            "gradients": [leaf.grad for leaf in parameters if leaf.is_leaf and leaf.grad is not None],
            "weights": parameters,
        }

    def _saving(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return `real`, wrapped to begin a phase, which lasts until a model or an optimizer runs again."""

        @wraps(real)
        def begin(*args: Any, **kwargs: Any) -> Any:
            if self.phase not in ("load", "saving") and not self._stack and not self._stepping:
                self.enter("saving")
            return real(*args, **kwargs)

        return begin

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        if all(known is not optimizer for known in living(self._optimizers)):
            self._optimizers.append(weakref.ref(optimizer))
        self._stepping = True
        if self.phase != "optimizer":
            self.enter("optimizer")

    def _step_ends(self, *_: Any) -> None:
        self._stepping = False
        self.enter(self.phase)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self._stack:
            self._pass = "forward" if torch.is_grad_enabled() else "no-grad"
            if current_graph_task_id() != -1:  # checkpointing recomputes a block
                self._recomputing = self.now()
        super()._enter(module, args)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        path = self._stack[-1]
        super()._leave(module, args, output)
        if path.endswith("lm_head") and isinstance(output, Tensor):
            self.logits |= {2 * output.numel(), 4 * output.numel()}
        if not self._stack and self._recomputing is not None:
            self.marks.append(Mark(self.now(), self.phase, {}, self._recomputing))
            self._recomputing = None
