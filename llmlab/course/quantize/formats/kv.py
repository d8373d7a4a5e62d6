"""KV cache quantization (KIVI): keys with scales per channel, values with scales per token.

KIVI (Liu et al., arXiv 2402.02750, section 3): in keys a few channels are large in every token. A scale shared by all
channels of a token would be set by those few; a scale shared by many tokens of one channel fits that channel. Values
have no such channels, and attention sums them over tokens, so a token's error should not spread to other tokens.

Shapes: cache (B, H, T, d): batch, kv heads, tokens, head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ....base.errors import SpecError, check_counts
from ..checks import check_bits
from . import affine

Per = Literal["channel", "token"]


def rounded(cache: Tensor, per: Per, bits: int = 2, group: int = 32) -> Tensor:
    """Return `cache` (B, H, T, d), keys or values, as it is restored from `bits` bits with scales per channel or token.

    Per channel, `group` tokens share a scale, and the last T mod `group` tokens stay exact; per token, `group` channels
    do. Raises SpecError for other shapes, a group that does not divide the head dimension (per token), and values that
    are not finite.
    """
    if cache.ndim != 4 or not cache.numel():
        raise SpecError(f"a cache of shape {tuple(cache.shape)} is not (batch, kv heads, tokens, head dimension)")
    if per not in ("channel", "token"):
        raise SpecError(f"per={per!r} is neither 'channel' (keys) nor 'token' (values)")
    check_counts(group=group)
    check_bits(bits)
    tokens = cache.shape[2]
    old = tokens if per == "token" else tokens - tokens % group
    if not old:
        return cache.clone()
    rows = cache[:, :, :old] if per == "token" else cache[:, :, :old].transpose(2, 3)
    quantized = affine.quantize(rows.reshape(-1, rows.shape[-1]), bits, "group", group, symmetric=False)
    restored = quantized.dequantize().to(cache.dtype).reshape(rows.shape)
    restored = restored if per == "token" else restored.transpose(2, 3)
    return torch.cat([restored, cache[:, :, old:]], dim=2)


def attend_quantized(bits: int = 2, group: int = 32, keys: Per = "channel") -> Callable[..., Tensor]:
    """Return a function for `Attention.attend` (architectures.llama) that rounds keys and values to `bits` bits.

    All tokens of the pass are rounded, the query's own too, except, per channel, the last ones that fill no group.
    """
    from ...architectures.gpt import attend

    def attend_rounded(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kind: str = "sdpa", dropout: float = 0.0
    ) -> Tensor:
        k, v = rounded(k, keys, bits, group), rounded(v, "token", bits, group)
        return attend(q, k, v, mask, kind, dropout)

    return attend_rounded
