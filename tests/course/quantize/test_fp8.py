"""FP8 bit for bit as torch's own dtypes; scales per tensor, row and tile; MXFP4's clipping; the quantized KV cache."""

import numpy as np
import pytest
import torch

from llmlab.base.errors import SpecError, UnknownName
from llmlab.course import quantize
from llmlab.course.quantize.formats import fp8, kv


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_what_is_too_large_becomes_the_largest_number():
    x = torch.tensor([449.0, -1e9, 1e38])
    assert fp8.decode("e4m3", fp8.encode("e4m3", x)).tolist() == [448.0, -448.0, 448.0]


def test_a_tile_keeps_an_outlier_to_itself():
    weight = normal(256, 256) * 1e-3
    weight[3, 5] = 1000.0
    error = {}
    for tile in ("tensor", "row", (1, 128), (128, 128)):
        q = fp8.quantize(weight, "e4m3", tile)
        off = (q.dequantize() - weight).abs()
        off[3, 5] = 0
        error[tile] = off.mean().item()
    assert error[(1, 128)] < error["row"] < error[(128, 128)] < error["tensor"]
    assert error["tensor"] == pytest.approx(weight.abs().sort().values[:, :-1].mean().item(), rel=0.1), "all lost"


def test_the_largest_number_of_a_tile_is_exact_and_zeros_stay():
    weight = normal(4, 64)
    weight[2] = 0
    q = fp8.quantize(weight, "e4m3", "row")
    at = weight.abs().argmax(dim=1, keepdim=True)
    torch.testing.assert_close(q.dequantize().gather(1, at), weight.gather(1, at))
    assert q.scale.shape == (4, 1) and not q.dequantize()[2].any()
    assert torch.equal(fp8.quantize(torch.full((1, 4), 1e-44), "e4m3").dequantize().isfinite(), torch.ones(1, 4).bool())


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: fp8.quantize(normal(4, 64), "e3m4"), UnknownName, "e4m3"),
        (lambda: fp8.quantize(normal(100, 128), tile=(128, 128)), SpecError, "128 × 128 do not cover"),
        (lambda: fp8.quantize(normal(4, 64), tile="column"), SpecError, "tile='column'"),
        (lambda: fp8.quantize(normal(4, 64) / 0), SpecError, "inf"),
        (lambda: fp8.encode("e4m3", torch.tensor([float("nan")])), SpecError, "1 infinities or NaNs"),
        (lambda: fp8.encode("e4m3", torch.tensor([1])), SpecError, "int64"),
        (lambda: fp8.decode("e4m3", torch.zeros(4)), SpecError, "float32"),
    ],
)
def test_bad_input_is_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_mxfp4_has_eight_sizes_and_clips_what_lies_above_the_largest():
    row = np.array([[0, 0.5, 1, 1.5, 2, 3, 4, 6, 7.9, *[0.0] * 23]], dtype=np.float32)
    restored = quantize.gguf.decode("MXFP4", quantize.gguf.encode("MXFP4", row), row.shape)
    np.testing.assert_array_equal(restored[0, :8], row[0, :8])
    assert restored[0, 8] == 6, "7.9 needs the same exponent as 4, whose largest number is 6"


# ---- the KV cache


def keys_with_loud_channels():
    keys = normal(2, 2, 128, 64)
    keys[..., [5, 40]] *= 15
    return keys


def cache_error(cache, restored):
    return ((restored - cache).square().mean() / cache.square().mean()).item()


def test_keys_want_a_scale_a_channel():
    keys = keys_with_loud_channels()
    quiet = [c for c in range(64) if c not in (5, 40)]
    off = {
        per: (kv.rounded(keys, per, 2, 32) - keys)[..., quiet].square().mean().item()
        for per in ("channel", "token")
    }
    assert off["channel"] < 0.5 * off["token"]


def test_a_token_is_attended_to_nearly_as_before():
    keys, values, query = keys_with_loud_channels(), normal(2, 2, 128, 64, seed=1), normal(2, 2, 1, 64, seed=2) * 0.2
    exact = torch.nn.functional.scaled_dot_product_attention(query, keys, values)

    def off(per):
        restored = kv.rounded(keys, per, 4), kv.rounded(values, "token", 4)
        return (torch.nn.functional.scaled_dot_product_attention(query, *restored) - exact).norm() / exact.norm()

    assert off("channel") < 0.1 and off("channel") < 0.8 * off("token")


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 100])
def test_tokens_that_fill_no_group_stay_exact(tokens):
    keys = normal(1, 2, tokens, 64).half()
    restored = kv.rounded(keys, "channel", 2, 32)
    recent = tokens % 32
    assert restored.shape == keys.shape and restored.dtype == keys.dtype
    assert torch.equal(restored[:, :, tokens - recent :], keys[:, :, tokens - recent :])


def test_fewer_bits_are_worse_and_the_cache_is_left_alone():
    values = normal(1, 2, 64, 64)
    before = values.clone()
    errors = [cache_error(values, kv.rounded(values, "token", bits)) for bits in (8, 4, 3, 2)]
    assert errors == sorted(errors) and errors[0] < 1e-4
    assert torch.equal(values, before)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: kv.rounded(normal(2, 64, 64), "channel"), "kv heads"),
        (lambda: kv.rounded(normal(1, 2, 8, 48), "token", 2, 32), "group=32 does not divide 48"),
        (lambda: kv.rounded(normal(1, 2, 32, 8), "channel", 2, 0), "group=0"),
        (lambda: kv.rounded(normal(1, 2, 32, 8), "channel", 1), "bits=1"),
        (lambda: kv.rounded(normal(1, 2, 32, 8), "head"), "per='head'"),
        (lambda: kv.rounded(normal(1, 2, 32, 8) / 0, "channel"), "inf"),
    ],
)
def test_bad_caches_are_refused(call, says):
    with pytest.raises(SpecError, match=says):
        call()
