"""The bytes that real caches allocate while a small model processes a prompt."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 2048,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@torch.no_grad()
def cache_bytes(
    config: Any, makers: Mapping[str, Callable[[], Any]], ids_shape: tuple[int, int], device: str,
    allocated: Callable[[], int],
) -> dict[str, int]:  # fmt: skip
    """Return the bytes that each maker's cache holds after a prompt; `allocated` returns all allocated bytes."""
    model = AutoModelForCausalLM.from_config(config).eval().to(device)
    ids = torch.zeros(*ids_shape, dtype=torch.long, device=device)

    def resident_bytes(make: Callable[[], Any]) -> int:
        gc.collect()
        before = allocated()
        cache = make()
        model.model(ids, past_key_values=cache, use_cache=True)
        gc.collect()
        return allocated() - before

    resident_bytes(lambda: DynamicCache(config=config))  # warm up
    return {name: resident_bytes(make) for name, make in makers.items()}
