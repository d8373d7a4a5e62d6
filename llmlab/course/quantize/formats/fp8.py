"""FP8: two 8-bit floats, e4m3 (finer, to 448) and e5m2 (wider, to 57344), and the scales that bring tensors into range.

Micikevicius et al., arXiv 2209.05433, table 1. A float's step grows with the number, so the largest relative error is
the same from the largest number down to the smallest normal one: 2^-4 for e4m3, 2^-3 for e5m2. Training uses e4m3 for
weights and activations, e5m2 for gradients. Rounding is to nearest, ties to even, and a number that is too large
becomes the largest one (a cast that does not saturate gives NaN or infinity).

Scales: one per tensor, per row or per tile; DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) uses tiles of 1 × 128 for
activations and 128 × 128 for weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....base.errors import SpecError, unknown_name
from ..checks import as_matrix

KINDS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def encode(kind: str, x: Tensor) -> Tensor:
    """Return the bytes (uint8) of `x`: any shape, finite floats; numbers that are too large become the largest."""
    dtype = _dtype(kind)
    if not torch.isfinite(x).all() or not x.is_floating_point():
        raise SpecError(f"{x.dtype} with {int((~torch.isfinite(x)).sum())} infinities or NaNs; give finite floats")
    largest = torch.finfo(dtype).max
    return x.float().clamp(-largest, largest).to(dtype).view(torch.uint8)


def decode(kind: str, codes: Tensor) -> Tensor:
    """Return the numbers in float32; e4m3's 0x7f is NaN, and e5m2's exponent of all ones is infinity or NaN."""
    dtype = _dtype(kind)
    if codes.dtype != torch.uint8:
        raise SpecError(f"codes of {codes.dtype}; give uint8, as encode does")
    return codes.view(dtype).float()


@dataclass(frozen=True)
class Scaled:
    """A matrix in FP8: weight ≈ decode(codes) · scale, with one scale per tile."""

    kind: str
    codes: Tensor  # (O, I) uint8
    scale: Tensor  # (O / tile rows, I / tile columns) float32
    tile: tuple[int, int]

    def dequantize(self) -> Tensor:
        scale = self.scale.repeat_interleave(self.tile[0], 0).repeat_interleave(self.tile[1], 1)
        return decode(self.kind, self.codes) * scale


def quantize(weight: Tensor, kind: str = "e4m3", tile: str | tuple[int, int] = "tensor") -> Scaled:
    """Return `weight` (O, I) in FP8, scaled so that the largest number of each `tile` becomes the format's largest.

    `tile` is "tensor", "row", or (rows, columns). Raises UnknownName for another kind, SpecError for tiles that do not
    divide the matrix and for values that are not finite.
    """
    dtype, matrix = _dtype(kind), as_matrix(weight).float()
    rows, columns = matrix.shape
    named = {"tensor": (rows, columns), "row": (1, columns)}
    size = named.get(tile) if isinstance(tile, str) else tile
    if not isinstance(size, tuple) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise SpecError(f"tile={tile!r} is neither 'tensor', 'row' nor (rows, columns); for example (128, 128)")
    if rows % size[0] or columns % size[1]:
        raise SpecError(f"tiles of {size[0]} × {size[1]} do not cover a matrix of {rows} × {columns}; give divisors")
    tiles = matrix.reshape(rows // size[0], size[0], columns // size[1], size[1])
    largest = tiles.abs().amax(dim=(1, 3))  # (tile rows, tile columns)
    scale = torch.where(largest == 0, torch.ones_like(largest), largest / torch.finfo(dtype).max)
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    codes = encode(kind, (tiles / scale[:, None, :, None]).reshape(rows, columns))
    return Scaled(kind, codes, scale, size)


def _dtype(kind: str) -> torch.dtype:
    if kind not in KINDS:
        raise unknown_name("FP8 kind", str(kind), list(KINDS), "It is one of e4m3, e5m2.")
    return KINDS[kind]
