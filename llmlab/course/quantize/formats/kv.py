"""KV cache quantization (KIVI): keys with scales per channel, values with scales per token.

KIVI (Liu et al., arXiv 2402.02750, section 3): in keys a few channels are large in every token. A scale shared by all
channels of a token would be set by those few; a scale shared by many tokens of one channel fits that channel. Values
have no such channels, and attention sums them over tokens, so a token's error should not spread to other tokens.

Shapes: cache (B, H, T, d): batch, kv heads, tokens, head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ....base.errors import SpecError, check_counts
from ..checks import check_bits
from . import affine
from .affine import Quantized

Per = Literal["channel", "token"]


@dataclass(frozen=True)
class QuantizedCache:
    """Keys or values in few bits, and in full precision the last tokens, which do not fill a group yet."""

    quantized: Quantized | None
    recent: Tensor  # (B, H, R, d)
    shape: tuple[int, ...]  # (B, H, T, d) of all tokens, the R recent ones included
    per: Per

    def dequantize(self) -> Tensor:
        """Return (B, H, T, d) in the original dtype."""
        if self.quantized is None:
            return self.recent
        batch, heads, tokens, width = self.shape
        old = tokens - self.recent.shape[2]
        restored = self.quantized.dequantize().to(self.recent.dtype)
        if self.per == "channel":
            restored = restored.reshape(batch, heads, width, old).transpose(2, 3)
        return torch.cat([restored.reshape(batch, heads, old, width), self.recent], dim=2)

    @property
    def bytes(self) -> int:
        """Its bytes with packed codes; scales and zeros (stored as minima) take 2 bytes each."""
        packed = 0
        if self.quantized is not None:
            packed = -(-self.quantized.codes.numel() * self.quantized.bits // 8) + 4 * self.quantized.scale.numel()
        return packed + self.recent.numel() * self.recent.element_size()


def quantize_cache(cache: Tensor, per: Per, bits: int = 2, group: int = 32) -> QuantizedCache:
    """Quantize `cache` (B, H, T, d), keys or values, with scales per channel or per token.

    Raises SpecError for other shapes, a group that does not divide the head dimension (per token), and values that are
    not finite.
    """
    if cache.ndim != 4 or not cache.numel():
        raise SpecError(f"a cache of shape {tuple(cache.shape)} is not (batch, kv heads, tokens, head dimension)")
    if per not in ("channel", "token"):
        raise SpecError(f"per={per!r} is neither 'channel' (keys) nor 'token' (values)")
    check_counts(group=group)
    check_bits(bits)
    tokens = cache.shape[2]
    old = tokens if per == "token" else tokens - tokens % group
    recent = cache[:, :, old:].clone()
    rows = cache[:, :, :old] if per == "token" else cache[:, :, :old].transpose(2, 3)
    quantized = None
    if old:
        matrix = rows.reshape(-1, rows.shape[-1])
        quantized = affine.quantize(matrix, bits, "group", group, symmetric=False)
    return QuantizedCache(quantized, recent, tuple(cache.shape), per)


def attend_quantized(bits: int = 2, group: int = 32, keys: Per = "channel") -> Callable[..., Tensor]:
    """Return a function for `Attention.attend` (architectures.llama) that rounds keys and values to `bits` bits.

    All tokens of the pass are rounded, the query's own too, except, per channel, the last ones that fill no group.
    """
    from ...architectures.gpt import attend

    def attend_rounded(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kind: str = "sdpa", dropout: float = 0.0
    ) -> Tensor:
        k, v = quantize_cache(k, keys, bits, group).dequantize(), quantize_cache(v, "token", bits, group).dequantize()
        return attend(q, k, v, mask, kind, dropout)

    return attend_rounded
