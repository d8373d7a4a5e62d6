"""The T4 rows by the code that they ran: what two releases of the libraries do to reserved bytes.

    python benchmarks/versions.py                              # prints
    python benchmarks/versions.py --out benchmarks/results     # and writes versions.md, which the book includes

The rows ran transformers 5.0 and 5.17. Where these compute otherwise than what is installed, `llmlab.simulate.older`
does as they did. No row says in which order its threads loaded: of that, several draws are shown. What a row says is
its peaks of allocated bytes; a draw that has them to `SLACK` is one that may have been the row's.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import NamedTuple

import click
from configurations import BAR
from peers import published_rows
from provenance import provenance, titled_table, write

import llmlab as lab
from llmlab import Report
from llmlab.simulate.older import loaded_by_threads, rotary_products
from llmlab.units import MiB

DRAWS = 3
SHORTEST = 512  # tokens: where what loading leaves weighs most
SLACK = MiB // 20  # of a peak of allocated bytes
STEP = ("forward", "backward", "optimizer")
HEADER = ["model, base, attention, batch × tokens", "measured", "as installed", "as the rows' transformers",
          "error", f"loaded by threads, {DRAWS} draws"]  # fmt: skip


class Line(NamedTuple):
    """A configuration: its figures of reserved bytes, measured and simulated; `met` are those of the draws whose
    allocated bytes peak where the row's do, each with the row's."""

    name: str
    quantized: bool
    measured: list[int]
    installed: int
    older: int
    threaded: list[int]
    met: list[tuple[int, int]]


def reserved(row: Report) -> int:
    """Return the bytes that a simulated step reserves at most."""
    return lab.simulate(row.model, row.run, "T4").peak_reserved


def line(rows: list[Report]) -> Line:
    """Return what is said of rows of one configuration."""
    row, run, drawn = rows[0], rows[0].run, []
    met: list[tuple[int, int]] = []
    with rotary_products():
        older = reserved(row)
        if run.quantization and run.seq_len == SHORTEST:
            for seed in range(DRAWS):
                with loaded_by_threads(seed):
                    report = lab.simulate(row.model, run, "T4")
                drawn.append(report.peak_reserved)
                met += [(report.peak_reserved, each.peak_reserved) for each in rows if same_peaks(report, each)]
    base = f"{run.quantization}, " if run.quantization else ""
    name = f"{row.model.rpartition('/')[2]}, {base}{run.attention}, {run.micro_batch} × {run.seq_len}"
    measured = list(dict.fromkeys(each.peak_reserved for each in rows))
    return Line(name, bool(run.quantization), measured, reserved(row), older, drawn, met)


def same_peaks(simulated: Report, row: Report) -> bool:
    """Return whether the allocated bytes peak as the row's in each part of the step; no where it has no such peaks."""
    return all(abs(simulated.phases[part] - row.phases.get(part, 0)) <= SLACK for part in STEP)


def lines() -> list[Line]:
    """Return a line a configuration, in the order of the rows."""
    groups: dict[tuple, list[Report]] = {}
    for row in published_rows():
        groups.setdefault((row.model, row.run), []).append(row)
    return [line(rows) for rows in groups.values()]


def body(found: list[Line]) -> list[list[str]]:
    """Return the text of each line."""
    return [
        [
            each.name, " / ".join(map(mebibytes, each.measured)), mebibytes(each.installed), mebibytes(each.older),
            " / ".join(f"{each.older / true - 1:+.1%}" for true in each.measured),
            " / ".join(draws(each)) or "–",
        ]
        for each in found
    ]  # fmt: skip


def draws(line: Line) -> list[str]:
    """Return the different reserved bytes of the draws, bold where one of them met the row's peaks."""
    bold = {size for size, _ in line.met}
    return [f"**{mebibytes(size)}**" if size in bold else mebibytes(size) for size in sorted(set(line.threaded))]


def mebibytes(size: int) -> str:
    return f"{size / MiB:,.0f}"


def notes(found: list[Line]) -> list[str]:
    """Return what the two kinds of bases say."""
    said = []
    for quantized, bases in ((False, "Bases not quantized"), (True, "Bases in NF4")):
        of_kind = [each for each in found if each.quantized == quantized]
        if not of_kind:
            continue
        counts = [sum(getattr(each, by) in each.measured for each in of_kind) for by in ("installed", "older")]
        errors = [min((each.older / true - 1 for true in each.measured), key=abs) for each in of_kind]
        worst, middle = max(errors, key=abs), median(map(abs, errors))
        text = f"{bases}: a measured figure to the MiB in {counts[1]} of {len(of_kind)} configurations, where what is "
        text += f"installed gives {counts[0]}; from the nearest figure the median is {middle:.1%}, "
        said.append(f"{text}the worst {worst:+.1%}.")
    far = [each.name for each in found if any(abs(each.older / true - 1) > BAR for true in each.measured)]
    met = [(each, size / true - 1) for each in found for size, true in each.met]
    if met:
        worst = max((error for _, error in met), key=abs)
        names = "; ".join(dict.fromkeys(each.name for each, _ in met))
        said.append(
            f"In bold: draws whose allocated bytes peak as the row's in forward, backward and optimizer, to "
            f"{SLACK / MiB:.2f} MiB. There are some for {names}. The row's reserved bytes did not choose them, and are "
            f"met all the same: {worst:+.1%} at worst."
        )
    if far:
        said.append(f"A measured figure is more than {BAR:.0%} away in {'; '.join(far)}.")
    return said


def to_markdown(found: list[Line], made: str) -> str:
    """Return the table and its notes."""
    title = "Reserved bytes in MiB, as the rows' libraries compute and as those installed do"
    lines = titled_table(title, HEADER, body(found))
    return "\n".join([*lines, *(f"- {note}" for note in notes(found)), "", made])


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write versions.md here.")
def main(out: Path | None) -> None:
    """Hold the simulated reserved bytes to the T4 rows by the code that these ran."""
    text = to_markdown(lines(), provenance("llmlab", "torch", "transformers", "peft", "bitsandbytes"))
    print(text)
    if out:
        write(out / "versions.md", text)


if __name__ == "__main__":
    main()
