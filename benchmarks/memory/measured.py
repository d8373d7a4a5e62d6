"""What `llmlab record` measured on GPUs, beside what simulate and estimate say of the same steps.

    python -m benchmarks.memory.measured                           # prints
    python -m benchmarks.memory.measured --out benchmarks/results  # and writes measured.md

Memory was predicted by formulas and by a simulator that nobody had held to a card of ours before: the records are the
first. They are of the torch that the machine had; the simulation is of the one that is installed here. Speed is another
matter (throughput.py): what was predicted of it before anybody measured is in predictions.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
from rich.console import Console
from rich.progress import track

import llmlab as lab
from benchmarks.provenance import provenance, titled_table, write
from llmlab.archive import records
from llmlab.archive.store import PACKAGE
from llmlab.base.errors import NotAvailable
from llmlab.base.units import GiB

PEAKS = ("peak_allocated", "peak_reserved")
HEADER = ["step", "measured, GiB", "simulated", "estimated", "reserved, GiB", "simulated"]


@dataclass(frozen=True)
class Row:
    """A step that was measured, and the errors of what is said of it, as shares; None where nothing is."""

    report: lab.Report
    simulated: float | None
    estimated: float
    reserved: float | None

    @property
    def cells(self) -> list[str]:
        run = repr(self.report.run).partition("(")[2].removesuffix(")")
        sizes = (getattr(self.report, peak) for peak in PEAKS)
        allocated, reserved = (f"{size / GiB:.2f}" if size else "–" for size in sizes)
        shown = [_percent(each) for each in (self.simulated, self.estimated, self.reserved)]
        return [f"{self.report.model.rpartition('/')[2]}: {run}", allocated, *shown[:2], reserved, shown[2]]


def measured(report: lab.Report) -> Row:
    """Return the errors of simulate and estimate on the step of a record."""
    off = _off(lab.estimate(report.model, report.run, report.gpu), report)
    assert off is not None
    try:
        simulated = lab.simulate(report.model, report.run, report.gpu)
    except NotAvailable:  # Liger's kernels
        return Row(report, None, off, None)
    return Row(report, _off(simulated, report), off, _off(simulated, report, "peak_reserved"))


def _off(said: lab.Report, measured: lab.Report, peak: str = "peak_allocated") -> float | None:
    size = getattr(measured, peak)
    return getattr(said, peak) / size - 1 if size else None


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:+.2%}"


def summary(what: str, errors: list[float]) -> str:
    """Return a sentence about errors."""
    off = sorted(map(abs, errors))
    most, near = off[int(0.9 * len(off))], sum(each <= 0.001 for each in off)
    worst = f"nine in ten within {most:.2%}, worst {off[-1]:.2%}"
    return f"{what}: median {median(off):.2%}, {worst}; {near} of {len(off)} within 0.1%."


def to_markdown(rows: list[Row], made: str) -> str:
    """Return the page: what holds for all, then every step."""
    gpus = ", ".join(sorted({row.report.gpu or "" for row in rows}))
    torch = ", ".join(sorted({row.report.environment["torch"] for row in rows}))
    lines = [
        f"**{len(rows)} steps measured on {gpus}, with torch {torch}**", "",
        "- " + summary("Peak allocated, simulated", [row.simulated for row in rows if row.simulated is not None]),
        "- " + summary("Peak allocated, estimated", [row.estimated for row in rows]),
        "- " + summary("Peak reserved, simulated", [row.reserved for row in rows if row.reserved is not None]), "",
    ]  # fmt: skip
    body = [row.cells for row in sorted(rows, key=lambda row: -abs(row.simulated or 0))]
    return "\n".join([*lines, *titled_table("Every step, the farthest off first", HEADER, body), "", made])


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for measured.md.")
def main(out: Path | None) -> None:
    """Simulate and estimate what was measured."""
    found = [report for report in records(source="measured", folder=PACKAGE) if isinstance(report.run, lab.Training)]
    rows = [measured(report) for report in track(found, "Simulating", console=Console(stderr=True), transient=True)]
    text = to_markdown(rows, provenance("llmlab", "torch", "transformers"))
    click.echo(text)
    if out:
        write(out / "measured.md", text)


if __name__ == "__main__":
    main()
