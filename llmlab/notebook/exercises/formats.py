"""Facts about the functions of yours/formats.py."""

from __future__ import annotations

import math

import torch

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
