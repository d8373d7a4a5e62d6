"""Predict the published training throughputs of mixtures of experts, and say how far off that is.

    python -m benchmarks.time.mixtures                           # prints the table
    python -m benchmarks.time.mixtures --out benchmarks/results  # and writes mixtures.md

The rows are those of mixtures.toml, which says where they are from. A hash of their ids divides them into two halves.
The first was looked at while the formulas were written, and the second was predicted once, after that, as were the rows
of older recipes. No constant is fitted to any of them.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import click

from benchmarks.provenance import provenance, titled_table, write
from benchmarks.time.throughput import Pairs, errors, predict
from benchmarks.time.throughput_rows import Row, read

ROWS = Path(__file__).with_name("mixtures.toml")


def parts(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the rows by title: in two halves, in the order of a hash of their ids, and those of older recipes."""
    older = [row for row in rows if row.group == "older recipes"]
    ordered = sorted([row for row in rows if row not in older], key=lambda row: sha256(row.id.encode()).hexdigest())
    middle = -(-len(ordered) // 2)
    return {"First half": ordered[:middle], "Second half, kept back": ordered[middle:],
            "Older recipes, kept back": older}  # fmt: skip


def shown(found: Pairs) -> list[list[str]]:
    """Return a line of the table for each row."""
    lines = []
    for row, it in found:
        run, error = row.run, f"{it.rate / row.measured - 1:+.1%}" if it.rate else it.why
        inside = "yes" if it.low and it.high and it.low <= row.measured <= it.high else "no"
        degrees = " ".join(f"{axis}{getattr(run, axis)}" for axis in ("tp", "pp", "ep") if getattr(run, axis) > 1)
        graphs = {None: "", "full_iteration": ", one graph", "transformer_engine": ", graphs of modules"}
        degrees += graphs[run.stack.cuda_graph_impl]
        lines.append([f"{row.label}, {run.world_size} × {row.card}", f"{degrees}, {run.micro_batch} × {run.seq_len:,}",
                      row.citation.rpartition("container ")[2].partition(",")[0], f"{row.measured:,.0f}",
                      f"{it.rate or 0:,.0f}", error, inside])  # fmt: skip
    return lines


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Folder for mixtures.md.")
def main(out: Path | None) -> None:
    """Predict all rows."""
    header = ["run", "parallelism, micro-batch", "container", "published tokens/s per GPU", "predicted", "error",
              "within the 80 % interval"]  # fmt: skip
    text = []
    for name, rows in parts(read(ROWS)).items():
        found: Pairs = [(row, predict(row)) for row in rows]
        text += titled_table(f"{name}: {errors(found)}", header, shown(found))
    whole = "\n".join([*text, provenance("llmlab")])
    print(whole)
    if out:
        write(out / "mixtures.md", whole)


if __name__ == "__main__":
    main()
