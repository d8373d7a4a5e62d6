"""Gradient accumulation: one optimizer step from several micro-batches, and the ways it goes wrong.

    B  sequences of a micro-batch     T  tokens of a sequence     V  vocabulary size

Sequences of unequal length are padded; positions whose label is IGNORE do not count in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...base.errors import check_counts

IGNORE = -100  # cross_entropy's ignore_index: the label of padding, and of prompt tokens that are not trained on

Loader = Iterable[tuple[Tensor, Tensor]]  # (ids, labels), (B, T) each


def groups(loader: Loader, steps: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield lists of `steps` micro-batches, one list per optimizer step; the last list may be shorter."""
    check_counts(steps=steps)
    batches = iter(loader)
    while group := list(islice(batches, steps)):
        yield group


def pad(sequences: Sequence[Tensor], token: int = 0) -> tuple[Tensor, Tensor]:
    """Pad sequences of token ids to the longest; return ids and labels, (B, T) each, where padded labels are IGNORE."""
    ids = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=token)  # (B, T)
    return ids, nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=IGNORE)


def targets(labels: Tensor) -> int:
    """Return how many labels, (B, T), count in the next-token loss; a sequence's first token is never predicted."""
    return int((labels[:, 1:] != IGNORE).sum())


def summed_loss(model: Callable[..., Any], ids: Tensor, labels: Tensor) -> Tensor:
    """Return the next-token cross entropy in nats, summed over the `targets(labels)` positions that count."""
    logits = model(input_ids=ids).logits  # (B, T, V)
    return cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
    )


def backward_exact(model: nn.Module, group: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Accumulate the gradient of the group's mean loss per token, and return that loss.

    It equals the gradient of the group as one batch: each micro-batch's summed loss is divided by the number of tokens
    in the whole group, which is therefore counted before the first forward pass.
    """
    tokens = sum(targets(labels) for _, labels in group)
    total = 0.0
    for ids, labels in group:
        loss = summed_loss(model, ids, labels) / tokens
        loss.backward()  # accumulates into .grad
        total += loss.item()
    return total


def backward_of_means(model: nn.Module, group: Sequence[tuple[Tensor, Tensor]], steps: int) -> float:
    """Accumulate the gradient of the usual loop, mean loss / `steps` for each micro-batch, and return that loss.

    It equals the group's gradient only if all micro-batches have the same number of tokens and there are `steps` of
    them.
    """
    total = 0.0
    for ids, labels in group:
        loss = summed_loss(model, ids, labels) / targets(labels) / steps
        loss.backward()
        total += loss.item()
    return total


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader, steps: int) -> list[float]:
    """Take an optimizer step per `steps` micro-batches and one for the remainder; return each step's loss per token."""
    losses = []
    for group in groups(loader, steps):
        optimizer.zero_grad()
        losses.append(backward_exact(model, group))
        optimizer.step()
    return losses


def gradient(model: nn.Module) -> Tensor:
    """Return a copy of all gradients as one vector, in the order of the parameters, and set them to None."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return flat


def difference(one: Tensor, other: Tensor) -> float:
    """Return |one - other| / |other|, in Euclidean norms."""
    return ((one - other).norm() / other.norm()).item()
