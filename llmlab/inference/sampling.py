"""From logits to the next token: temperature, top-k, top-p, min-p, in the order in which transformers applies them.

    B  batch     V  vocabulary
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from ..base.errors import SpecError

__all__ = ["Filters", "next_token", "probabilities"]


class Filters(TypedDict, total=False):
    """What `probabilities` takes besides the logits."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None


def probabilities(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Return what the next token is drawn from, (B, V) rows that add up to 1, for `logits` (B, V).

    `temperature` divides the logits; 0 puts all on the largest (the first of equals), and the filters change nothing.
    `top_k` keeps the k likeliest and their equals; `top_p` the fewest likeliest that together have at least p (Holtzman
    et al. 2020); `min_p` those with at least min_p times the likeliest's probability (Nguyen et al. 2024). Raises
    SpecError for a value that leaves no token.
    """
    _check(temperature, top_k, top_p, min_p)
    if temperature == 0:
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    scores = logits.float() / temperature
    if top_k is not None:
        least = scores.topk(min(top_k, scores.shape[-1])).values[:, -1:]  # (B, 1)
        scores = scores.masked_fill(scores < least, -torch.inf)
    if top_p is not None and top_p < 1:
        rising, order = scores.sort(descending=False)
        dropped = rising.softmax(-1).cumsum(-1) <= 1 - top_p  # the tail that together has at most 1 - p
        dropped[:, -1] = False
        scores = scores.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
    if min_p is not None:
        weights = scores.softmax(-1)
        scores = scores.masked_fill(weights < min_p * weights.amax(-1, keepdim=True), -torch.inf)
    return scores.softmax(-1)


def next_token(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return one token id a row, (B, 1), drawn from `probs` (B, V); without a generator, the likeliest."""
    if generator is None:
        return probs.argmax(-1, keepdim=True)
    return torch.multinomial(probs, 1, generator=generator)


def _check(temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    if not temperature >= 0:
        raise SpecError(f"temperature={temperature}: give 0 (the likeliest token) or more")
    if top_k is not None and top_k < 1:
        raise SpecError(f"top_k={top_k}: give 1 or more tokens, or None for all")
    if top_p is not None and not 0 < top_p <= 1:
        raise SpecError(f"top_p={top_p}: give 0 < top_p <= 1, or None for all")
    if min_p is not None and not 0 <= min_p <= 1:
        raise SpecError(f"min_p={min_p}: give 0 <= min_p <= 1, or None for all")
