"""Optimizers and warm-up, compared at several learning rates and seeds on a tiny GPT.

    python -m llmlab.course.experiments.learning_rates FILE

trains all runs again (about 15 minutes on one core) and writes FILE; `results` reads the package's own. All runs have
the same model, the same number of steps and tokens, and the same schedule after the first steps. They differ in
optimizer, peak learning rate, warm-up and seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...data import split
from ..architectures.gpt import GPT
from ..techniques.learning_rate import warmup_cosine
from ..techniques.optimizers import Adafactor, AdamW, Lion, root_mean_square
from ..techniques.optimizers_8bit import AdamW8bit
from ..techniques.training_loop import Recipe
from .sweeps import final_loss, fit, grouped, record, record_file

RESULTS = Path(__file__).with_suffix(".json")
VOCAB, BATCH, LENGTH, STEPS, WARMUP = 512, 8, 64, 200, 20
RECIPE = Recipe(micro_batch=BATCH, seq_len=LENGTH, eval_batches=16)
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
        for optimizer in self.pair:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.pair:
            optimizer.step()


def muon(model: nn.Module) -> Optimizer:
    """Return Muon for the matrices of the blocks and AdamW for everything else, at comparable learning rates."""
    hidden = [w for name, w in model.named_parameters() if w.ndim == 2 and name.startswith("h.")]
    remaining = [w for name, w in model.named_parameters() if not (w.ndim == 2 and name.startswith("h."))]
    matrices = torch.optim.Muon(hidden, lr=1.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return Both(matrices, torch.optim.AdamW(remaining, lr=1.0, weight_decay=0.1))


def large_norm_steps(model: nn.Module) -> Optimizer:
    """Return AdamW with 30 times the learning rate for the weights of norms."""
    norms = [w for name, w in model.named_parameters() if "ln" in name and name.endswith("weight")]
    remaining = [w for name, w in model.named_parameters() if not ("ln" in name and name.endswith("weight"))]
    groups: list[dict[str, Any]] = [{"params": norms, "scale": 30.0}, {"params": remaining}]
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
    """Train the tiny GPT and return its held-out loss. With fewer `steps`, the schedule is the same but ends early."""
    (training, held_out), model, factor = texts(), new_gpt(seed), SCHEDULES[schedule]
    rule = OPTIMIZERS[optimizer][0](model)
    fit(model, rule, training, RECIPE, seed, range(steps), lambda step: rate * factor(step))
    return Result(optimizer, schedule, rate, seed, final_loss(model, held_out, RECIPE))


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Return the tokens of the training text and of the held-out text."""
    return split(VOCAB)



def plan() -> list[tuple[str, float, int, str]]:
    """Return the arguments of all runs: every optimizer with warm-up, and AdamW and SGD with the other schedules."""
    pairs = [(name, "warm-up") for name in OPTIMIZERS]
    pairs += [(name, schedule) for name in ("AdamW", "SGD, momentum") for schedule in ("no warm-up", "moments first")]
    return [(name, rate, seed, schedule) for name, schedule in pairs for rate in OPTIMIZERS[name][1] for seed in SEEDS]


def results() -> list[Result]:
    """Return the recorded results of `plan`."""
    return [Result(*row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]]


def losses(optimizer: str, schedule: str = "warm-up") -> dict[float, list[float]]:
    """Return the recorded losses of an optimizer by learning rate, one for each seed."""
    rows = (result for result in results() if (result.optimizer, result.schedule) == (optimizer, schedule))
    return grouped((result.rate, result.loss) for result in rows)


def best(by_rate: dict[float, list[float]]) -> tuple[float, list[float]]:
    """Return the learning rate with the lowest mean loss, and the losses of its seeds."""
    rate = min(by_rate, key=lambda rate: sum(by_rate[rate]) / len(by_rate[rate]))
    return rate, by_rate[rate]


if __name__ == "__main__":
    record(learn, plan(), record_file(), "llmlab.course.experiments.learning_rates")
