"""Fine-tuning a tiny Llama on a new kind of text, with all weights or with LoRA: what it learns and what it forgets.

    python -m llmlab.course.experiments.lora

trains all runs again (about ten minutes on one core) and writes lora.json, which `results` reads. The model of
`course.architectures.small` has been trained on Python's documentation. Here it is trained on Python code, the source
of some modules of the standard library. All runs have the same tokens and the same schedule. They differ in the weights
that are trained, in the peak learning rate and in the seed.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...data import windows
from ...specs.run import LoRA
from ..architectures.small import small_ids, small_model, small_tokenizer
from ..quantize.formats import nf4
from ..techniques.learning_rate import clip_gradients, warmup_cosine
from ..techniques.lora import adapters, inject, merge
from ..techniques.training_loop import batch_seed, next_token_loss

RESULTS = Path(__file__).with_suffix(".json")
BATCH, LENGTH, STEPS, WARMUP = 2, 128, 200, 10
EVALUATED = (50, 100, STEPS)  # steps after which both losses are computed
SEEDS = (0, 1, 2)  # of A and of the batches
ALPHA = 32
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL = (*ATTENTION, *MLP)
MODULES = (
    "argparse", "ast", "configparser", "dataclasses", "datetime", "difflib", "doctest", "http.client", "inspect",
    "logging", "optparse", "pathlib", "pickle", "shutil", "subprocess", "tarfile", "tempfile", "threading", "typing",
    "zipfile",
)  # fmt: skip
HELD_OUT = 0.1  # of each module, at its end

# What each method trains, and its peak learning rates, from the lowest. "MLP only" and "attention only" train about as
# many parameters as rank 16.
METHODS: dict[str, tuple[LoRA | None, tuple[float, ...]]] = {
    "all weights": (None, (1e-4, 3e-4, 1e-3, 3e-3)),
    "linear weights": (None, (1e-4, 3e-4, 1e-3, 3e-3)),  # those that LoRA adapts, and neither embedding nor norms
    "rank 1": (LoRA(1, ALL, ALPHA), (3e-4, 1e-3, 3e-3, 1e-2)),
    "rank 16": (LoRA(16, ALL, ALPHA), (1e-3, 3e-3, 1e-2, 3e-2)),
    "rank 64": (LoRA(64, ALL, ALPHA), (1e-3, 3e-3, 1e-2, 3e-2)),
    "MLP only, rank 25": (LoRA(25, MLP, ALPHA), (1e-3, 3e-3, 1e-2)),
    "attention only, rank 46": (LoRA(46, ATTENTION, ALPHA), (1e-3, 3e-3, 1e-2)),
}
KEPT = (1, 4, 16, 64, 256)  # singular directions of a full update, of at most 256


class Result(NamedTuple):
    """The losses of a run after a step, in nats per token of held-out text: code is new, documentation is old."""

    method: str
    rate: float
    seed: int
    step: int
    code: float
    docs: float


@cache
def texts() -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of the code to train on, of held-out code, and of held-out documentation."""
    new, held_out = [], []
    for name in MODULES:
        path = importlib.import_module(name).__file__ or ""
        ids = torch.tensor(small_tokenizer().encode(Path(path).read_text(encoding="utf-8")).ids)
        end = round(len(ids) * (1 - HELD_OUT))
        new.append(ids[:end])
        held_out.append(ids[end:])
    return torch.cat(new), torch.cat(held_out), small_ids()[1]


@torch.no_grad()
def held_out_loss(model: nn.Module, ids: Tensor) -> float:
    """Return the mean loss over 32 windows, the same for every model."""
    batches = [windows(ids, 8, LENGTH, seed) for seed in range(4)]
    return sum(next_token_loss(model(batch), batch).item() for batch in batches) / len(batches)


def both_losses(model: nn.Module) -> tuple[float, float]:
    """Return the losses on held-out code and on held-out documentation."""
    return held_out_loss(model, texts()[1]), held_out_loss(model, texts()[2])


def through_nf4(weight: Tensor) -> Tensor:
    """Return the values that a weight has after it was stored in NF4.

    >>> through_nf4(torch.full((1, 64), 0.5)).unique()
    tensor([0.5000])
    """
    return nf4.decode(*nf4.encode(weight), weight.shape)


def rounded_model() -> nn.Module:
    """Return the small model with the linear weights of its blocks rounded to NF4, but stored in fp32."""
    model = small_model()
    for name, linear in model.named_modules():
        if isinstance(linear, nn.Linear) and name.rpartition(".")[2] in ALL:
            linear.weight.data = through_nf4(linear.weight.data)
    return model


def prepare(method: str, model: nn.Module, seed: int = 0) -> nn.Module:
    """Choose the parameters of `model` that `method` trains, with adapters for LoRA, and return the model."""
    torch.manual_seed(seed)
    if lora := METHODS[method][0]:
        return inject(model, lora)
    for name, weight in model.named_parameters():
        weight.requires_grad_(method == "all weights" or name.split(".")[-2] in ALL)
    return model


def learn(
    method: str, rate: float, seed: int, model: nn.Module | None = None, steps: int = STEPS
) -> tuple[nn.Module, list[Result]]:
    """Fine-tune `model`, by default the small one, on code, and return it with its losses.

    `steps` below `STEPS` stops early and keeps the schedule.
    """
    model = prepare(method, model or small_model(), seed)
    parameters = [w for w in model.parameters() if w.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.0)
    found = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * warmup_cosine(step + 1, WARMUP, STEPS, 0.1)
        ids = windows(texts()[0], BATCH, LENGTH, batch_seed(seed, step))
        loss = next_token_loss(model(ids), ids)
        optimizer.zero_grad()
        loss.backward()
        clip_gradients(parameters, 1.0)
        optimizer.step()
        if step + 1 in EVALUATED:
            found.append(Result(method, rate, seed, step + 1, *both_losses(model)))
    return model, found


def with_directions(tuned: nn.Module, rank: int) -> nn.Module:
    """Return the small model with the `rank` largest singular directions of each linear weight's change in `tuned`."""
    weights, model = dict(tuned.named_parameters()), small_model()
    for name, weight in model.named_parameters():
        if name.split(".")[-2] in ALL:
            left, values, right = torch.linalg.svd(weights[name].detach() - weight.detach(), full_matrices=False)
            weight.data += (left[:, :rank] * values[:rank]) @ right[:rank]
    return model


# ---- the record


def results() -> list[Result]:
    """Return the recorded losses."""
    return [Result(*row) for row in _recorded("runs")]


def losses_before() -> tuple[float, float]:
    """Return the recorded losses of the small model, on code and on documentation."""
    code, docs = _recorded("before")
    return code, docs


def final_losses(method: str) -> dict[float, list[tuple[float, float]]]:
    """Return the (code, documentation) losses after the last step by learning rate, one pair for each seed."""
    found: dict[float, list[tuple[float, float]]] = {}
    for result in results():
        if result.method == method and result.step == STEPS:
            found.setdefault(result.rate, []).append((result.code, result.docs))
    return found


def best_rate(method: str) -> float:
    """Return the learning rate with the lowest loss on code for the first seed."""
    losses = final_losses(method)
    return min(losses, key=lambda rate: losses[rate][0])


def directions() -> dict[int, list[tuple[float, float]]]:
    """Return the (code, documentation) losses with the largest directions of full updates, by their number.

    The updates are those of "linear weights" at their best rate, one for each seed.
    """
    found: dict[int, list[tuple[float, float]]] = {}
    for rank, _, code, docs in _recorded("directions"):
        found.setdefault(rank, []).append((code, docs))
    return found


def rounded() -> dict[str, list[float]]:
    """Return the losses on code of a base in NF4: before training, after it, and after merging, one for each seed."""
    found: dict[str, list[float]] = {}
    for name, _, code in _recorded("nf4"):
        found.setdefault(name, []).append(code)
    return found


def _recorded(part: str) -> list[Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))[part]


def record(methods: Iterable[str] = tuple(METHODS), path: Path = RESULTS) -> None:
    """Train by `methods`. Each uses the first seed at growing rates until the loss on code rises, and then the other
    seeds at the best rate."""
    torch.set_num_threads(1)
    rows: dict[str, list[list[Any]]] = {"runs": [], "directions": [], "nf4": []}
    for method in methods:
        losses = {}
        for rate in METHODS[method][1]:
            model, found = learn(method, rate, SEEDS[0])
            losses[rate] = found[-1].code, model
            _append(rows, "runs", found, path)
            if losses[rate][0] > min(loss for loss, _ in losses.values()):
                break  # a larger rate would be worse still
        best = min(losses, key=lambda rate: losses[rate][0])
        tuned = [losses[best][1]]
        for seed in SEEDS[1:]:
            model, found = learn(method, best, seed)
            tuned.append(model)
            _append(rows, "runs", found, path)
        if method == "linear weights":
            for seed, model in zip(SEEDS, tuned, strict=True):
                kept = [(rank, seed, *both_losses(with_directions(model, rank))) for rank in KEPT]
                _append(rows, "directions", kept, path)
        if method == "rank 16":
            for seed in SEEDS:
                _append(rows, "nf4", _round_and_learn(method, best, seed), path)


def _round_and_learn(method: str, rate: float, seed: int) -> list[tuple[str, int, float]]:
    """Return (name, seed, loss on code) of a base in NF4 and of its adapter, beside the base and merged into it."""
    base = rounded_model()
    losses = [("base in NF4", seed, held_out_loss(base, texts()[1]))]
    model, found = learn(method, rate, seed, base)
    losses.append(("trained on the base in NF4", seed, found[-1].code))
    merge(model)
    losses.append(("merged into fp32", seed, held_out_loss(model, texts()[1])))
    for layer in adapters(model).values():
        layer.base.weight.data = through_nf4(layer.base.weight.data)
    losses.append(("merged into NF4", seed, held_out_loss(model, texts()[1])))
    return losses


def _append(rows: dict[str, list[list[Any]]], part: str, found: Iterable[Iterable[Any]], path: Path) -> None:
    """Add rows with rounded losses to a part of the record, print them, and write the record."""
    for row in found:
        rows[part].append([round(value, 4) if isinstance(value, float) and value > 0.1 else value for value in row])
        print(*rows[part][-1], flush=True)
    write(rows, path)


def write(rows: dict[str, list[list[Any]]], path: Path) -> None:
    """Write the record, a row per line, with its command, the versions of torch and Python, and the text's tokens."""
    header = {
        "command": "python -m llmlab.course.experiments.lora", "torch": torch.__version__,
        "python": sys.version.split()[0], "tokens": [len(ids) for ids in texts()],
        "before": [round(loss, 4) for loss in both_losses(small_model())],
    }  # fmt: skip
    parts = [f' "{part}": [\n  ' + ",\n  ".join(map(json.dumps, found)) + "\n]" for part, found in rows.items()]
    path.write_text(f"{json.dumps(header)[:-1]},\n" + ",\n".join(parts) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    record(path=Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
