"""A plan: its candidates, the best first, each with its reasons, or the nearest runs that fit if none of them does."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from ..base.notes import Note, notes_to_json
from ..base.tables import Table, Tabular
from ..base.units import show_bytes, show_seconds
from ..report import Report
from ..specs.model import ModelLike
from ..specs.model import model as find_model
from ..specs.run import Training, stack_of
from .files.write import Written, write_files
from .machines import Machines
from .search import Estimate

if TYPE_CHECKING:
    from ..plots.canvas import Picture

TIMES = {  # the parts of a step's time, in the words of the table
    "products": "matmuls", "elementwise": "elementwise operators", "launches": "kernel launches",
    "data": "data-parallel communication", "tensor": "tensor-parallel communication",
    "context": "context-parallel communication", "experts": "expert-parallel communication",
    "pipeline": "pipeline communication", "bubble": "pipeline bubble", "scale": "waiting for the slowest node",
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Candidate:
    """A run that fits, with its estimate and the simulation that confirmed it, or the reason why there is none.

    `lost` is the one reason why it is not the best; "" for the best.
    """

    run: Training
    machines: Machines
    report: Report
    simulation: Report | None
    unconfirmed: str = ""
    lost: str = ""

    def __repr__(self) -> str:
        return f"<Candidate: {self.run} on {self.machines}: {show_seconds(self.report.step_seconds)} per step>"

    @property
    def process(self) -> int | None:
        """Bytes of GPU memory that the simulated process uses; None without a simulation or a known CUDA context."""
        return self.simulation.process if self.simulation else None

    @property
    def usd_per_billion_tokens(self) -> float | None:
        """Rent in US dollars of all GPUs while they train on 10^9 tokens; None without a price or a time."""
        return rent(self.machines, self.report)

    @property
    def mark(self) -> tuple[str, str] | None:
        """The sign beside a memory that is not that of the simulated run, and what it means."""
        if not self.simulation:
            return "*", f"Estimated memory: {self.unconfirmed.removesuffix('.')}."
        return next((("†", str(note)) for note in self.simulation.notes if note.code == "simulated-eager"), None)

    def days(self, tokens: int) -> float | None:
        """Return the days that training on `tokens` tokens takes without interruptions; None without a time."""
        return days(self.report, tokens)

    def write(self, folder: str | os.PathLike[str], force: bool = False, model: ModelLike | None = None) -> Written:
        """Write the files that run it into `folder`; see `lab.write`. `model` is the planned model, needed if it is no
        preset."""
        machines = self.machines
        spec = find_model(self.report.model if model is None else model)
        return write_files(spec, self.run, machines.gpu.name, machines.nodes, machines.per_node, folder, force)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            "gpus": str(self.machines), "run": self.run.to_dict(), "report": self.report.to_dict(),
            "simulation": self.simulation.to_dict() if self.simulation else None, "unconfirmed": self.unconfirmed,
            "usd_per_billion_tokens": self.usd_per_billion_tokens, "lost": self.lost,
        }  # fmt: skip


def rent(machines: Machines, report: Report) -> float | None:
    """Return the rent in US dollars of the GPUs while they train on 10^9 tokens; None without a price or a time."""
    hourly, speed = machines.usd_per_hour, report.tokens_per_second
    return None if hourly is None or not speed else hourly / 3600 / speed * 1e9


def days(report: Report, tokens: int) -> float | None:
    """Return the days that training on `tokens` tokens takes; None without a time."""
    return tokens / report.tokens_per_second / 86_400 if report.tokens_per_second else None


@dataclass(frozen=True)
class Nearest:
    """A run that would fit, by its estimate and with room to spare, if one thing were different: `direction` names
    it."""

    direction: str
    what: str
    model: str
    machines: Machines
    run: Training
    report: Report
    tokens: int | None = None

    def __str__(self) -> str:
        hourly, billion = self.machines.usd_per_hour, rent(self.machines, self.report)
        price = [f"${hourly:,.2f} an hour"] if hourly else ["price unknown"]
        price += [f"${billion:,.0f} for 10^9 tokens"] if billion else []
        if self.tokens and (duration := days(self.report, self.tokens)):
            price.append(f"{show_seconds(duration * 86_400)} for all tokens")
        return f"{self.direction}: {self.what} ({', '.join(price)})."

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            "direction": self.direction, "what": self.what, "model": self.model, "gpus": str(self.machines),
            "run": self.run.to_dict(), "usd_per_hour": self.machines.usd_per_hour,
            "usd_per_billion_tokens": rent(self.machines, self.report),
        }  # fmt: skip


@dataclass(frozen=True, repr=False)
class Plan(Tabular, Sequence["Candidate"]):
    """A sequence of candidates, the best first; empty if nothing fits.

    `tried`: how many configurations were estimated and could fit. `cuts`: how many were left out, by reason. `refuted`:
    runs that fit by estimate, but not by simulation. `seen`: all runs whose memory and time are known. `interrupted`:
    Ctrl-C ended the search, so the candidates are the best so far.
    """

    model: str
    gpus: str
    goal: str
    global_batch: int
    candidates: tuple[Candidate, ...]
    tried: int
    cuts: Mapping[str, int]
    refuted: tuple[Training, ...] = ()
    tokens: int | None = None
    nearest: tuple[Nearest, ...] = ()
    problem: str = ""
    interrupted: bool = False
    notes: tuple[Note, ...] = ()
    seen: tuple[Estimate, ...] = field(default=(), compare=False)

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None

    @property
    def cut(self) -> int:
        """The number of configurations that were left out."""
        return sum(self.cuts.values())

    @overload
    def __getitem__(self, place: int) -> Candidate: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, place: int | slice) -> Candidate | Sequence[Candidate]:
        return self.candidates[place]

    def __len__(self) -> int:
        return len(self.candidates)

    def plot(self) -> Picture:
        """Return a picture of all estimated configurations, memory against time, with the best marked.

        Raises SpecError if nothing was estimated.
        """
        from ..plots.pareto import plot_pareto

        return plot_pareto(self)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            "model": self.model, "gpus": self.gpus, "goal": self.goal, "global_batch": self.global_batch,
            "tokens": self.tokens, "tried": self.tried, "cut": self.cut, "cuts": dict(self.cuts),
            "problem": self.problem, "nearest": [run.to_dict() for run in self.nearest],
            "notes": notes_to_json(self.notes),
            "interrupted": self.interrupted, "refuted": [run.to_dict() for run in self.refuted],
            "candidates": [candidate.to_dict() for candidate in self.candidates],
        }  # fmt: skip

    def _table(self) -> Table:
        return self.table()

    def table(self) -> Table:
        """Return the table that is printed: a row per candidate, or the nearest runs if there is none."""
        title = f"{self.model} on {self.gpus}, {self.global_batch} sequences per step, the {self.goal} first"
        if self.interrupted:
            title = f"Interrupted, the best so far: {title}"
        counts = [f"{self.tried:,} configurations were estimated"]
        counts[0] += f", of which simulation refuted {len(self.refuted)}." if self.refuted else "."
        if self.cut:
            counts.append(f"{self.cut:,} others were left out:")
            counts += [f"  {number:,}: {why}" for why, number in self.cuts.items() if number]
        if not self.candidates:
            lines = [self.problem, *map(str, self.nearest), *counts, *self.notes]
            return Table(("", ""), [], title, "\n".join(lines))
        rows = [self._row(candidate, rank) for rank, candidate in enumerate(self.candidates, 1)]
        any_gpu = self.goal == "cheapest"
        total = "" if any_gpu else f", of {show_bytes(self.candidates[0].report.capacity)}"
        price = "price of 10^9 tokens"
        header = ["configuration", f"memory{total}", "step time", "80 % interval", "MFU", price, "vs. the best"]
        if self.tokens:
            header.insert(-1, "time for all tokens")
        header.insert(0, "GPUs" if any_gpu else "")
        marks = dict.fromkeys(mark for candidate in self.candidates if (mark := candidate.mark))
        notes = [f"{sign} {why}" for sign, why in marks]
        return Table(header, rows, title, "\n".join([*counts, *notes, *self.notes]), words=(0, 1, len(header) - 1))

    def _row(self, c: Candidate, rank: int) -> list[str]:
        r, any_gpu = c.report, self.goal == "cheapest"
        size, capacity = c.process or (c.simulation.peak_reserved if c.simulation else r.peak_allocated), r.capacity
        price, star = c.usd_per_billion_tokens, c.mark[0] if c.mark else ""
        row = [
            words(c.run), f"{show_bytes(size)}{star}" + (f" of {show_bytes(capacity)}" if any_gpu else ""),
            show_seconds(r.step_seconds),
            between(show_seconds(r.step_seconds_low), show_seconds(r.step_seconds_high)) if r.step_seconds else "–",
            f"{r.mfu:.0%}" if r.mfu else "–", f"${price:,.0f}" if price else "–", c.lost or "the best",
        ]  # fmt: skip
        if self.tokens:
            duration = c.days(self.tokens)
            row.insert(-1, show_seconds(86_400 * duration) if duration else "–")
        return [str(c.machines) if any_gpu else str(rank), *row]

    def __repr__(self) -> str:
        return f"<Plan: {self.model} on {self.gpus}: {len(self)} candidates>"


def between(low: str, high: str) -> str:
    """Return both ends of an interval as text; a unit that they share appears once.

    >>> between("1.95 s", "2.68 s"), between("102 s", "2.25 min")
    ('1.95 to 2.68 s', '102 s to 2.25 min')
    """
    return f"{low.removesuffix(' ' + high.split()[-1])} to {high}"


def words(run: Training) -> str:
    """Return the fields of `run` that differ from the defaults, as text, without the fields of the question."""
    asked_fields = {"seq_len", "lora", "quantization", "stack"}
    fields = {name: value for name, value in run.differences().items() if name not in asked_fields}
    phrases = [name if value is True else f"{name} {value}" for name, value in fields.items()]
    return ", ".join([*phrases, *([repr(run.stack)] if stack_of(run).own_program else [])]) or "the defaults"


def lost(candidate: Candidate, best: Candidate, goal: str) -> str:
    """Return the one reason why `candidate` is not the best: its price, its memory, or its time, with the part of the
    time that grew most."""
    own_report, best_report = candidate.report, best.report
    extra_memory = (own_report.peak_allocated or 0) - (best_report.peak_allocated or 0)
    if goal == "smallest" and extra_memory > 0:
        return f"{show_bytes(extra_memory)} more memory"
    price, best_price = candidate.usd_per_billion_tokens, best.usd_per_billion_tokens
    if goal == "cheapest" and candidate.machines != best.machines and price and best_price:
        return f"{price / best_price - 1:.1%} more expensive"
    if not own_report.step_seconds:
        return "unknown time"
    if not best_report.step_seconds or own_report.step_seconds <= best_report.step_seconds * (1 + 1e-9):
        return f"{show_bytes(extra_memory)} more memory" if extra_memory > 0 else "equally good, but less simple"
    parts = {part: seconds - best_report.time.get(part, 0.0) for part, seconds in own_report.time.items()}
    part = max(parts, key=lambda name: parts[name]) if parts else "time"
    slower = own_report.step_seconds / best_report.step_seconds - 1
    return f"{slower:.1%} slower: {TIMES.get(part, part)} +{show_seconds(parts.get(part))}"
