"""llmlab beside its peers: each tool's prediction for the same measured fine-tuning steps, in one run.

    python -m benchmarks.memory.peers --out benchmarks/results  # peers.json, and peers.md, which the book includes

The rows are the published T4 records. A peer that is not installed is shown as such, and stops --out; pip install
'llmlab[benchmarks]' installs them.
"""

from __future__ import annotations

import json
import platform
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import click

import llmlab as lab
from benchmarks.memory import configurations
from benchmarks.memory.questions import TOOLS, Tool, installed
from benchmarks.provenance import titled_table
from llmlab import Report, Training
from llmlab.archive import held_out, records
from llmlab.archive.store import write_whole
from llmlab.base.tables import Table, show
from llmlab.base.units import MiB
from llmlab.formulas.memory.states import states

SCHEMA = 2
GROUPS = ("model", "attention", "quantization")
LOADS = (
    "The same model loaded again, each time by a new process: MiB allocated after loading; equal values are listed once"
)
LOADS_HEADER = ["model, base", "loads", "allocated", "error that no single prediction can avoid"]
FAIRNESS = (
    "The rows are fitcheck-llm's own measurement archive, and its README says that its constants were fitted to 49 "
    "runs of it: its errors here are of a fit, not of a prediction. llmlab's formulas hold no constant fitted to these "
    "rows, but they were corrected with the rows in view."
)


def published_rows(unseen: bool = False) -> list[Report]:
    """Return the published training steps on a T4 whose peak allocated bytes are known.

    They are those that were known while the formulas were written, or with `unseen` those that were held out.
    """
    reports = [report for report in records(gpu="T4", source="published") if held_out(report) == unseen]
    return [r for r in reports if isinstance(r.run, Training) and r.peak_allocated is not None]


def relative_error(predicted: int, measured: int) -> float:
    """Return (predicted − measured) / measured: −0.1 is 10 % too low."""
    return (predicted - measured) / measured


def summarise(errors: list[float]) -> dict[str, Any]:
    """Return the number of errors, the median of their sizes, the worst with its sign, and how many are too low."""
    if not errors:
        return {"rows": 0, "median_abs_error": None, "worst_error": None, "too_low": None}
    return {
        "rows": len(errors),
        "median_abs_error": median(abs(e) for e in errors),
        "worst_error": max(errors, key=abs),
        "too_low": sum(e < 0 for e in errors),
    }


def predictions(tool: Tool, reports: list[Report]) -> list[int | None] | str:
    """Return a tool's bytes for each row (None: it cannot be asked), or a text that says why it has none at all."""
    if installed(tool.package) is None:
        return "not installed"
    try:
        return [tool.predict(lab.model(report.model), report.run) for report in reports]
    except ImportError as error:  # it is installed, but not what it needs
        return f"cannot be imported: {error}"


def as_row(report: Report) -> dict[str, Any]:
    """Return what the tables show of a measured training step, without predictions yet."""
    return {
        "model": report.model,
        "quantization": report.run.quantization or "none",
        "attention": report.run.attention,
        "micro_batch": report.run.micro_batch,
        "seq_len": report.run.seq_len,
        "peak_allocated": report.peak_allocated,
        "peak_reserved": report.peak_reserved,
        "process": report.process,
        "after_load": report.phases.get("load"),
        "session": report.environment.get("session"),
        "predicted": {},
    }


def run_all(reports: list[Report]) -> dict[str, Any]:
    """Return all that the tables show: a row per measurement, a summary per tool, medians by group, versions, date."""
    rows = [as_row(report) for report in reports]
    tools = []
    for tool in TOOLS:
        found = predictions(tool, reports)
        missing = found if isinstance(found, str) else None
        for row, size in zip(rows, [None] * len(rows) if missing else found, strict=True):
            row["predicted"][tool.name] = size
        tools.append(
            {
                "name": tool.name,
                "package": tool.package,
                "version": installed(tool.package),
                "missing": missing,
                "asked": tool.asked,
                "held_to": tool.truth,
                **summarise(errors_of(tool.name, tool.truth, rows)),
                "by": {key: by_group(tool.name, tool.truth, rows, key) for key in GROUPS},
                "note": tool.note,
            }
        )
    return {
        "schema": SCHEMA,
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "gpu": "T4",
        "versions": {tool.package: installed(tool.package) for tool in TOOLS},
        "note": FAIRNESS,
        "sources": sorted({report.citation for report in reports if report.citation}),
        "tools": tools,
        "components": component_gaps(reports),
        "rows": rows,
    }


def component_gaps(reports: list[Report]) -> list[dict[str, Any]]:
    """Return the errors of llmlab's estimate: a summary per component and per phase that was published."""
    errors: dict[str, list[float]] = {}
    for report in reports:
        guess = lab.estimate(report.model, report.run, report.gpu)
        known = {f"the part {part}": (guess.parts[part], size) for part, size in report.parts.items()}
        known |= {f"the peak in {phase}": (guess.phases[phase], size) for phase, size in report.phases.items()}
        if trained := report.detail.get("gradients"):
            known["the part gradients, at its largest"] = (states(lab.model(report.model), report.run).gradients,
                                                           sum(trained.values()))  # fmt: skip
        for name, (predicted, measured) in known.items():
            errors.setdefault(name, []).append(relative_error(predicted, measured))
    return [{"name": name, **summarise(found)} for name, found in errors.items()]


def errors_of(name: str, truth: str, rows: list[dict[str, Any]]) -> list[float]:
    """Return a tool's relative errors over the rows that it covers and whose `truth` was measured."""
    return [
        relative_error(row["predicted"][name], row[truth])
        for row in rows
        if row["predicted"].get(name) is not None and row[truth]
    ]


def by_group(name: str, truth: str, rows: list[dict[str, Any]], key: str) -> dict[str, float | None]:
    """Return a tool's median absolute error for each value of `key`."""
    values = dict.fromkeys(row[key] for row in rows)
    return {
        value: summarise(errors_of(name, truth, [row for row in rows if row[key] == value]))["median_abs_error"]
        for value in values
    }


def least_worst_error(measured: list[int]) -> float:
    """Return the largest relative error over `measured` of the best single number, their extremes' harmonic mean.

    It is (largest − smallest) / (largest + smallest).
    """
    return (max(measured) - min(measured)) / (max(measured) + min(measured))


def loads(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return a text row per model and base that several rows loaded: each figure, and the error of any one number.

    Each row is a process of its own, which loads the model before it makes a batch (fitcheck-llm 0.3.1,
    scripts/calibration_sweep.py), so rows of the same model and base loaded it alike, whatever they did afterwards.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row["after_load"]:
            groups.setdefault((row["model"].rpartition("/")[2], row["quantization"]), []).append(row["after_load"])
    return [
        [f"{model}, {base}", str(len(sizes)), " / ".join(f"{size / MiB:,.2f}" for size in dict.fromkeys(sizes)),
         f"{least_worst_error(sizes):.2%}"]
        for (model, base), sizes in groups.items() if len(sizes) > 1
    ]  # fmt: skip


def floors(rows: list[dict[str, Any]]) -> list[str]:
    """Return how near a prediction can be to repeats that differ: of reserved bytes, for each kind of base."""
    said = []
    for base in sorted({row["quantization"] for row in rows}):
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in rows:
            if row["quantization"] == base:
                groups.setdefault(tuple(row[key] for key in configurations.KEY), []).append(row)
        repeated = {
            configurations.name(group[0]): least_worst_error([row["peak_reserved"] for row in group])
            for group in groups.values()
            if len(group) > 1
        }
        if not repeated:
            continue
        farthest = max(repeated, key=repeated.__getitem__)
        kind = "Bases not quantized" if base == "none" else f"Bases in {base}"
        if not repeated[farthest]:
            said.append(f"{kind}: repeats reserve the same bytes, so a prediction can be exact.")
            continue
        said.append(
            f"{kind}: if repeats of a row differ, within a session or between two, one prediction cannot match all of "
            f"them. For {farthest}, any prediction is wrong by at least {repeated[farthest]:.1%} of the reserved bytes."
        )
    return said


def tables(results: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the tables as title, header and text rows: all, medians by group, gap by component, configurations."""
    tools, total = results["tools"], len(results["rows"])
    summary: dict[bool, list[list[str]]] = {True: [], False: []}  # of tools that are asked for the run, and of others
    for number, tool in enumerate(tools, 1):
        rows = f"{tool['rows']}" + (f" of {total}" if tool["rows"] < total else "")
        what = [f"{tool['name']} [{number}]", tool["missing"] or tool["version"], tool["asked"]]
        figures = ["–", "–", "–"]
        if tool["rows"]:
            figures = [f"{tool['median_abs_error']:.1%}", f"{tool['worst_error']:+.1%}", f"{tool['too_low']}"]
        summary[_asked_for_the_run(tool)].append([*what, tool["held_to"].replace("_", " "), rows, *figures])
    header = ["tool", "version", "asked for", "compared with", "rows", "median |error|", "worst error", "rows too low"]
    groups = []
    for key in GROUPS:
        for value in tools[0]["by"][key]:
            medians = [tool["by"][key][value] for tool in tools if _asked_for_the_run(tool)]
            groups.append([value.rpartition("/")[2], *("–" if m is None else f"{m:.1%}" for m in medians)])
    components = [
        [one["name"], str(one["rows"]), f"{one['median_abs_error']:.2%}", f"{one['worst_error']:+.2%}"]
        for one in results["components"]
    ]
    title = f"Predicted against measured, {total} fine-tuning steps on a {results['gpu']}"
    found = [
        (title, header, summary[True]),
        ("Tools that answer another question, compared with the same steps", header, summary[False]),
        (
            "Median |error| by model, attention and quantization",
            ["", *(tool["name"] for tool in tools if _asked_for_the_run(tool))],
            groups,
        ),
        ("Errors of llmlab by component and phase", ["", "rows", "median |error|", "worst error"], components),
        (configurations.TITLE, configurations.HEADER, configurations.body(results["rows"])),
        (LOADS, LOADS_HEADER, loads(results["rows"])),
    ]
    return [one for one in found if one[2]]


def _asked_for_the_run(tool: dict[str, Any]) -> bool:
    return tool["asked"].startswith("the run")


def footnotes(results: dict[str, Any]) -> list[str]:
    """Return the notes under the tables: one per tool, on repeats, on whose rows they are and whom they favour."""
    notes = [f"[{number}] {tool['note']}" for number, tool in enumerate(results["tools"], 1)]
    notes += configurations.notes(results["rows"])
    notes += floors(results["rows"])
    return [*notes, results["note"], *(f"Source: {source}" for source in results["sources"])]


def to_markdown(results: dict[str, Any]) -> str:
    """Return the tables and the notes as Markdown."""
    lines = []
    for title, header, body in tables(results):
        lines += titled_table(title, header, body)
    return "\n".join(lines + [f"- {note}" for note in footnotes(results)])


def print_all(results: dict[str, Any]) -> None:
    """Print the tables and the notes."""
    for title, header, body in tables(results):
        show(Table(header, body, title))
    print(*footnotes(results), sep="\n")


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write peers.json and peers.md here.")
def main(out: Path | None) -> None:
    """Compare llmlab's estimate and its peers' with the published T4 rows."""
    gone = sorted({tool.package for tool in TOOLS if installed(tool.package) is None})
    if out and gone:  # the results that the book shows hold every peer
        raise click.ClickException(f"--out renews what the book shows, and {', '.join(gone)} is not installed")
    reports = published_rows()
    if not reports:
        raise click.ClickException("no published T4 record was found; is llmlab/archive complete?")
    results = run_all(reports)
    print_all(results)
    if out:
        write_whole(out / "peers.json", json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        write_whole(out / "peers.md", to_markdown(results) + "\n")


if __name__ == "__main__":
    main()
