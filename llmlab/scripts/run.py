"""Run a script on a simulated card: `llmlab run`.

The script runs as it stands, in this process, as rank 0 of its ranks. It ends after so many optimizer steps, whatever
loop it has, and what it writes goes to a folder of its own. Where it runs out of memory, a second process runs it on a
card with enough, to say what it would have taken.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from ..base.errors import NotAvailable, ScriptFailed, SpecError, check_counts
from ..base.terms import PARTS, Outcome
from ..base.units import show_bytes
from ..hardware.gpu import GPU
from ..simulation.simulator import Simulator, simulator
from .command import Command
from .report import ScriptReport
from .written_files import WrittenFiles

ROOMY = 2**50  # bytes: of a card on which nothing runs out
OURS = (str(Path(__file__).parents[1]), "<frozen runpy>")
NO_NETWORK = "The time per step is without what the ranks send to each other."
CAUGHT = "The card ran out of memory on the way; the script caught the error and went on."


class _Enough(BaseException):
    """Ends a script after its last step. No Exception, so that a script which catches those does not go on."""


@dataclass(frozen=True)
class Conditions:
    """What `llmlab run` says of the machine: the card, the ranks, and when to end.

    `steps`: the optimizer steps after which the script ends, None for its own end. `world_size`: the ranks, None for
    what the script's launcher says. `limit`: the bytes that it may take of the card. `roomy` gives the card more memory
    than any script takes.

    Raises SpecError for numbers that cannot be, and UnknownName for a card that is not known.
    """

    gpu: GPU
    steps: int | None = None
    world_size: int | None = None
    gpus_per_node: int | None = None
    limit: int | None = None
    assume: float | None = None
    roomy: bool = False

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("steps", "world_size", "gpus_per_node")}
        check_counts(**{name: value for name, value in counts.items() if value is not None})
        if self.limit is not None and not 0 < self.limit <= self.gpu.memory:
            card = f"{self.gpu.name}'s {show_bytes(self.gpu.memory)}"
            raise SpecError(f"a limit of {show_bytes(self.limit)}; give more than 0 and at most {card}")

    def ranks(self, script: Command) -> int:
        """Return how many ranks `script` is one of."""
        return self.world_size or (script.nodes or 1) * (script.gpus_per_node or self.gpus_per_node or 1)


def run_script(
    script: Command,
    where: Conditions,
    folder: str,
    on_step: Callable[[int, Simulator], None] = lambda steps, sim: None,
    on_end: Callable[[Simulator], None] = lambda sim: None,
) -> ScriptReport:
    """Return what `script` takes; the files it writes go to `folder`.

    `on_step` is called after each optimizer step, `on_end` before the simulator closes. Raises NotAvailable where the
    script does what is not simulated, and ScriptFailed where it fails by itself.
    """
    ranks = where.ranks(script)
    card = replace(where.gpu, memory=ROOMY) if where.roomy else where.gpu
    with (
        mock.patch.dict(os.environ, script.environment),
        simulator(card, assume=where.assume, world_size=ranks if ranks > 1 else None) as sim,
        _Steps(sim, where.steps, on_step).counted() as steps,
    ):
        try:
            with WrittenFiles(folder).patched():
                _execute(script)
            ended = "ran to its end"
        except _Enough:
            ended = f"was ended after {steps.done} optimizer steps"
        except KeyboardInterrupt:
            ended = "was interrupted"
        except SystemExit as exit:
            if exit.code not in (None, 0):
                raise ScriptFailed(f"{script.target} ended itself: sys.exit({exit.code!r})") from None
            ended = "ran to its end"
        except Exception as error:
            if not _is_out_of_memory(error):
                raise error if isinstance(error, NotAvailable) else _failure(error) from None
            ended = "ran out of memory"
        on_end(sim)
        return _report(script, where, ranks, ended, sim, steps)


def _execute(script: Command) -> None:
    """Run the script as Python would."""
    first = os.getcwd() if script.module else os.path.dirname(os.path.abspath(script.target))
    with (
        mock.patch.object(sys, "argv", [script.target, *script.arguments]),
        mock.patch.object(sys, "path", [first, *sys.path]),
    ):
        if script.module:
            runpy.run_module(script.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script.target, run_name="__main__")


class _Steps:
    """Counts optimizer steps, and times what runs from one to the next."""

    def __init__(self, sim: Simulator, most: int | None, on_step: Callable[[int, Simulator], None]) -> None:
        self.sim, self.most, self.on_step = sim, most, on_step
        self.done = 0
        self.seconds: list[float | None] = []

    @contextmanager
    def counted(self) -> Iterator[_Steps]:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        handle = register_optimizer_step_post_hook(self._step)
        try:
            with self.sim.operators() as self._operators:
                yield self
        finally:
            handle.remove()

    def _step(self, *_: Any) -> None:
        self.done += 1
        self.seconds.append(self._operators.seconds)
        self._operators.clear()
        self.on_step(self.done, self.sim)
        if self.most is not None and self.done >= self.most:
            raise _Enough


def _report(
    script: Command, where: Conditions, ranks: int, ended: str, sim: Simulator, steps: _Steps
) -> ScriptReport:
    timeline, outside = sim.timeline, where.gpu.outside(ranks)
    process = sim.peak_reserved + (outside or 0)
    outcome: Outcome = "fits"
    if ended == "ran out of memory" or process > (where.limit or where.gpu.memory):
        outcome = "out of memory"
    elif ended == "was interrupted":
        outcome = "unknown"
    later = [seconds for seconds in steps.seconds[1:] or steps.seconds if seconds is not None]
    notes = [*sim.notes]
    if ranks > 1 and later:
        notes.append(NO_NETWORK)
    if sim.out_of_memory and outcome == "fits":
        notes.append(CAUGHT)
    return ScriptReport(
        command=" ".join([*(["-m"] if script.module else []), script.target, *script.arguments]),
        gpu=where.gpu.name,
        capacity=where.gpu.memory,
        world_size=ranks,
        steps=steps.done,
        ended=ended,
        outcome=outcome,
        where=sim.out_of_memory if outcome == "out of memory" else None,
        peak_allocated=timeline.peak,
        peak_reserved=sim.peak_reserved,
        process=process,
        limit=where.limit,
        step_seconds=median(later) if later else None,
        by_category=_by_category(timeline.modules),
        by_module=timeline.modules,
        notes=tuple(notes),
    )


def _by_category(modules: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    sizes = dict.fromkeys(PARTS, 0)
    for parts in modules.values():
        for name, size in parts.items():
            sizes[name if name in sizes else "other"] += size
    return {name: size for name, size in sizes.items() if size}


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the card's memory ended the script, also where a library raised its own error from that one."""
    import torch

    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _failure(error: Exception) -> ScriptFailed:
    """Return the script's own traceback, without the lines of what ran it."""
    told = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in told.stack if not frame.filename.startswith(OURS)]
    told.stack = traceback.StackSummary.from_list(frames)
    return ScriptFailed("".join(told.format()).rstrip())
