"""Train a small Llama with experts as MLPs, and measure how evenly they are used and how much dropped tokens cost.

One process trains, and the seed determines weights and batches. `balance.py` records the numbers of the page.

    T  tokens of a batch    E  experts    K  experts per token
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...base.errors import SpecError, check_counts
from ...data import split, windows
from ...specs.model import model
from ..architectures.llama import Llama
from ..techniques.experts import MoE, balancing_loss
from ..techniques.training_loop import batch_seed, next_token_loss
from .job import SEQ_LEN, TINY_LLAMA, check_seed

WIDTH = 64  # of an expert
SIZES = {"intermediate_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": True}
CONFIG = {**TINY_LLAMA, **SIZES}
SEQUENCES = 16  # of a batch


@dataclass(frozen=True)
class Routing:
    """Loss and routing of some batches: `loss` in nats per token, the `load` of every layer and expert as a multiple of
    an equal share, and `dropped`, the share of choices that no expert served."""

    loss: float
    load: list[list[float]]
    dropped: float

    @property
    def busiest(self) -> float:
        return max(max(layer) for layer in self.load)


def build(experts: int = 8, k: int = 1, factor: float | None = None, seed: int = 0) -> Llama:
    """Return a Llama whose MLPs are replaced by `MoE`; with a capacity `factor` of None, no token is dropped."""
    check_seed(seed)
    torch.manual_seed(seed)
    llama = Llama(model(CONFIG))
    for block in llama.layers:
        block.mlp = MoE(CONFIG["hidden_size"], WIDTH, experts, k, factor)
    return llama


def moe_layers(llama: Llama) -> list[MoE]:
    """Return the MoE of each block, in the order of the blocks."""
    return [module for module in llama.modules() if isinstance(module, MoE)]


def trained(balance: float = 0.0, steps: int = 150, seed: int = 0, **mixture: Any) -> Llama:
    """Return the model of `build(**mixture)` after `steps` steps of AdamW; `balance` weighs the balancing loss."""
    check_counts(steps=steps)
    if not balance >= 0:
        raise SpecError(f"balance={balance} is not a coefficient >= 0")
    llama, (ids, _) = build(**mixture, seed=seed), split(CONFIG["vocab_size"])
    optimizer = torch.optim.AdamW(llama.parameters(), lr=3e-3)
    for step in range(steps):
        batch = windows(ids, SEQUENCES, SEQ_LEN, batch_seed(seed, step))
        loss = next_token_loss(llama(batch), batch)
        imbalance = sum(balancing_loss(layer.logits, layer.chosen) for layer in moe_layers(llama))
        (loss + balance * imbalance).backward()
        optimizer.step()
        optimizer.zero_grad()
    return llama


@torch.no_grad()
def evaluate(llama: Llama, factor: float | None = None, batches: int = 8) -> Routing:
    """Return loss and routing of held-out batches with this capacity factor, and restore the model's own factor."""
    (_, ids), rows = split(CONFIG["vocab_size"]), []
    layers = moe_layers(llama)
    factors = [layer.factor for layer in layers]
    for layer in layers:
        layer.factor = factor
    for number in range(batches):
        batch = windows(ids, SEQUENCES, SEQ_LEN, batch_seed(10**6, number))
        loss = next_token_loss(llama(batch), batch).item()
        load = [F.one_hot(layer.chosen.flatten(), layer.count).float().mean(0) * layer.count for layer in layers]
        rows.append((loss, torch.stack(load), sum(layer.dropped for layer in layers) / len(layers)))
    for layer, own_factor in zip(layers, factors, strict=True):
        layer.factor = own_factor
    losses, loads, dropped = zip(*rows, strict=True)
    return Routing(sum(losses) / batches, (sum(loads) / batches).tolist(), sum(dropped) / batches)
