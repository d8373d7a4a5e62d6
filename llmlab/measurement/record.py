"""`llmlab record`: measure on the GPU at hand what the chapters ask for, a budget of seconds at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..archive import store
from ..archive.lookup import gpu_of, recorded_gpu, records
from ..archive.plan import PLAN, Item
from ..base.errors import NotAvailable, SpecError, UnknownName
from ..base.units import show_bytes, show_seconds
from ..formulas.report import estimated
from ..hardware import pretend
from ..hardware.this_machine import Host, host
from ..report import Report
from ..specs.check import check, dtypes_of
from ..specs.model import model as find_model
from ..specs.run import Run, Training

if TYPE_CHECKING:
    from rich.console import Console

BUDGET = 540  # seconds: one command of under nine minutes
FIXED_PARTS = ("weights", "gradients", "optimizer")  # what a step holds whatever the batch


@dataclass(frozen=True)
class Recording:
    """What one `record` did. `left` is how many measurements wait for the next call; 0 is done."""

    path: Path
    measured: tuple[Report, ...]
    known: int
    skipped: tuple[tuple[Item, str], ...]
    left: int

    def __str__(self) -> str:
        done = f"{len(self.measured)} measured, {self.known} known already, {len(self.skipped)} skipped"
        rest = f", {self.left} left: run it again" if self.left else ""
        where = f"; written to {self.path}" if self.measured else ""
        return f"{done}{rest}{where}"


def record(
    budget_seconds: float = BUDGET,
    only: str | Iterable[str] | None = None,
    out: Path | str | None = None,
    *,
    allow_cpu: bool = False,
    plan: Sequence[Item] = PLAN,
    console: Console | None = None,
) -> Recording:
    """Measure what `plan` asks for and the records lack, write each result at once, and stop within the budget.

    `only` names the chapters to measure for. `out` is the folder of records; None is the package's in a checkout, so
    that the file can be contributed, else the user's. What this GPU cannot run is skipped, with the reason; running out
    of memory is a result. A measurement with the same model, run, GPU and torch is not repeated, so calling again goes
    on. One that is expected to pass the budget, judged by those before it, is left for the next call.

    Raises NotAvailable without a CUDA GPU (unless `allow_cpu`, which needs `out`) or with LLMLAB_AS set, SpecError for
    a budget that is not positive, UnknownName for a chapter that asks for no measurement.
    """
    if not budget_seconds > 0:
        raise SpecError(f"budget_seconds={budget_seconds!r} is not above 0; give seconds, such as {BUDGET}")
    items = _wanted(plan, only)
    here = _this_machine(allow_cpu, out)
    gpu = gpu_of(here)
    folder = Path(out) if out is not None else store.output_folder()
    path = folder / store.slug(gpu) / "measured.json"
    if console is None:
        from rich.console import Console

        console = Console(soft_wrap=True, highlight=False)
    console.print(f"{gpu}, torch {here.versions.get('torch')}, into {path}")

    budget = _Budget(budget_seconds)
    measured: list[Report] = []
    skipped: list[tuple[Item, str]] = []
    known = left = 0
    for number, item in enumerate(items, 1):
        head = f"[{number}/{len(items)}] {item.model} {item.run!r}"
        if reason := cannot(item, here):
            skipped.append((item, reason))
            console.print(f"{head}: skipped, {reason}", markup=False)
        elif _known(item, gpu, here, folder):
            known += 1
        elif not budget.allows(item):
            left += 1
        else:
            try:
                report = budget.timed(item, partial(_measure, item.model, item.run))
            except (SpecError, NotAvailable, UnknownName) as error:
                skipped.append((item, str(error)))
                console.print(f"{head}: skipped, {error}", markup=False)
                continue
            _write(path, report)
            measured.append(report)
            console.print(f"{head}: {_result(report)}", markup=False)
    done = Recording(path, tuple(measured), known, tuple(skipped), left)
    console.print(str(done), markup=False)
    return done


def cannot(item: Item, here: Host) -> str | None:
    """Return why this machine cannot run `item`, or None: a dtype it lacks, or states that alone exceed its memory."""
    try:
        spec = find_model(item.model)
        check(spec, item.run, here.gpu)
    except (SpecError, UnknownName) as error:
        return str(error)
    if here.device == "cuda" and not here.supports_bf16 and "bf16" in dtypes_of(item.run):
        return f"{here.name} has no bf16 units"  # a GPU that is not in the table: check() could not know
    parts = estimated(spec, item.run, here.gpu or "cpu").parts
    least = sum(parts.get(part, 0) for part in FIXED_PARTS)
    if here.memory is not None and least > here.memory:
        return f"{', '.join(FIXED_PARTS)} alone take {show_bytes(least)}; {here.name} has {show_bytes(here.memory)}"
    return None


class _Budget:
    """Seconds to spend, and a guess of what the next measurement takes from what the others took."""

    def __init__(self, seconds: float) -> None:
        self.started = time.monotonic()
        self.seconds = seconds
        self.took: list[tuple[int, float]] = []  # work, seconds

    def timed(self, item: Item, measurement: Callable[[], Report]) -> Report:
        before = time.monotonic()
        try:
            return measurement()
        finally:
            self.took.append((_work(item), time.monotonic() - before))

    def allows(self, item: Item) -> bool:
        # Time grows at most with the work, and never falls below what setting up took: each measurement so far bounds
        # the next, and the tightest bound is the guess. Twice that, because a step in fp32 or with eager attention
        # takes longer for the same work. The first has nothing to go by.
        spent = time.monotonic() - self.started
        bounds = [seconds * max(1, _work(item) / work) for work, seconds in self.took]
        return spent + 2 * min(bounds, default=0) < self.seconds


def _work(item: Item) -> int:
    run = item.run
    tokens = run.tokens if isinstance(run, Training) else run.batch * run.seq_len
    return find_model(item.model).parameters * tokens


def _wanted(plan: Sequence[Item], only: str | Iterable[str] | None) -> list[Item]:
    if only is None:
        return list(plan)
    chapters = {only} if isinstance(only, str) else set(only)
    asking = list(dict.fromkeys(item.chapter for item in plan))
    if missing := sorted(chapters - set(asking)):
        raise UnknownName(f"chapters {', '.join(missing)} need no measurements; these do: {', '.join(asking)}")
    return [item for item in plan if item.chapter in chapters]


def _this_machine(allow_cpu: bool, out: Path | str | None) -> Host:
    if pretend.pretended():
        raise NotAvailable(
            f"{pretend.VARIABLE}={os.environ[pretend.VARIABLE]} is set: records are of real GPUs; unset it to record"
        )
    here = host()
    if "torch" not in here.versions:
        raise NotAvailable("recording needs torch, which is not installed: pip install 'llmlab[torch]'")
    if here.device == "cuda":
        return here
    if not allow_cpu:
        raise NotAvailable(
            "recording needs a CUDA GPU, and there is none here; run it on a machine with one (Colab has a T4), or let "
            "llmlab.measure show what a step takes on this machine"
        )
    if out is None:
        raise NotAvailable("the book has no records of CPUs; give a folder for yours (out=, --out DIR)")
    return here


def _known(item: Item, gpu: str, here: Host, folder: Path) -> bool:
    known = records(item.model, item.run, source="measured", folder=folder)
    torch = here.versions.get("torch")
    return any(recorded_gpu(report) == gpu and report.environment.get("torch") == torch for report in known)


def _measure(model: str, run: Run) -> Report:
    from .report import measured  # torch comes with it

    return measured(model, run)


def _write(path: Path, report: Report) -> None:
    # What was alive at each moment is kilobytes per record; the phases and the parts at the peak stay.
    data = {key: value for key, value in report.to_dict().items() if key != "timeline"}
    store.merge(path, "reports", [data], key=_key)


def _key(data: dict[str, Any]) -> tuple:
    report = Report.from_dict(data)
    return (report.model, report.run, report.gpu, report.environment.get("torch"))


def _result(report: Report) -> str:
    if report.outcome == "out of memory":
        return f"out of memory in {report.where}" if report.where else "out of memory"
    return f"{show_bytes(report.peak_allocated)} allocated, {show_seconds(report.step_seconds)}"
