"""The T4 rows by the code that they ran: what two releases of the libraries do to reserved bytes.

    python benchmarks/versions.py                              # prints
    python benchmarks/versions.py --out benchmarks/results     # and writes versions.md, which the book includes

The rows ran transformers 5.0 and 5.17. Where these compute otherwise than what is installed, `llmlab.simulate.older`
does as they did. No row says in which order its threads loaded: of that, several draws are shown.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import NamedTuple

import click
from configurations import BAR
from peers import published_rows
from provenance import provenance, table, write

import llmlab as lab
from llmlab import Report
from llmlab.simulate.older import loaded_by_threads, rotary_products
from llmlab.units import MiB

DRAWS = 3
SHORTEST = 512  # tokens: where what loading leaves weighs most
HEADER = ["model, base, attention, batch × tokens", "measured", "as installed", "as the rows' transformers",
          "error", f"loaded by threads, {DRAWS} draws"]  # fmt: skip


class Line(NamedTuple):
    """A configuration: its figures of reserved bytes, measured and simulated."""

    name: str
    quantized: bool
    measured: list[int]
    installed: int
    older: int
    threaded: list[int]


def reserved(row: Report) -> int:
    """Return the bytes that a simulated step reserves at most."""
    return lab.simulate(row.model, row.run, "T4").peak_reserved


def line(rows: list[Report]) -> Line:
    """Return what is said of rows of one configuration."""
    row, run, drawn = rows[0], rows[0].run, []
    with rotary_products():
        older = reserved(row)
        if run.quantization and run.seq_len == SHORTEST:
            for seed in range(DRAWS):
                with loaded_by_threads(seed):
                    drawn.append(reserved(row))
    base = f"{run.quantization}, " if run.quantization else ""
    name = f"{row.model.rpartition('/')[2]}, {base}{run.attention}, {run.micro_batch} × {run.seq_len}"
    measured = list(dict.fromkeys(each.peak_reserved for each in rows))
    return Line(name, bool(run.quantization), measured, reserved(row), older, drawn)


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
            " / ".join(map(mebibytes, sorted(set(each.threaded)))) or "–",
        ]
        for each in found
    ]  # fmt: skip


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
    if far:
        said.append(f"A measured figure is more than {BAR:.0%} away in {'; '.join(far)}.")
    return said


def to_markdown(found: list[Line], made: str) -> str:
    """Return the table and its notes."""
    text = ["**Reserved bytes in MiB, as the rows' libraries compute and as those installed do**", ""]
    return "\n".join([*text, *table(HEADER, body(found)), "", *(f"- {note}" for note in notes(found)), "", made])


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
