"""The T4 rows with the code that they ran: how releases of the libraries change the reserved bytes.

    python -m benchmarks.memory.versions                           # prints
    python -m benchmarks.memory.versions --out benchmarks/results  # and writes versions.md, which the book includes

Where the rows' releases of transformers and peft compute or load differently from the installed ones, `past_releases`
does as they did; `loading` tells which sessions loaded by threads.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import click

import llmlab as lab
from benchmarks.memory import loading
from benchmarks.memory.loading import Loaded
from benchmarks.memory.peers import published_rows
from benchmarks.provenance import provenance, titled_table, write
from llmlab import Report
from llmlab.base.units import MiB

TITLE = "Reserved MiB, simulated with the library versions of the measured rows and with the installed ones"
HEADER = ["model, base, attention, batch × tokens", "measured", "as installed", "in order",
          "threads: least – median – most", "error"]  # fmt: skip


class Line(NamedTuple):
    """A configuration: its rows, the bytes it reserves with the installed libraries, and with the rows' libraries."""

    rows: list[Report]
    installed: int
    loaded: Loaded


def lines(rows: list[Report]) -> list[Line]:
    """Return a line per configuration, in the order of the rows."""
    groups: dict[tuple, list[Report]] = {}
    for row in rows:
        groups.setdefault((row.model, row.run), []).append(row)
    return [Line(rows, reserved(rows[0]), loading.of(rows[0])) for rows in groups.values()]


def reserved(row: Report) -> int:
    """Return the most bytes that a step reserves with the installed libraries."""
    size = lab.simulate(row.model, row.run, "T4").peak_reserved
    assert size is not None
    return size


def body(found: list[Line], threaded: set[str]) -> list[list[str]]:
    """Return the text of each line; equal figures of one session are shown once."""
    said = []
    for line in found:
        kinds = {(row.peak_reserved, loading.session(row)): loading.error(row, threaded) for row in line.rows}
        in_order = line.loaded.in_order
        said.append([
            loading.named(line.rows[0]), " / ".join(mebibytes(size) for size, _ in kinds), mebibytes(line.installed),
            mebibytes(in_order.reserved) if in_order else "–", loading.reserved(line.loaded) or "–",
            " / ".join("–" if error is None else f"{error:+.1%}" for error in kinds.values()),
        ])  # fmt: skip
    return said


def mebibytes(size: int) -> str:
    return f"{size / MiB:,.0f}"


def to_markdown(rows: list[Report], found: list[Line], made: str) -> str:
    """Return the tables and their notes."""
    tables = [
        (TITLE, HEADER, body(found, loading.by_threads(rows))),
        (loading.SESSIONS, loading.SESSIONS_HEADER, loading.sessions(rows)),
        (loading.HELD, loading.HELD_HEADER, loading.held(rows)),
    ]
    text = []
    for title, header, cells in tables:
        text += titled_table(title, header, cells)
    return "\n".join([*text, *(f"- {note}" for note in loading.notes(rows)), "", made])


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write versions.md here.")
def main(out: Path | None) -> None:
    """Compare the simulated bytes with the T4 rows, with the code that these ran."""
    rows = published_rows()
    made = provenance("llmlab", "torch", "transformers", "peft", "bitsandbytes")
    text = to_markdown(rows, lines(rows), made)
    print(text)
    if out:
        write(out / "versions.md", text)


if __name__ == "__main__":
    main()
