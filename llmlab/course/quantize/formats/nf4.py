"""NF4: 4-bit codes for 16 quantiles of a normal distribution, with one absmax per block (QLoRA, arXiv 2305.14314).

Weights are roughly normal around zero, and the values are that distribution's quantiles. Not all codes are used equally
often for that: each block is divided by its own absmax (arXiv 2306.06965). Equal to bitsandbytes byte for byte: the
code book, the codes (two per byte), absmax, and double quantization.

All functions take numpy arrays or torch tensors, and return the kind that they were given.

>>> import torch
>>> codes, absmax = encode(torch.linspace(-1, 1, 64))
>>> codes.shape, absmax, [f"{byte:08b}" for byte in codes[[0, 31]].tolist()]
(torch.Size([32]), tensor([1.]), ['00000000', '11111111'])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np
import torch

from ....base.errors import SpecError
from ..checks import as_floats

# The probability of the outermost quantiles: halfway between 1 - 1/30 and 1 - 1/32, those of 15 and of 16 equally
# likely values (QLoRA, appendix E; bitsandbytes has this rounded number).
TAIL = 0.9677083
Array = TypeVar("Array", np.ndarray, torch.Tensor)
NESTED_BLOCK = 256  # blocks whose absmax share one fp32 scale in double quantization


@cache
def code_book() -> torch.Tensor:
    """Return the 16 values, ascending, float32: 7 negative, zero, 8 positive, scaled to end at -1 and 1.

    Zero must be one of them (padding and pruned weights stay exact), so the two sides are divided separately, in equal
    steps of probability from the tail to the middle: the positive side in 8, the negative side in 7. Both begin at the
    same tail probability, so both -1 and 1 are values.
    """
    inverse_cdf = NormalDist().inv_cdf
    positive = [inverse_cdf(p) for p in torch.linspace(TAIL, 0.5, 9)[:-1].tolist()]  # 8, largest first
    negative = [-inverse_cdf(p) for p in torch.linspace(TAIL, 0.5, 8)[:-1].tolist()]  # 7
    values = torch.tensor([*negative, 0.0, *reversed(positive)])
    return values / values.max()


def encode(array: Array, block: int = 64) -> tuple[Array, Array]:
    """Return codes (weights / 2 bytes, uint8) and absmax (blocks, float32) of an array of any shape, row after row.

    The first of two weights is in the high nibble. Raises SpecError if `block` does not divide the number of weights,
    for dtypes that are not floats, infinities and NaNs. (bitsandbytes accepts a shorter last block.)
    """
    _check_block(block)
    flat = as_floats(array).reshape(-1)
    if flat.numel() % block:
        raise SpecError(
            f"{flat.numel()} weights (shape {tuple(np.shape(array))}) are not a whole number of blocks of {block}; "
            "give a block that divides them, or pad with zeros"
        )
    blocks = flat.reshape(-1, block)
    absmax = blocks.abs().amax(dim=1)
    scaled = blocks * (1.0 / absmax.clamp(min=1e-38)).unsqueeze(1)  # a block of zeros divides by no zero
    codes = nearest(scaled.reshape(-1).clamp(-1, 1), code_book())
    return _as_given(codes[::2] << 4 | codes[1::2], array), _as_given(absmax, array)


def decode(codes: Array, absmax: Array, shape: Sequence[int], block: int = 64) -> Array:
    """Return float32 weights of `shape`; raises SpecError for codes or absmax of another length or dtype."""
    _check_block(block)
    shape = tuple(int(n) for n in shape)
    count = math.prod(shape)
    packed, scales = _of(codes, torch.uint8, "codes"), _of(absmax, torch.float32, "absmax")
    if packed.numel() * 2 != count or scales.numel() * block != count:
        raise SpecError(
            f"{packed.numel()} bytes of codes and {scales.numel()} absmax for shape {shape} in blocks of {block}, "
            f"which takes {count / 2:g} and {count / block:g}; the data is truncated or of another shape"
        )
    nibbles = torch.stack([packed >> 4, packed & 15], dim=1).reshape(-1, block)
    return _as_given((code_book()[nibbles.int()] * scales.unsqueeze(1)).reshape(shape), codes)


def double_encode(absmax: Array) -> tuple[Array, Array, Array]:
    """Quantize `absmax` again: return codes (blocks, uint8), an absmax for each 256 of them, and their mean.

    32 bits per block of 64 weights become 8 + 32/256: 0.127 bits per weight instead of 0.5. The absmax are all
    positive; their mean is subtracted first, so that both sides of the signed 8-bit code book are used (QLoRA,
    section 3; bitsandbytes quantize_4bit).
    """
    scales = _of(absmax, torch.float32, "absmax")
    offset = scales.mean()
    centred = torch.nn.functional.pad(scales - offset, (0, -scales.numel() % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    outer = centred.abs().amax(dim=1)
    scaled = (centred * (1.0 / outer).unsqueeze(1)).clamp(-1, 1)
    # On a CPU bitsandbytes rounds to a grid of 2^16 values and looks up the code; on a GPU it searches the code book.
    grid = ((scaled + 1) * 0.5 * 65535 + 0.5).floor()
    codes = nearest(-1 + 2 * grid / 65535, dynamic_code_book())
    codes = torch.where(outer.unsqueeze(1) == 0, torch.zeros_like(codes), codes)  # the scale is 0: any code will do
    codes = codes.reshape(-1)[: scales.numel()]
    return _as_given(codes, absmax), _as_given(outer, absmax), _as_given(offset, absmax)


def double_decode(codes: Array, outer: Array, offset: Array | float) -> Array:
    """Return float32 absmax from the results of `double_encode`."""
    index, outer_scales = _of(codes, torch.uint8, "codes"), _of(outer, torch.float32, "outer absmax")
    if outer_scales.numel() != -(-index.numel() // NESTED_BLOCK):
        raise SpecError(f"{outer_scales.numel()} outer absmax for {index.numel()} codes in blocks of {NESTED_BLOCK}")
    scales = outer_scales.repeat_interleave(NESTED_BLOCK)[: index.numel()]
    return _as_given(dynamic_code_book()[index.int()] * scales + float(offset), codes)


@cache
def dynamic_code_book() -> torch.Tensor:
    """Return the 256 values of bitsandbytes' 8-bit type, ascending, float32.

    Dynamic tree quantization (Dettmers, arXiv 1511.04561, section 2; signed, as in 2110.02861): each power of ten from
    1e-6 to 1 has twice as many values as the one below, the middles of equal intervals from 0.1 to 1 times the power.
    So small numbers are kept too, with fewer digits.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        middles = 10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(values))


def nearest(values: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    """Return the index (uint8) of the nearest value in `book`, which is ascending; of two equally near, the lower."""
    return torch.bucketize(values, (book[:-1] + book[1:]) / 2).to(torch.uint8)


def _check_block(block: int) -> None:
    if isinstance(block, bool) or not isinstance(block, int) or block < 2 or block % 2:
        raise SpecError(f"block={block!r} is not an even whole number >= 2; bitsandbytes takes 64, 128, … 4096")


def _of(data: Any, dtype: torch.dtype, what: str) -> torch.Tensor:
    tensor = torch.as_tensor(data).detach().cpu().reshape(-1)
    if tensor.dtype != dtype or not tensor.numel():
        raise SpecError(f"{what} of {tensor.dtype}, {tensor.numel()} of them; give {dtype}, as encode does")
    return tensor


def _as_given(tensor: torch.Tensor, like: Array) -> Array:
    return tensor.to(like.device) if isinstance(like, torch.Tensor) else np.asarray(tensor)
