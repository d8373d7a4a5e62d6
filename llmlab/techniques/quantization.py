"""Outliers as large models have them, made in a small one; and the error that a quantizer leaves.

The number formats and the algorithms of quantization are in llmlab/quantize.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ..architectures.llama import Block, Llama
from ..base.errors import SpecError


@torch.no_grad()
def with_outliers(model: Llama, channels: tuple[int, ...] = (7, 77), factor: int = 64) -> Llama:
    """Return a copy that computes the same logits, bit for bit, with a few channels `factor` times larger.

    Every norm multiplies them, and the weights that read them are divided: a power of two rounds nothing. Large models
    develop such channels by themselves (Dettmers et al., arXiv 2208.07339, section 4).
    """
    if factor < 1 or factor & (factor - 1):
        raise SpecError(f"factor={factor} is not a power of two; any other would change how the logits are rounded")
    copied = copy.deepcopy(model)
    index = list(channels)
    for block in copied.layers:
        assert isinstance(block, Block)
        attention, mlp = block.self_attn, block.mlp
        for norm, readers in (
            (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            norm.weight[index] *= factor
            for linear in readers:
                linear.weight[:, index] /= factor
    return copied


def relative_error(restored: Tensor, exact: Tensor) -> float:
    """Return |restored - exact| / |exact|, over all numbers: 0 if nothing is lost, 1 if as wrong as zeros."""
    return ((restored - exact).norm() / exact.norm()).item()
