"""Perplexity: how many tokens the model hesitates between, on average, at each token of a text.

    perplexity = exp(-mean of log p(token | tokens before it))

A model has a window. Cutting the text into windows side by side gives the first tokens of each almost no context and
makes the model look worse; sliding by `stride` < `window` gives each token at least `window - stride` tokens of it.

    T  tokens of the text     V  vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..base.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Perplexity", "perplexity", "windows"]


class Perplexity(float):
    """A perplexity, with what it is made of: `nll`, the negative log likelihood of all `tokens` scored, in nats."""

    nll: float
    tokens: int

    def per(self, units: int) -> float:
        """Return the same likelihood a unit of another kind: exp(nll / units), with `units` words, say.

        Two models with different tokenizers can only be compared so: a token of one is not a token of the other.
        """
        if units < 1:
            raise SpecError(f"units={units}: give the number of words (or characters) in the text that was scored")
        return math.exp(self.nll / units)

    def bits_per(self, units: int) -> float:
        """Return bits a unit: nll / units / ln 2; with `units` UTF-8 bytes, the "bits per byte" of papers."""
        return math.log2(self.per(units))


def windows(tokens: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """Return (begin, scored from, end) of each pass: it reads [begin, end) and scores [scored from, end).

    Every token but the text's first is scored exactly once.

    >>> windows(10, window=6, stride=3)
    [(0, 1, 6), (3, 6, 9), (6, 9, 10)]
    >>> windows(4, window=6, stride=3)
    [(0, 1, 4)]
    """
    passes, scored, begin = [], 1, 0
    while scored < tokens:
        end = min(begin + window, tokens)
        passes.append((begin, scored, end))
        begin, scored = begin + stride, end
    return passes


def perplexity(
    model: Callable[..., Any], ids: Tensor, window: int | None = None, stride: int | None = None
) -> Perplexity:
    """Return the Perplexity of `model` on the text `ids`, (T,) or (1, T) token ids.

    `model(ids)` gives logits (1, T, V), or an output with `.logits`. `window`: the most tokens it reads at once, by
    default the model's own limit (of its `spec` or `config`) or the whole text; `stride`: how far the window
    moves, by default half of it. With `stride=window` they stand side by side and share one token, which the first
    prediction of each is made from. No gradient is taken; the model's mode is kept: put it into eval() first.

    Raises SpecError for fewer than two tokens, a stride above the window, or an id outside the vocabulary.
    """
    import torch
    from torch.nn.functional import cross_entropy

    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or len(ids) < 2:
        raise SpecError(f"ids of shape {tuple(ids.shape)}: give one text of at least 2 tokens, (T,) or (1, T)")
    limit, vocab = _limits(model)
    if vocab:
        _check_ids(ids, vocab)  # here: an embedding would raise something else, on a GPU from a kernel
    window = window or min(limit or len(ids), len(ids))
    stride = stride or max(window // 2, 1)
    if window < 2 or not 1 <= stride <= window:
        raise SpecError(f"window={window}, stride={stride}: give a window of 2 or more and 1 <= stride <= window")
    if limit and window > limit:
        raise SpecError(f"window={window}: the model reads at most {limit} tokens; give a window of {limit} or less")
    nll, tokens = 0.0, 0
    with torch.no_grad():
        for begin, scored, end in windows(len(ids), window, min(stride, window - 1)):
            output = model(ids[None, begin:end])
            logits = getattr(output, "logits", output)[0]  # (end - begin, V)
            targets = ids[scored:end]
            _check_ids(targets, logits.shape[-1])
            predictions = logits[scored - 1 - begin : end - 1 - begin]  # the logits at t predict token t + 1
            nll += cross_entropy(predictions.double(), targets, reduction="sum").item()
            tokens += end - scored
    result = Perplexity(math.exp(nll / tokens))
    result.nll, result.tokens = nll, tokens
    return result


def _limits(model: Callable[..., Any]) -> tuple[int | None, int | None]:
    """Return the most tokens the model was made to read, and its vocabulary, where it says so."""
    if (spec := getattr(model, "spec", None)) is not None:
        return spec.max_positions, spec.vocab
    config = getattr(model, "config", None)
    return getattr(config, "max_position_embeddings", None), getattr(config, "vocab_size", None)


def _check_ids(ids: Tensor, vocab: int) -> None:
    wrong = ids[(ids < 0) | (ids >= vocab)]
    if len(wrong):
        raise SpecError(f"token id {int(wrong[0])}: the model's vocabulary has {vocab}; use its own tokenizer")
