"""The best configuration for a model, some GPUs and a batch: searched by estimate, confirmed by simulation.

Of each layout (precision, optimizer, kernels, checkpointing, ZeRO stage, tp, pp) micro-batches are tried from the
smallest on: memory grows with them, so the first that cannot fit ends the layout. A layout that does not fit with full
checkpointing is not tried without it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing import get_context
from typing import Any, overload

from ..base.errors import NotAvailable, SpecError
from ..base.tables import Table, Tabular
from ..base.units import show_bytes, show_seconds
from ..formulas.report import estimated
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu
from ..hardware.links import Cluster, cluster
from ..report import Report
from ..specs.model import ModelLike, ModelSpec
from ..specs.model import model as find_model
from ..specs.run import LoRA, Training
from .files.write import Written, write_files

METHODS = ("full", "lora", "qlora")
GOALS = ("fastest", "smallest")
CONFIRMED = 3  # candidates that a plan shows at least, each simulated where it can be
SHOWN = 10
# What is varied only where `allow` lists it: it changes the model that comes out, or needs a package.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "optimizer": ("adamw", "adamw-8bit", "adafactor"), "precision": ("bf16",), "kernels": ("liger", None),
}  # fmt: skip


@dataclass(frozen=True)
class Machines:
    """GPUs of one kind: `nodes` nodes with `per_node` of them each."""

    card: GPU
    nodes: int
    per_node: int

    @property
    def total(self) -> int:
        return self.nodes * self.per_node

    @property
    def cluster(self) -> Cluster | None:
        return cluster(self.card, gpus=self.per_node) if self.total > 1 else None

    def __str__(self) -> str:
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.per_node}x{self.card.name}"


def machines(text: str) -> Machines:
    """Return the GPUs that "T4", "8xH100-80GB" or "2x8xA100-80GB" (nodes, GPUs per node) name; over 8 in eights."""
    counts = re.match(r"(?:(\d+)x)?(?:(\d+)x)?(?=[A-Za-z])", text)
    if not counts:
        raise SpecError(f"gpus={text!r} is no card with its number; give 'T4', '8xH100-80GB' or '2x8xA100-80GB'")
    numbers = [int(number) for number in counts.groups() if number]
    card = find_gpu(text[counts.end() :])
    if any(number < 1 for number in numbers):
        raise SpecError(f"gpus={text!r}: give at least one GPU")
    if len(numbers) == 2:
        return Machines(card, *numbers)
    total = numbers[0] if numbers else 1
    if total > 8 and total % 8:
        raise SpecError(f"gpus={text!r}: nodes have 8 GPUs; give a multiple of 8, or nodes and GPUs: '3x4x{card.name}'")
    return Machines(card, total // 8, 8) if total > 8 else Machines(card, 1, total)


@dataclass(frozen=True)
class Candidate:
    """A run that fits: its estimate, and the simulation that confirmed it, or why there is none.

    `lost`: why it is not the best, in one reason; "" of the best itself.
    """

    run: Training
    machines: Machines
    report: Report
    simulation: Report | None
    unconfirmed: str = ""
    lost: str = ""

    @property
    def process(self) -> int | None:
        """Bytes of the card that the simulated process takes; None without a simulation, or a known context."""
        return self.simulation.process if self.simulation else None

    @property
    def usd_per_billion_tokens(self) -> float | None:
        """Rent of all GPUs while 10^9 tokens are trained; None for a card without a price."""
        hourly, speed = self.machines.card.usd_per_hour, self.report.tokens_per_second
        return None if hourly is None or not speed else hourly * self.machines.total / 3600 / speed * 1e9

    def days(self, tokens: int) -> float | None:
        """Days that training on `tokens` takes without an interruption."""
        speed = self.report.tokens_per_second
        return tokens / speed / 86_400 if speed else None

    def write(self, folder: str | os.PathLike[str], force: bool = False, model: ModelLike | None = None) -> Written:
        """Write the files that run it into `folder`; see `lab.write`. `model` is the one planned, where no preset."""
        where = self.machines
        spec = find_model(self.report.model if model is None else model)
        return write_files(spec, self.run, where.card.name, where.nodes, where.per_node, folder, force)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            "gpus": str(self.machines), "run": self.run.to_dict(), "report": self.report.to_dict(),
            "simulation": self.simulation.to_dict() if self.simulation else None, "unconfirmed": self.unconfirmed,
            "usd_per_billion_tokens": self.usd_per_billion_tokens, "lost": self.lost,
        }  # fmt: skip


@dataclass(frozen=True, repr=False)
class Plan(Tabular, Sequence["Candidate"]):
    """Candidates, the best first; empty where nothing fits. `tried`: configurations whose estimate was computed;
    `cut`: those that cannot fit, as a smaller one did not; `refuted`: what an estimate held for possible and its
    simulation did not."""

    model: str
    gpus: str
    goal: str
    global_batch: int
    candidates: tuple[Candidate, ...]
    tried: int
    cut: int
    refuted: tuple[Training, ...] = ()
    tokens: int | None = None
    nearest: tuple[str, ...] = field(default=())

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None

    @overload
    def __getitem__(self, place: int) -> Candidate: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, place: int | slice) -> Candidate | Sequence[Candidate]:
        return self.candidates[place]

    def __len__(self) -> int:
        return len(self.candidates)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            "model": self.model, "gpus": self.gpus, "goal": self.goal, "global_batch": self.global_batch,
            "tokens": self.tokens, "tried": self.tried, "cut": self.cut, "nearest": list(self.nearest),
            "refuted": [run.to_dict() for run in self.refuted],
            "candidates": [candidate.to_dict() for candidate in self.candidates],
        }  # fmt: skip

    def _table(self) -> Table:
        title = f"{self.model} on {self.gpus}, {self.global_batch} sequences per update, the {self.goal} first"
        counts = f"{self.tried:,} configurations were estimated, {self.cut:,} cut unseen, {len(self.refuted)} refuted."
        if not self.candidates:
            lines = ["Nothing fits.", *self.nearest, counts]
            return Table(("", ""), [], title, "\n".join(lines))
        rows = []
        for c in self.candidates:
            r = c.report
            fits = f"{show_bytes(c.process or _reserved(c))} of {show_bytes(r.capacity)}"
            rows.append((
                _words(c.run), fits + ("" if c.simulation else " (estimate)"), show_seconds(r.step_seconds),
                f"{show_seconds(r.step_seconds_low)} to {show_seconds(r.step_seconds_high)}",
                f"{r.mfu:.0%}" if r.mfu else "–",
                f"${c.usd_per_billion_tokens:,.0f}" if c.usd_per_billion_tokens else "–",
                *((show_seconds(86_400 * (c.days(self.tokens) or 0)),) if self.tokens else ()), c.lost or "the best",
            ))  # fmt: skip
        header = ("configuration", "memory", "update", "8 in 10", "MFU", "10^9 tokens")
        header += (*(("all tokens",) if self.tokens else ()), "why not")
        footer = counts + " " + "; ".join(dict.fromkeys(c.unconfirmed for c in self.candidates if c.unconfirmed))
        return Table(header, rows, title, footer, (0, len(header) - 1))

    def __repr__(self) -> str:
        return f"<Plan: {self.model} on {self.gpus}: {len(self)} candidates>"


def _reserved(candidate: Candidate) -> int | None:
    if candidate.simulation is not None:
        return candidate.simulation.peak_reserved
    return candidate.report.peak_allocated


def _words(run: Training) -> str:
    """Return what a reader sets: the fields that are not the default, those of the question left out."""
    told = {"seq_len", "lora", "quantization"}
    fields = {name: value for name, value in run.to_dict().items() if name not in told}
    default = Training().to_dict()
    return ", ".join(f"{name} {value}" for name, value in fields.items() if value != default[name]) or "as it is"


# ---- what is tried


def layouts(
    spec: ModelSpec, where: Machines, method: str, allow: Sequence[str], fixed: Mapping[str, Any]
) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield, for each layout, what may be kept in memory: the fields of a Training in growing order of memory."""
    half = "bf16" if where.card.supports_bf16 else "fp16"
    precisions: tuple[str, ...] = (f"autocast-{half}", f"mixed-{half}") if method == "full" else (half,)
    if method == "full" and "precision" in allow:
        precisions += ALLOWED["precision"] if half == "bf16" else ()
    optimizers = ALLOWED["optimizer"] if "optimizer" in allow else ("adamw",)
    base: dict[str, Any] = {} if method == "full" else {"lora": LoRA()}
    if method == "qlora":
        base["quantization"] = "nf4"

    def options(name: str, values: Sequence[Any]) -> Sequence[Any]:
        return [fixed[name]] if name in fixed else values

    sides = [side for side in (1, 2, 4, 8, 16, 32, 64) if side <= where.total]
    attention = "eager" if spec.family == "gemma2" else "sdpa"
    for precision, optimizer, tp, pp in product(
        options("precision", precisions), options("optimizer", optimizers),
        options("tp", [side for side in sides if side <= where.per_node]), options("pp", sides),
    ):  # fmt: skip
        if where.total % (tp * pp) or ("dp" in fixed and fixed["dp"] * tp * pp != where.total):
            continue
        dp = where.total // (tp * pp)
        for zero in options("zero", (3, 2, 1, 0) if dp > 1 else (0,)):
            shape = {
                **base, "precision": precision, "optimizer": optimizer, "tp": tp, "pp": pp, "dp": dp, "zero": zero,
                "sequence_parallel": fixed.get("sequence_parallel", tp > 1), "attention": attention, **fixed,
            }  # fmt: skip
            fused = ALLOWED["kernels"] if "kernels" in allow else (None,)
            kept = product(options("checkpointing", ("full", "selective", None)), options("kernels", fused))
            yield ({**shape, "checkpointing": checkpointing, "kernels": kernels} for checkpointing, kernels in kept)


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


class Search:
    """The estimates of one question; counts what it computes and what it cuts."""

    def __init__(self, spec: ModelSpec, where: Machines, global_batch: int) -> None:
        self.spec, self.where, self.global_batch = spec, where, global_batch
        self.tried = self.cut = 0
        self.found: list[Report] = []

    def layout(self, kept: Iterator[dict[str, Any]]) -> None:
        """Estimate a layout, what keeps least first; if that does not fit with one sequence, nothing of it does."""
        for number, fields in enumerate(kept):
            micro_batches = self._micro_batches(fields)
            fitted = self._micro(fields, micro_batches)
            if number == 0 and not fitted:
                self.cut += 5 * len(micro_batches)
                return

    def _micro_batches(self, fields: Mapping[str, Any]) -> list[int]:
        if self.global_batch % fields["dp"]:
            return []
        per_rank = self.global_batch // fields["dp"]
        return [fields["micro_batch"]] if "micro_batch" in fields else divisors(per_rank)

    def _micro(self, fields: Mapping[str, Any], micro_batches: Sequence[int]) -> bool:
        for place, micro_batch in enumerate(micro_batches):
            per_rank = self.global_batch // fields["dp"]
            if per_rank % micro_batch:
                continue
            try:
                run = Training(**{**fields, "micro_batch": micro_batch, "accumulation": per_rank // micro_batch})
                report = estimated(self.spec, run, self.where.card, self.where.cluster)
            except SpecError:  # this model or this engine does not have it
                return False
            self.tried += 1
            if report.outcome == "out of memory":
                self.cut += len(micro_batches) - place - 1
                return place > 0
            self.found.append(report)
        return True


def plan(
    model: ModelLike,
    gpus: str,
    global_batch: int,
    method: str = "full",
    allow: Sequence[str] = (),
    tokens: int | None = None,
    goal: str = "fastest",
    fixed: Mapping[str, Any] | None = None,
    within: float | None = None,
    executor: Executor | None = None,
) -> Plan:
    """Return the plan of `lab.plan`, which says what the arguments are."""
    fixed = dict(fixed or {})
    _check(global_batch, method, allow, tokens, goal, fixed, within)
    spec, where = find_model(model), machines(gpus)
    search = Search(spec, where, global_batch)
    for kept in layouts(spec, where, method, allow, fixed):
        search.layout(kept)
    reports = sorted(search.found, key=lambda report: _rank(report, goal))
    if within is not None and tokens:
        reports = [r for r in reports if r.tokens_per_second and tokens / r.tokens_per_second / 86_400 <= within]
    candidates, refuted = confirmed(spec, where, _distinct(reports), executor)
    nearest = () if candidates else _nearest(spec, where, global_batch, method, fixed)
    return Plan(
        spec.name, str(where), goal, global_batch, candidates, search.tried, search.cut, refuted, tokens, nearest
    )


def _check(
    global_batch: int,
    method: str,
    allow: Sequence[str],
    tokens: int | None,
    goal: str,
    fixed: Mapping[str, Any],
    within: float | None,
) -> None:
    if method not in METHODS:
        raise SpecError(f"method={method!r} is not one of {', '.join(METHODS)}")
    if goal not in GOALS:
        raise SpecError(f"goal={goal!r} is not one of {', '.join(GOALS)}")
    if unknown := sorted(set(allow) - set(ALLOWED)):
        raise SpecError(f"allow={unknown[0]!r} is not one of {', '.join(ALLOWED)}")
    for name, value in (("global_batch", global_batch), ("tokens", tokens), ("within", within)):
        if value is not None and value <= 0:
            raise SpecError(f"{name}={value!r} is too small; give more than 0")
    if within is not None and tokens is None:
        raise SpecError(f"within={within!r} days needs tokens=: how many are to be trained on")
    names = Training().to_dict()
    if unknown := sorted(set(fixed) - set(names)):
        raise SpecError(f"fixed={unknown[0]!r} is no field of Training; it has {', '.join(names)}")
    if "lora" in fixed and method == "full" and fixed["lora"]:
        raise SpecError("fixed lora and method='full' contradict each other; give method='lora'")
    if both := sorted(set(fixed) & set(allow)):
        raise SpecError(f"{both[0]} is fixed to {fixed[both[0]]!r} and allowed to vary; drop one of the two")


def _rank(report: Report, goal: str) -> tuple[float, ...]:
    seconds = report.step_seconds or float("inf")
    if goal == "smallest":
        return (report.peak_allocated or 0, seconds)
    return (seconds, report.peak_allocated or 0)


def _distinct(reports: Sequence[Report]) -> Iterator[Report]:
    """Yield of each layout two micro-batches, the first of `reports`: the second stands in where that is refuted."""
    seen: dict[str, int] = {}
    for report in reports:
        assert isinstance(report.run, Training)
        layout = repr(replace(report.run, micro_batch=1, accumulation=1))
        seen[layout] = seen.get(layout, 0) + 1
        if seen[layout] <= 2:
            yield report


# ---- confirmed by simulation


def _simulated(model: dict[str, Any], run: Training, card: str) -> Report | str:
    """Simulate in a process of its own; a sentence where that cannot be done."""
    from ..simulation.report import simulated

    try:
        report = simulated(model, run, card)
    except NotAvailable as error:
        return str(error)
    return replace(report, timeline=(), modules={})


def confirmed(
    spec: ModelSpec, where: Machines, reports: Iterator[Report], executor: Executor | None
) -> tuple[tuple[Candidate, ...], tuple[Training, ...]]:
    """Return the first candidates that their simulation does not refute, and the runs that it did refute.

    Where no simulation is to be had, an estimate that is sure to fit stands for itself.
    """
    own = executor is None
    # A new process each: a forked one has threads of torch that do not exist.
    pool = executor or ProcessPoolExecutor(2, mp_context=get_context("spawn"))
    candidates: list[Candidate] = []
    refuted: list[Training] = []
    try:
        while len(candidates) < SHOWN and (batch := [r for _, r in zip(range(SHOWN), reports, strict=False)]):
            asked = [pool.submit(_simulated, spec.config, report.run, where.card.name) for report in batch]  # type: ignore[arg-type]
            for report, answer in zip(batch, (future.result() for future in asked), strict=True):
                run = report.run
                assert isinstance(run, Training)
                shown = {replace(each.run, micro_batch=1, accumulation=1) for each in candidates}
                if replace(run, micro_batch=1, accumulation=1) in shown:
                    continue
                if isinstance(answer, str):
                    if report.outcome == "fits":
                        candidates.append(Candidate(run, where, report, None, answer))
                elif answer.outcome == "out of memory":
                    refuted.append(run)
                else:
                    candidates.append(Candidate(run, where, report, answer))
            if len(candidates) >= CONFIRMED:
                break
    finally:
        if own:
            pool.shutdown(cancel_futures=True)
    kept = candidates[:SHOWN]
    return (*kept[:1], *(replace(each, lost=lost(each, kept[0])) for each in kept[1:])), tuple(refuted)


def lost(candidate: Candidate, best: Candidate) -> str:
    """Return the one reason why `candidate` is not the best: what of its time grew most, or its memory."""
    mine, its = candidate.report, best.report
    if not mine.step_seconds or not its.step_seconds or mine.step_seconds <= its.step_seconds:
        more = (mine.peak_allocated or 0) - (its.peak_allocated or 0)
        return f"{show_bytes(more)} more memory" if more > 0 else "as good: a simpler one stands above"
    parts = {part: seconds - its.time.get(part, 0.0) for part, seconds in mine.time.items()}
    part = max(parts, key=lambda name: parts[name]) if parts else "time"
    slower = mine.step_seconds / its.step_seconds - 1
    return f"{slower:.1%} slower: {part} +{show_seconds(parts.get(part))}"


# ---- nothing fits


def _nearest(
    spec: ModelSpec, where: Machines, global_batch: int, method: str, fixed: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return what would fit in each direction: more GPUs, a larger card, shorter sequences, another method."""
    from ..hardware.gpu import gpus as cards

    def fits(there: Machines, method: str = method, **more: Any) -> bool:
        batch = max(global_batch, there.total)
        search = Search(spec, there, batch - batch % there.total)
        for kept in layouts(spec, there, method, (), {**fixed, **more}):
            search.layout(kept)
            if any(report.outcome == "fits" for report in search.found):
                return True
        return False

    lines = []
    for total in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        there = Machines(where.card, -(-total // 8), min(total, 8))
        if total > where.total and fits(there):
            lines.append(f"More GPUs: {there}.")
            break
    larger = sorted((card for card in cards() if card.memory > where.card.memory), key=lambda card: card.memory)
    for card in larger:
        if card.vendor == "NVIDIA" and fits(Machines(card, where.nodes, where.per_node)):
            lines.append(f"A larger card: {Machines(card, where.nodes, where.per_node)}.")
            break
    seq_len = int(fixed.get("seq_len", Training.seq_len))
    while (seq_len := seq_len // 2) >= 128:
        if fits(where, seq_len=seq_len):
            lines.append(f"Shorter sequences: {seq_len} tokens.")
            break
    for other in METHODS[METHODS.index(method) + 1 :]:
        if fits(where, method=other):
            lines.append(f"Another method: {other}.")
            break
    return tuple(lines)
