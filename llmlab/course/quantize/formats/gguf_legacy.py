"""GGUF's simple block formats: 32 weights, one fp16 scale d (and, in *_1, one fp16 minimum m).

        bytes per block                       weight
Q8_0    d 2, 32 × int8                        d · q
Q4_0    d 2, 32 × 4 bit                       d · (q - 8)
Q4_1    d 2, m 2, 32 × 4 bit                  d · q + m
Q5_0    d 2, 32 fifth bits, 32 × 4 bit        d · (q - 16)
Q5_1    d 2, m 2, 32 fifth bits, 32 × 4 bit   d · q + m

Byte j of the four-bit codes has weight j's code in the low nibble and weight j + 16's in the high one. Source:
ggml/src/ggml-quants.c, quantize_row_q{8_0,4_0,4_1,5_0,5_1}_ref. Shapes: x (blocks, 32) float32, raw (blocks, bytes)
uint8.
"""

from __future__ import annotations

import numpy as np

from ....base.errors import SpecError


def half(scale: np.ndarray) -> np.ndarray:
    """Return (blocks, 2) bytes of `scale` (blocks, 1) in fp16; raises SpecError for a scale above 65504."""
    short = scale.astype(np.float16)
    if not np.isfinite(short).all():
        raise SpecError(
            f"a block's scale or minimum is {np.abs(scale).max():.4g}, and fp16 ends at 65504; rescale the weights"
        )
    return short.view(np.uint8)


def unhalf(raw: np.ndarray) -> np.ndarray:
    """Return (blocks, 1) float32 from (blocks, 2) bytes of fp16."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def ratio(top: float, scale: np.ndarray) -> np.ndarray:
    """Return top / scale, or 0 if that is infinite: a block of zeros, or of weights below 1e-37, gets code 0.

    `scale` is in float32: ggml does not divide by the fp16 scale that it stores, so the codes do not depend on how the
    scale is rounded.
    """
    with np.errstate(divide="ignore", over="ignore"):
        steps = np.float32(top) / scale
    return np.where(np.isfinite(steps), steps, np.float32(0))


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return (blocks, 4 · bits) bytes of 32 codes of 4 or 5 bits, in the order of the table above.

    The fifth bits come first, as a little-endian 32-bit number whose bit j is bit 4 of code j.
    """
    nibbles = codes[:, :16] & 15 | (codes[:, 16:] & 15) << 4
    if bits == 4:
        return nibbles
    return np.concatenate([np.packbits(codes >> 4, axis=1, bitorder="little"), nibbles], axis=1)


def unpack(raw: np.ndarray, bits: int) -> np.ndarray:
    nibbles = raw[:, -16:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=1)
    return codes if bits == 4 else codes | np.unpackbits(raw[:, :4], axis=1, bitorder="little") << 4


def encode_q8_0(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * ratio(1, scale)
    # C's roundf rounds halves away from zero. floor(|q| + 0.5) would round 0.49999997 up, because the sum rounds to 1.
    whole = np.floor(np.abs(scaled))
    rounded = np.copysign(whole + (np.abs(scaled) - whole >= 0.5), scaled)
    return np.concatenate([half(scale), rounded.astype(np.int8).view(np.uint8)], axis=1)


def decode_q8_0(raw: np.ndarray) -> np.ndarray:
    return raw[:, 2:].view(np.int8).astype(np.float32) * unhalf(raw[:, :2])


def encode_symmetric(x: np.ndarray, bits: int) -> np.ndarray:
    """Q4_0 and Q5_0: code 2^bits / 2 means 0, and the weight that is largest in magnitude gets code 0.

    Two's complement has one more negative number than positive ones, so the largest magnitude becomes -2^bits / 2, and
    the scale has the sign that this needs.
    """
    middle = 2 ** (bits - 1)
    at = np.abs(x).argmax(axis=1)[:, None]
    scale = np.take_along_axis(x, at, axis=1) / np.float32(-middle)
    # + 0.5 and truncation, not rint, so that halves are rounded up
    codes = np.minimum(np.trunc(x * ratio(1, scale) + np.float32(middle + 0.5)), 2**bits - 1)
    return np.concatenate([half(scale), pack(codes.astype(np.uint8), bits)], axis=1)


def decode_symmetric(raw: np.ndarray, bits: int) -> np.ndarray:
    return unhalf(raw[:, :2]) * (unpack(raw[:, 2:], bits).astype(np.float32) - 2 ** (bits - 1))


def encode_with_minimum(x: np.ndarray, bits: int) -> np.ndarray:
    """Q4_1 and Q5_1: the codes cover the range from the block's minimum to its maximum."""
    low = x.min(axis=1, keepdims=True)
    scale = (x.max(axis=1, keepdims=True) - low) / np.float32(2**bits - 1)
    codes = np.minimum(np.trunc((x - low) * ratio(1, scale) + np.float32(0.5)), 2**bits - 1)
    return np.concatenate([half(scale), half(low), pack(codes.astype(np.uint8), bits)], axis=1)


def decode_with_minimum(raw: np.ndarray, bits: int) -> np.ndarray:
    return unhalf(raw[:, :2]) * unpack(raw[:, 4:], bits).astype(np.float32) + unhalf(raw[:, 2:4])
