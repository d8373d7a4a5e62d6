"""A small mixture of experts, trained with and without a balancing loss, at three seeds.

    python -m llmlab.course.experiments.balance FILE

trains all models again (about five minutes on one core) and writes FILE; `results` reads the package's own. All models
have the same size, the same number of steps and the same learning rate. For each seed, the initial weights and the
batches are the same with and without the balancing loss.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from .experts import evaluate, trained
from .sweeps import record_file

RESULTS = Path(__file__).with_suffix(".json")
BALANCES, SEEDS, STEPS = (0.0, 0.03), (0, 1, 2), 150
FACTORS = (None, 2.0, 1.25, 1.0, 0.75, 0.5)  # of the capacity; None serves all tokens


class Result(NamedTuple):
    """Loss and routing of a model on held-out text with one capacity factor: the loss in nats per token, the share of
    choices that no expert served, and the load of the busiest expert as a multiple of an equal share."""

    balance: float
    seed: int
    factor: float | None
    loss: float
    dropped: float
    busiest: float


def record(path: Path) -> None:
    """Train all models, and write their results to `path`."""
    torch.set_num_threads(1)
    rows = []
    for balance in BALANCES:
        for seed in SEEDS:
            model = trained(balance, STEPS, seed)
            for factor in FACTORS:
                routing = evaluate(model, factor)
                numbers = (round(number, 4) for number in (routing.loss, routing.dropped, routing.busiest))
                rows.append(Result(balance, seed, factor, *numbers)._asdict())
            print(rows[-1], flush=True)
    lines = ",\n ".join(json.dumps(row) for row in rows)
    path.write_text(f"[{lines}]\n", encoding="utf-8")


@cache
def results() -> tuple[Result, ...]:
    """Return all recorded results."""
    return tuple(Result(**row) for row in json.loads(RESULTS.read_text(encoding="utf-8")))


def values(balance: float, factor: float | None, name: str) -> list[float]:
    """Return the field `name` of the results with this balancing loss and capacity factor, one for each seed."""
    return [getattr(row, name) for row in results() if (row.balance, row.factor) == (balance, factor)]


if __name__ == "__main__":
    record(record_file())
