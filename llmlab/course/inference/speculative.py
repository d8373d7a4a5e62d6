"""Speculative decoding: a small model guesses, the large one checks all guesses in one pass (Leviathan et al. 2023).

It is exact: the tokens have the distribution p of the large model. A guess x from the draft's distribution q is
accepted with probability min(1, p(x) / q(x)). After the first rejection, a token is drawn from max(0, p - q), divided
by its sum. So x is generated with probability q·min(1, p/q) + (probability of a rejection)·max(0, p - q)/(its sum) =
p(x).

    V  vocabulary     G  guesses per round
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...base.errors import SpecError
from .cache import GrowingCache, KVCache
from .forward import check_prompt, limits, logits
from .sampling import Filters, next_token, probabilities

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's own from Python 3.11 on


@dataclass(frozen=True)
class Speculation:
    """The text `ids`, (1, T + new), and counts: guesses of the draft, those accepted, the large model's passes.

    `refused` counts the rejected guesses. A guess after a rejected one is counted neither as accepted nor as refused.
    """

    ids: Tensor
    guessed: int
    accepted: int
    refused: int
    passes: int

    @property
    def acceptance(self) -> float:
        """The probability that a guess is accepted if those before it are: Leviathan's alpha."""
        return self.accepted / max(self.accepted + self.refused, 1)


def tokens_per_pass(acceptance: float, guesses: int) -> float:
    """Return the mean number of tokens per pass of the large model (Leviathan et al. 2023, equation 1).

    Each of `guesses` is accepted with probability `acceptance` if all before it are; one token is the model's own.

    >>> tokens_per_pass(0.0, 4), tokens_per_pass(1.0, 4), tokens_per_pass(0.5, 1)
    (1.0, 5.0, 1.5)
    """
    return sum(acceptance**i for i in range(guesses + 1))


def speedup(acceptance: float, guesses: int, cost: float) -> float:
    """Return the speedup of decoding if a pass of the draft takes `cost` times a pass of the model (theorem 3.8).

    This assumes that a pass over all guesses takes as long as one over a single token, which is true while decoding is
    bound by reading the weights.
    """
    return tokens_per_pass(acceptance, guesses) / (guesses * cost + 1)


@torch.no_grad()
def speculate(
    model: nn.Module,
    draft: nn.Module,
    ids: Tensor,
    max_new_tokens: int,
    cache: KVCache | None = None,
    draft_cache: KVCache | None = None,
    generator: torch.Generator | None = None,
    guesses: int = 4,
    **filters: Unpack[Filters],
) -> Speculation:
    """Return the Speculation for one prompt `ids`, (1, T). `filters` are those of `probabilities`, for both models.

    Without a `generator`, both models choose the likeliest token, and the text equals that of `model` alone. Raises
    SpecError as `generate` does, and if the two vocabularies differ in size.
    """
    check_prompt(model, ids[0].tolist(), max_new_tokens)
    check_prompt(draft, ids[0].tolist(), max_new_tokens)
    (draft_vocab, _), (vocab, _) = limits(draft), limits(model)
    if draft_vocab != vocab:
        raise SpecError(f"the draft's vocabulary is {draft_vocab}, the model's {vocab}: both must have the same tokens")
    if guesses < 1:
        raise SpecError(f"guesses={guesses}: give 1 or more")
    cache, draft_cache = cache or GrowingCache(), draft_cache or GrowingCache()
    text, end = ids, ids.shape[1] + max_new_tokens
    guessed = accepted = refused = passes = 0
    try:
        while (begin := text.shape[1]) < end:
            G = min(guesses, end - begin - 1)  # the model adds one token of its own to the accepted ones
            guess, q = _guess(draft, draft_cache, text, G, generator, filters)
            unread = torch.cat((text[:, cache.length :], guess), dim=1)
            p = probabilities(logits(model, unread, cache, G + 1)[0], **filters)  # (G + 1, V)
            count = _kept(p, q, guess[0], generator)
            if count == G:
                last = next_token(p[G:], generator)
            else:
                last = next_token(_residual(p[count], q[count])[None], generator)
            text = torch.cat((text, guess[:, :count], last), dim=1)
            guessed, accepted, refused, passes = guessed + G, accepted + count, refused + (count < G), passes + 1
            cache.crop(begin + count)  # `last` has not been read yet
            draft_cache.crop(min(draft_cache.length, begin + count))
    finally:
        cache.release()
        draft_cache.release()
    return Speculation(text, guessed, accepted, refused, passes)


def _guess(
    draft: nn.Module, cache: KVCache, text: Tensor, G: int, generator: torch.Generator | None, filters: Filters
) -> tuple[Tensor, Tensor]:
    """Return G tokens after `text`, (1, G), and the probabilities that each was drawn from, (G, V)."""
    begin, drawn_from = text.shape[1], []
    for _ in range(G):
        probs = probabilities(logits(draft, text[:, cache.length :], cache)[:, -1], **filters)  # (1, V)
        text = torch.cat((text, next_token(probs, generator)), dim=1)
        drawn_from.append(probs)
    return text[:, begin:], torch.cat(drawn_from) if drawn_from else text.new_zeros(0)


def _kept(p: Tensor, q: Tensor, guess: Tensor, generator: torch.Generator | None) -> int:
    """Return how many guesses are accepted before the first rejection."""
    for i, token in enumerate(guess.tolist()):
        draw = 0.5 if generator is None else torch.rand((), generator=generator, device=p.device).item()
        if draw * q[i, token] >= p[i, token]:  # without a generator, p and q are 0 or 1
            return i
    return len(guess)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    rest = (p - q).clamp(min=0)
    return rest / rest.sum()
