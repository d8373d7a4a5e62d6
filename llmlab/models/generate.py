"""Greedy generation, and the simplest KV cache: it grows by a copy a token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .gpt import Cache


class GrowingCache:
    """Keys and values of all tokens so far, one tensor of each a layer, made longer by concatenation."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    @property
    def length(self) -> int:
        """Tokens of each sequence held; a forward pass reads it before its first layer adds to it."""
        return self.layers[0][0].shape[2] if self.layers else 0

    def update(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens' keys and values of `layer`; return all of it, (B, H, S, D) each."""
        if layer == len(self.layers):
            self.layers.append((k_BHTD, v_BHTD))
        else:
            k_BHSD, v_BHSD = self.layers[layer]
            self.layers[layer] = torch.cat((k_BHSD, k_BHTD), dim=2), torch.cat((v_BHSD, v_BHTD), dim=2)
        return self.layers[layer]


@torch.no_grad()
def generate(model: nn.Module, ids_BT: Tensor, new_tokens: int, cache: Cache | None = None) -> Tensor:
    """Return the prompts with `new_tokens` greedy tokens after each, (B, T + new_tokens).

    With a `cache` each token goes through the model once; without one the whole text does, for every new token.
    Prompts are of one length: see `visible` for what padding needs.
    """
    given_BT = ids_BT
    for _ in range(new_tokens):
        last_BC = model.hidden(given_BT, cache)[:, -1]  # the head reads the last token alone: T × V logits are a lot
        new_B1 = model.lm_head(last_BC).argmax(-1, keepdim=True)
        ids_BT = torch.cat((ids_BT, new_B1), dim=1)
        given_BT = ids_BT if cache is None else new_B1
    return ids_BT
