"""Sampling the next token from logits: temperature, top-k, top-p, min-p, in the order that transformers uses.

    B  batch     V  vocabulary
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from ...base.errors import SpecError


class Filters(TypedDict, total=False):
    """The arguments of `probabilities`, without the logits."""

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
    """Return the probabilities that the next token is drawn from, (B, V), each row with sum 1, for `logits` (B, V).

    `temperature` divides the logits; 0 gives the largest logit (the first of equal ones) probability 1, and the filters
    then change nothing. `top_k` keeps the k likeliest tokens, and those as likely as the k-th; `top_p` the fewest
    likeliest tokens whose probabilities add up to at least p (Holtzman et al. 2020); `min_p` those with at least min_p
    times the probability of the likeliest (Nguyen et al. 2024). Raises SpecError for a value that leaves no token.
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
        dropped = rising.softmax(-1).cumsum(-1) <= 1 - top_p  # the least likely tokens, at most 1 - p together
        dropped[:, -1] = False
        scores = scores.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
    if min_p is not None:
        weights = scores.softmax(-1)
        scores = scores.masked_fill(weights < min_p * weights.amax(-1, keepdim=True), -torch.inf)
    return scores.softmax(-1)


def next_token(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return one token id per row, (B, 1), drawn from `probs` (B, V); without a generator, the likeliest."""
    if generator is None:
        return probs.argmax(-1, keepdim=True)
    return torch.multinomial(probs, 1, generator=generator)


def random_source(temperature: float, seed: int | None, device: torch.device) -> torch.Generator | None:
    """Return the generator to sample with: None at temperature 0, randomly seeded without a `seed`."""
    if temperature == 0:
        return None
    generator = torch.Generator(device)
    generator.manual_seed(seed) if seed is not None else generator.seed()
    return generator


def _check(temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    if not temperature >= 0:
        raise SpecError(f"temperature={temperature}: give 0 (the likeliest token) or more")
    if top_k is not None and top_k < 1:
        raise SpecError(f"top_k={top_k}: give 1 or more tokens, or None for all")
    if top_p is not None and not 0 < top_p <= 1:
        raise SpecError(f"top_p={top_p}: give 0 < top_p <= 1, or None for all")
    if min_p is not None and not 0 <= min_p <= 1:
        raise SpecError(f"min_p={min_p}: give 0 <= min_p <= 1, or None for all")
