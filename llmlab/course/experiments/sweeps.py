"""What the recorded comparisons share: a training loop, held-out losses, and the JSON files of their results."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...data import windows
from ..techniques.learning_rate import clip_gradients
from ..techniques.training_loop import Recipe, batch_seed, evaluate, next_token_loss

Key = TypeVar("Key")
Value = TypeVar("Value")


def fit(
    model: nn.Module, optimizer: Optimizer, ids: Tensor, recipe: Recipe, seed: int, steps: Iterable[int],
    rate: Callable[[int], float],
) -> None:  # fmt: skip
    """Train on windows of `ids` at the learning rate `rate(step)`, times the "scale" of a parameter group, if any.

    The sizes of the batches and the limit of the gradients' norm are those of the recipe; the seed and the step
    determine a batch.
    """
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = rate(step) * group.get("scale", 1.0)
        batch = windows(ids, recipe.micro_batch, recipe.seq_len, batch_seed(seed, step))
        loss = next_token_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        clip_gradients(model.parameters(), recipe.clip)
        optimizer.step()


def final_loss(model: nn.Module, ids: Tensor, recipe: Recipe) -> float:
    """Return the mean loss over windows of the held-out `ids`, or inf if the run diverged to NaN."""
    loss = evaluate(model, ids, recipe)
    return loss if math.isfinite(loss) else math.inf


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key.

    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def record_file() -> Path:
    """Return the new file that the command line names for the record; an error if it exists, so that none is lost."""
    parser = argparse.ArgumentParser(description="Run the experiment again and write its record.")
    parser.add_argument("file", type=Path, help="new JSON file")
    path: Path = parser.parse_args().file
    if path.exists():
        parser.error(f"{path} exists; name a new file")
    if not path.parent.is_dir():
        parser.error(f"{path.parent} is no folder; name a file in one that exists")
    return path


def record(learn: Callable[..., tuple[Any, ...]], runs: Iterable[tuple[Any, ...]], path: Path, command: str) -> None:
    """Write the results of `learn(*run)` for all `runs` to `path`, after each run."""
    torch.set_num_threads(1)
    rows: list[tuple[Any, ...]] = []
    for run in runs:
        rows.append(learn(*run))
        print(*rows[-1], flush=True)
        write(path, command, {"runs": rows})


def write(
    path: Path, command: str, parts: Mapping[str, Sequence[Iterable[Any]]], digits: int = 4, **facts: Any
) -> None:
    """Write the rows of each part, one per line, with the module that computes them, torch's version and other facts.

    Losses, which are floats above 0.1, are rounded to `digits`.
    """
    header = {"command": f"python -m {command}", "torch": torch.__version__, **facts}
    lists = []
    for part, rows in parts.items():
        rounded = ([round(x, digits) if isinstance(x, float) and x > 0.1 else x for x in row] for row in rows)
        lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rounded)
        lists.append(f' "{part}": [\n  {lines}\n]')
    path.write_text(f"{json.dumps(header)[:-1]},\n" + ",\n".join(lists) + "}\n", encoding="utf-8")
