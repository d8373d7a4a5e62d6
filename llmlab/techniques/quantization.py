"""Quantization: when it is faster and when not, and outliers as large models have them.

What is quantized, and how, lies in llmlab/quantize, a file an idea.
"""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn

from ..architectures.llama import Block, Llama, RMSNorm
from ..base.errors import NotAvailable, SpecError
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu

Way = Literal["16-bit", "fused", "unpacked", "w8a8"]


def linear_seconds(
    card: GPU | str, tokens: int, rows: int, columns: int, way: Way = "16-bit", bits: float = 4.5, dtype: str = "fp16"
) -> float:
    """Return the least seconds of x Wᵀ, x (tokens, columns), W (rows, columns), on a card's data sheet rates.

    The roofline (Williams et al., 2009): the larger of FLOP / peak and bytes / bandwidth.
        "16-bit"    the weight is read in `dtype`
        "fused"     it is read in `bits` a weight and unpacked in registers (Marlin, GPTQ's and AWQ's kernels)
        "unpacked"  one kernel unpacks it to memory, another reads it from there (bitsandbytes beyond few tokens)
        "w8a8"      weight and inputs in 8 bits, multiplied by the int8 units
    Raises NotAvailable for a card without the units, SpecError for another way.
    """
    card = find_gpu(card)
    ways = ("16-bit", "fused", "unpacked", "w8a8")
    if way not in ways:
        raise SpecError(f"way={way!r} is not one of {', '.join(ways)}")
    peak = card.peak("int8" if way == "w8a8" else dtype)
    if peak is None:
        raise NotAvailable(f"{card.name} has no units for {'int8' if way == 'w8a8' else dtype}")
    weights = rows * columns
    streams = 2 * tokens * (rows + columns)  # inputs and outputs, in 16 bits
    packed = weights * (8 if way == "w8a8" else bits) / 8
    read = 2 * weights if way in ("16-bit", "unpacked") else packed
    product = max(2 * tokens * weights / peak, (read + streams) / card.bandwidth)
    unpacking = (packed + 2 * weights) / card.bandwidth if way == "unpacked" else 0.0
    return product + unpacking


@torch.no_grad()
def with_outliers(model: Llama, channels: tuple[int, ...] = (7, 77), factor: int = 64) -> Llama:
    """Return a copy that computes the same logits, bit for bit, with a few channels `factor` times larger.

    Every norm makes them larger and the layers that read it divide them out; `factor`, a power of two, costs no
    rounding. Large models grow such channels by themselves (Dettmers et al., arXiv 2208.07339, section 4).
    """
    if factor < 1 or factor & (factor - 1):
        raise SpecError(f"factor={factor} is no power of two; with another one the logits would round differently")
    copied = copy.deepcopy(model)
    index = list(channels)
    for block in copied.layers:
        assert isinstance(block, Block)
        attention, mlp = block.self_attn, block.mlp
        scale_norm(block.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj], index, factor)
        scale_norm(block.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj], index, factor)
    return copied


def scale_norm(norm: RMSNorm, readers: list[nn.Linear], channels: list[int], factor: int) -> None:
    """Multiply a norm's `channels` by `factor`, and divide the columns that read them: in place."""
    norm.weight[channels] *= factor
    for linear in readers:
        linear.weight[:, channels] /= factor


def relative_error(restored: Tensor, exact: Tensor) -> float:
    """Return |restored - exact| / |exact|, over all numbers: 0 nothing lost, 1 as wrong as zeros."""
    return ((restored - exact).norm() / exact.norm()).item()
