"""GGUF's blocks: K-quants byte for byte those of ggml, errors of each kind, and what is refused."""

import hashlib

import numpy as np
import pytest
import torch

from llmlab.base.errors import SpecError, UnknownName
from llmlab.course import quantize

KINDS = tuple(quantize.gguf.FORMATS)


def ours(kind, x):
    return np.frombuffer(quantize.gguf.encode(kind, x), np.uint8)


# sha256 of what ggml's own C gives (quantize_row_q4_K_ref and quantize_row_q6_K_ref of llama.cpp, compiled without
# fused multiply-add, x86-64) for `fixed_weights()`: the gguf package has no encoder for these two.
GGML_C = {
    "Q4_K": "bfe8035b13ffc2e383dcbb2f2f831d4b8b9880e343097e14c8b822a0e48883c2",
    "Q6_K": "8a0c765f4404c57a87816e7d89b7e30aa08a7a7ab20e13ac8db1d24d4224fc04",
}


def fixed_weights():
    """16 384 weights from whole numbers alone, so that no version of numpy draws them differently."""
    state, drawn = 12345, []
    for _ in range(256 * 64):
        state = (1103515245 * state + 12345) % 2**31
        drawn.append((state >> 8) % 2001 - 1000)
    spread = np.array(drawn, dtype=np.float32).reshape(64, 256)
    cubed = spread * spread * spread / np.float32(2**30)  # heavy tails
    magnitude = np.float32(2.0) ** np.arange(-16, 16, dtype=np.float32)[:, None]
    return np.concatenate([spread[:32] / np.float32(1024), cubed[32:] * magnitude]).astype(np.float32)


@pytest.mark.parametrize("kind", GGML_C)
def test_k_quants_are_ggmls_own_bytes(kind):
    assert hashlib.sha256(quantize.gguf.encode(kind, fixed_weights())).hexdigest() == GGML_C[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_no_weight_is_off_by_more_than_half_a_step(kind):
    """Of the block's range or its largest weight; an fp16 scale's own rounding comes on top, at most 1/512 of that.

    K-quants round their scales to 6 or 8 bits as well: a whole step. Q4_0 and Q5_0 have one code less on the side away
    from the largest weight, MXFP4 clips what is above 6: a step, too.
    """
    x = np.random.default_rng(1).standard_normal((200, 256)).astype(np.float32)
    restored = quantize.gguf.decode(kind, quantize.gguf.encode(kind, x), x.shape)
    blocks = x.reshape(-1, 16 if kind == "Q6_K" else 32)
    error = np.abs(restored.reshape(blocks.shape) - blocks).max(axis=1)
    largest, span = np.abs(blocks).max(axis=1), np.ptp(blocks, axis=1)
    step = {
        "Q8_0": largest / 127, "Q4_0": largest / 8, "Q5_0": largest / 16, "Q4_1": span / 15, "Q5_1": span / 31,
        "Q4_K": np.maximum(span, largest) / 15, "Q6_K": largest / 32, "MXFP4": largest / 4,
    }[kind]  # fmt: skip
    exact = kind in ("Q8_0", "Q4_1", "Q5_1")
    assert (error <= step * (0.5 if exact else 1) + largest / 512).all()
    assert error.max() > 0.45 * step.min(), "and it comes close"


def test_more_bits_are_closer_and_k_quants_beat_the_simple_format_of_their_size():
    x = 0.02 * np.random.default_rng(2).standard_normal((50, 256)).astype(np.float32)
    error = {kind: np.square(quantize.gguf.decode(kind, ours(kind, x), x.shape) - x).mean() for kind in KINDS}
    assert error["Q8_0"] < error["Q6_K"] < error["Q5_1"] < error["Q4_K"] < error["Q4_0"] < error["MXFP4"]
    assert quantize.bits_per_weight("Q4_K") == quantize.bits_per_weight("Q4_0") == 4.5


@pytest.mark.parametrize("kind", KINDS)
def test_torch_tensors_of_any_float_are_taken_and_left_alone(kind):
    x = torch.linspace(-1, 1, 512).reshape(2, 256).bfloat16()
    before = x.clone()
    assert quantize.gguf.encode(kind, x) == quantize.gguf.encode(kind, x.float().numpy())
    assert torch.equal(x, before)


# ---- what cannot be


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda x: x[:, :-1], "not a whole number"),
        (lambda x: x.astype(np.int32), "int32"),
        (lambda x: x.astype(bool), "bool"),
        (lambda x: x[:0], r"shape \(0, 256\)"),
        (lambda x: np.where(x == x.max(), np.nan, x), r"1 nan and 0 inf, the first at \(1, 255\)"),
        (lambda x: np.where(x == x.max(), -np.inf, x), "1 inf"),
    ],
)
def test_bad_weights_are_refused_and_unchanged(kind, broken, says):
    x = broken(np.linspace(0, 1, 512, dtype=np.float32).reshape(2, 256))
    before = x.copy()
    with pytest.raises(SpecError, match=says):
        quantize.gguf.encode(kind, x)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "MXFP4"])
def test_a_scale_beyond_fp16_is_refused_and_not_written_as_infinity(kind):
    with pytest.raises(SpecError, match="65504"):
        quantize.gguf.encode(kind, np.full((1, 256), -3e38, np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_data_of_another_length_is_refused(kind):
    data = quantize.gguf.encode(kind, np.ones((2, 256), np.float32))
    for cut, says in ((data[:-1], "truncated"), (data + b"\0", "another shape or kind"), (b"", "truncated")):
        with pytest.raises(SpecError, match=says):
            quantize.gguf.decode(kind, cut, (2, 256))
    with pytest.raises(SpecError, match="not a whole number"):
        quantize.gguf.decode(kind, data, (256, 2))


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(UnknownName, match="Q4_K"):
        quantize.gguf.encode("Q4_K_M", np.ones((1, 256), np.float32))
