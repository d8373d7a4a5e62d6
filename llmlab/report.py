"""The answers: each verb returns a Report, and a Comparison puts reports side by side.

All sizes are integer bytes. A figure that is not known is None, never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .base.errors import SpecError
from .base.notes import Note, notes_from_json, notes_to_json
from .base.tables import Table, Tabular
from .base.terms import (
    INFERENCE_PHASES,
    OUTCOMES,
    PARTS,
    PHASES,
    SOURCES,
    TRAINING_PHASES,
    Outcome,
    Source,
    TimelinePoint,
)
from .base.units import MiB, show_bytes, show_seconds
from .specs.run import Inference, LoRA, Run, Training, run_from_dict

if TYPE_CHECKING:
    from .plots.canvas import Picture

# Of the printed tables: the label of a figure, the field it is in, how it is shown.
PEAKS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("peak allocated", "peak_allocated", show_bytes),
    ("peak reserved", "peak_reserved", show_bytes),
    ("process, with CUDA context", "process", show_bytes),
    ("memory needed", "needed", show_bytes),
    ("memory of the device", "capacity", show_bytes),
)
SPEED: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("FLOP per step", "flops", "{:.4g}".format),
    ("time per step", "step_seconds", show_seconds),
    ("tokens per second", "tokens_per_second", "{:,.0f}".format),
    ("MFU", "mfu", "{:.1%}".format),
)
COMPARED = ("gpu-memory-assumed", "not-simulated")  # codes of notes that a comparison prints too
SCHEMA = 1  # of to_json(); a reader of records refuses any other by name


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(Tabular):
    """What one run costs on one device.

    `peak_allocated` is the most bytes that tensors occupied at once, `peak_reserved` the most that the allocator had
    reserved for them, `process` what the driver shows: reserved + CUDA context. `phases` has the peak inside each
    phase; `parts` divides the peak and adds up to it (a record may know only some); `detail` divides a part further.
    `needed` is the memory of a larger device that a run which did not fit needs: reserved bytes (allocated ones where
    those are not known) and the known bytes outside the allocator. A prediction's other sizes are then those of the
    run with enough room, and `process` is None.
    `step_seconds` is one optimizer step (training) or the whole generation (inference). An estimate of training has the
    80 % interval of such predictions (`step_seconds_low`, `step_seconds_high`), and divides the seconds by
    what takes them (`time`) with the origin of each rate (`time_sources`). `time_hidden` has the seconds of
    communication that computation hides, and `layer_time` what one layer takes in a micro-batch.
    `notes` are sentences; the `code` of each names its kind: [note.code for note in report.notes].
    """

    source: Source
    model: str
    run: Run
    gpu: str | None = None
    outcome: Outcome = "unknown"
    where: str | None = None  # on "out of memory": the phase, the operator and its module if known, and by how much
    peak_at: str | None = None  # the operator and the module that made the peak; in an estimate the moment of the step
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    process: int | None = None
    needed: int | None = None  # on "out of memory"; a measurement cannot know it
    capacity: int | None = None  # bytes the device has
    phases: Mapping[str, int] = field(default_factory=dict)
    parts: Mapping[str, int] = field(default_factory=dict)
    detail: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    modules: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # the peak by module path, and by part
    flops: int | None = None
    step_seconds: float | None = None
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    time: Mapping[str, float] = field(default_factory=dict)
    time_sources: Mapping[str, str] = field(default_factory=dict)
    time_hidden: Mapping[str, float] = field(default_factory=dict)
    layer_time: Mapping[str, float] = field(default_factory=dict)
    tokens_per_second: float | None = None
    mfu: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    citation: str | None = None
    notes: tuple[Note, ...] = ()
    timeline: tuple[TimelinePoint, ...] = ()

    def __post_init__(self) -> None:
        for name, allowed in (("source", SOURCES), ("outcome", OUTCOMES)):
            if (given := getattr(self, name)) not in allowed:
                raise SpecError(f"{name}={given!r} is not one of {', '.join(allowed)}")
        if unknown := sorted(set(self.parts) - set(PARTS)):
            raise SpecError(f"parts {', '.join(unknown)} are not among {', '.join(PARTS)}")
        if self.source in ("measured", "published") and not (self.environment or self.citation):
            raise SpecError(f"a {self.source} report needs its provenance: environment=... or citation=...")

    # ---- as data

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values; fields that hold their default are left out."""
        data: dict[str, Any] = {"schema": SCHEMA}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "run":
                kind = "training" if isinstance(value, Training) else "inference"
                data["run"] = {"kind": kind, **value.to_dict()}
            elif value not in (None, {}, ()):
                data[f.name] = notes_to_json(value) if f.name == "notes" else value
        return data

    def to_json(self) -> str:
        """Return the report as JSON text; `Report.from_json` gives an equal report."""
        return json.dumps(self.to_dict(), indent=1, sort_keys=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Return the report that `to_dict` wrote. A wrong schema, an unknown or a missing field raises SpecError."""
        values = dict(data)
        if (schema := values.pop("schema", None)) != SCHEMA:
            raise SpecError(f"report has schema {schema!r}; this version of llmlab reads schema {SCHEMA}")
        if unknown := sorted(set(values) - {f.name for f in fields(cls)}):
            raise SpecError(f"report has unknown fields {', '.join(unknown)}")
        for name in ("source", "model", "run"):
            if name not in values:
                raise SpecError(f"report lacks {name!r}")
        run = dict(values["run"])
        values["run"] = run_from_dict(run.pop("kind", None), run)
        values["notes"] = notes_from_json(values.get("notes", ()))
        values["timeline"] = tuple((phase, sizes) for phase, sizes in values.get("timeline", ()))
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Return the report that `to_json` wrote; text that is not JSON raises SpecError."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"not JSON: {error}") from None
        if not isinstance(data, dict):
            raise SpecError(f"a report is a JSON object; this is a {type(data).__name__}")
        return cls.from_dict(data)

    # ---- as text, table and picture

    @property
    def title(self) -> str:
        where = f" on {self.gpu}" if self.gpu else ""
        return f"{self.model}{where}, {self.source}"

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the printed table: a label, and the value with its unit."""
        rows: list[tuple[str, str]] = []
        for part in PARTS:
            kinds = self.detail.get(part, {})
            if part in self.parts:
                rows.append((_label(part), show_bytes(self.parts[part])))
            elif kinds:  # freed before the peak, or allocated after it
                rows.append((f"({_label(part)}, not at the peak)", show_bytes(sum(kinds.values()))))
            rows += [(f"  {name}", show_bytes(size)) for name, size in kinds.items()]
            if kinds and (rest := self.parts.get(part, 0) - sum(kinds.values())) > 0:
                rows.append(("  the rest" if part == "other" else f"  other {_label(part)}", show_bytes(rest)))
        for label, name, shown in PEAKS:
            if (size := getattr(self, name)) is not None or name == "peak_allocated":
                at_least = ", at least" if name == "needed" and self.peak_reserved is None else ""
                rows.append((label + at_least, shown(size)))
        if self.needed and self.capacity and self.needed > self.capacity:
            rows.append(("  more than the device has", show_bytes(self.needed - self.capacity)))
        rows += [(f"peak during {PHASES[phase]}", show_bytes(size)) for phase, size in self.phases.items()]
        for label, name, shown in SPEED:
            if (value := getattr(self, name)) is not None:
                whole = isinstance(self.run, Inference)
                rows.append((label.replace("per step", "per generation") if whole else label, shown(value)))
            if name == "step_seconds" and self.step_seconds_low and self.step_seconds_high:
                between = f"{show_seconds(self.step_seconds_low)} to {show_seconds(self.step_seconds_high)}"
                rows.append(("  80 % interval", between))
        why = f" in {self.where}" if self.where else ""
        if self.source == "estimated" and self.gpu is None:
            why = " (no GPU was given)"
        rows.append(("outcome", self.outcome + why))
        return rows

    def module_table(self) -> str:
        """Return the peak by module as a printed table, all layers as one; a report without modules says so."""
        if not self.modules:
            return f"{self.title}: not divided by module; lab.simulate(model, run, gpu) does that"
        known = [*PARTS[:-1], *sorted({part for sizes in self.modules.values() for part in sizes} - set(PARTS[:-1]))]
        parts = [part for part in known if any(part in sizes for sizes in self.modules.values())]
        rows = [
            (path, *(f"{size / MiB:,.1f}" if size else "" for size in (*map(sizes.get, parts), sum(sizes.values()))))
            for path, sizes in self.modules.items()
        ]
        return str(Table(("", *parts, "all"), rows, f"{self.title}, the peak by module, MiB"))

    def __repr__(self) -> str:
        return f"<Report: {self.title}: peak {show_bytes(self.peak_allocated)}, {self.outcome}>"

    def _table(self) -> Table:
        lines: list[str] = list(self.notes)
        if self.environment:
            lines.append("; ".join(f"{key} {value}" for key, value in self.environment.items()))
        if self.citation:
            lines.append(f"Source: {self.citation}")
        return Table(("", ""), self.rows(), f"{self.title}: {summary(self.run)}", "\n".join(lines))

    def plot(self) -> Picture:
        """Return a picture of the parts: a stacked bar against the device's memory."""
        from .plots import plot_parts

        return plot_parts([self])

    def plot_time(self) -> Picture:
        """Return a picture of the time of one layer and of the step: what computes, and what is sent meanwhile.

        Raises SpecError for a report whose time is not divided.
        """
        from .plots import plot_time

        return plot_time(self)

    def plot_timeline(self) -> Picture:
        """Return a picture of the live bytes over the step, stacked by part, with the peak marked.

        Raises SpecError for a report without a timeline.
        """
        from .plots import plot_timeline

        return plot_timeline(self)


@dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """Reports side by side: of one run, compared with the first measured, else published, one; or of several runs."""

    reports: tuple[Report, ...]

    @property
    def truth(self) -> Report | None:
        """The report that the others are compared with: the first measured one, else the first published, else None."""
        known = [report for report in self.reports if report.peak_allocated is not None]
        return next((r for source in ("measured", "published") for r in known if r.source == source), None)

    @property
    def names(self) -> list[str]:
        """What tells each report's run from the others: the GPU, and the fields that differ and that somebody gave."""
        runs = [report.run for report in self.reports]
        given = dict.fromkeys(f.name for run in runs for f in fields(run) if f.name not in getattr(run, "unset", ()))
        differ = [name for name in given if len({repr(getattr(run, name, None)) for run in runs}) > 1]
        if len({_setting(report, "stack") for report in self.reports}) == len(set(map(repr, runs))) > 1:
            differ = ["stack"]  # each run has its own, and with it what it sets
        several = len({report.gpu for report in self.reports}) > 1
        names = [[report.gpu or "no GPU"] if several else [] for report in self.reports]
        return [", ".join([*gpu, *(_setting(report, name) for name in differ)])
                for gpu, report in zip(names, self.reports, strict=True)]  # fmt: skip

    def _between_runs(self) -> list[str]:
        """Return one sentence for each run after the first: by how much its memory differs, and in which parts."""
        known = [(name, report) for name, report in zip(self.names, self.reports, strict=True)
                 if report.peak_allocated is not None]  # fmt: skip
        (first_name, first), *rest = [pair for pair in known if pair[1].source == known[0][1].source]
        sentences = []
        for name, report in rest:
            change = (report.peak_allocated or 0) - (first.peak_allocated or 0)
            parts = {part: report.parts.get(part, 0) - first.parts.get(part, 0) for part in PARTS}
            most = sorted((part for part in PARTS if parts[part]), key=lambda part: -abs(parts[part]))[:3]
            by = ", ".join(f"{part} {_signed(parts[part])}" for part in most)
            time, least = report.step_seconds, first.step_seconds
            slower = f"; its step takes {time / least:.2f} times as long" if time and least else ""
            if not change:
                sentences.append(f"{name} needs as much memory as {first_name}{slower}.")
                continue
            difference = f"{show_bytes(abs(change))} {'less' if change < 0 else 'more'} than"
            sentences.append(f"{name} needs {difference} {first_name}: {by}{slower}.")
        return sentences

    def relative_errors(self) -> dict[str, float]:
        """Return, for each predicted report's source, (predicted − true) / true of peak_allocated."""
        true = self.truth.peak_allocated if self.truth else None
        if not true:
            return {}
        predictions = [report for report in self.reports if report.source in ("estimated", "simulated")]
        return {r.source: (r.peak_allocated - true) / true for r in predictions if r.peak_allocated is not None}

    def explain(self) -> list[str]:
        """Return one sentence per prediction: its error, and which part or phase makes most of the difference."""
        truth = self.truth
        if len(set(self.names)) > 1:
            return self._between_runs()
        if truth is None:
            return ["No measurement of this run is recorded, so the predictions cannot be compared with one."]
        sentences = []
        for source, error in self.relative_errors().items():
            report = next(r for r in self.reports if r.source == source)
            sentence = f"{source} is {error:+.1%} against {truth.source}"
            shared = [p for p in PARTS if p in report.parts and p in truth.parts]
            kind, mine, real = "part", report.parts, truth.parts
            if not shared:
                shared = [p for p in report.phases if p in truth.phases]
                kind, mine, real = "phase", report.phases, truth.phases
            if shared:
                worst = max(shared, key=lambda name: abs(mine[name] - real[name]))
                gap = mine[worst] - real[worst]
                sentence += f"; the largest gap is the {kind} {worst}: {_signed(gap)}"
            sentences.append(sentence + ".")
        return sentences

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return the header and the rows of the printed comparison."""
        header = ("", *(f"{r.source}, {name}" if name else r.source
                        for r, name in zip(self.reports, self.names, strict=True)))  # fmt: skip
        rows: list[tuple[str, ...]] = []

        def add(label: str, values: Sequence[Any], show: Callable[[Any], str]) -> None:
            if any(v is not None for v in values):
                rows.append((label, *("–" if v is None else show(v) for v in values)))

        for part in PARTS:
            add(_label(part), [r.parts.get(part) for r in self.reports], show_bytes)
        for label, name, shown in PEAKS[:-1]:  # the device is in the title
            add(label, [getattr(r, name) for r in self.reports], shown)
        phases = INFERENCE_PHASES if isinstance(self.reports[0].run, Inference) else TRAINING_PHASES
        for phase in phases:
            add(f"peak during {PHASES[phase]}", [r.phases.get(phase) for r in self.reports], show_bytes)
        for label, name, shown in SPEED[1:]:
            add(label, [getattr(r, name) for r in self.reports], shown)
        if errors := self.relative_errors():
            cells = (f"{errors[r.source]:+.1%}" if r.source in errors else "" for r in self.reports)
            rows.append(("error of peak", *cells))
        rows.append(("outcome", *(r.outcome for r in self.reports)))
        return header, rows

    @property
    def title(self) -> str:
        first = self.reports[0]
        several = len({report.gpu for report in self.reports}) > 1
        where = "several GPUs" if several else first.gpu or "this machine"
        return f"{first.model} on {where}" + ("" if any(self.names) else f": {summary(first.run)}")

    def _table(self) -> Table:
        lines = self.explain()
        lines += dict.fromkeys(note for r in self.reports for note in r.notes if note.code in COMPARED)
        lines += [
            f"{r.source}: {r.citation or '; '.join(f'{k} {v}' for k, v in r.environment.items())}"
            for r in self.reports
            if r.citation or r.environment
        ]
        return Table(*self.table(), self.title, "\n".join(lines))

    def __repr__(self) -> str:
        return f"<Comparison: {', '.join(map(repr, self.reports))}>"

    def to_json(self) -> str:
        """Return the reports, the errors and the explanation as JSON text."""
        data = {
            "reports": [r.to_dict() for r in self.reports],
            "relative_errors": self.relative_errors(),
            "explanation": self.explain(),
        }
        return json.dumps(data, indent=1)

    def plot(self) -> Picture:
        """Return a picture with one stacked bar per report, against the device's memory."""
        from .plots import plot_parts

        return plot_parts(list(self.reports))


def summary(run: Run) -> str:
    """Return what a run is, for people: dtypes, optimizer and tokens always, other fields where they are no default."""
    if isinstance(run, Inference):
        shown = ("weights", "kv", "batch", "prompt_len", "new_tokens")
        tokens = f"{run.prompt_len} prompt + {run.new_tokens} new tokens"
        words = [f"{run.weights} weights", f"{run.kv} KV cache", f"batch {run.batch}", tokens]
    else:
        shown = ("precision", "optimizer", "micro_batch", "seq_len", "lora")
        words = [run.precision, run.optimizer, f"{run.micro_batch} × {run.seq_len} tokens"]
        if run.lora:
            words.append(f"LoRA of rank {run.lora.rank} on {' and '.join(run.lora.targets)}")
    options = {f.name: getattr(run, f.name) for f in fields(run) if f.name not in shown}
    words += [name if value is True else f"{name}={value}" for name, value in options.items()
              if value != getattr(type(run), name)]  # fmt: skip
    return ", ".join(words)


def _label(part: str) -> str:
    return "KV cache" if part == "kv_cache" else part


def _setting(report: Report, field: str) -> str:
    """Return the value of one field of a report's run, as a heading names it."""
    value = getattr(report.run, field, None)
    if field == "stack":
        return str(getattr(value, "name", value))
    if value is True or value in (False, None):
        return f"{'' if value else 'no '}{field}"
    return f"{field} {value.rank if isinstance(value, LoRA) else value}"


def _signed(size: int) -> str:
    return f"{'+' if size >= 0 else '−'}{show_bytes(abs(size))}"
