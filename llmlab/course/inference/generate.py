"""Prefill and decode: read the prompt once, then generate one token at a time.

    B  batch     T  tokens of each prompt
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...base.errors import SpecError
from .blocks import BlockPool
from .cache import GrowingCache, KVCache, PagedCache, StaticCache
from .forward import check_prompt, logits
from .sampling import Filters, next_token, probabilities, random_source
from .speculative import speculate

CACHES = ("none", "grow", "static", "paged")


def generate(
    model: nn.Module,
    ids: Tensor,
    max_new_tokens: int,
    cache: str = "grow",
    temperature: float = 0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    draft: nn.Module | None = None,
) -> Tensor:
    """Return the prompts `ids`, (B, T) or (T,), with `max_new_tokens` after each: (B, T + new) or (T + new,).

    `model` is a Llama or GPT of `course.architectures`, or any causal model of transformers. All prompts have the same
    length; `Scheduler` accepts prompts of different lengths. `cache` stores keys and values; with "none", the model
    reads the whole text again for every token. The cache changes the time, but never the tokens. `temperature` 0
    chooses the likeliest token; for other values see `probabilities`. `seed` makes the sampling repeatable: the tokens
    are those of transformers' generate() after torch.manual_seed(seed). `draft`, a smaller model with the same
    vocabulary, guesses tokens, which `model` then checks in one pass (see `speculate`). It allows only one prompt.

    Raises SpecError for an empty prompt, one that does not fit into the context, a token outside the vocabulary, and
    values that are not allowed. The cache is freed whatever happens.
    """
    if cache not in CACHES:
        raise SpecError(f"cache={cache!r}: give one of {', '.join(map(repr, CACHES))}")
    prompts = ids
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2:
        raise SpecError(f"ids of shape {tuple(prompts.shape)}: give (T,) or (B, T) token ids")
    for row in ids.tolist():
        check_prompt(model, row, max_new_tokens)
    filters: Filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    generator = random_source(temperature, seed, ids.device)
    if draft is not None:
        if ids.shape[0] != 1 or cache == "none":
            raise SpecError(f"draft with {ids.shape[0]} prompts, cache={cache!r}: give one prompt, and a cache")
        model_cache, draft_cache = (_cache(cache, ids, max_new_tokens) for _ in range(2))
        text = speculate(model, draft, ids, max_new_tokens, model_cache, draft_cache, generator, **filters).ids
    else:
        text = _decode(model, ids, max_new_tokens, _cache(cache, ids, max_new_tokens), generator, filters)
    return text[0] if prompts.dim() == 1 else text


@torch.no_grad()
def _decode(
    model: nn.Module,
    text: Tensor,
    new_tokens: int,
    cache: KVCache | None,
    generator: torch.Generator | None,
    filters: Filters,
) -> Tensor:
    unread = text  # the prompt first (prefill), then each new token (decode)
    try:
        for _ in range(new_tokens):
            probs = probabilities(logits(model, unread, cache)[:, -1], **filters)
            new = next_token(probs, generator)  # (B, 1)
            text = torch.cat((text, new), dim=1)
            unread = text if cache is None else new
    finally:
        if cache is not None:
            cache.release()
    return text


def _cache(kind: str, ids: Tensor, new_tokens: int, block: int = 16) -> KVCache | None:
    B, T = ids.shape
    if kind == "none":
        return None
    if kind == "grow":
        return GrowingCache()
    if kind == "static":
        return StaticCache(T + new_tokens)
    return PagedCache(BlockPool(B * -(-(T + new_tokens) // block), block))
