"""A KV cache in 8 or 4 bits: every 64 numbers of a token share a scale and a minimum, 2 bytes each.

The numbers of a token are rounded once, when the token is read. Later tokens are appended, so nothing is rounded twice.
For attention, the codes of a layer are dequantized into a copy, while a real engine's kernel dequantizes them in
registers. Keys with one scale per channel lose less (see `llmlab.course.quantize.formats.kv`), but then several tokens
share each scale, so a single token cannot be appended.

    B  batch     T  new tokens     S  all tokens     H  key-value heads     D  size of a head     G  groups
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...base.errors import SpecError
from ...formulas.inference import KV_GROUP
from .cache import GrowingCache

Rounded = tuple[Tensor, Tensor, Tensor]  # codes, scale, minimum


def narrow(x_BHTD: Tensor, bits: int) -> Rounded:
    """Return codes (B, T, H·D·bits/8) in uint8, scale and minimum (B, T, G) in fp16: x ≈ minimum + code · scale."""
    groups = x_BHTD.transpose(1, 2).flatten(2).unflatten(2, (-1, KV_GROUP)).float()  # (B, T, G, 64)
    low, high = groups.amin(-1, keepdim=True).half(), groups.amax(-1, keepdim=True)
    scale = ((high - low.float()) / (2**bits - 1)).half()
    codes = ((groups - low.float()) / scale.float().clamp(min=1e-7)).round().clamp(0, 2**bits - 1).to(torch.uint8)
    if bits == 4:  # two codes per byte
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return codes.flatten(2), scale[..., 0], low[..., 0]


def widen(rounded: Rounded, bits: int, heads: int, dtype: torch.dtype) -> Tensor:
    """Dequantize the result of `narrow`: return (B, H, S, D) in `dtype`."""
    codes, scale, low = rounded
    groups = codes.unflatten(2, (scale.shape[2], -1))  # (B, S, G, 64 · bits / 8)
    if bits == 4:
        groups = torch.stack((groups & 15, groups >> 4), dim=-1).flatten(3)
    values = groups.float() * scale[..., None].float() + low[..., None].float()
    return values.flatten(2).unflatten(2, (heads, -1)).transpose(1, 2).to(dtype)


def _joined(old: Rounded, new: Rounded) -> tuple[Tensor, ...]:
    return tuple(torch.cat(parts, dim=1) for parts in zip(old, new, strict=True))


class QuantizedCache(GrowingCache):
    """Grows as GrowingCache does, in `bits` bits. Raises SpecError if a layer's H · D is not a multiple of 64."""

    def __init__(self, bits: int = 4) -> None:
        if bits not in (4, 8):
            raise SpecError(f"bits={bits}: give 8 or 4")
        super().__init__()
        self.bits = bits

    @property
    def length(self) -> int:
        """The number of tokens in the cache, per sequence."""
        return self.layers[0][0][0].shape[1] if self.layers else 0

    def update(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens, rounded; return keys and values, (B, H, S, D) each, where the new ones are exact."""
        both = (k_BHTD, v_BHTD)
        for new in both:
            if new.shape[1] * new.shape[3] % KV_GROUP:
                raise SpecError(f"{new.shape[1]} heads of {new.shape[3]} do not fall into groups of {KV_GROUP}")
        k_new, v_new = (narrow(new, self.bits) for new in both)
        if layer == len(self.layers):
            self.layers.append((k_new, v_new))
            return both
        k_old, v_old = self.layers[layer]
        old = [widen(rounded, self.bits, k_BHTD.shape[1], k_BHTD.dtype) for rounded in (k_old, v_old)]
        self.layers[layer] = _joined(k_old, k_new), _joined(v_old, v_new)
        k_BHSD, v_BHSD = (torch.cat(pair, dim=2) for pair in zip(old, both, strict=True))
        return k_BHSD, v_BHSD

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self.layers = [[tuple(part[:, :length] for part in rounded) for rounded in layer] for layer in self.layers]
