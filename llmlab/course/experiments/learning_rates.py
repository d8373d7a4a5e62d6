"""Optimizers and warm-up, compared at several learning rates and seeds on a tiny GPT.

    python -m llmlab.course.experiments.learning_rates

trains all runs again (about 15 minutes on one core) and writes learning_rates.json, which `results` reads. All runs
have the same model, the same number of steps and tokens, and the same schedule after the first steps. They differ in
optimizer, peak learning rate, warm-up and seed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...data import split, windows
from ..architectures.gpt import GPT
from ..techniques.learning_rate import clip_gradients, warmup_cosine
from ..techniques.optimizers import Adafactor, AdamW, Lion, root_mean_square
from ..techniques.optimizers_8bit import AdamW8bit
from ..techniques.training_loop import batch_seed, next_token_loss

RESULTS = Path(__file__).with_suffix(".json")
VOCAB, BATCH, LENGTH, STEPS, WARMUP = 512, 8, 64, 200, 20
SEEDS = (0, 1, 2)  # of the initial weights and of the batches
TINY_GPT: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": LENGTH,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": True,
}  # fmt: skip


class RelativeAdamW(AdamW):
    """AdamW without decay, whose learning rate is multiplied by the root mean square of each tensor."""

    def update(self, w, g, state, group):
        size = max(1e-3, root_mean_square(w))  # as in Adafactor
        super().update(w, g, state, {**group, "lr": group["lr"] * size, "weight_decay": 0.0})


class AbsoluteAdafactor(Adafactor):
    """Adafactor whose step size is the learning rate itself, as in AdamW, whatever the size of the tensor."""

    def step_size(self, w, t, group):
        return group["lr"]


class Both(Optimizer):
    """Two optimizers that share the parameters of a model, and the learning rate of a schedule."""

    def __init__(self, first: Optimizer, second: Optimizer) -> None:
        self.pair = (first, second)
        self.param_groups = [*first.param_groups, *second.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.pair:
            one.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.pair:
            one.step()


def muon(model: nn.Module) -> Optimizer:
    """Return Muon for the matrices of the blocks and AdamW for everything else, at comparable learning rates."""
    hidden = [w for name, w in model.named_parameters() if w.ndim == 2 and name.startswith("h.")]
    others = [w for name, w in model.named_parameters() if not (w.ndim == 2 and name.startswith("h."))]
    matrices = torch.optim.Muon(hidden, lr=1.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return Both(matrices, torch.optim.AdamW(others, lr=1.0, weight_decay=0.1))


def large_norm_steps(model: nn.Module) -> Optimizer:
    """Return AdamW with 30 times the learning rate for the weights of norms."""
    norms = [w for name, w in model.named_parameters() if "ln" in name and name.endswith("weight")]
    others = [w for name, w in model.named_parameters() if not ("ln" in name and name.endswith("weight"))]
    groups: list[dict[str, Any]] = [{"params": norms, "scale": 30.0}, {"params": others}]
    return torch.optim.AdamW(groups, lr=1.0, weight_decay=0.1)


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Optimizer], tuple[float, ...]]] = {
    "SGD": (lambda m: torch.optim.SGD(m.parameters(), lr=1.0), (0.1, 0.3, 1.0, 3.0)),
    "SGD, momentum": (lambda m: torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.9), (0.03, 0.1, 0.3, 1.0)),
    "AdamW": (lambda m: torch.optim.AdamW(m.parameters(), lr=1.0, weight_decay=0.1), (1e-3, 3e-3, 1e-2, 3e-2)),
    "8-bit AdamW": (lambda m: AdamW8bit(m.parameters(), lr=1.0, weight_decay=0.1), (1e-3, 3e-3, 1e-2, 3e-2)),
    "Lion": (lambda m: Lion(m.parameters(), lr=1.0, weight_decay=0.1), (1e-4, 3e-4, 1e-3, 3e-3)),
    "Muon + AdamW": (muon, (1e-3, 3e-3, 1e-2, 3e-2)),
    "Adafactor": (lambda m: Adafactor(m.parameters(), lr=1.0), (1e-2, 3e-2, 1e-1, 3e-1)),
    "AdamW, relative step": (lambda m: RelativeAdamW(m.parameters(), lr=1.0), (1e-2, 3e-2, 1e-1, 3e-1)),
    "Adafactor, absolute step": (lambda m: AbsoluteAdafactor(m.parameters(), lr=1.0), (1e-3, 3e-3, 1e-2, 3e-2)),
    "AdamW, 30 × for norms": (large_norm_steps, (3e-4, 1e-3, 3e-3, 1e-2)),
}
SCHEDULES: dict[str, Callable[[int], float]] = {
    "warm-up": lambda step: warmup_cosine(step + 1, WARMUP, STEPS, 0.1),
    "no warm-up": lambda step: max(warmup_cosine(step + 1, WARMUP, STEPS, 0.1), float(step < WARMUP)),
    "moments first": lambda step: 0.0 if step < WARMUP else warmup_cosine(step + 1, WARMUP, STEPS, 0.1),
}


class Result(NamedTuple):
    """The held-out loss at the end of one run, in nats per token; inf if the loss was no longer finite."""

    optimizer: str
    schedule: str
    rate: float
    seed: int
    loss: float


def new_gpt(seed: int) -> GPT:
    """Return the tiny GPT with random weights."""
    torch.manual_seed(seed)
    return GPT.from_spec(TINY_GPT)


def learn(optimizer: str, rate: float, seed: int, schedule: str = "warm-up", steps: int = STEPS) -> Result:
    """Train the tiny GPT and return its held-out loss. `steps` below `STEPS` stops early and keeps the schedule."""
    training, held_out = texts()
    model = new_gpt(seed)
    rule = OPTIMIZERS[optimizer][0](model)
    for step in range(steps):
        for group in rule.param_groups:
            group["lr"] = rate * SCHEDULES[schedule](step) * group.get("scale", 1.0)
        ids = windows(training, BATCH, LENGTH, batch_seed(seed, step))
        loss = next_token_loss(model(ids), ids)
        rule.zero_grad()
        loss.backward()
        clip_gradients(model.parameters(), 1.0)
        rule.step()
    return Result(optimizer, schedule, rate, seed, held_out_loss(model, held_out))


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Return the tokens of the training text and of the held-out text."""
    return split(VOCAB)


@torch.no_grad()
def held_out_loss(model: nn.Module, ids: Tensor) -> float:
    """Return the mean loss over 128 windows, the same for every model."""
    batches = [windows(ids, BATCH, LENGTH, seed) for seed in range(16)]
    loss = sum(next_token_loss(model(batch), batch).item() for batch in batches) / len(batches)
    return loss if math.isfinite(loss) else math.inf


def plan() -> list[tuple[str, float, int, str]]:
    """Return the arguments of all runs: every optimizer with warm-up, and AdamW and SGD with the other schedules."""
    wanted = [(name, "warm-up") for name in OPTIMIZERS]
    wanted += [(name, schedule) for name in ("AdamW", "SGD, momentum") for schedule in ("no warm-up", "moments first")]
    return [(name, rate, seed, schedule) for name, schedule in wanted for rate in OPTIMIZERS[name][1] for seed in SEEDS]


def results() -> list[Result]:
    """Return the recorded results of `plan`."""
    return [Result(*row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]]


def losses(optimizer: str, schedule: str = "warm-up") -> dict[float, list[float]]:
    """Return the recorded losses of an optimizer by learning rate, one for each seed."""
    found: dict[float, list[float]] = {}
    for result in results():
        if (result.optimizer, result.schedule) == (optimizer, schedule):
            found.setdefault(result.rate, []).append(result.loss)
    return found


def best(by_rate: dict[float, list[float]]) -> tuple[float, list[float]]:
    """Return the learning rate with the lowest mean loss, and the losses of its seeds."""
    rate = min(by_rate, key=lambda one: sum(by_rate[one]) / len(by_rate[one]))
    return rate, by_rate[rate]


def record(runs: Iterable[tuple[str, float, int, str]], path: Path = RESULTS) -> None:
    """Train `runs` and write their results to `path`."""
    torch.set_num_threads(1)
    rows = []
    for run in runs:
        result = learn(*run)
        rows.append([*result[:-1], round(result.loss, 4)])
        print(*rows[-1], flush=True)
        path.write_text(
            '{"command": "python -m llmlab.course.experiments.learning_rates", "torch": "' + torch.__version__
            + '",\n "runs": [\n  ' + ",\n  ".join(json.dumps(row) for row in rows) + "\n]}\n", encoding="utf-8",
        )  # fmt: skip


if __name__ == "__main__":
    record(plan(), Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
