"""One forward pass: llmlab's models or transformers', with one of llmlab's KV caches or none.

    B  batch     T  tokens being read     C  hidden size     V  vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

from torch import Tensor, nn

from ..architectures.gpt import Cache
from ..base.errors import SpecError
from ..specs.model import ModelSpec
from .cache import KVCache, PagedCache

__all__ = ["check_prompt", "logits"]


class Ours(Protocol):
    """What llmlab's models have: the Llama and GPT of `llmlab.architectures`, and the drafts of `drafts`."""

    spec: ModelSpec
    lm_head: nn.Module

    def hidden(self, ids_BT: Tensor, cache: Cache | None, mask: Tensor | None, positions_BT: Tensor | None) -> Tensor:
        """Return what the head reads, (B, T, C)."""


def _is_ours(model: nn.Module) -> TypeGuard[Ours]:
    return hasattr(model, "spec")


def logits(model: nn.Module, ids_BT: Tensor, cache: KVCache | None = None, last: int = 1) -> Tensor:
    """Return the logits after each of the last `last` tokens of `ids_BT`, (B, last, V): the head reads only those."""
    positions = mask = None
    if cache is not None:
        cache.expect(ids_BT)
        if isinstance(cache, PagedCache) and len(set(cache.begins)) > 1:  # the rows begin at different positions
            positions, mask = cache.positions(), cache.mask()
    if _is_ours(model):
        return model.lm_head(model.hidden(ids_BT, cache, mask, positions)[:, -last:])
    from .transformers_cache import AsTransformers, additive

    theirs: Any = model  # a model of transformers, or a wrapper of one: mypy does not know its attributes
    if mask is not None and theirs.config._attn_implementation == "eager":
        mask = additive(mask, theirs.dtype)
    return theirs(
        input_ids=ids_BT,
        past_key_values=None if cache is None else AsTransformers(cache),
        use_cache=cache is not None,
        position_ids=positions,
        attention_mask=mask,
        logits_to_keep=last,
    ).logits


def limits(model: nn.Module) -> tuple[int, int]:
    """Return the size of the model's vocabulary and the most tokens it can read."""
    if _is_ours(model):
        return model.spec.vocab, model.spec.max_positions
    config: Any = model.config
    return config.vocab_size, config.max_position_embeddings


def check_prompt(model: nn.Module, tokens: Sequence[int], max_new_tokens: int) -> None:
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
