"""Predict the training throughputs that others published, and say how far off that is, beside what others predict.

    python benchmarks/throughput.py                              # prints
    python benchmarks/throughput.py --out benchmarks/results     # and writes throughput.md

The rows are those of throughputs.toml, in three groups: sources that constants come from, sources looked at while the
formulas were written, and sources that were not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
from provenance import provenance, titled_table, write
from throughput_peers import EFFICIENCY, RULE, llm_analysis, rule
from throughput_rows import Row, rows

import llmlab as lab
from llmlab.base.errors import NotAvailable, SpecError, UnknownName
from llmlab.hardware.links import cluster

GROUPS = ("in sample", "left out", "never seen")
REFUSED = (NotAvailable, SpecError, UnknownName)


@dataclass(frozen=True)
class Predicted:
    """Tokens/s per GPU: `rate` and its interval `low` to `high`, None where no time is known, which `why` says."""

    rate: float | None
    low: float | None = None
    high: float | None = None
    why: str = ""


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
    names = ["llmlab", f"6ND at {RULE:.0%} of the peak", f"llm-analysis 0.2.2 at {EFFICIENCY:.0%}"]
    lines = []
    for group in GROUPS:
        of = [row for row, _ in found if row.group == group]
        others = ([(row, Predicted(asked(row))) for row in of] for asked in (rule, llm_analysis))
        mine = [each for each in found if each[0].group == group]
        lines.append([group, *(str(errors(some)) for some in (mine, *others))])
    yield from titled_table("By group", ["group", *names], lines)
    header = ["run", "measured", "predicted", "error", "10–90 %", "inside", "6ND", "llm-analysis"]
    for group in GROUPS:
        lines = [_line(row, it) for row, it in found if row.group == group]
        yield from titled_table(f"Tokens per second and GPU, {group}", header, lines)
    yield from ("Sources:", "", *(f"- {citation}" for citation in dict.fromkeys(row.citation for row, _ in found)), "")
    assumed: dict[str, list[str]] = {}
    for row, _ in found:
        assumed.setdefault(row.assumed, []).append(row.id)
    yield from ("Assumed, where a source does not say it, or differs:", "")
    yield from (f"- {text}: {', '.join(ids)}" for text, ids in assumed.items() if text)
    yield from ("", provenance("llmlab", "llm-analysis"))


def _line(row: Row, it: Predicted) -> list[str]:
    others = [f"{it / row.measured - 1:+.0%}" if it else "" for it in (rule(row), llm_analysis(row))]
    cells = [f"{row.id} {row.shown}", f"{row.measured:,.0f}"]
    if it.rate is None:
        cells += ["unknown", "", "", ""]
    else:
        span = f"{it.low:,.0f} to {it.high:,.0f}" if it.low and it.high else ""
        inside = ("yes" if it.low <= row.measured <= it.high else "no") if it.low and it.high else ""
        cells += [f"{it.rate:,.0f}", f"{it.rate / row.measured - 1:+.1%}", span, inside]
    return [*cells, *others]


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
