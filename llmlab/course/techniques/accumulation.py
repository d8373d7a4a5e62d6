"""Gradient accumulation: one optimizer step from several micro-batches.

    B  sequences of a micro-batch     S  tokens of a sequence     V  vocabulary size

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

MicroBatch = tuple[Tensor, Tensor]  # token ids and labels, (B, S) each


def groups(loader: Iterable[MicroBatch], steps: int) -> Iterator[list[MicroBatch]]:
    """Yield lists of `steps` micro-batches, one list per optimizer step; the last list may be shorter."""
    check_counts(steps=steps)
    micro_batches = iter(loader)
    while group := list(islice(micro_batches, steps)):
        yield group


def pad(sequences: Sequence[Tensor], token: int = 0) -> MicroBatch:
    """Pad sequences of token ids to the longest; return ids and labels, (B, S) each, where padded labels are IGNORE."""
    ids = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=token)  # (B, S)
    return ids, nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=IGNORE)


def count_targets(labels: Tensor) -> int:
    """Return how many labels, (B, S), count in the next-token loss; a sequence's first token is never predicted."""
    return int((labels[:, 1:] != IGNORE).sum())


def summed_loss(model: Callable[..., Any], ids: Tensor, labels: Tensor) -> Tensor:
    """Return the next-token cross entropy in nats, summed over the `count_targets(labels)` positions that count."""
    logits = model(input_ids=ids).logits  # (B, S, V)
    return cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
    )


def backward_exact(model: nn.Module, group: Sequence[MicroBatch]) -> float:
    """Accumulate the gradient of the group's mean loss per token, and return that loss.

    It equals the gradient of the group as one batch, because each micro-batch's summed loss is divided by the number of
    tokens in the whole group. That number is counted before the first forward pass.
    """
    tokens = sum(count_targets(labels) for _, labels in group)
    total = 0.0
    for ids, labels in group:
        loss = summed_loss(model, ids, labels) / tokens
        loss.backward()  # adds to .grad
        total += loss.item()
    return total


def backward_of_means(model: nn.Module, group: Sequence[MicroBatch], steps: int) -> float:
    """Accumulate the gradient of the usual loop, mean loss / `steps` for each micro-batch, and return that loss.

    It equals the group's gradient only if all micro-batches have the same number of tokens and there are `steps` of
    them.
    """
    total = 0.0
    for ids, labels in group:
        loss = summed_loss(model, ids, labels) / count_targets(labels) / steps
        loss.backward()
        total += loss.item()
    return total


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[MicroBatch], steps: int
) -> list[float]:
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


def difference(vector: Tensor, reference: Tensor) -> float:
    """Return the relative difference |vector - reference| / |reference|, in Euclidean norms."""
    return ((vector - reference).norm() / reference.norm()).item()
