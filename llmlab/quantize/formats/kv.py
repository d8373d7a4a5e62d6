"""A KV cache in few bits: keys a channel at a time, values a token at a time.

KIVI (Liu et al., arXiv 2402.02750, section 3): keys have a few channels that are large in every token, so a scale that
a token's channels share is theirs alone; a scale that many tokens share in one channel is not. Values have none, and
attention sums them over tokens, so that a token's error stays with the token.

Shapes: cache (B, H, T, d): batch, kv heads, tokens, head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...base.errors import SpecError
from ..checks import check_bits
from . import affine
from .affine import Quantized

Per = Literal["channel", "token"]


@dataclass(frozen=True)
class QuantizedCache:
    """Keys or values in few bits, and the last tokens that do not fill a group yet, as they came."""

    quantized: Quantized | None
    recent: Tensor  # (B, H, R, d)
    shape: tuple[int, ...]  # (B, H, T, d), all of it
    per: Per

    def dequantize(self) -> Tensor:
        """Return (B, H, T, d) in the dtype it came in."""
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
        """Bytes of it, codes packed, scales and zeros (as minima) in fp16."""
        packed = 0
        if self.quantized is not None:
            packed = -(-self.quantized.codes.numel() * self.quantized.bits // 8) + 4 * self.quantized.scale.numel()
        return packed + self.recent.numel() * self.recent.element_size()


def quantize_keys(keys: Tensor, bits: int = 2, group: int = 32) -> QuantizedCache:
    """Return `keys` (B, H, T, d), `group` tokens of a channel to a scale; the last T mod `group` stay as they are."""
    return quantize_cache(keys, "channel", bits, group)


def quantize_values(values: Tensor, bits: int = 2, group: int = 32) -> QuantizedCache:
    """Return `values` (B, H, T, d), `group` channels of a token to a scale."""
    return quantize_cache(values, "token", bits, group)


def quantize_cache(cache: Tensor, per: Per, bits: int = 2, group: int = 32) -> QuantizedCache:
    """Return `cache` (B, H, T, d) quantized per channel or per token; the other way round is what a test shows worse.

    Raises SpecError for other shapes, a group that does not divide the head dimension (per token), and values that are
    not finite.
    """
    if cache.ndim != 4 or not cache.numel():
        raise SpecError(f"a cache of shape {tuple(cache.shape)} is not (batch, kv heads, tokens, head dimension)")
    if per not in ("channel", "token"):
        raise SpecError(f"per={per!r} is neither 'channel' (keys) nor 'token' (values)")
    if isinstance(group, bool) or not isinstance(group, int) or group < 1:
        raise SpecError(f"group={group!r} is not a whole number >= 1")
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
    """Return what stands in `Attention.attend` of models.llama: attention to keys and values that went through `bits`.

    All tokens of the pass are rounded, the query's own too, but for the last that fill no group.
    """
    from ...architectures.gpt import attend

    def attend_rounded(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kind: str = "sdpa", dropout: float = 0.0
    ) -> Tensor:
        k, v = quantize_cache(k, keys, bits, group).dequantize(), quantize_values(v, bits, group).dequantize()
        return attend(q, k, v, mask, kind, dropout)

    return attend_rounded
