"""Encoders of GGUF's K-quants: superblocks of 256 weights, whose sub-blocks' scales are themselves quantized.

        bytes per superblock                                                   sub-blocks    weight
Q4_K    d 2, dmin 2, 8 scales and 8 minima of 6 bit 12, 256 × 4 bit 128        8 × 32        d · s · q - dmin · m
Q6_K    256 low nibbles 128, 256 × 2 high bits 64, 16 int8 scales 16, d 2      16 × 16       d · s · (q - 32)

The simple formats compute the scale from the largest weight; these search for each sub-block's scale (and minimum) with
the least weighted squared error. Source: ggml/src/ggml-quants.c, quantize_row_q4_K_ref with make_qkx2_quants, and
quantize_row_q6_K_ref with make_qx_quants. All is float32, with sums from left to right, so that the bytes are those of
ggml compiled without fused multiply-add.

x (B, 256) float32, raw (B, bytes) uint8, sub-blocks (B, 8, 32) or (B, 16, 16).
"""

from __future__ import annotations

import numpy as np

from ....base.errors import SpecError

TINY = np.float32(1e-15)  # GROUP_MAX_EPS: a Q6_K sub-block whose largest magnitude is smaller becomes zeros


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


def in_order(values: np.ndarray) -> np.ndarray:
    """Return the sum over the last dimension (kept, of size 1), from left to right, because np.sum adds pairwise."""
    return np.add.accumulate(values, axis=-1)[..., -1:]


def search_scale_and_minimum(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes 0 … 15, scales and minima (each ≥ 0) with x ≈ scale · code - minimum, for sub-blocks x (B, 8, 32).

    21 step sizes around (max - min) / 15 are tried: each gives codes, and the codes give the scale and minimum by
    weighted linear regression; the least error wins. In these sums a weight x counts rms + |x|, so large weights count
    more (make_qkx2_quants).
    """
    importance = np.sqrt(in_order(x * x) / np.float32(32)) + np.abs(x)
    high = x.max(axis=-1, keepdims=True)
    low = np.minimum(x.min(axis=-1, keepdims=True), 0)  # minima are stored without a sign: the range must contain 0
    flat = high == low  # all weights are 0, or all are the same negative number

    def codes_for(steps: np.float32, low: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(steps / np.where(flat, np.float32(1), high - low) * (x - low)), 0, 15)

    def error(codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
        return in_order(importance * (scale * codes + minimum - x) ** 2)

    sum_w, sum_x = in_order(importance), in_order(importance * x)
    best, scale, minimum = codes_for(np.float32(15), low), 1 / (np.float32(15) / (high - low + flat)), low
    least = error(best, scale, minimum)
    for step in range(21):
        steps = np.float32(-1) + np.float32(0.1) * np.float32(step) + np.float32(15)
        codes = codes_for(steps, minimum)  # counted from the best minimum so far, not from the lowest weight
        weighted = importance * codes
        sum_q, sum_qq, sum_qx = in_order(weighted), in_order(weighted * codes), in_order(weighted * x)
        determinant = sum_w * sum_qq - sum_q * sum_q
        with np.errstate(divide="ignore", invalid="ignore"):  # results with a determinant of 0 are not used below
            new_scale = (sum_w * sum_qx - sum_x * sum_q) / determinant
            new_minimum = (sum_qq * sum_x - sum_q * sum_qx) / determinant
            positive = new_minimum > 0
            new_scale = np.where(positive, sum_qx / sum_qq, new_scale)
            new_minimum = np.where(positive, np.float32(0), new_minimum)
            new_error = error(codes, new_scale, new_minimum)
        better = (determinant > 0) & (new_error < least)
        best, least = np.where(better, codes, best), np.where(better, new_error, least)
        scale, minimum = np.where(better, new_scale, scale), np.where(better, new_minimum, minimum)
    return np.where(flat, 0, best), np.where(flat, 0, scale)[..., 0], -np.where(flat, low, minimum)[..., 0]


def encode_q4_k(x: np.ndarray) -> np.ndarray:
    sub = x.reshape(-1, 8, 32)
    codes, scales, minima = search_scale_and_minimum(sub)
    top_scale = np.maximum(scales.max(axis=1, keepdims=True), 0)
    top_minimum = np.maximum(minima.max(axis=1, keepdims=True), 0)
    s = np.minimum(np.rint(ratio(63, top_scale) * scales), 63).astype(np.int32) & 63
    m = np.minimum(np.rint(ratio(63, top_minimum) * minima), 63).astype(np.int32) & 63
    d, dmin = half(top_scale / np.float32(63)), half(top_minimum / np.float32(63))
    # Rounding has changed the scales, so the codes are computed again from the decoded scales, unless those are 0.
    step, offset = (unhalf(d) * s)[..., None], (unhalf(dmin) * m)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(step == 0, codes, np.clip(np.rint((sub + offset) / step), 0, 15)).astype(np.uint8)
    pairs = codes.reshape(-1, 4, 2, 32)  # two sub-blocks share 32 bytes: low nibbles, then high nibbles
    nibbles = pairs[:, :, 0] | pairs[:, :, 1] << 4
    return np.concatenate([d, dmin, pack_scales(s, m), nibbles.reshape(-1, 128)], axis=1)


def pack_scales(s: np.ndarray, m: np.ndarray) -> np.ndarray:
    """Return (B, 12) bytes of eight scales and eight minima of 6 bits, (B, 8) each.

    The first four scales and minima are the low 6 bits of bytes 0-3 and 4-7. The low nibbles of the other four are in
    bytes 8-11, and their top two bits are the top two bits of bytes 0-3 and 4-7.
    """
    first = s[:, :4] | s[:, 4:] >> 4 << 6
    second = m[:, :4] | m[:, 4:] >> 4 << 6
    return np.concatenate([first, second, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], axis=1).astype(np.uint8)


def search_scale(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes 0 … 63 and signed scales with x ≈ scale · (code - 32), for sub-blocks x (B, 16, 16).

    19 values around -32 / the largest weight are tried as 1 / scale: each gives codes, and the codes give the scale by
    least squares; the best fit wins, with x² as the weight of x (make_qx_quants, rmse_type 1).
    """
    at = np.abs(x).argmax(axis=-1)[..., None]
    largest = np.take_along_axis(x, at, axis=-1)
    zero = np.abs(largest) < TINY
    largest = np.where(zero, np.float32(1), largest)
    importance = x * x

    def fit(steps: np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        codes = np.clip(np.rint(-steps / largest * x), -32, 31)
        return codes, in_order(importance * x * codes), in_order(importance * codes * codes)

    best, sum_qx, sum_qq = fit(np.float32(32))
    with np.errstate(divide="ignore", invalid="ignore"):  # the scale is 0 if sum_qq is
        scale = np.where(sum_qq == 0, np.float32(0), sum_qx / sum_qq)
        explained = scale * sum_qx  # the error is the sum of the weighted squares minus this
        for step in (*range(-9, 0), *range(1, 10)):
            codes, sum_qx, sum_qq = fit(np.float32(32) + np.float32(0.1) * np.float32(step))
            better = (sum_qq > 0) & (sum_qx * sum_qx > explained * sum_qq)
            best, scale = np.where(better, codes, best), np.where(better, sum_qx / sum_qq, scale)
            explained = np.where(better, scale * sum_qx, explained)
    return np.where(zero, 0, best + 32), np.where(zero, 0, scale)[..., 0]


def encode_q6_k(x: np.ndarray) -> np.ndarray:
    sub = x.reshape(-1, 16, 16)
    codes, scales = search_scale(sub)
    top = np.take_along_axis(scales, np.abs(scales).argmax(axis=1)[:, None], axis=1)
    zero = np.abs(top) < TINY
    steps = np.float32(-128) / np.where(zero, np.float32(1), top)  # the largest scale, with its sign, is code -128
    d = half(np.where(zero, np.float32(0), 1 / steps))
    s = np.where(zero, 0, np.minimum(np.rint(steps * scales), 127)).astype(np.int8)
    step = (unhalf(d) * s)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(step == 0, codes, np.clip(np.rint(sub / step), -32, 31) + 32)
    q = np.where(zero[..., None], 0, codes).astype(np.uint8).reshape(-1, 2, 4, 32)  # each half: four runs of 32
    low = np.concatenate([q[:, :, 0] & 15 | (q[:, :, 2] & 15) << 4, q[:, :, 1] & 15 | (q[:, :, 3] & 15) << 4], axis=2)
    high = q[:, :, 0] >> 4 | q[:, :, 1] >> 4 << 2 | q[:, :, 2] >> 4 << 4 | q[:, :, 3] >> 4 << 6
    return np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64), s.view(np.uint8), d], axis=1)
