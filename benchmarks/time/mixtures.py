"""Predict the published training throughputs of mixtures of experts, and say how far off that is.

    python -m benchmarks.time.mixtures                           # prints the table
    python -m benchmarks.time.mixtures --out benchmarks/results  # and writes mixtures.md

The rows are those of mixtures.toml, which says where they are from. A hash of their ids divides them into two halves.
The first was looked at while the formulas were written, and the second was predicted once, after that. No constant is
fitted to either.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import click

from benchmarks.provenance import provenance, titled_table, write
from benchmarks.time.throughput import Pairs, errors, predict
from benchmarks.time.throughput_rows import Row, read

ROWS = Path(__file__).with_name("mixtures.toml")


def halves(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows in two halves, in the order of a hash of their ids; the first has one more if they are odd."""
    ordered = sorted(rows, key=lambda row: sha256(row.id.encode()).hexdigest())
    middle = -(-len(ordered) // 2)
    return ordered[:middle], ordered[middle:]


def shown(found: Pairs) -> list[list[str]]:
    """Return a line of the table for each row."""
    lines = []
    for row, it in found:
        run, error = row.run, f"{it.rate / row.measured - 1:+.1%}" if it.rate else it.why
        inside = "yes" if it.low and it.high and it.low <= row.measured <= it.high else "no"
        degrees = " ".join(f"{axis}{getattr(run, axis)}" for axis in ("tp", "pp", "ep") if getattr(run, axis) > 1)
        lines.append([f"{row.label}, {run.world_size} × {row.card}", f"{degrees}, {run.micro_batch} × {run.seq_len:,}",
                      row.citation.rpartition("container ")[2], f"{row.measured:,.0f}", f"{it.rate or 0:,.0f}", error,
                      inside])  # fmt: skip
    return lines


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Folder for mixtures.md.")
def main(out: Path | None) -> None:
    """Predict all rows."""
    header = ["run", "parallelism, micro-batch", "container", "published tokens/s per GPU", "predicted", "error",
              "within the 80 % interval"]  # fmt: skip
    text = []
    for name, rows in zip(("First half", "Second half, kept back"), halves(read(ROWS)), strict=True):
        found: Pairs = [(row, predict(row)) for row in rows]
        text += titled_table(f"{name}: {errors(found)}", header, shown(found))
    whole = "\n".join([*text, provenance("llmlab")])
    print(whole)
    if out:
        write(out / "mixtures.md", whole)


if __name__ == "__main__":
    main()
