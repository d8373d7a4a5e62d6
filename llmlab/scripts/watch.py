"""What a piece of code takes on a simulated card: its optimizer steps counted and timed, and the report of it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from statistics import median
from typing import Any
from unittest import mock

from ..base.errors import NotAvailable, SpecError, check_counts
from ..base.notes import Note
from ..base.terms import PARTS, Outcome
from ..base.units import show_bytes
from ..hardware.gpu import EMULATED_BF16, GPU
from ..simulation.simulator import EAGER_TOO_LARGE, Simulator, simulator
from .report import ScriptReport

ROOMY = 2**50  # bytes: of a card on which nothing runs out
RAN_TO_ITS_END, RAN_OUT_OF_MEMORY, INTERRUPTED = "ran to its end", "ran out of memory", "was interrupted"
NO_NETWORK = Note("no-communication", "The time per step leaves out communication between ranks.")
CAUGHT = Note("caught-out-of-memory", "The GPU ran out of memory once; the script caught the error and went on.")


class Enough(BaseException):
    """Ends a script after its last step. No Exception, so that a script which catches those does not go on."""


@dataclass(frozen=True)
class Conditions:
    """The machine that is simulated, and when to end.

    `world_size`: the ranks that a launcher starts, of which this is rank 0; None without one. `steps`: the optimizer
    steps after which the code ends, None for its own end; of code without an optimizer, backward passes. `limit`: the
    bytes that the process may take of the card, None for all. `assume` is that of `lab.simulator`. `roomy` gives the
    card more memory than any code takes.

    Raises SpecError for numbers that cannot be.
    """

    gpu: GPU
    world_size: int | None = None
    steps: int | None = None
    limit: int | None = None
    assume: float | None = None
    roomy: bool = False

    def __post_init__(self) -> None:
        check_counts(world_size=self.ranks, steps=1 if self.steps is None else self.steps)
        if self.limit is not None and not 0 < self.limit <= self.gpu.memory:
            card = f"{self.gpu.name}'s {show_bytes(self.gpu.memory)}"
            raise SpecError(f"the memory limit is {show_bytes(self.limit)}; give more than 0 and at most {card}")

    @property
    def ranks(self) -> int:
        return 1 if self.world_size is None else self.world_size


@contextmanager
def watched(where: Conditions, on_step: Callable[[Watch], None] = lambda watch: None) -> Iterator[Watch]:
    """Simulate the card of `where` until the block ends; `on_step` is called after each step and backward pass."""
    card = replace(where.gpu, memory=ROOMY) if where.roomy else where.gpu
    with simulator(card, assume=where.assume, world_size=where.world_size) as sim:
        watch = Watch(sim, where, on_step)
        with watch.counting():
            yield watch


class Watch:
    """The simulator `sim`, and the optimizer `steps` that ran in it; `ended` says how the code came to its end."""

    def __init__(self, sim: Simulator, where: Conditions, on_step: Callable[[Watch], None]) -> None:
        self.sim, self.where, self.on_step = sim, where, on_step
        self.steps, self.ended = 0, RAN_TO_ITS_END
        self.passes = 0  # backward, of which a step has as many as micro-batches
        self.refused: str | None = None  # what was not simulated, if the script asked for some
        self.elsewhere: list[int] = []  # bytes that processes of the script's own took of the card
        self._seconds: list[float] = []
        self._untimed: str | None = None  # a dtype whose products take nobody knows how long
        self._stepping: list[Any] = []  # optimizers, each inside the one before it
        self._has_optimizer = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the steps of every optimizer until the block ends, and time what runs from one to the next."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        handles = register_optimizer_step_pre_hook(self._begin), register_optimizer_step_post_hook(self._step)
        try:
            passed = mock.patch.object(torch.autograd, "backward", self._passed(torch.autograd.backward))
            with passed, self.sim.operators() as self._operators, self._refusals():
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Note each refusal of a line of the user's code: the script may catch it."""
        real = NotAvailable.__init__

        def noting(error: NotAvailable, *args: Any) -> None:
            real(error, *args)
            if ", line " in str(error):
                self.refused = str(error)

        with mock.patch.object(NotAvailable, "__init__", noting):
            yield

    def _passed(self, real: Callable[..., None]) -> Callable[..., None]:
        """torch.autograd.backward, counted: a script without an optimizer has no other steps."""

        @wraps(real)
        def backward(*args: Any, **kwargs: Any) -> None:
            real(*args, **kwargs)
            self.passes += 1
            self.on_step(self)
            if self.steps or self.where.steps is None or self.passes < self.where.steps:
                return
            self._has_optimizer = self._has_optimizer or _an_optimizer_exists()
            if not self._has_optimizer:
                self.ended = f"was ended after {self.passes} backward passes, because it has no optimizer"
                raise Enough

        return backward

    def _begin(self, optimizer: Any, *_: Any) -> None:
        if optimizer in self._stepping:  # its last step raised an error
            del self._stepping[self._stepping.index(optimizer) :]
        self._stepping.append(optimizer)

    def _step(self, optimizer: Any, *_: Any) -> None:
        del self._stepping[self._stepping.index(optimizer) :]
        if self._stepping or _makes_states():  # one of several that another optimizer holds and steps
            return
        self.steps += 1
        if (seconds := self._operators.seconds) is not None:
            self._seconds.append(seconds)
        elif self._untimed is None:
            self._untimed = self._operators.untimed
        self._operators.clear()
        if self.is_done:
            self.ended = f"was ended after {self.steps} optimizer step{'s' if self.steps > 1 else ''}"
        self.on_step(self)
        if self.is_done:  # again where a script caught the end
            raise Enough

    @property
    def is_done(self) -> bool:
        """Whether all steps that were asked for were taken."""
        return self.where.steps is not None and self.steps >= self.where.steps

    def report(self, name: str) -> ScriptReport:
        """Return what the code, called `name`, took until now."""
        sim, where, timeline = self.sim, self.where, self.sim.timeline
        outside = where.gpu.outside(where.ranks)
        taken = sim.peak_reserved + (outside or 0)
        nothing_seen = not self.steps and (self.refused or self.elsewhere)
        notes: list[Note] = []
        outcome: Outcome = "unknown" if self.ended == INTERRUPTED or nothing_seen else "fits"
        if self.ended == RAN_OUT_OF_MEMORY or taken > (where.limit or where.gpu.memory):
            outcome = "unknown" if sim.has_upper_sizes else "out of memory"
            notes = [EAGER_TOO_LARGE] if sim.has_upper_sizes else []
        known = self._seconds and sim.counts_all_kernels
        seconds = median(self._seconds[1:] or self._seconds) if known else None
        interval = self._operators.interval if seconds and where.ranks == 1 else None
        notes += sim.notes
        if self._untimed and not seconds:
            why = _without_time(where.gpu, self._untimed)
            notes.append(Note("time-unknown", f"The time per step is unknown: the {where.gpu.name} {why}."))
        if seconds and where.ranks > 1:
            notes.append(NO_NETWORK)
        if sim.out_of_memory and self.ended != RAN_OUT_OF_MEMORY:
            notes.append(CAUGHT)
        if self.refused:
            caught = "The script caught this error of the simulation and went on"
            notes.append(Note("caught-refusal", f"{caught}: {self.refused}"))
        if self.elsewhere:
            most = show_bytes(max(self.elsewhere))
            others = "Processes that the script started are not included in these sizes"
            notes.append(Note("other-processes", f"{others}; each allocated at most {most}."))
        return ScriptReport(
            command=name,
            gpu=where.gpu.name,
            capacity=where.gpu.memory,
            world_size=where.ranks,
            steps=self.steps,
            ended=self.ended,
            outcome=outcome,
            where=sim.out_of_memory if self.ended == RAN_OUT_OF_MEMORY else None,
            peak_allocated=timeline.peak,
            peak_reserved=sim.peak_reserved,
            process=None if outside is None else taken,
            limit=where.limit,
            needed=taken if outcome == "out of memory" and self.ended != RAN_OUT_OF_MEMORY else None,
            step_seconds=seconds,
            step_seconds_low=seconds / interval if seconds and interval else None,
            step_seconds_high=seconds * interval if seconds and interval else None,
            by_category=_by_category(timeline.modules),
            by_module=timeline.modules,
            notes=tuple(notes),
        )


def _without_time(gpu: GPU, dtype: str) -> str:
    """Return why products in `dtype` have no time."""
    if dtype == "bf16" and gpu.peak("bf16") is None:
        return f"has no bf16 units, and {EMULATED_BF16}; use fp16"
    return f"has no measured rate for {dtype}"


def _an_optimizer_exists() -> bool:
    from torch.optim import Optimizer

    return any(issubclass(type(each), Optimizer) for each in gc.get_objects())


def _makes_states() -> bool:
    """Whether torch.distributed.checkpoint takes the step, without a learning rate, to have states to load into."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("torch.optim.", "torch.utils.", __name__)):
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"


def _by_category(modules: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    sizes = dict.fromkeys(PARTS, 0)
    for parts in modules.values():
        for name, size in parts.items():
            sizes[name if name in sizes else "other"] += size
    return {name: size for name, size in sizes.items() if size}


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether the card's memory led to `error`, also where a library raised its own from that one."""
    import torch

    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
