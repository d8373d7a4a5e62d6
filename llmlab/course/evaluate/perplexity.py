"""Perplexity: the number of equally likely tokens that would leave the model as uncertain as a text does.

    perplexity = exp(-mean of log p(token | tokens before it))

A model reads a limited window. Windows that do not overlap give the first tokens of each almost no context and make
the model look worse; with `stride` < `window`, each token after the first window has at least `window - stride` tokens
of context.

    T  tokens of the text     V  vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...base.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor


class Perplexity(float):
    """A perplexity; `nll` is the negative log likelihood in nats of all scored tokens, `tokens` their number."""

    nll: float
    tokens: int

    def per(self, units: int) -> float:
        """Return the perplexity per unit of another kind, for example per word: exp(nll / units).

        Only such perplexities compare models with different tokenizers: their tokens are not the same units.
        """
        if units < 1:
            raise SpecError(f"units={units}: give the number of words (or characters) in the text that was scored")
        return math.exp(self.nll / units)

    def bits_per(self, units: int) -> float:
        """Return bits per unit, nll / units / ln 2; with UTF-8 bytes as units, the "bits per byte" of papers."""
        return math.log2(self.per(units))


def windows(tokens: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """Return (begin, scored, end) for each pass: it reads tokens [begin, end) and scores tokens [scored, end).

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

    `model(ids)` returns logits (1, T, V), or an output with `.logits`. `window` is the most tokens it reads at once, by
    default the model's own limit (from its `spec` or `config`) or the whole text; `stride` is how far the window moves,
    by default half its length. With `stride=window` neighbouring windows share only one token: the one that the first
    prediction of each is made from. No gradients are computed. The model's mode stays: put it into eval() first.

    Raises SpecError for fewer than two tokens, a stride above the window, or an id outside the vocabulary.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from ..inference.forward import limits

    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or len(ids) < 2:
        raise SpecError(f"ids of shape {tuple(ids.shape)}: give one text of at least 2 tokens, (T,) or (1, T)")
    vocab, limit = limits(model)
    if vocab:
        _check_ids(ids, vocab)  # else the embedding raises an IndexError, and on a GPU a device-side assert
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


def small_perplexity(model: Callable[..., Any]) -> Perplexity:
    """Return the Perplexity of the book's small model, or of a changed copy: one text, window and stride for all.

    `model` reads the small model's tokens (llmlab.course.architectures.small); its own is 38.2.
    """
    from ..architectures.small import STRIDE, WINDOW, small_sample

    return perplexity(model, small_sample(), WINDOW, STRIDE)


def _check_ids(ids: Tensor, vocab: int) -> None:
    wrong = ids[(ids < 0) | (ids >= vocab)]
    if len(wrong):
        raise SpecError(f"token id {int(wrong[0])}: the model's vocabulary has {vocab}; use its own tokenizer")
