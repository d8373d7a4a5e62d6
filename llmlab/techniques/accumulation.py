"""Gradient accumulation: one optimizer step from several micro-batches, and the ways it goes wrong.

    B  sequences of a micro-batch     T  tokens of a sequence     V  vocabulary     K  micro-batches a step

Sequences of unequal length are padded; a label of IGNORE is a position that no loss counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..base.errors import SpecError

IGNORE = -100  # cross_entropy's ignore_index: padding, and the parts of a prompt that are not trained on

Loader = Iterable[tuple[Tensor, Tensor]]  # (ids, labels), (B, T) each


def groups(loader: Loader, steps: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield lists of `steps` micro-batches, one an optimizer step; the last list holds what is left."""
    if steps < 1:
        raise SpecError(f"steps={steps} is too small; give a whole number >= 1")
    batches = iter(loader)
    while group := list(islice(batches, steps)):
        yield group


def pad(sequences: Sequence[Tensor], token: int = 0) -> tuple[Tensor, Tensor]:
    """Return ids and labels, (B, T) each, of sequences of token ids; T is the longest's, labels end in IGNORE."""
    ids = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=token)  # (B, T)
    return ids, nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=IGNORE)


def targets(labels: Tensor) -> int:
    """Return how many positions of `labels`, (B, T), the loss of the next token counts: the first has no past."""
    return int((labels[:, 1:] != IGNORE).sum())


def summed_loss(model: Callable[..., Any], ids: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over `targets(labels)` positions of the next token's cross entropy, in nats."""
    logits = model(input_ids=ids).logits  # (B, T, V)
    return cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
    )


def backward_exact(model: nn.Module, group: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Add the gradient of the whole group's mean loss a token, and return that loss.

    It is the gradient that the group gives as one batch: each micro-batch brings its sum, and all are divided by the
    group's number of tokens, which is therefore counted before the first forward.
    """
    tokens = sum(targets(labels) for _, labels in group)
    total = 0.0
    for ids, labels in group:
        loss = summed_loss(model, ids, labels) / tokens
        loss.backward()  # adds to .grad
        total += loss.item()
    return total


def backward_of_means(model: nn.Module, group: Sequence[tuple[Tensor, Tensor]], steps: int) -> float:
    """Add the gradient that the usual loop takes, loss / steps a micro-batch, and return that loss.

    It is the whole group's only where every micro-batch has as many tokens and the group has all its `steps`.
    """
    total = 0.0
    for ids, labels in group:
        loss = summed_loss(model, ids, labels) / targets(labels) / steps
        loss.backward()
        total += loss.item()
    return total


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader, steps: int) -> list[float]:
    """Take one optimizer step for each `steps` micro-batches and one for the rest; return the loss a token of each."""
    losses = []
    for group in groups(loader, steps):
        optimizer.zero_grad()
        losses.append(backward_exact(model, group))
        optimizer.step()
    return losses


def gradient(model: nn.Module) -> Tensor:
    """Return a copy of all gradients as one vector, in the order of the parameters, and set them to None."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()
    model.zero_grad(set_to_none=True)
    return flat


def difference(one: Tensor, other: Tensor) -> float:
    """Return |one - other| / |other|, by Euclidean norms."""
    return ((one - other).norm() / other.norm()).item()
