"""Best learning rates of tiny GPTs of several widths, under rules that scale the rate with the width.

    python -m llmlab.course.experiments.widths FILE

trains all runs again (about 15 minutes on one core) and writes FILE; `results` reads the package's own. All runs have
the same depth, head size, number of steps and tokens, and the same schedule. They differ in method, width, peak
learning rate and seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...data import windows
from ..architectures.gpt import GPT
from ..techniques.learning_rate import warmup_cosine
from ..techniques.optimizers import Adafactor
from ..techniques.training_loop import Recipe, batch_seed, next_token_loss
from .learning_rates import texts
from .sweeps import final_loss, fit, grouped, record, record_file

RESULTS = Path(__file__).with_suffix(".json")
VOCAB, BATCH, LENGTH, STEPS, WARMUP = 512, 8, 32, 200, 20
BASE, WIDTHS, HEAD_SIZE = 32, (32, 64, 128, 256), 32
RECIPE = Recipe(micro_batch=BATCH, seq_len=LENGTH, eval_batches=32, clip=math.inf)
SEEDS = (0, 1, 2)  # of the initial weights and of the batches


class Rule(NamedTuple):
    """Factors for a model that is wider than the base: the ratio of the widths to the power of these exponents.

    They multiply the learning rates of hidden matrices and of the head, the standard deviation with which the head
    starts, and the logits.
    """

    hidden_rate: float
    head_rate: float
    head_start: float
    logits: float


RULES = {
    "usual": Rule(0, 0, -0.5, 0),
    "table 3": Rule(-1, -1, -1, 0),  # Tensor Programs V, arXiv 2203.03466
    "table 8": Rule(-1, 0, 0, -1),
    "mixed": Rule(-1, -1, 0, -1),  # a mistake: the head of both tables
}


def kind(name: str, w: Tensor) -> str:
    """Return whether a parameter of `GPT` is a "vector", an "embedding", the "head", or "hidden".

    >>> kind("h.0.mlp.c_fc.weight", torch.zeros(4, 2)), kind("ln_f.weight", torch.zeros(4))
    ('hidden', 'vector')
    """
    if w.ndim < 2:
        return "vector"
    return {"wte": "embedding", "wpe": "embedding", "lm_head": "head"}.get(name.split(".")[0], "hidden")


class ScaledGPT(nn.Module):
    """A GPT of width `n`, whose head and learning rates follow a rule.

    Hidden matrices start with a standard deviation of 1/√inputs. The embeddings start the same at every width.
    """

    def __init__(self, n: int, rule: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.rule, self.ratio = RULES[rule], n / BASE
        self.gpt = GPT.from_spec({
            "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": n, "n_layer": 2, "n_head": n // HEAD_SIZE,
            "n_positions": LENGTH, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
            "tie_word_embeddings": False,
        })  # fmt: skip
        base = BASE**-0.5
        start = {"embedding": base, "head": base * self.ratio**self.rule.head_start}
        with torch.no_grad():
            for name, w in self.gpt.named_parameters():
                if w.ndim == 2:
                    w.normal_(std=start.get(kind(name, w), w.shape[1] ** -0.5))

    def forward(self, ids_BS: Tensor) -> Tensor:
        return self.gpt(ids_BS) * self.ratio**self.rule.logits

    def groups(self) -> list[dict[str, Any]]:
        """Return a parameter group for each kind of parameter; `scale` is the factor of its learning rate."""
        scales = {"hidden": self.ratio**self.rule.hidden_rate, "head": self.ratio**self.rule.head_rate}
        kinds: dict[str, list[Tensor]] = {}
        for name, w in self.gpt.named_parameters():
            kinds.setdefault(kind(name, w), []).append(w)
        return [{"params": weights, "kind": name, "scale": scales.get(name, 1.0)} for name, weights in kinds.items()]


def adamw(model: ScaledGPT) -> Optimizer:
    """Return AdamW without weight decay."""
    return torch.optim.AdamW(model.groups(), lr=1.0, weight_decay=0.0)


def adafactor(model: ScaledGPT) -> Optimizer:
    """Return Adafactor, whose step is relative to the size of each tensor."""
    return Adafactor(model.groups(), lr=1.0)


# The rule and the optimizer of each method, and the learning rates that are tried at each width, as powers of two.
METHODS: dict[str, tuple[str, Callable[[ScaledGPT], Optimizer], dict[int, range]]] = {
    "AdamW, usual": ("usual", adamw, {32: range(-7, -2), 64: range(-7, -4), 128: range(-9, -4), 256: range(-10, -4)}),
    "AdamW, µP": ("table 3", adamw, {64: range(-7, -4), 128: range(-7, -2), 256: range(-7, -2)}),
    "AdamW, mixed": ("mixed", adamw, {64: range(-7, -4), 128: range(-7, -2), 256: range(-7, -2)}),
    "Adafactor": ("usual", adafactor, {32: range(-6, 0), 256: range(-5, -2)}),
}
SAME_AT_BASE = {"AdamW, µP": "AdamW, usual", "AdamW, mixed": "AdamW, usual"}  # there, all factors are 1


class Result(NamedTuple):
    """The held-out loss at the end of one run, in nats per token; inf if the loss was no longer finite."""

    method: str
    width: int
    power: int  # the peak learning rate is 2 ** power
    seed: int
    loss: float


def train(
    model: ScaledGPT, optimizer: Optimizer, rate: float, seed: int, start: int = 0, stop: int = STEPS
) -> None:
    """Train from step `start` to step `stop` of a run of `STEPS` steps, with warm-up and cosine."""
    steps = range(start, stop)
    fit(model, optimizer, texts()[0], RECIPE, seed, steps, lambda n: rate * warmup_cosine(n + 1, WARMUP, STEPS, 0.1))


def learn(method: str, width: int, power: int, seed: int) -> Result:
    """Train a GPT and return its held-out loss."""
    rule, make, _ = METHODS[method]
    model = ScaledGPT(width, rule, seed)
    train(model, make(model), 2.0**power, seed)
    return Result(method, width, power, seed, held_out_loss(model))


def held_out_loss(model: nn.Module) -> float:
    """Return the mean loss over windows of the held-out text."""
    return final_loss(model, texts()[1], RECIPE)


def output_change(rule: str, width: int, steps: int = 5, rate: float = 2**-6, seed: int = 0) -> float:
    """Return the root mean square by which `steps` updates of AdamW at a constant rate change the logits of a batch."""
    training, held_out = texts()
    model, ids = ScaledGPT(width, rule, seed), windows(held_out, BATCH, LENGTH, 0)
    optimizer = torch.optim.AdamW(model.groups(), weight_decay=0.0)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]
    before = model(ids).detach()
    for step in range(steps):
        batch = windows(training, BATCH, LENGTH, batch_seed(seed, step))
        optimizer.zero_grad()
        next_token_loss(model(batch), batch).backward()
        optimizer.step()
    return (model(ids) - before).square().mean().sqrt().item()


def noise_scale(model: ScaledGPT, count: int = 64) -> float:
    """Return tr(Σ) / |g|² in tokens, from the gradients of `count` batches of the training text.

    A gradient of T tokens has a squared norm of |g|² + tr(Σ) / T on average (McCandlish et al., arXiv 1812.06162,
    appendix A.1). The mean of `count` gradients has `count` times as many tokens, which gives a second equation.
    """
    gradients = []
    for number in range(count):
        model.zero_grad()
        ids = windows(texts()[0], BATCH, LENGTH, batch_seed(1000, number))
        next_token_loss(model(ids), ids).backward()
        gradients.append(torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None]))
    model.zero_grad()
    small = sum(g.square().sum().item() for g in gradients) / count
    large = torch.stack(gradients).mean(0).square().sum().item()
    return count * BATCH * LENGTH * (small - large) / (count * large - small)


def plan() -> list[tuple[str, int, int, int]]:
    """Return the arguments of all runs."""
    return [
        (method, width, power, seed)
        for method, (_, _, grid) in METHODS.items() for width, powers in grid.items()
        for power in powers for seed in SEEDS
    ]  # fmt: skip


def results() -> list[Result]:
    """Return the recorded results of `plan`."""
    return [Result(*row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]]


def losses(method: str) -> dict[int, dict[int, list[float]]]:
    """Return the recorded losses of a method by width and by power of two, one for each seed."""
    trained_as = {width: SAME_AT_BASE.get(method, method) if width == BASE else method for width in WIDTHS}
    rows = sorted(row for row in results() if row.method == trained_as[row.width])  # by width, power and seed
    by_width = grouped((row.width, (row.power, row.loss)) for row in rows)
    return {width: grouped(pairs) for width, pairs in by_width.items()}


if __name__ == "__main__":
    record(learn, plan(), record_file(), "llmlab.course.experiments.widths")
