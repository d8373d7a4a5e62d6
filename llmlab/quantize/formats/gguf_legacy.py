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

from ...base.errors import SpecError


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


def over(top: float, scale: np.ndarray) -> np.ndarray:
    """Return top / scale, or 0 if that is infinite: a block of zeros, or of weights below 1e-37, gets code 0.

    `scale` is in float32: ggml does not divide by the fp16 scale that it stores, so the codes do not depend on how the
    scale is rounded.
    """
    with np.errstate(divide="ignore", over="ignore"):
        steps = np.float32(top) / scale
    return np.where(np.isfinite(steps), steps, np.float32(0))


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Return (blocks, 16) bytes from (blocks, 32) codes: first half in low nibbles, second half in high nibbles."""
    low, high = codes[:, :16] & 15, codes[:, 16:] & 15
    return low | high << 4


def unpack_nibbles(raw: np.ndarray) -> np.ndarray:
    return np.concatenate([raw & 15, raw >> 4], axis=1)


def pack_fifth(codes: np.ndarray) -> np.ndarray:
    """Return (blocks, 4) bytes, a little-endian 32-bit number whose bit j is bit 4 of code j."""
    return np.packbits(codes >> 4, axis=1, bitorder="little")


def unpack_fifth(raw: np.ndarray) -> np.ndarray:
    return np.unpackbits(raw, axis=1, bitorder="little") << 4


def encode_q8_0(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * over(1, scale)
    # C's roundf rounds halves away from zero. floor(|q| + 0.5) would round 0.49999997 up, because the sum rounds to 1.
    whole = np.floor(np.abs(scaled))
    rounded = np.copysign(whole + (np.abs(scaled) - whole >= 0.5), scaled)
    return np.concatenate([half(scale), rounded.astype(np.int8).view(np.uint8)], axis=1)


def decode_q8_0(raw: np.ndarray) -> np.ndarray:
    return raw[:, 2:].view(np.int8).astype(np.float32) * unhalf(raw[:, :2])


def _signed(x: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the scale and codes 0 … levels - 1; levels / 2 means 0, and the weight largest in magnitude is code 0.

    Two's complement has one more negative number than positive ones, so the largest magnitude becomes -levels / 2, and
    the scale has the sign that this needs.
    """
    at = np.abs(x).argmax(axis=1)[:, None]
    scale = np.take_along_axis(x, at, axis=1) / np.float32(-levels // 2)
    # + 0.5 and truncation, not rint, so that halves are rounded up
    codes = np.minimum(np.trunc(x * over(1, scale) + np.float32(levels // 2 + 0.5)), levels - 1)
    return scale, codes.astype(np.uint8)


def _offset(x: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the scale, the minimum, and codes 0 … levels - 1 that cover the range from minimum to maximum."""
    low = x.min(axis=1, keepdims=True)
    scale = (x.max(axis=1, keepdims=True) - low) / np.float32(levels - 1)
    codes = np.minimum(np.trunc((x - low) * over(1, scale) + np.float32(0.5)), levels - 1)
    return scale, low, codes.astype(np.uint8)


def encode_q4_0(x: np.ndarray) -> np.ndarray:
    scale, codes = _signed(x, 16)
    return np.concatenate([half(scale), pack_nibbles(codes)], axis=1)


def decode_q4_0(raw: np.ndarray) -> np.ndarray:
    return unhalf(raw[:, :2]) * (unpack_nibbles(raw[:, 2:]).astype(np.float32) - 8)


def encode_q4_1(x: np.ndarray) -> np.ndarray:
    scale, low, codes = _offset(x, 16)
    return np.concatenate([half(scale), half(low), pack_nibbles(codes)], axis=1)


def decode_q4_1(raw: np.ndarray) -> np.ndarray:
    return unhalf(raw[:, :2]) * unpack_nibbles(raw[:, 4:]).astype(np.float32) + unhalf(raw[:, 2:4])


def encode_q5_0(x: np.ndarray) -> np.ndarray:
    scale, codes = _signed(x, 32)
    return np.concatenate([half(scale), pack_fifth(codes), pack_nibbles(codes)], axis=1)


def decode_q5_0(raw: np.ndarray) -> np.ndarray:
    codes = unpack_nibbles(raw[:, 6:]) | unpack_fifth(raw[:, 2:6])
    return unhalf(raw[:, :2]) * (codes.astype(np.float32) - 16)


def encode_q5_1(x: np.ndarray) -> np.ndarray:
    scale, low, codes = _offset(x, 32)
    return np.concatenate([half(scale), half(low), pack_fifth(codes), pack_nibbles(codes)], axis=1)


def decode_q5_1(raw: np.ndarray) -> np.ndarray:
    codes = unpack_nibbles(raw[:, 8:]) | unpack_fifth(raw[:, 4:8])
    return unhalf(raw[:, :2]) * codes.astype(np.float32) + unhalf(raw[:, 2:4])
