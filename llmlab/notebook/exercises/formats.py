"""Facts about the functions of yours/formats.py."""

from __future__ import annotations

import math

import torch

from ...course.quantize.formats import fp8
from ...course.techniques.precision import FORMATS


def _agrees_with_torch(f, dtype: torch.dtype, exponent: int, mantissa: int) -> bool:
    patterns = range(0, 1 << 16, 7)
    values = torch.tensor(patterns, dtype=torch.uint16).view(dtype).double().tolist()
    return all(f(p, exponent, mantissa) == x for p, x in zip(patterns, values, strict=True) if math.isfinite(x))


decoded = {
    "0 is 0": lambda f: f(0, 5, 10) == 0,
    "one in fp16": lambda f: f(0b0_01111_0000000000, 5, 10) == 1,
    "the smallest number of fp16": lambda f: f(1, 5, 10) == FORMATS["fp16"].smallest,
    "PyTorch's fp16": lambda f: _agrees_with_torch(f, torch.float16, 5, 10),
    "PyTorch's bf16": lambda f: _agrees_with_torch(f, torch.bfloat16, 8, 7),
}

_x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
_outlier = torch.ones(4, 4)
_outlier[0, 0] = 2.0**20


def _agrees_with_package(f, rows: int, columns: int) -> bool:
    codes, scales = f(_x, rows, columns)
    package = fp8.quantize(_x, "e4m3", (rows, columns))
    return torch.equal(codes.view(torch.uint8), package.codes) and torch.equal(scales, package.scale)


blockwise = {
    "1 × 128 agrees with the package": lambda f: _agrees_with_package(f, 1, 128),
    "128 × 128 agrees with the package": lambda f: _agrees_with_package(f, 128, 128),
    "one block is tensorwise": lambda f: f(_x, *_x.shape)[1] == _x.abs().max() / 448,
    "an outlier erases only its block": lambda f: int((f(_outlier, 2, 2)[0].float() == 0).sum()) == 3,
}


def _clipped(f, amaxes: list[float], length: int) -> list[int]:
    """Return the steps whose amax, divided by the scale, does not fit into the format."""
    pairs = enumerate(zip(amaxes, f(amaxes, length), strict=True))
    return [step for step, (amax, scale) in pairs if amax / scale > 448.5]


delayed = {
    "constant amaxes: same as dynamic": lambda f: f([448.0] * 4, 2) == [1.0] * 4,
    "a jump is clipped once": lambda f: _clipped(f, [1, 1, 4, 4, 4], 3) == [2],
    "a peak is remembered": lambda f: f([448.0, *[224.0] * 3], 2)[1:] == [1, 1, 0.5],
    "a long history clips nothing": lambda f: _clipped(f, [4, 1, 1, 4] * 3, 8) == [],
    "a short history does": lambda f: _clipped(f, [4, 1, 1, 4] * 3, 1) == [3, 7, 11],
}
