"""Which kernel scaled_dot_product_attention takes on a card, and the call of it.

The rules are those of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, the calls those of transformers/
attention.cpp (torch 2.13). What each kernel saves for backward is what its operator returns.

    B  batch    H  heads    T  query positions    S  key positions    D  head size
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .capability import Capability

HALF = (torch.float16, torch.bfloat16)

# Grouped heads on a card before Ampere: FlashAttention is not there and the memory-efficient kernel wants as many K/V
# heads as Q heads, so torch would fall back to math, which writes out all (B, H, T, S) scores. The published T4
# records, and who trains on such cards, repeat the heads first and take the memory-efficient kernel; so does this.
REPEAT_GROUPED_HEADS_BELOW = (8, 0)


def backend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, card: Capability
) -> str:
    """Return "cudnn", "flash", "efficient" or "math" for q (B, H, T, D), k and v (B, Hkv, S, D) on compute capability
    `card`. What sdpa_kernel and torch.backends.cuda switch off is left out; RuntimeError where nothing is left."""
    switches = torch.backends.cuda
    if query.dim() == 4 and all(each.stride(-1) == 1 for each in (query, key, value)):
        if prefers_cudnn(card) and switches.cudnn_sdp_enabled() and _cudnn(query, key, value, mask, card):
            return "cudnn"
        if switches.flash_sdp_enabled() and _flash(query, key, value, mask, dropout, causal, card):
            return "flash"
        if switches.mem_efficient_sdp_enabled() and _efficient(query, key, value, card):
            return "efficient"
    if not switches.math_sdp_enabled():
        raise RuntimeError("No available kernel. Aborting execution.")
    return "math"


def prefers_cudnn(card: Capability) -> bool:
    """check_prefer_cudnn_attention: Hopper and data-centre Blackwell, with the cuDNN of CUDA 13 wheels (> 9.15).

    Its workspace is not counted: cuDNN picks an algorithm at run time, and says only then how much that takes.
    """
    return card[0] in (9, 10)


def _cudnn(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, card: Capability) -> bool:
    D, Dv = query.shape[-1], value.shape[-1]
    fits = (D <= 128 and Dv <= 128) or (D, Dv) == (192, 128)
    return query.dtype in HALF and fits and D % 8 == 0 and Dv % 8 == 0 and key.shape[2] != 1


def _flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, card: Capability
) -> bool:
    D = query.shape[-1]
    if (
        card < (8, 0)
        or query.dtype not in HALF
        or mask is not None
        or D > 256
        or not D == key.shape[-1] == value.shape[-1]
    ):
        return False
    if causal and query.shape[2] != key.shape[2]:
        return False
    consumer = card in ((8, 6), (8, 9)) or card[0] == 12
    trains = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    return not (consumer and trains and D > 192 and (D <= 224 or dropout > 0))


def _efficient(query: Tensor, key: Tensor, value: Tensor, card: Capability) -> bool:
    if query.dtype not in (*HALF, torch.float32) or (query.dtype == torch.bfloat16 and card < (8, 0)):
        return False
    if query.shape[1] != key.shape[1]:
        return False
    half = query.dtype in HALF
    uses_tensor_cores = card[0] >= 8 or (card[0] >= 7 and half)
    alignment = max(4 if card[0] >= 8 else 1, (8 if half else 4) if uses_tensor_cores else 1)
    return query.shape[-1] % alignment == 0 and value.shape[-1] % alignment == 0


def attention(
    card: Capability,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention as on a CUDA card of compute capability `card`."""
    aten = torch.ops.aten
    if card < REPEAT_GROUPED_HEADS_BELOW and query.dim() == 4 and key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        enable_gqa = False
    chosen = backend(query, key, value, attn_mask, dropout_p, is_causal, card)
    trains = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    if chosen == "math":
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # convert_boolean_attn_mask
        attn_mask = torch.where(attn_mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    if chosen == "flash":
        D = query.shape[-1]
        scale = D**-0.5 if scale is None else scale
        if D % 8:  # pad_last_dim<8>
            query, key, value = (F.pad(each, (0, 8 - D % 8)) for each in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :D]
    if chosen == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, trains, dropout_p, is_causal, False, scale=scale
        )[0]
    if attn_mask is not None:
        attn_mask = _aligned_mask(attn_mask, query, key)
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, trains, dropout_p, is_causal, scale=scale
    )[0]


def _aligned_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """preprocess_mask: rows that do not begin at a multiple of 8 elements are padded, then repeated as a view."""
    S = mask.shape[-1]
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        mask = F.pad(mask, (0, 8 - S % 8))[..., :S]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
