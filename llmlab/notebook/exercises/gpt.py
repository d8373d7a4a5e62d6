"""Facts about the functions of yours/gpt.py."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from ...course.architectures import llama
from ...course.architectures.gpt import GPT, Attention, attend
from ...course.techniques import gpt_mistakes as wrong

TINY = {
    "model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.05,
}  # fmt: skip


@cache
def _model(attention=attend, norm=nn.LayerNorm) -> nn.Module:
    torch.manual_seed(0)
    model = GPT.from_spec(TINY)
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = attention
    return model if norm is nn.LayerNorm else wrong.with_norm(model, norm)


_text = torch.randint(512, (1, 32), generator=torch.Generator().manual_seed(0))

leaks = {
    "the correct model does not leak": lambda f: not f(_model(), _text),
    "the model without a mask does": lambda f: f(_model(wrong.attend_without_mask), _text),
    "attention over heads does not": lambda f: not f(_model(wrong.attend_over_heads), _text),
    "BatchNorm leaks in training": lambda f: f(_model(norm=wrong.BatchNorm).train(), _text),
    "BatchNorm does not leak in eval": lambda f: not f(_model(norm=wrong.BatchNorm).eval(), _text),
}

_q, _k = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
_places = torch.tensor([7.0, 3.0, 103.0])
_speeds = llama.frequencies({"rope_type": "default", "rope_theta": 10_000.0}, head_dim=32)


def _rotated(x: Tensor) -> Tensor:
    angles = (_places[:, None] * _speeds).repeat(1, 2)[None]
    return llama.rotate(x[None, None], angles.cos(), angles.sin())[0, 0]


def _scores_at(f, shift: int) -> Tensor:
    return f(_q, _places + shift, _speeds) @ f(_k, _places + shift, _speeds).T


rope = {
    "the rotation of the package": lambda f: torch.allclose(f(_q, _places, _speeds), _rotated(_q), atol=1e-5),
    "position 0 changes nothing": lambda f: torch.allclose(f(_q, 0 * _places, _speeds), _q),
    "lengths stay": lambda f: torch.allclose(f(_q, _places, _speeds).norm(dim=1), _q.norm(dim=1)),
    "scores depend on distances only": lambda f: torch.allclose(_scores_at(f, 0), _scores_at(f, 100), atol=1e-3),
}
