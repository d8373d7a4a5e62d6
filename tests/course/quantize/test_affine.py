"""Affine quantization and the products built on it, held to torch's own quantizer and to bitsandbytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmlab.course.quantize.algorithms import smoothquant
from llmlab.course.quantize.algorithms.hqq import hqq
from llmlab.course.quantize.formats import affine, int8


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outlier_inputs(tokens=256, features=128, outliers=(3, 70), factor=40.0):
    x = normal(tokens, features, seed=5)
    x[:, list(outliers)] *= factor
    return x


def mean_error(weight, quantized):
    return (quantized.dequantize() - weight).square().mean().item()


# ---- affine


@given(seed=st.integers(0, 2**31), symmetric=st.booleans(), magnitude=st.integers(-30, 30))
def test_int8_is_torchs_own_quantizer(seed, symmetric, magnitude):
    weight = normal(6, 32, seed=seed) * 2.0**magnitude
    q = affine.quantize(weight, 8, "channel", symmetric=symmetric)
    theirs = torch.fake_quantize_per_channel_affine(weight, q.scale[:, 0], q.zero[:, 0].int(), 0, 0, 255)
    # torch multiplies by 1 / scale where we divide: a code differs at most where a weight lies halfway between two
    steps = ((theirs - q.dequantize()) / q.scale).abs()
    assert steps.max() < 1.001 and (steps > 0.001).float().mean() < 0.02


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_no_weight_is_off_by_more_than_half_a_step(bits, symmetric):
    weight = normal(16, 64) + 0.3
    q = affine.quantize(weight, bits, "group", 16, symmetric=symmetric)
    step = q.scale.repeat_interleave(16, 1)
    # asymmetric: the zero is rounded to a code too, which can cost the ends another half step
    assert ((q.dequantize() - weight).abs() <= step * (0.501 if symmetric else 1.001)).all()
    assert int(q.codes.max()) < 2**bits and q.scale.shape == (16, 4)


def test_finer_scales_and_more_bits_are_closer():
    weight = normal(64, 256) * torch.logspace(-1, 1, 64).unsqueeze(1)  # rows of different sizes
    errors = [
        mean_error(weight, affine.quantize(weight, 4, "tensor")),
        mean_error(weight, affine.quantize(weight, 4, "channel")),
        mean_error(weight, affine.quantize(weight, 4, "group", 64)),
        mean_error(weight, affine.quantize(weight, 5, "group", 64)),
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[2] / errors[3] == pytest.approx(4, rel=0.2), "a bit more halves the step: a quarter of the error"


def test_asymmetric_codes_pay_where_weights_are_one_sided():
    weight = normal(8, 64).abs()
    plain, offset = (affine.quantize(weight, 4, symmetric=symmetric) for symmetric in (True, False))
    assert mean_error(weight, offset) < 0.4 * mean_error(weight, plain)


@given(seed=st.integers(0, 2**31), bits=st.sampled_from([2, 3, 4]))
def test_the_best_clip_is_never_worse_than_none(seed, bits):
    weight = normal(4, 64, seed=seed) ** 3  # heavy tails
    clipped = affine.quantize(weight, bits, clip="mse")
    whole = affine.quantize(weight, bits)
    error = [(q.dequantize() - weight).square().sum(dim=1) for q in (clipped, whole)]
    assert (error[0] <= error[1] * 1.0001).all()


def test_stochastic_rounding_is_right_on_average_and_worse_at_once():
    x = torch.full((1, 1000), 0.3)
    x[0, 0] = 1.0
    scale, zero = torch.ones(1, 1), torch.zeros(1, 1)
    drawn = affine.to_codes(x, scale, zero, 4, torch.Generator().manual_seed(0))[0, 1:]
    assert set(drawn.tolist()) == {0.0, 1.0} and drawn.mean().item() == pytest.approx(0.3, abs=0.05)
    weight = normal(16, 128)
    stochastic = affine.quantize(weight, 4, generator=torch.Generator().manual_seed(0))
    assert mean_error(weight, stochastic) == pytest.approx(2 * mean_error(weight, affine.quantize(weight, 4)), rel=0.15)


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_are_exact(symmetric):
    weight = normal(4, 64)
    weight[:, ::3] = 0
    weight[2] = 0
    q = affine.quantize(weight, 3, "group", 16, symmetric=symmetric)
    assert not q.dequantize()[weight == 0].any()


def test_zero_is_a_code_even_where_no_weight_is_near_it():
    for weight in (torch.rand(4, 32) + 5, -torch.rand(4, 32) - 5):
        q = affine.quantize(weight, 4, symmetric=False)
        assert ((q.zero >= 0) & (q.zero <= 15)).all()


def test_bits_a_weight_count_the_scales():
    assert affine.quantize(normal(8, 128), 4, "group", 128).bits_per_weight == 4 + 20 / 128
    assert hqq(normal(8, 128), 4, 128).bits_per_weight == 4 + 32 / 128


# ---- int8 products


def test_rows_in_int8_are_bitsandbytes_own():
    import bitsandbytes.functional as bnb

    for dtype in (torch.float32, torch.float16):
        x = normal(64, 96, seed=2).to(dtype)
        codes, absmax = int8.quantize_rows(x)
        theirs, stats, _ = bnb.int8_vectorwise_quant(x)
        assert torch.equal(codes, theirs) and torch.equal(absmax, stats)


def test_outliers_ruin_int8_and_apart_they_do_not():
    x, weight = outlier_inputs(), normal(64, 128, seed=6)
    codes, absmax = int8.quantize_rows(weight)
    exact = x @ weight.T

    def error(threshold):
        return ((int8.linear_int8(x, codes, absmax, threshold) - exact).norm() / exact.norm()).item()

    assert int8.outlier_columns(x, 8.0).tolist() == [3, 70]
    assert error(8.0) < 0.01 < error(0)


def test_int8_products_are_bitsandbytes_own():
    import bitsandbytes.functional as bnb

    x, weight = outlier_inputs().half(), normal(64, 128, seed=6).half()
    codes, absmax = int8.quantize_rows(weight)
    x_codes, x_stats, columns = bnb.int8_vectorwise_quant(x.clone(), threshold=8.0)
    theirs, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(x, x_codes, codes, x_stats, absmax, columns)
    ours = int8.linear_int8(x, codes, absmax, 8.0)
    assert ours.dtype == torch.float16
    # They round to fp16 between the parts, and some CPUs also sum in fp16; without the outliers ours is 0.02 apart.
    assert ((ours - theirs).float().norm() / theirs.float().norm()) < 0.01


# ---- SmoothQuant


def test_smoothing_changes_no_output():
    x, weight = outlier_inputs(), normal(64, 128, seed=6)
    s = smoothquant.smoothing(weight, x)
    torch.testing.assert_close((x / s) @ (weight * s).T, x @ weight.T, rtol=1e-4, atol=1e-3)
    before, after = x.abs().amax(dim=0), (x / s).abs().amax(dim=0)
    assert before.max() / before.median() > 20 and after.max() / after.median() < 8


def test_half_the_difficulty_moved_makes_both_sides_alike():
    """Equation 4 at α = 0.5: a feature's largest activation and its largest weight become the same number."""
    x, weight = outlier_inputs(), normal(64, 128, seed=6) * torch.logspace(-1, 1, 128)
    s = smoothquant.smoothing(weight, x)
    torch.testing.assert_close((x / s).abs().amax(dim=0), (weight * s).abs().amax(dim=0))


def test_smoothing_makes_w8a8_closer():
    x, weight = outlier_inputs(), normal(64, 128, seed=6)
    exact = x @ weight.T

    def error(quantized):
        return ((smoothquant.linear_w8a8(x, quantized) - exact).norm() / exact.norm()).item()

    assert error(smoothquant.smoothquant(weight, x)) < 0.7 * error(affine.quantize(weight, 8))


def test_w8a8_is_the_product_of_both_rounded():
    x, weight = outlier_inputs(), normal(64, 128, seed=6)
    q = smoothquant.smoothquant(weight, x)
    rounded = affine.quantize(x / q.input_scale, 8).dequantize()
    expected = rounded @ (q.dequantize() * q.input_scale).T
    torch.testing.assert_close(smoothquant.linear_w8a8(x, q), expected, rtol=1e-4, atol=1e-3)
