"""Predict the training throughputs that others published, and say how far off that is, beside two rules of thumb.

    python benchmarks/throughput.py                              # prints
    python benchmarks/throughput.py --out benchmarks/results     # and writes throughput.md

The rows are those of throughputs.toml, in three groups: sources that constants come from, sources looked at while the
formulas were written, and sources that were not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
from provenance import provenance, titled_table, write

import llmlab as lab
from llmlab.base.errors import NotAvailable, SpecError, UnknownName
from llmlab.hardware.links import cluster

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROWS = Path(__file__).with_name("throughputs.toml")
GROUPS = ("in sample", "left out", "never seen")
REFUSED = (NotAvailable, SpecError, UnknownName)
RULE = 0.4  # of the data sheet's peak, for 6 FLOP per parameter and token


@dataclass(frozen=True)
class Row:
    """A published throughput: `measured` tokens/s per GPU of `run`, of a source in `group`."""

    id: str
    group: str
    citation: str
    model: str | dict[str, Any]
    label: str
    run: lab.Training
    card: str
    nodes: dict[str, Any]
    measured: float
    assumed: str = ""

    @property
    def shown(self) -> str:
        run, many = self.run, self.run.world_size
        degrees = " ".join(f"{d}{getattr(run, d)}" for d in ("dp", "tp", "pp", "cp") if getattr(run, d) > 1)
        adapters = "QLoRA" if run.quantization else "LoRA" if run.lora else ""
        what = (adapters, "FSDP" if run.zero == 3 else "", degrees, f"{run.micro_batch}×{run.seq_len}",
                run.checkpointing, "compiled" if run.compile else "")  # fmt: skip
        return f"{self.label}, {many} × {self.card}: {', '.join(filter(None, what))}"


@dataclass(frozen=True)
class Predicted:
    """Tokens/s per GPU: `rate` and its interval `low` to `high`, None where no time is known, which `why` says."""

    rate: float | None
    low: float | None = None
    high: float | None = None
    why: str = ""


def rows() -> list[Row]:
    """Return the published throughputs."""
    table = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    return [_row(source, entry, table["models"]) for source in table["source"] for entry in source["row"]]


def _row(source: dict[str, Any], entry: dict[str, Any], models: dict[str, Any]) -> Row:
    adapters = lab.LoRA(**entry["lora"]) if "lora" in entry else None
    run = lab.Training(**entry["run"], lora=adapters)
    rate = entry.get("tokens_per_second")
    if rate is None:
        rate = run.global_batch * run.seq_len / run.world_size / entry["seconds"]
    name = entry["model"]
    nodes = {"network": entry.get("network"), "adapters": entry.get("adapters")}
    if "gpus_per_node" in entry:
        nodes["gpus"] = entry["gpus_per_node"]
    citation = f"{source['citation']}, {source['date']}"
    label = name.rpartition("/")[2]
    return Row(entry["id"], source["group"], citation, models.get(name, name), label, run, entry["card"], nodes, rate,
               entry.get("assumed", ""))  # fmt: skip


def predict(row: Row) -> Predicted:
    """Return what `llmlab.estimate` says of a row."""
    try:
        nodes = cluster(row.card, **row.nodes) if row.run.world_size > 1 else None
        report = lab.estimate(row.model, row.run, row.card, nodes)
    except REFUSED as error:
        return Predicted(None, why=str(error))
    if report.step_seconds is None:
        return Predicted(None, why=next((note for note in report.notes if note.startswith("Time is")), "no time"))
    tokens = row.run.global_batch * row.run.seq_len / row.run.world_size
    low, high = (getattr(report, f"step_seconds_{end}", None) for end in ("high", "low"))
    return Predicted(tokens / report.step_seconds, low and tokens / low, high and tokens / high)


def rule(row: Row) -> float | None:
    """Return the tokens/s per GPU of 6ND FLOP at 40 % of the peak; None where the card has none in this dtype."""
    try:
        peak = lab.gpu(row.card).peak(row.run.compute_dtype)
    except REFUSED:
        return None
    return RULE * peak / (6 * lab.model(row.model).parameters) if peak else None


@dataclass(frozen=True)
class Errors:
    """Of some rows: how many have a prediction, its median and largest error, and the share inside their interval."""

    rows: int
    known: int
    median: float
    worst: float
    inside: float | None

    def __str__(self) -> str:
        held = "" if self.inside is None else f", inside the interval {self.inside:.0%}"
        return f"{self.known} of {self.rows} rows, median {self.median:.1%}, worst {self.worst:.0%}{held}"


def errors(found: list[tuple[Row, Predicted]]) -> Errors:
    """Return the errors of predictions, as shares of what was measured."""
    off = [abs(it.rate / row.measured - 1) for row, it in found if it.rate]
    held = [it.low <= row.measured <= it.high for row, it in found if it.low and it.high]
    inside = sum(held) / len(held) if held else None
    return Errors(len(found), len(off), median(off) if off else 0.0, max(off, default=0.0), inside)


def text(found: list[tuple[Row, Predicted]]) -> Iterator[str]:
    """Return the lines of the results file."""
    yield "# Training throughput that others published, predicted"
    yield ""
    yield from titled_table("By group", ["group", "llmlab", f"6ND at {RULE:.0%}"], [
        [group, str(errors([each for each in found if each[0].group == group])),
         str(errors([(row, Predicted(rule(row))) for row, _ in found if row.group == group]))] for group in GROUPS
    ])  # fmt: skip
    header = ["run", "measured", "predicted", "error", "10–90 %", "inside", "6ND"]
    for group in GROUPS:
        lines = [_line(row, it) for row, it in found if row.group == group]
        yield from titled_table(f"Tokens per second and GPU, {group}", header, lines)
    yield from ("Sources", "", *(f"* {citation}" for citation in dict.fromkeys(row.citation for row, _ in found)), "")
    yield from (f"* {row.id}: {row.assumed}" for row, _ in found if row.assumed)
    yield from ("", provenance("llmlab"))


def _line(row: Row, it: Predicted) -> list[str]:
    by_rule = rule(row)
    cells = [f"{row.id} {row.shown}", f"{row.measured:,.0f}"]
    if it.rate is None:
        cells += ["unknown", "", "", ""]
    else:
        span = f"{it.low:,.0f} to {it.high:,.0f}" if it.low and it.high else ""
        inside = ("yes" if it.low <= row.measured <= it.high else "no") if it.low and it.high else ""
        cells += [f"{it.rate:,.0f}", f"{it.rate / row.measured - 1:+.1%}", span, inside]
    return [*cells, f"{by_rule / row.measured - 1:+.0%}" if by_rule else ""]


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Write throughput.md there.")
def main(out: Path | None) -> None:
    """Predict every row, and say how far off that is."""
    found = [(row, predict(row)) for row in rows()]
    made = "\n".join(text(found))
    print(made)
    if out:
        write(out / "throughput.md", made)


if __name__ == "__main__":
    main()
