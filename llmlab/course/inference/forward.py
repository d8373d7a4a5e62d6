"""One forward pass of a model of llmlab or transformers, with or without one of llmlab's KV caches.

llmlab's models (the Llama and GPT of `course.architectures`, and the drafts of `drafts`) have `spec`, `lm_head`, and
`hidden(ids_BT, cache, mask, positions_BT)`, which returns the input of the head, (B, T, C).

    B  batch     T  new tokens     C  hidden size     V  vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.errors import SpecError
from .cache import KVCache, PagedCache


def logits(model: Any, ids_BT: Tensor, cache: KVCache | None = None, last: int = 1) -> Tensor:
    """Return the logits after each of the last `last` tokens of `ids_BT`, (B, last, V); the head computes no others."""
    positions = mask = None
    if cache is not None:
        cache.expect(ids_BT)
        if isinstance(cache, PagedCache) and len(set(cache.begins)) > 1:  # the rows begin at different positions
            positions, mask = cache.positions(), cache.mask()
    if hasattr(model, "spec"):
        return model.lm_head(model.hidden(ids_BT, cache, mask, positions)[:, -last:])
    from .transformers_cache import AsTransformers

    if mask is not None and model.config._attn_implementation == "eager":
        # eager attention adds the mask to the scores: 0 where True
        mask = torch.zeros_like(mask, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)
    return model(
        input_ids=ids_BT,
        past_key_values=None if cache is None else AsTransformers(cache),
        use_cache=cache is not None,
        position_ids=positions,
        attention_mask=mask,
        logits_to_keep=last,
    ).logits


def limits(model: Any) -> tuple[Any, Any]:
    """Return the size of the model's vocabulary and the most tokens it can read, each None if unknown."""
    if hasattr(model, "spec"):
        return model.spec.vocab, model.spec.max_positions
    config = getattr(model, "config", None)
    return getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None)


def check_prompt(model: Any, tokens: Sequence[int], max_new_tokens: int) -> None:
    """Raise SpecError for a prompt that is empty, too long with its answer, or has a token outside the vocabulary."""
    vocab, context = limits(model)
    if not tokens:
        raise SpecError("an empty prompt: give at least one token, the beginning-of-text token if there is no other")
    if max_new_tokens < 1:
        raise SpecError(f"max_new_tokens={max_new_tokens}: give 1 or more")
    if len(tokens) + max_new_tokens > context:
        raise SpecError(
            f"{len(tokens)} tokens of prompt and {max_new_tokens} new ones: the model's context is {context}; "
            f"give a prompt of {context - max_new_tokens} tokens or fewer, or fewer new ones"
        )
    if unknown := [token for token in tokens if not 0 <= token < vocab]:
        raise SpecError(f"token {unknown[0]}: the model's vocabulary is 0 to {vocab - 1}; use its own tokenizer")
