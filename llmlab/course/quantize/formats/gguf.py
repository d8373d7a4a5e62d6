"""GGUF's block formats: `encode` to the bytes that llama.cpp reads, `decode` back to float32.

A block is a run of weights along a row that share a scale. Only blocks are stored, so the bits per weight are the
block's bytes · 8 / its weights. llama.cpp's package `gguf` encodes and decodes them; it has no encoder of K-quants, for
which gguf_k has one.

>>> import numpy as np
>>> row = np.linspace(-1, 1, 64, dtype=np.float32)
>>> len(encode("Q8_0", row)), float(abs(decode("Q8_0", encode("Q8_0", row), (64,)) - row).max()) < 1 / 127
(68, True)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ....base.errors import NotAvailable, SpecError, unknown_name
from ....specs.gguf import BLOCKS
from ..checks import as_floats
from .gguf_k import encode_q4_k, encode_q6_k

try:
    import gguf as package
except ImportError:
    raise NotAvailable("GGUF's formats need the gguf package: pip install gguf") from None

if TYPE_CHECKING:
    import torch


FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K", "MXFP4")
K_QUANTS = {"Q4_K": encode_q4_k, "Q6_K": encode_q6_k}
SMALLEST = 1e-35  # the inverse of a smaller scale overflows in the package, so blocks below it are stored as zeros


def encode(kind: str, array: np.ndarray | torch.Tensor) -> bytes:
    """Return the blocks of `array` (…, columns), row after row.

    Raises UnknownName for a kind not in FORMATS; SpecError for rows that are not a whole number of blocks, dtypes that
    are not floats, infinities, NaNs, and weights whose scale is too large for fp16.
    """
    weights, _ = _format(kind)
    floats = as_floats(array).numpy()
    _whole_blocks(kind, floats.shape, weights)
    blocks = floats.reshape(-1, weights)
    with np.errstate(all="ignore"):  # the package divides by scales of zero, and does not use the result
        if kind in K_QUANTS:
            return K_QUANTS[kind](blocks).tobytes()
        blocks = np.where(np.abs(blocks).max(axis=1, keepdims=True) < SMALLEST, np.float32(0), blocks)
        data = package.quantize(blocks, package.GGMLQuantizationType[kind])
        if not np.isfinite(package.dequantize(data, package.GGMLQuantizationType[kind])).all():
            raise SpecError(f"the scale of weights up to {np.abs(floats).max():.4g} exceeds 65504, where fp16 ends; "
                            "rescale the weights")  # fmt: skip
    return data.tobytes()


def decode(kind: str, data: bytes, shape: Sequence[int]) -> np.ndarray:
    """Return float32 weights of `shape` from blocks; raises UnknownName, and SpecError if the bytes do not fit."""
    weights, size = _format(kind)
    shape = tuple(int(n) for n in shape)
    if not shape or min(shape) < 1:
        raise SpecError(f"shape={shape} holds no row of weights; give at least one")
    _whole_blocks(kind, shape, weights)
    raw = np.frombuffer(data, dtype=np.uint8)
    expected = math.prod(shape) // weights * size
    if len(raw) != expected:
        cause = "truncated, or of another shape" if len(raw) < expected else "of another shape or kind"
        raise SpecError(f"{len(raw)} bytes for {kind} of shape {shape}, which takes {expected}; the data is {cause}")
    with np.errstate(all="ignore"):  # any bytes are a scale
        return package.dequantize(raw.reshape(-1, size), package.GGMLQuantizationType[kind]).reshape(shape)


def _format(kind: str) -> tuple[int, int]:
    if kind not in FORMATS:
        raise unknown_name("GGUF kind", str(kind), list(FORMATS), f"It is one of {', '.join(FORMATS)}.")
    return BLOCKS[kind]


def _whole_blocks(kind: str, shape: tuple[int, ...], weights: int) -> None:
    if shape[-1] % weights:
        raise SpecError(
            f"a row of {shape[-1]} weights (shape {shape}) is not a whole number of {kind} blocks of {weights}; "
            f"pad it to {-(-shape[-1] // weights) * weights}, or take a format with smaller blocks"
        )
