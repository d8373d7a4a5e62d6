"""Watches code on a simulated GPU: counts and times its optimizer steps, and reports its memory."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from statistics import median
from types import CodeType, FrameType
from typing import Any
from unittest import mock
from weakref import WeakSet

from ..base.errors import NotAvailable, SpecError, check_counts
from ..base.notes import Note
from ..base.terms import PARTS, Outcome
from ..base.units import MiB, show_bytes
from ..hardware.gpu import EMULATED_BF16, GPU
from ..simulation.simulator import EAGER_TOO_LARGE, Simulator, simulator
from ..simulation.values.placeholders import printed
from .holders import Holder, holders
from .report import ScriptReport

ROOMY = 2**50  # bytes of a GPU that never runs out of memory
RAN_TO_ITS_END, RAN_OUT_OF_MEMORY, INTERRUPTED = "ran to its end", "ran out of memory", "was interrupted"
NO_NETWORK = Note("no-communication", "The time per step leaves out communication between ranks.")
Place = tuple[tuple[CodeType, int], ...]  # the line of each running function
PRINTED = Note("unknown-printed", "In what the script printed, ? is a value that a simulated tensor does not hold.")
CAUGHT = Note("caught-out-of-memory", "The GPU ran out of memory; the script caught the error and went on.")


class Enough(BaseException):
    """Ends a script after its last step. It is no Exception, so that a script that catches those does not go on."""


@dataclass(frozen=True)
class Conditions:
    """The simulated machine, and the number of steps after which to end.

    `world_size`: the number of ranks that a launcher starts, None without a launcher; this is rank `rank`. `steps`:
    the number of updates (of backward passes, for code without an optimizer) after which the code ends; None runs it to
    its own end. `limit`: the bytes of GPU memory that the process may use, None for all. `assume` is that of
    `lab.simulator`. `roomy` gives the GPU more memory than any code needs.

    Raises SpecError for impossible numbers.
    """

    gpu: GPU
    world_size: int | None = None
    steps: int | None = None
    limit: int | None = None
    assume: float | None = None
    roomy: bool = False
    rank: int = 0

    def __post_init__(self) -> None:
        check_counts(world_size=self.ranks, steps=1 if self.steps is None else self.steps)
        if not 0 <= self.rank < self.ranks:
            ranks = f"{self.ranks} ranks, 0 to {self.ranks - 1}" if self.ranks > 1 else "one rank, 0"
            raise SpecError(f"--rank {self.rank}: the run has {ranks}; give another, or more ranks by a launcher or "
                            "--world-size")  # fmt: skip
        if self.limit is not None and not 0 < self.limit <= self.gpu.memory:
            gpu_memory = f"{self.gpu.name}'s {show_bytes(self.gpu.memory)}"
            raise SpecError(f"the memory limit is {show_bytes(self.limit)}; give more than 0 and at most {gpu_memory}")

    @property
    def ranks(self) -> int:
        return 1 if self.world_size is None else self.world_size


@contextmanager
def watched(conditions: Conditions, on_step: Callable[[Watch], None] = lambda watch: None) -> Iterator[Watch]:
    """Simulate the GPU of `conditions` until the block ends; `on_step` is called after each update and backward
    pass."""
    gpu = replace(conditions.gpu, memory=ROOMY) if conditions.roomy else conditions.gpu
    with simulator(gpu, assume=conditions.assume, world_size=conditions.world_size, rank=conditions.rank) as sim:
        watch = Watch(sim, conditions, on_step)
        with watch.counting():
            yield watch


class Watch:
    """The simulator `sim` and the number of weight updates in it, `steps`; `ended` says how the code ended.

    One update may call several optimizers, each after its own loss (the two networks of a GAN), or one of them for one
    part of its parameters at a time. It ends with:
    - DeepSpeed's engine.step, in which ZeRO calls its optimizer for each group of parameters, or each part of a group,
      if it was the last of all engines (PPO has one for the actor and one for the critic), or if one steps again;
    - an optimizer's step outside a backward pass, if it was the last of all optimizers;
    - otherwise, the first sign of the next update: another step of the same parameters or, after a backward pass, at
      the same place of the code. If hooks step in the backward pass, it is the next backward pass.
    A step that a GradScaler skips calls no optimizer, and a closure's backward passes are inside its step.
    """

    def __init__(self, sim: Simulator, where: Conditions, on_step: Callable[[Watch], None]) -> None:
        self.sim, self.where, self.on_step = sim, where, on_step
        self.steps, self.ended = 0, RAN_TO_ITS_END
        self._printed = printed.total()  # before the code ran
        self.passes = 0  # backward passes; an update has one per micro-batch
        self.refused: str | None = None  # the last error about code that is not simulated
        self.elsewhere: list[int] = []  # peak bytes of the script's other processes on the GPU
        self._seconds: list[float] = []
        self._untimed: str | None = None  # a dtype whose matmuls have no known time
        self._stepping: list[Any] = []  # optimizers whose step runs, each inside the one before it
        self._in_engine = False  # DeepSpeed's engine.step runs
        self._engine_stepped = False  # its optimizer has stepped, as it does after the last micro-batch
        self._engines: WeakSet[Any] = WeakSet()  # all engines that existed when a new one first stepped
        self._stepped_engines: WeakSet[Any] = WeakSet()  # those that this update has stepped
        self._stepped: set[int] = set()  # ids of the parameters that this update has stepped
        self._places: set[Place] = set()  # the places of the code at which it stepped
        self._in_pass = False  # whether hooks have stepped in a backward pass
        self._passed_since = False  # whether a backward pass has begun since the last step
        self._operators_done = 0  # the number of operators that had run after its last step
        self._events_done = 0  # the number of the allocator's events by then
        self._optimizers: WeakSet[Any] = WeakSet()  # all optimizers that existed when a new one first stepped
        self._has_optimizer = False
        self._allocated = 0  # bytes at the end of the last update
        self._holders: dict[Holder, int] = {}  # the holders of tensors at that time, if memory grew
        self._holder: Holder | None = None  # the holder that grows with each update

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the updates of every optimizer until the block ends, and time the operators between updates."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        from ..base.compat import symbol
        from ..simulation.patching.imports import on_import

        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._begin).remove)
            stack.callback(register_optimizer_step_post_hook(self._step).remove)

            def deepspeed() -> None:
                engine = symbol("deepspeed.runtime.engine.DeepSpeedEngine")
                stack.enter_context(mock.patch.object(engine, "step", self._engine_step(engine.step)))

            stack.enter_context(on_import({"deepspeed.runtime.engine": deepspeed}))
            passed = self._passed(torch.autograd.backward)
            stack.enter_context(mock.patch.object(torch.autograd, "backward", passed))
            self._operators = stack.enter_context(self.sim.operators())
            stack.enter_context(self._refusals())
            yield

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Record each NotAvailable for a line of the user's code, and each error of the simulation in a second thread,
        because the script may catch it."""
        owner = threading.get_ident()

        def noting(real: Callable[..., None]) -> Callable[..., None]:
            def init(error: Exception, *args: Any) -> None:
                real(error, *args)
                is_refused = isinstance(error, NotAvailable) and ", line " in str(error)
                if is_refused or threading.get_ident() != owner:
                    self.refused = str(error)

            return init

        shown = threading.excepthook

        def excepthook(args: threading.ExceptHookArgs) -> None:
            if not isinstance(args.exc_value, NotAvailable | SpecError):  # the report has their words
                shown(args)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(threading, "excepthook", excepthook))
            for kind in (NotAvailable, SpecError):
                stack.enter_context(mock.patch.object(kind, "__init__", noting(kind.__init__)))
            yield

    def _passed(self, real: Callable[..., None]) -> Callable[..., None]:
        """Return torch.autograd.backward with a counter, because a script without an optimizer has no other steps."""

        @wraps(real)
        def backward(*args: Any, **kwargs: Any) -> None:
            if _in_backward():  # that of a checkpointed block
                return real(*args, **kwargs)
            if self._in_pass:
                self._end_update()
            self._passed_since = True
            real(*args, **kwargs)
            self.passes += 1
            self.on_step(self)
            if self.steps or self.where.steps is None or self.passes < self.where.steps:
                return
            self._has_optimizer = self._has_optimizer or bool(_all_optimizers())
            if not self._has_optimizer:
                self.ended = f"was ended after {self.passes} backward passes, because it has no optimizer"
                raise Enough

        return backward

    def _engine_step(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return DeepSpeedEngine.step with a counter. Between micro-batches, it steps nothing."""

        @wraps(real)
        def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if engine in self._stepped_engines:
                self._end_update()
            self._in_engine, self._engine_stepped = True, False
            try:
                returned = real(engine, *args, **kwargs)
            finally:
                self._in_engine = False
            if self._engine_stepped:
                if engine not in self._engines:
                    self._engines = WeakSet(_all_engines())
                self._stepped_engines.add(engine)
                if self._engines <= self._stepped_engines:
                    self._end_update()
            return returned

        return step

    def _begin(self, optimizer: Any, *_: Any) -> None:
        if optimizer in self._stepping:  # its last step raised an error
            del self._stepping[self._stepping.index(optimizer) :]
        if self._stepped and not (self._stepping or self._in_engine or _in_backward()):
            at_same_place = self._passed_since and _place() in self._places
            if at_same_place or any(id(each) in self._stepped for each in _trained(optimizer) if each.grad is not None):
                self._end_update()
        self._stepping.append(optimizer)

    def _step(self, optimizer: Any, *_: Any) -> None:
        del self._stepping[self._stepping.index(optimizer) :]
        if _makes_states():
            return
        self._stepped.update(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        self._operators_done, self._events_done = len(self._operators), self.sim.events
        self._in_pass = self._in_pass or _in_backward()
        self._engine_stepped = self._engine_stepped or self._in_engine
        if self._stepping or self._in_engine or _in_backward():
            return  # another optimizer steps this one, or only part of the parameters stepped
        self._passed_since = False
        self._places.add(_place())
        if optimizer not in self._optimizers:
            self._optimizers = WeakSet(_all_optimizers())
        trained = (parameter for other in self._optimizers for parameter in _trained(other))
        if all(id(parameter) in self._stepped for parameter in trained):
            self._end_update()

    def _end_update(self) -> None:
        """Count the current update, if there is one, and end the code after the last."""
        if not self._stepped:
            return
        self._count()
        if self.is_done:
            self.ended = f"was ended after {self.steps} optimizer step{'s' if self.steps > 1 else ''}"
        self.on_step(self)
        if self.is_done:  # also again, if a script caught the end
            raise Enough

    def _count(self) -> None:
        self.steps += 1
        self._find_holder()
        self.sim.end_step(self._events_done)
        self._stepped.clear()
        self._stepped_engines.clear()
        self._places.clear()
        self._in_pass = False
        next_operators = self._operators[self._operators_done :]  # those of the next update
        del self._operators[self._operators_done :]
        if (seconds := self._operators.seconds) is not None:
            self._seconds.append(seconds)
        elif self._untimed is None:
            self._untimed = self._operators.untimed
        self._operators[:] = next_operators

    def _find_holder(self) -> None:
        """Find the variable that grows with memory, only if an update after the first ends with more memory."""
        if self._holder is None and self.steps > 1 and self.sim.allocated > self._allocated:
            current = holders(self.sim.holds)
            before = self._holders
            grown = {holder: size - before[holder] for holder, size in current.items() if holder in before}
            if most := max(grown.values(), default=0):
                self._holder = next(holder for holder, size in grown.items() if size == most) if most > 0 else None
            self._holders = current
        self._allocated = self.sim.allocated

    @property
    def is_done(self) -> bool:
        """Whether all requested steps have run."""
        return self.where.steps is not None and self.steps >= self.where.steps

    def report(self, name: str) -> ScriptReport:
        """Return the report on the code so far, under the name `name`."""
        if self._stepped and self.ended == RAN_TO_ITS_END:
            self._count()
        sim, where, timeline = self.sim, self.where, self.sim.timeline
        ranks = max(where.ranks, sim.ranks)
        outside = where.gpu.outside(ranks)
        used = sim.peak_reserved + (outside or 0)
        nothing_seen = not self.steps and (self.refused or self.elsewhere)
        notes: list[Note] = []
        outcome: Outcome = "unknown" if self.ended == INTERRUPTED or nothing_seen else "fits"
        if self.ended == RAN_OUT_OF_MEMORY or used > (where.limit or where.gpu.memory):
            outcome = "unknown" if sim.has_upper_sizes else "out of memory"
            notes = [EAGER_TOO_LARGE] if sim.has_upper_sizes else []
        timed = self._seconds and sim.counts_all_kernels
        seconds = median(self._seconds[1:] or self._seconds) if timed else None
        interval = self._operators.interval if seconds and ranks == 1 else None
        notes += sim.notes
        if printed.total() > self._printed:
            notes.append(PRINTED)
        if self._untimed and not seconds:
            why = _without_time(where.gpu, self._untimed)
            notes.append(Note("time-unknown", f"The time per step is unknown: the {where.gpu.name} {why}."))
        elif self._seconds and not sim.counts_all_kernels:
            notes.append(Note("time-unknown", "The time per step is unknown, because that of its Triton kernels is."))
        if seconds and ranks > 1:
            notes.append(NO_NETWORK)
        if sim.out_of_memory and self.ended != RAN_OUT_OF_MEMORY:
            notes.append(CAUGHT)
        growth = sim.growth
        if (grown := sum(growth.values())) >= MiB:
            notes.append(Note("growth", self._growth(grown)))
        if self.refused:
            caught = "The script caught this error of the simulation and went on"
            notes.append(Note("caught-refusal", f"{caught}: {self.refused}"))
        if self.elsewhere:
            most = show_bytes(max(self.elsewhere))
            excluded = "Processes that the script started are not included in these sizes"
            notes.append(Note("other-processes", f"{excluded}; each allocated at most {most}."))
        return ScriptReport(
            command=name,
            gpu=where.gpu.name,
            capacity=where.gpu.memory,
            world_size=ranks,
            rank=where.rank,
            steps=self.steps,
            ended=self.ended,
            outcome=outcome,
            where=sim.out_of_memory if self.ended == RAN_OUT_OF_MEMORY else None,
            peak_allocated=timeline.peak,
            peak_reserved=sim.peak_reserved,
            process=None if outside is None else used,
            limit=where.limit,
            needed=used if outcome == "out of memory" and self.ended != RAN_OUT_OF_MEMORY else None,
            step_seconds=seconds,
            step_seconds_low=seconds / interval if seconds and interval else None,
            step_seconds_high=seconds * interval if seconds and interval else None,
            host_peak=sim.host_peak,
            host_pinned=sim.host_pinned,
            host_lines=sim.host_lines,
            phases=timeline.phases,
            growth=growth,
            by_category=_by_category(timeline.modules),
            by_module=timeline.modules,
            notes=tuple(notes),
        )

    def _growth(self, size: int) -> str:
        """Return sentences that name what keeps `size` bytes of every step, and when the memory will be full."""
        text = f"Memory grows by {show_bytes(size)} with each step"
        room = (self.where.limit or self.where.gpu.memory) - self.sim.allocated
        histories = [optimizer for optimizer in self._optimizers if type(optimizer).__name__ == "LBFGS"]
        if histories:
            most = sum(_history(optimizer) for optimizer in histories)
            text += f", because LBFGS keeps its last history_size iterations, two gradients of each, {show_bytes(most)}"
            text += " in all. This run ended before its history was full; a smaller history_size takes less memory."
            if most <= room + self.sim.allocated:
                return text
        elif self._holder:
            graphs = " and their autograd graphs" if self._holder.has_graph else ""
            text += f", because {self._holder} keeps tensors of every step{graphs}. "
            text += "Keep numbers (.item()) instead, or detach the tensors and move them to the host."
        else:
            text += ": something keeps tensors of earlier steps, often a list of losses or outputs."
        return f"{text} At this rate the GPU is full after about {max(0, room) // size} more steps."


def _without_time(gpu: GPU, dtype: str) -> str:
    """Return the reason why matmuls in `dtype` have no known time."""
    if dtype == "bf16" and gpu.peak("bf16") is None:
        return f"has no bf16 units, and {EMULATED_BF16}; use fp16"
    return f"has no measured rate for {dtype}"


def _all_optimizers() -> list[Any]:
    from torch.optim import Optimizer

    return [item for item in gc.get_objects() if issubclass(type(item), Optimizer)]


def _all_engines() -> list[Any]:
    """Return DeepSpeed's engines that train; that of a reference model has no optimizer."""
    from ..base.compat import symbol

    kind = symbol("deepspeed.runtime.engine.DeepSpeedEngine")
    return [item for item in gc.get_objects() if issubclass(type(item), kind) and item.optimizer_name()]


def _trained(optimizer: Any) -> list[Any]:
    from ..base.compat import DisableTorchFunction

    groups = getattr(optimizer, "param_groups", ())  # accelerate's wrapper has them if the wrapped one does
    with DisableTorchFunction():  # so that reading an attribute runs no user code
        return [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]


def _history(lbfgs: Any) -> int:
    """Return the bytes of the full history of torch's LBFGS."""
    size = lbfgs.param_groups[0]["history_size"]
    return 2 * size * sum(parameter.numel() * parameter.element_size() for parameter in _trained(lbfgs))


def _in_backward() -> bool:
    from ..base.compat import current_graph_task_id

    return current_graph_task_id() != -1


def _makes_states() -> bool:
    """Return whether torch.distributed.checkpoint runs this step, without a learning rate, to create states to load
    into."""
    return _caller().f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"


def _place() -> Place:
    """Return the lines of the code that led to the current step of an optimizer."""
    frame: FrameType | None = _caller()
    lines = []
    while frame is not None:
        lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


def _caller() -> FrameType:
    """Return the frame that called the current step of an optimizer."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("torch.optim.", "torch.utils.", __name__)):
        frame = frame.f_back
    return frame


def _by_category(modules: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    sizes = dict.fromkeys(PARTS, 0)
    for parts in modules.values():
        for name, size in parts.items():
            sizes[name if name in sizes else "other"] += size
    return {name: size for name, size in sizes.items() if size}


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an out-of-memory error of the GPU caused `error`, even if a library raised its own error."""
    import torch

    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
