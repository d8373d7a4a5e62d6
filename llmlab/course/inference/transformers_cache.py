"""An adapter that makes llmlab's KV caches usable by transformers' models (transformers/cache_utils.py, `Cache`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache

from ..architectures.gpt import Cache as Ours


class AsTransformers(Cache):
    """A view of one of llmlab's caches. The model computes its mask from the lengths; each layer calls `update`."""

    is_compileable = False  # a class attribute hides the base class's property, which would look at `layers`

    def __init__(self, cache: Ours) -> None:
        super().__init__(layers=[])
        self.cache = cache

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Pass the layer's new keys and values to the cache; return those of all tokens."""
        return self.cache.update(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens in the cache: the position of the next one."""
        return self.cache.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the first token being read."""
        return self.cache.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return how many tokens `update` will return, and the position of the first of them."""
        return self.cache.length + query_length, 0
