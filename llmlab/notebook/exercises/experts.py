"""Facts about the functions that the page on experts asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _as_transformers(
    function: Callable[..., Any], K: int, groups: int, most: int, bias: float = 0.0, experts: int = 32
) -> bool:
    """Whether the router of DeepSeek-V3 in transformers chooses the same experts for 100 tokens. `bias` is added to
    each score."""
    from transformers import DeepseekV3Config, DeepseekV3Model  # type: ignore[attr-defined]

    sizes: dict[str, Any] = {
        "hidden_size": experts, "n_routed_experts": experts, "num_experts_per_tok": K, "n_group": groups,
        "topk_group": most, "num_hidden_layers": 1, "first_k_dense_replace": 0, "vocab_size": 8,
        "moe_intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "pad_token_id": None,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    router = DeepseekV3Model(DeepseekV3Config(**sizes)).layers[0].mlp.gate
    logits = torch.randn(100, experts, generator=torch.Generator().manual_seed(K))
    torch.nn.init.eye_(router.weight)
    router.e_score_correction_bias.fill_(bias)
    chosen = function(logits.sigmoid() + bias, K, groups, most)
    return torch.equal(chosen.sort(1).values, router(logits)[2].sort(1).values)


def _chosen(function: Callable[..., Any], scores: list[float], K: int, groups: int, most: int) -> list[int]:
    return sorted(function(torch.tensor([scores]), K, groups, most)[0].tolist())


few_nodes = {
    "as in transformers, 8 of 32 experts in 4 of 8 groups": lambda f: _as_transformers(f, 8, 8, 4),
    "all groups allowed: the K best": lambda f: _as_transformers(f, 5, 4, 4),
    "two good experts of a group beat the best one": lambda f: _chosen(f, [0.9, 0.1, 0.6, 0.5], 2, 2, 1) == [2, 3],
    "only two experts of a group count": lambda f: (
        _chosen(f, [0.9, 0.8, 0, 0, 0.6, 0.6, 0.6, 0.6], 2, 2, 1) == [0, 1]
    ),
    "negative scores, which a bias can cause": lambda f: _as_transformers(f, 8, 8, 2, bias=-2.0),
}


def _rows(function: Callable[..., Any], experts: list[list[int]], E: int, ep: int) -> list[int]:
    return [int(number) for number in function(torch.tensor(experts), E, ep)]


rows_to_ranks = {
    "two experts on one rank: one row": lambda f: _rows(f, [[0, 1]], 4, 2) == [1, 0],
    "two experts on two ranks: two rows": lambda f: _rows(f, [[1, 2]], 4, 2) == [1, 1],
    "several tokens": lambda f: _rows(f, [[0, 1], [0, 3], [2, 3]], 4, 2) == [2, 2],
    "one rank receives every token": lambda f: _rows(f, [[0, 5], [2, 7], [3, 4]], 8, 1) == [3],
    "one expert per rank: every copy": lambda f: _rows(f, [[0, 5], [5, 7]], 8, 8) == [1, 0, 0, 0, 0, 2, 0, 1],
}
