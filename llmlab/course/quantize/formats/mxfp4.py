"""MXFP4: blocks of 32 weights in 4-bit floats (e2m1) that share one power of two (e8m0); 4.25 bits per weight.

A weight is ±{0, 0.5, 1, 1.5, 2, 3, 4, 6} · 2^(e - 127). Source: OCP Microscaling Formats (MX) v1.0, section 5.1;
encoded as in ggml (ggml/src/ggml-quants.c, quantize_row_mxfp4_ref): the shared exponent is that of the largest weight
minus 2, the exponent of e2m1's largest number, so a largest weight between 6 and 8 times the scale is clipped to 6.
"""

from __future__ import annotations

import numpy as np

from .gguf_legacy import pack, unpack

# Each code's value, doubled to be an integer: two exponent bits, one mantissa bit; bit 3 is the sign, code 8 is -0.
VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)


def half_scale(e: np.ndarray) -> np.ndarray:
    """Return 2^(e - 128) as float32, for e (blocks, 1) uint8: half the scale, because VALUES are doubled."""
    return np.ldexp(np.float32(1), e.astype(np.int32) - 128)


def encode_blocks(x: np.ndarray) -> np.ndarray:
    """Return (blocks, 17) bytes of x (blocks, 32): the exponent, then the codes, ordered as in gguf_legacy."""
    largest = np.abs(x).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(largest)) - 2 + 127  # in float32, as in ggml: 7.9999995 counts as 8
    e = np.maximum(exponent, 0).astype(np.uint8)  # 0 for a block of zeros, and for one below 2^-125
    errors = np.abs(half_scale(e)[:, :, None] * VALUES - x[:, :, None])  # (blocks, 32, 16)
    codes = errors.argmin(axis=2).astype(np.uint8)  # the first of equal errors: the smaller magnitude, and +0, not -0
    return np.concatenate([e, pack(codes, 4)], axis=1)


def decode_blocks(raw: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # e = 255 means NaN in the standard; ggml multiplies anyway, and so does this
        return half_scale(raw[:, :1]) * VALUES[unpack(raw[:, 1:], 4)]
