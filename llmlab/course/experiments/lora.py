"""Fine-tuning a tiny Llama on a new kind of text, with all weights or with LoRA: its losses on new and on old text.

    python -m llmlab.course.experiments.lora FILE

trains all runs again (about ten minutes on one core) and writes FILE; `results` reads the package's own. The model of
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
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...specs.run import LoRA
from ..architectures.small import small_ids, small_model, small_tokenizer
from ..quantize.formats import nf4
from ..techniques.learning_rate import warmup_cosine
from ..techniques.lora import adapters, inject, merge
from ..techniques.training_loop import Recipe, evaluate
from .sweeps import fit, grouped, record_file, write

RESULTS = Path(__file__).with_suffix(".json")
BATCH, LENGTH, STEPS, WARMUP = 2, 128, 200, 10
TRAINING, EVALUATION = Recipe(micro_batch=BATCH, seq_len=LENGTH), Recipe(micro_batch=8, seq_len=LENGTH, eval_batches=4)
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
KEPT = (1, 4, 16, 64, 256)  # how many of the 256 singular directions of a full update are kept


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


def code_loss(model: nn.Module) -> float:
    """Return the loss on held-out code."""
    return evaluate(model, texts()[1], EVALUATION)


def both_losses(model: nn.Module) -> tuple[float, float]:
    """Return the losses on held-out code and on held-out documentation."""
    return code_loss(model), evaluate(model, texts()[2], EVALUATION)


def through_nf4(weight: Tensor) -> Tensor:
    """Return the values of a weight after a round trip through NF4.

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

    With fewer `steps`, the schedule is the same but ends early.
    """
    model = prepare(method, model or small_model(), seed)
    parameters = [w for w in model.parameters() if w.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for start, stop in pairwise((0, *EVALUATED)):
        numbers = range(start, min(stop, steps))
        fit(model, optimizer, texts()[0], TRAINING, seed, numbers,
            lambda step: rate * warmup_cosine(step + 1, WARMUP, STEPS, 0.1))  # fmt: skip
        if stop <= steps:
            losses.append(Result(method, rate, seed, stop, *both_losses(model)))
    return model, losses


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
    rows = (result for result in results() if result.method == method and result.step == STEPS)
    return grouped((result.rate, (result.code, result.docs)) for result in rows)


def best_rate(method: str) -> float:
    """Return the learning rate with the lowest loss on code for the first seed."""
    losses = final_losses(method)
    return min(losses, key=lambda rate: losses[rate][0])


def directions() -> dict[int, list[tuple[float, float]]]:
    """Return the (code, documentation) losses with the largest directions of full updates, by how many are kept.

    The updates are those of "linear weights" at their best rate, one for each seed.
    """
    return grouped((rank, (code, docs)) for rank, _, code, docs in _recorded("directions"))


def rounded() -> dict[str, list[float]]:
    """Return the losses on code of a base in NF4: before training, after it, and after merging, one for each seed."""
    return grouped((name, code) for name, _, code in _recorded("nf4"))


def _recorded(part: str) -> list[Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))[part]


def record(path: Path, methods: Iterable[str] = tuple(METHODS)) -> None:
    """Train by `methods`. Each uses the first seed at growing rates until the loss on code rises, and then the other
    seeds at the best rate."""
    torch.set_num_threads(1)
    record: dict[str, list[Any]] = {"runs": [], "directions": [], "nf4": []}
    for method in methods:
        by_rate = {}
        for rate in METHODS[method][1]:
            model, losses = learn(method, rate, SEEDS[0])
            by_rate[rate] = losses[-1].code, model
            _append(record, "runs", losses, path)
            if by_rate[rate][0] > min(loss for loss, _ in by_rate.values()):
                break  # a larger rate would be even worse
        best = min(by_rate, key=lambda rate: by_rate[rate][0])
        tuned = [by_rate[best][1]]
        for seed in SEEDS[1:]:
            model, losses = learn(method, best, seed)
            tuned.append(model)
            _append(record, "runs", losses, path)
        if method == "linear weights":
            for seed, model in zip(SEEDS, tuned, strict=True):
                rows = [(rank, seed, *both_losses(with_directions(model, rank))) for rank in KEPT]
                _append(record, "directions", rows, path)
        if method == "rank 16":
            for seed in SEEDS:
                _append(record, "nf4", _round_and_learn(method, best, seed), path)


def _round_and_learn(method: str, rate: float, seed: int) -> list[tuple[str, int, float]]:
    """Return (name, seed, loss on code) of a base in NF4, and of its adapter before and after two kinds of merging."""
    base = rounded_model()
    rows = [("base in NF4", seed, code_loss(base))]
    model, losses = learn(method, rate, seed, base)
    rows.append(("trained on the base in NF4", seed, losses[-1].code))
    merge(model)
    rows.append(("merged into fp32", seed, code_loss(model)))
    for layer in adapters(model).values():
        layer.base.weight.data = through_nf4(layer.base.weight.data)
    rows.append(("merged into NF4", seed, code_loss(model)))
    return rows


def _append(record: dict[str, list[Any]], part: str, rows: Iterable[tuple[Any, ...]], path: Path) -> None:
    """Add rows to a part of the record, print them, and write the record with the facts that it depends on."""
    for row in rows:
        record[part].append(row)
        print(*row, flush=True)
    facts: dict[str, Any] = {
        "python": sys.version.split()[0], "tokens": [len(ids) for ids in texts()],
        "before": [round(loss, 4) for loss in both_losses(small_model())],
    }  # fmt: skip
    write(path, "llmlab.course.experiments.lora", record, **facts)


if __name__ == "__main__":
    record(record_file())
