"""Four small GPTs on the bytes of a text: one is right, and three have a mistake. The curves of three seeds are stored.

    python -m llmlab.course.experiments gpt_mistakes --steps 500 --json

trains them again. `stored_curves` returns the stored output of this command.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...data import split
from ..architectures.gpt import GPT, Attention
from ..techniques.gpt_mistakes import attend_over_heads, attend_without_mask
from ..techniques.training_loop import Recipe, train
from .command import AS_JSON, STEPS, Options, command

STORED = Path(__file__).with_suffix(".json")
MODELS = ("right", "no mask", "attention over heads", "no positions")
RATES = (6.25e-4, 1.25e-3, 2.5e-3, 5e-3, 1e-2)  # learning rates
BYTES = 257  # 256 bytes and the end of a text: the smallest vocabulary, so that a small model learns to use its context
SPEC: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": BYTES, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "initializer_range": 0.05, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
OPTIONS: Options = {**STEPS, "--seeds": (3, "runs of each model (default 3)"), **AS_JSON}


def build(name: str, seed: int) -> GPT:
    """Return the GPT called `name` in MODELS, with random weights."""
    torch.manual_seed(seed)
    model = GPT.from_spec(SPEC)
    wrong: dict[str, Any] = {"no mask": attend_without_mask, "attention over heads": attend_over_heads}
    for module in model.modules():
        if isinstance(module, Attention) and name in wrong:
            module.attend = wrong[name]
    if name == "no positions":
        model.wpe.weight.requires_grad_(False).zero_()
    return model


def bigram_loss(training: Tensor, validation: Tensor, vocab: int) -> float:
    """Return the mean of −ln p(next token | token), in nats, under a table of counts with Kneser-Ney smoothing.

    Each count gives 0.75 to a second distribution, which counts how many different tokens come before a token.
    """
    pairs = torch.zeros(vocab, vocab)
    pairs.index_put_((training[:-1], training[1:]), torch.tensor(1.0), accumulate=True)
    occurs = pairs > 0
    variety = (occurs.sum(0) + 1.0) / (occurs.sum() + vocab)
    counts = pairs.sum(1, keepdim=True)
    table = ((pairs - 0.75).clamp(min=0) + 0.75 * occurs.sum(1, keepdim=True) * variety) / counts.clamp(min=1)
    table[counts[:, 0] == 0] = variety
    return -table[validation[:-1], validation[1:]].log().mean().item()


def curve(name: str, steps: int, seed: int, learning_rate: float) -> list[tuple[int, float]]:
    """Train the model `name` and return (step, held-out loss in nats per byte) pairs."""
    training, validation = split(vocab=BYTES)
    recipe = Recipe(
        steps, micro_batch=16, seq_len=64, learning_rate=learning_rate, warmup=min(30, steps - 1),
        eval_every=max(1, steps // 10), eval_batches=16, seed=seed,
    )  # fmt: skip
    return [(step, round(loss, 4)) for step, loss in train(build(name, seed), training, validation, recipe).evaluations]


def run(steps: int, seeds: int) -> dict[str, Any]:
    """Train each model with each of RATES and seed 0, then with its best rate and all `seeds`.

    `rates` has the last loss for each model and rate, and `curves` the held-out losses of each model and seed.
    """
    rates = {name: [curve(name, steps, 0, rate)[-1][1] for rate in RATES] for name in MODELS}
    best = {name: RATES[losses.index(min(losses))] for name, losses in rates.items()}
    runs = {name: [curve(name, steps, seed, best[name]) for seed in range(seeds)] for name in MODELS}
    curves = {name: [[loss for _, loss in curve] for curve in seeds] for name, seeds in runs.items()}
    training, validation = split(vocab=BYTES)
    bigram = round(bigram_loss(training, validation, BYTES), 4)
    return {"steps": [step for step, _ in runs["right"][0]], "rates": rates, "curves": curves, "bigram": bigram}


def stored_curves() -> dict[str, Any]:
    """Return the result of `run` with 500 steps and three seeds."""
    return json.loads(STORED.read_text(encoding="utf-8"))


def show(result: dict[str, Any]) -> str:
    """Return the last loss of each run as lines."""
    last_losses = {name: [f"{curve[-1]:.3f}" for curve in curves] for name, curves in result["curves"].items()}
    lines = [f"{name}: {', '.join(losses)}" for name, losses in last_losses.items()]
    return "\n".join([*lines, f"bigram table: {result['bigram']:.3f}"])


def main(arguments: list[str] | None = None, name: str = "gpt_mistakes") -> None:
    command(name, __doc__, OPTIONS, run, arguments, show)
