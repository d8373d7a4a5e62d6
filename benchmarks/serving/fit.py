"""Fit the seconds that engines' hosts take, the constants of llmlab/serving/step.py and load.py, to the fit rows.

    python -m benchmarks.serving.fit           # half an hour; prints the constants
    python -m benchmarks.serving.fit --list    # the ids of the rows

Each constant in turn is multiplied or divided by STEP while that makes the mean |ln(predicted / measured)| of the time
to the first token and of the time per output token smaller, until none changes. It starts from the constants as they
are.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from math import log
from statistics import fmean
from typing import Any

import click

import llmlab as lab
from benchmarks.serving.serving import FILE, GPUS, fitted, predicted, service_of, spec_of
from llmlab.base.errors import SpecError, UnknownName
from llmlab.serving import load, step

STEP = 1.2  # digits beyond the second are dropped
ENGINES = ("vllm", "sglang", "trtllm")


def fit_rows() -> Iterator[tuple[dict[str, str], tuple[Any, ...]]]:
    """Yield each fit row that has a prediction, with what it is predicted from."""
    with FILE.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if fitted(row)]
    for row in rows:
        service, gpu = service_of(row), lab.gpu(GPUS.get(row["gpu"], row["gpu"]))
        if service is None:
            continue
        try:
            about = row, spec_of(row["model"]), service, gpu
            predicted(*about)
        except (SpecError, UnknownName):
            continue
        yield row, about


def error(rows: list[tuple[dict[str, str], tuple[Any, ...]]], engine: str | None) -> float:
    """Return the mean |ln(predicted / measured)| of both times of an engine's rows, or of all."""
    step._step_seconds.cache_clear()
    logs = []
    for row, about in rows:
        if engine in (None, row["engine"]):
            found = predicted(*about)
            logs += [abs(log(found["predicted_ttft"] / found["ttft"]))]
            logs += [abs(log(found["predicted_tpot"] / float(row["tpot_ms"]) * 1e3))]
    return fmean(logs)


@click.command()
@click.option("--list", "listed", is_flag=True, help="Print the ids of the fit rows and stop.")
def main(listed: bool) -> None:
    """Print the constants that fit best."""
    rows = list(fit_rows())
    if listed:
        click.echo("\n".join(row["id"] for row, _ in rows))
        return
    places: list[tuple[Any, str, str | None]] = [
        (table, engine, engine) for engine in ENGINES for table in (step.STEP_HOST, step.START_HOST, load.ARRIVING)
    ]
    places += [(vars(step), "ROW_HOST", None), (vars(load), "TOKENIZING", None)]
    changed = True
    while changed:
        changed = False
        for table, key, engine in places:
            least = error(rows, engine)
            for factor in (STEP, 1 / STEP):
                while True:
                    before = table[key]
                    table[key] = float(f"{before * factor:.1e}")
                    now = error(rows, engine)
                    if now >= least:
                        table[key] = before
                        break
                    least, changed = now, True
            click.echo(f"{key} {table[key]:.1e}: {least:.4f}")
    click.echo(f"{len(rows)} rows; {step.STEP_HOST}, {step.START_HOST}, {load.ARRIVING}")
    click.echo(f"ROW_HOST {step.ROW_HOST}, TOKENIZING {load.TOKENIZING}; {error(rows, None):.4f}")


if __name__ == "__main__":
    main()
