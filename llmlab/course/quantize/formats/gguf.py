"""GGUF's block formats: `encode` to the bytes that llama.cpp reads, `decode` back to float32.

A block is a run of weights along a row that share a scale. Only blocks are stored, so the bits per weight are the
block's bytes · 8 / its weights. Rounding follows ggml's reference functions (ggml/src/ggml-quants.c,
quantize_row_*_ref); tests compare the bytes with those of the `gguf` package, which is itself tested against ggml.

>>> import numpy as np
>>> row = np.linspace(-1, 1, 64, dtype=np.float32)
>>> len(encode("Q8_0", row)), float(abs(decode("Q8_0", encode("Q8_0", row), (64,)) - row).max()) < 1 / 127
(68, True)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ....base.errors import SpecError, unknown_name
from ....specs.gguf import BLOCKS
from ..checks import as_floats
from . import gguf_k, gguf_legacy, mxfp4

if TYPE_CHECKING:
    import torch


class Format(NamedTuple):
    """The two functions of one format: (blocks, weights) float32 <-> (blocks, bytes) uint8."""

    encode: Callable[[np.ndarray], np.ndarray]
    decode: Callable[[np.ndarray], np.ndarray]


FORMATS = {
    "Q8_0": Format(gguf_legacy.encode_q8_0, gguf_legacy.decode_q8_0),
    "Q4_0": Format(partial(gguf_legacy.encode_symmetric, bits=4), partial(gguf_legacy.decode_symmetric, bits=4)),
    "Q4_1": Format(partial(gguf_legacy.encode_with_minimum, bits=4), partial(gguf_legacy.decode_with_minimum, bits=4)),
    "Q5_0": Format(partial(gguf_legacy.encode_symmetric, bits=5), partial(gguf_legacy.decode_symmetric, bits=5)),
    "Q5_1": Format(partial(gguf_legacy.encode_with_minimum, bits=5), partial(gguf_legacy.decode_with_minimum, bits=5)),
    "Q4_K": Format(gguf_k.encode_q4_k, gguf_k.decode_q4_k),
    "Q6_K": Format(gguf_k.encode_q6_k, gguf_k.decode_q6_k),
    "MXFP4": Format(mxfp4.encode_blocks, mxfp4.decode_blocks),
}


def encode(kind: str, array: np.ndarray | torch.Tensor) -> bytes:
    """Return the blocks of `array` (…, columns), row after row.

    Raises UnknownName for a kind not in FORMATS; SpecError for rows that are not a whole number of blocks, dtypes that
    are not floats, infinities, NaNs, and weights whose scale is too large for fp16.
    """
    known, (weights, _) = _format(kind)
    floats = as_floats(array).numpy()
    _whole_blocks(kind, floats.shape, weights)
    # An overflow makes the scale infinite, and `gguf_legacy.half` raises for that.
    with np.errstate(over="ignore", invalid="ignore"):
        return known.encode(floats.reshape(-1, weights)).tobytes()


def decode(kind: str, data: bytes, shape: Sequence[int]) -> np.ndarray:
    """Return float32 weights of `shape` from blocks; raises UnknownName, and SpecError if the bytes do not fit."""
    known, (weights, size) = _format(kind)
    shape = tuple(int(n) for n in shape)
    if not shape or min(shape) < 1:
        raise SpecError(f"shape={shape} holds no row of weights; give at least one")
    _whole_blocks(kind, shape, weights)
    raw = np.frombuffer(data, dtype=np.uint8)
    expected = math.prod(shape) // weights * size
    if len(raw) != expected:
        cause = "truncated, or of another shape" if len(raw) < expected else "of another shape or kind"
        raise SpecError(f"{len(raw)} bytes for {kind} of shape {shape}, which takes {expected}; the data is {cause}")
    return known.decode(raw.reshape(-1, size)).reshape(shape)


def _format(kind: str) -> tuple[Format, tuple[int, int]]:
    if kind not in FORMATS:
        raise unknown_name("GGUF kind", str(kind), list(FORMATS), f"It is one of {', '.join(FORMATS)}.")
    return FORMATS[kind], BLOCKS[kind]


def _whole_blocks(kind: str, shape: tuple[int, ...], weights: int) -> None:
    if shape[-1] % weights:
        raise SpecError(
            f"a row of {shape[-1]} weights (shape {shape}) is not a whole number of {kind} blocks of {weights}; "
            f"pad it to {-(-shape[-1] // weights) * weights}, or take a format with smaller blocks"
        )
