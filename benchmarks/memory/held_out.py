"""Steps on a T4 that played no part in writing llmlab's formulas and simulator, and were predicted first.

    python -m benchmarks.memory.held_out                           # prints
    python -m benchmarks.memory.held_out --out benchmarks/results  # and writes held_out.md, which the book includes

They are two later sessions of the archive that the rows of peers.py are from. Each is simulated with the installed
libraries. What is simulated with its base model loaded as its session loaded it (`loading`) stands apart: it is told
afterwards, by the measurements.
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click

import llmlab as lab
from benchmarks.memory import configurations, loading, peers
from benchmarks.memory.loading import PHASE_BAR, Loaded
from benchmarks.memory.questions import TOOLS, simulated
from benchmarks.provenance import provenance, titled_table, write
from llmlab import Report
from llmlab.archive import held_out, records

FITTED = "t4-phase3-2026-09-16"  # the session that is among the 49 runs fitcheck's constants were fitted to
ASKED = [tool for tool in TOOLS if tool.asked.startswith("the run")]
REQUEST = re.compile(r"(?:tried to allocate|segment of) ([\d.]+ \w+)")  # the words of PyTorch and of the simulator
HELD = re.compile(r"([\d.]+ \w+) allocated")
PHASES_HEADER = ["", "lab.estimate, median |error|", "worst", "lab.simulate, median |error|", "worst"]
EACH_HEADER = configurations.HEADER[:7]
THREADS = "Reserved MiB of each configuration that its session loaded by threads, in 25 draws"
THREADS_HEADER = ["", "reserved", "threads: least – median – most", "error"]
VERDICTS = "Steps that ran out of memory: the phase, the failed request, and the memory that was allocated"
VERDICTS_HEADER = ["", "measured", "lab.simulate", "lab.estimate"]
DRAWN = "The same steps, loaded by threads"
DRAWN_HEADER = ["", "lab.simulate"]
OUT_OF_MEMORY = "out of memory"
EXPLAINED = (
    "Explained afterwards, so no predictions: in the tables below, each row is simulated as its session loaded the "
    "model, which its own allocated bytes reveal. We knew the rows when we decided how many draws to show."
)
FAIRNESS = (
    "We wrote llmlab's formulas, its simulator and its model of threads without these rows, predicted them, and "
    "compared them afterwards. We changed nothing to meet them. "
    f"fitcheck's constants were fitted to {FITTED}, and to no row of the other session."
)


class Line(NamedTuple):
    """A configuration: its rows, its simulation as installed, and the simulations as its session may have loaded it."""

    rows: list[Report]
    simulated: Report
    loaded: Loaded

    @property
    def name(self) -> str:
        return loading.named(self.rows[0])


# ---- simulations


def lines(reports: list[Report]) -> list[Line]:
    """Return a line per configuration, in the order of the rows."""
    groups: dict[tuple[Any, ...], list[Report]] = {}
    for row in reports:
        groups.setdefault((row.model, row.run), []).append(row)
    return [
        Line(rows, simulated(lab.model(rows[0].model), rows[0].run), loading.of(rows[0])) for rows in groups.values()
    ]


def refused_rows() -> list[Report]:
    """Return the held-out steps that ran out of memory."""
    return [r for r in records(gpu="T4", source="published") if held_out(r) and r.outcome == OUT_OF_MEMORY]


# ---- tables


def predicted(reports: list[Report]) -> list[dict[str, Any]]:
    """Return the rows of the tables, with the predictions of the tools that can be asked about the run itself."""
    rows = [peers.as_row(report) for report in reports]
    for tool in ASKED:
        sizes = peers.predictions(tool, reports)
        for row, size in zip(rows, [None] * len(rows) if isinstance(sizes, str) else sizes, strict=True):
            row["predicted"][tool.name] = size
    return rows


def by_tool(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and text rows: each tool's errors over all rows, and their median in each session."""
    sessions = list(dict.fromkeys(row["session"] for row in rows))
    body = []
    for tool in ASKED:
        errors = peers.errors_of(tool.name, tool.truth, rows)
        medians = peers.by_group(tool.name, tool.truth, rows, "session")
        body.append([
            tool.name, tool.truth.replace("_", " "), str(len(errors)), *median_and_worst(errors),
            *("–" if (m := medians[session]) is None else f"{m:.2%}" for session in sessions),
        ])  # fmt: skip
    header = ["tool", "compared with", "rows", "median |error|", "worst error", *(f"median, {one}" for one in sessions)]
    return header, body


def by_phase(found: list[Line]) -> list[list[str]]:
    """Return text rows: the errors of estimate and simulation in each phase, and in the seconds of a step."""
    errors: dict[str, tuple[list[float], list[float]]] = {}
    for line in found:
        for row in line.rows:
            for verb, report in enumerate((lab.estimate(row.model, row.run, "T4"), line.simulated)):
                for what, measured in quantities(row).items():
                    if predicted := quantities(report).get(what):
                        errors.setdefault(what, ([], []))[verb].append(predicted / measured - 1)
    return [[what, *median_and_worst(guessed), *median_and_worst(ran)] for what, (guessed, ran) in errors.items()]


def quantities(report: Report) -> dict[str, float]:
    """Return, by name, the peak of each phase of a step, and its time."""
    peaks: dict[str, float] = {f"the peak in {phase}": size for phase, size in report.phases.items()}
    return peaks | ({"seconds per step": report.step_seconds} if report.step_seconds else {})


def median_and_worst(errors: list[float]) -> list[str]:
    return [f"{median(map(abs, errors)):.2%}", f"{max(errors, key=abs):+.2%}"] if errors else ["–", "–"]


def each(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return a text row per configuration."""
    return [cells[:7] for cells in configurations.body(rows)]


def each_by_threads(found: list[Line], rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return a text row per configuration that was loaded by threads, with the reserved bytes of the draws."""
    threaded = loading.by_threads([row for line in found for row in line.rows])
    last = {}
    for line in found:
        errors = {row.peak_reserved: loading.error(row, threaded) for row in line.rows}
        shown = " / ".join("does not fit" if error is None else f"{error:+.1%}" for error in errors.values())
        if drawn := loading.reserved(line.loaded):
            last[line.name] = [drawn, shown]
    return [[cells[0], cells[4], *last[cells[0]]] for cells in configurations.body(rows) if cells[0] in last]


def verdicts(found: list[Line]) -> list[list[str]]:
    """Return a text row per step that ran out of memory: where, and what each verb says of it."""
    return [
        [line.name, asked(row), asked(line.simulated), lab.estimate(row.model, row.run, "T4").outcome]
        for line in found
        for row in line.rows
    ]


def by_threads(line: Line) -> str:
    """Return the number of draws in which a step runs out of memory."""
    drawn = line.loaded.drawn
    return f"{OUT_OF_MEMORY} in {sum(peaks is None for peaks in drawn)} of {len(drawn)} draws" if drawn else "–"


def asked(report: Report) -> str:
    """Return the outcome; if memory ran out, instead the phase, the failed request and the bytes allocated before."""
    if report.outcome != OUT_OF_MEMORY:
        return report.outcome
    phase, said = str(report.where).partition(",")[0], "\n".join(report.notes)
    request, held = REQUEST.search(said), HELD.search(said)
    return f"{phase}, {request[1]} on top of {held[1]}" if request and held else phase


def estimated(lines: list[Line], outcome: str) -> int:
    """Return the number of rows of which lab.estimate says `outcome`."""
    return sum(lab.estimate(row.model, row.run, "T4").outcome == outcome for line in lines for row in line.rows)


# ---- notes


def notes(found: list[Line], refused: list[Line], rows: list[dict[str, Any]]) -> list[str]:
    """Return what the tables show of the errors, and the reasons."""
    inside = sum(
        all(abs(line.simulated.phases.get(phase, 0) / size - 1) <= PHASE_BAR for phase, size in row.phases.items())
        for line in found
        for row in line.rows
    )
    said = [f"Every phase is simulated within {PHASE_BAR:.0%} in {inside} of {len(rows)} rows."]
    said += configurations.notes(rows)
    if refused:
        right = sum(line.simulated.outcome == OUT_OF_MEMORY for line in refused)
        ran = [line.simulated.outcome == "fits" for line in found for _ in line.rows]
        said.append(
            f"lab.simulate recognizes {right} of the {len(refused)} steps that ran out of memory, and {sum(ran)} of "
            f"the {len(ran)} that ran. lab.estimate adds up tensors and leaves room for the rest of the allocator's "
            f"memory. It recognizes {estimated(refused, OUT_OF_MEMORY)} of the steps that ran out and "
            f"{estimated(found, 'fits')} of those that ran, and cannot decide about the others."
        )
    return said


# ---- the page


def to_markdown(rows: list[dict[str, Any]], found: list[Line], refused: list[Line], made: str) -> str:
    """Return the tables and their notes: of `rows`, of their configurations, and of those that ran out of memory."""
    reports = [row for line in found for row in line.rows]
    predictions = [
        (f"Predicted against measured, {len(rows)} fine-tuning steps on a T4 that were held out", *by_tool(rows)),
        ("llmlab's gap by phase", PHASES_HEADER, by_phase(found)),
        (configurations.TITLE, EACH_HEADER, each(rows)),
        (VERDICTS, VERDICTS_HEADER, verdicts(refused)),
    ]
    explained = [
        (loading.SESSIONS, loading.SESSIONS_HEADER, loading.sessions(reports)),
        (loading.HELD, loading.HELD_HEADER, loading.held(reports)),
        (peers.LOADS, peers.LOADS_HEADER, peers.loads(rows)),
        (THREADS, THREADS_HEADER, each_by_threads(found, rows)),
        (DRAWN, DRAWN_HEADER, [[line.name, by_threads(line)] for line in refused]),
    ]
    sources = dict.fromkeys(row.citation for line in found for row in line.rows)
    said = [*notes(found, refused, rows), FAIRNESS, *(f"Source: {source}" for source in sources)]
    text = [*chain.from_iterable(titled_table(*table) for table in predictions), *(f"- {note}" for note in said)]
    text += ["", EXPLAINED, "", *chain.from_iterable(titled_table(*table) for table in explained)]
    text += [f"- {note}" for note in (*loading.notes(reports), *peers.floors(rows))]
    return "\n".join([*text, "", made])


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write held_out.md here.")
def main(out: Path | None) -> None:
    """Compare llmlab and its peers with T4 rows that were held out."""
    reports = peers.published_rows(unseen=True)
    made = provenance("llmlab", "torch", "transformers", "peft", "bitsandbytes", "fitcheck-llm")
    text = to_markdown(predicted(reports), lines(reports), lines(refused_rows()), made)
    print(text)
    if out:
        write(out / "held_out.md", text)


if __name__ == "__main__":
    main()
