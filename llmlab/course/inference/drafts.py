"""Two draft models for speculative decoding that need no training: a bigram table, and the model's own first blocks.

    B  batch     T  new tokens     V  vocabulary
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ...base.errors import SpecError
from ...specs.model import ModelSpec
from ...specs.model import model as find_model
from ..architectures.gpt import Cache
from ..architectures.llama import Llama


class Bigram(nn.Module):
    """Predicts the next token from the last one alone, by the frequency of the pair in a text, so a pass is a look-up.

    `speculate` calls `hidden` and then `lm_head`, as of a Llama. Here, `hidden` already returns the logits.
    """

    def __init__(self, text: Tensor, spec: ModelSpec, smoothing: float = 0.01) -> None:
        """Count the pairs in `text`, (tokens,) ids below spec.vocab; `smoothing` is added to every count."""
        super().__init__()
        counts = torch.full((spec.vocab, spec.vocab), smoothing)
        counts.view(-1).index_add_(0, text[:-1] * spec.vocab + text[1:], torch.ones(len(text) - 1))
        self.spec = spec
        self.logits = nn.Parameter(counts.log(), requires_grad=False)  # their softmax is each pair's share
        self.lm_head = nn.Identity()

    def hidden(
        self, ids_BT: Tensor, cache: Cache | None = None, mask: Tensor | None = None, positions_BT: Tensor | None = None
    ) -> Tensor:
        """Return the logits after each token, (B, T, V). The cache only counts the tokens, without keys or values."""
        if cache is not None:
            counted = ids_BT[:, None, :, None].float()
            cache.update(0, counted, counted)
        return self.logits[ids_BT]

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the logits after each token, (B, T, V)."""
        return self.hidden(ids_BT)


def first_blocks(model: Llama, count: int) -> Llama:
    """Return a model of `model`'s embedding, first `count` blocks, last norm and head, which share its weights."""
    if not 1 <= count <= len(model.layers):
        raise SpecError(f"count={count}: the model has {len(model.layers)} blocks; give 1 to {len(model.layers)}")
    short = copy.copy(model)
    short._modules = dict(model._modules)  # copy.copy shares this dict: `model` would lose its blocks
    short.layers = nn.ModuleList(model.layers[:count])
    short.spec = find_model({**model.spec.config, "num_hidden_layers": count})
    return short
