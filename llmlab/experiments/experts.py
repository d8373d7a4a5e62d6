"""Train one small Llama whose MLPs are experts: how evenly they are used, which tokens are dropped, what that costs.

    python -m llmlab.experiments experts --balance 0.01 --steps 150

What chapter 16 runs. One process; weights and batches follow from the seed.

    N  tokens of a batch    E  experts    k  experts a token
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..architectures.llama import Llama
from ..base.errors import SpecError
from ..data import split, windows
from ..specs.model import model
from ..techniques.experts import MoE, balancing_loss
from ..techniques.training_loop import batch_seed, next_token_loss
from .train import check_counts, check_seed
from .train_split import TINY_LLAMA

WIDTH = 64  # of an expert
SIZES = {"intermediate_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": True}
CONFIG = {**TINY_LLAMA, **SIZES}


@dataclass(frozen=True)
class Job:
    """What is trained. `balance` is the balancing loss's coefficient, `factor` the capacity's (None: no token is
    dropped). Raises SpecError for what cannot be."""

    experts: int = 8
    k: int = 1
    balance: float = 0.0
    factor: float | None = None
    steps: int = 150
    sequences: int = 16
    seq_len: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(self, "steps", "sequences")
        check_seed(self)
        if not self.balance >= 0:
            raise SpecError(f"balance={self.balance} is not a coefficient >= 0")
        MoE(4, 4, self.experts, self.k, self.factor)  # says what is wrong with these


@dataclass(frozen=True)
class Seen:
    """What a batch met: `loss` in nats a token, `load` of every layer and expert as a multiple of an equal share,
    `dropped`, the share of choices that no expert served."""

    loss: float
    load: list[list[float]]
    dropped: float

    @property
    def busiest(self) -> float:
        return max(max(layer) for layer in self.load)


def build(job: Job) -> Llama:
    """Return a Llama with `MoE` in the place of every MLP."""
    torch.manual_seed(job.seed)
    whole = Llama(model(CONFIG))
    for block in whole.layers:
        block.mlp = MoE(CONFIG["hidden_size"], WIDTH, job.experts, job.k, job.factor)
    return whole


def layers_of(whole: Llama) -> list[MoE]:
    """Return the MoE of each block, the first block's first."""
    return [module for module in whole.modules() if isinstance(module, MoE)]


def trained(job: Job) -> Llama:
    """Return the model after `job.steps` steps of AdamW."""
    whole, (ids, _) = build(job), split(CONFIG["vocab_size"])
    optimizer = torch.optim.AdamW(whole.parameters(), lr=3e-3)
    for step in range(job.steps):
        batch = windows(ids, job.sequences, job.seq_len, batch_seed(job.seed, step))
        loss = next_token_loss(whole(batch), batch)
        balance = sum(balancing_loss(layer.logits, layer.chosen) for layer in layers_of(whole))
        (loss + job.balance * balance).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole


@torch.no_grad()
def seen(whole: Llama, factor: float | None = None, batches: int = 8) -> Seen:
    """Return what held-out batches meet with this capacity factor, whatever was trained with."""
    (_, ids), found = split(CONFIG["vocab_size"]), []
    layers = layers_of(whole)
    before = [layer.factor for layer in layers]
    for layer in layers:
        layer.factor = factor
    for number in range(batches):
        batch = windows(ids, 16, CONFIG["max_position_embeddings"], batch_seed(10**6, number))
        loss = next_token_loss(whole(batch), batch).item()
        load = [F.one_hot(layer.chosen.flatten(), layer.count).float().mean(0) * layer.count for layer in layers]
        found.append((loss, torch.stack(load), sum(layer.dropped for layer in layers) / len(layers)))
    for layer, kept in zip(layers, before, strict=True):
        layer.factor = kept
    losses, loads, dropped = zip(*found, strict=True)
    return Seen(sum(losses) / batches, (sum(loads) / batches).tolist(), sum(dropped) / batches)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m llmlab.experiments experts", description="Train a small mixture of experts."
    )
    parser.add_argument("--experts", type=int, default=Job.experts, help="a layer (default 8)")
    parser.add_argument("--k", type=int, default=Job.k, help="experts a token (default 1)")
    parser.add_argument(
        "--balance", type=float, default=Job.balance, help="the balancing loss's coefficient (default 0)"
    )
    parser.add_argument("--factor", type=float, help="of the capacity (default: no token is dropped)")
    parser.add_argument("--steps", type=int, default=Job.steps, help="optimizer steps (default 150)")
    parser.add_argument("--seed", type=int, default=0)
    try:
        job = Job(**vars(parser.parse_args(arguments)))
    except SpecError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    whole = trained(job)
    for factor in (None, 2.0, 1.25, 1.0, 0.75, 0.5):
        found = seen(whole, factor)
        shown = f"capacity factor {factor}: loss {found.loss:.3f} nats a token, {found.dropped:.0%} dropped"
        print(f"{shown}, busiest expert {found.busiest:.1f} equal shares")


if __name__ == "__main__":
    main()
