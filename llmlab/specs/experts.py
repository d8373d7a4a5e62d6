"""The load of expert-parallel ranks, from a measured number of tokens for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from ..base.errors import SpecError


def expert_imbalance(tokens: Sequence[Any], ep: int) -> float:
    """Return the tokens of the busiest of `ep` expert-parallel ranks, divided by the mean of all ranks, as
    `Training(expert_imbalance=)` takes it.

    `tokens` are the numbers of tokens that the experts of a layer received, for example as the router's log counts
    them. For several layers, give a list of such lists: every layer waits for its own busiest rank, so the result is
    the mean over the layers. Each rank has the same number of consecutive experts, as in Megatron-LM (moe_layer.py,
    local_expert_indices). Raises SpecError for numbers that no router can have counted.

    >>> expert_imbalance([300, 100, 100, 100], ep=2)
    1.3333333333333333
    >>> expert_imbalance([[300, 100, 100, 100], [150, 150, 150, 150]], ep=2)
    1.1666666666666665
    """
    nested = isinstance(tokens, Sequence) and len(tokens) > 0 and isinstance(tokens[0], Sequence)
    layers = tokens if nested else [tokens]
    return fmean(_busiest(layer, ep) for layer in layers)


def _busiest(tokens: Any, ep: int) -> float:
    numbers = isinstance(tokens, Sequence) and all(isinstance(n, (int, float)) for n in tokens)
    if not numbers or not all(0 <= n < float("inf") for n in tokens) or not sum(tokens):
        raise SpecError(f"tokens={tokens!r}: give a list of the tokens of each expert; at least one must be above 0")
    if isinstance(ep, bool) or not isinstance(ep, int) or ep < 1 or len(tokens) % ep:
        raise SpecError(f"ep={ep!r} does not divide the {len(tokens)} experts; give a divisor")
    own = len(tokens) // ep
    return max(sum(tokens[first : first + own]) for first in range(0, len(tokens), own)) * ep / sum(tokens)
