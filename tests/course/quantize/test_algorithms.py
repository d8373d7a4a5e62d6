"""GPTQ, AWQ, HQQ against direct solutions and against round to nearest; fake quantization against torch's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.base.errors import SpecError
from llmlab.course import quantize
from llmlab.course.quantize.algorithms.awq import column_scale
from llmlab.course.quantize.algorithms.gptq import damped_hessian, inverse_factor
from llmlab.course.quantize.algorithms.hqq import hqq
from llmlab.course.quantize.algorithms.qat import FakeQuantize
from llmlab.course.quantize.algorithms.rtn import layer_error, rtn


def layer(rows=24, columns=64, tokens=200, seed=0, outliers=0):
    """A weight and inputs whose features are correlated, as a network's are; `outliers` of them are 20 times larger."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    mixed = torch.randn(columns, columns, generator=generator) / columns**0.5
    inputs = torch.randn(tokens, columns, generator=generator) @ (mixed + 0.3 * torch.eye(columns))
    inputs[:, torch.randperm(columns, generator=generator)[:outliers]] *= 20
    return weight, inputs


def error(method, weight, inputs, *args, **kwargs):
    return layer_error(weight, method(weight, inputs, *args, **kwargs), inputs)


# ---- GPTQ


@settings(max_examples=12)
@given(seed=st.integers(0, 2**31), bits=st.sampled_from([2, 3, 4, 8]), group=st.sampled_from([None, 8, 16]),
       symmetric=st.booleans(), tokens=st.sampled_from([10, 200]))  # fmt: skip
def test_gptq_is_the_direct_solution(gptq_direct, seed, bits, group, symmetric, tokens):
    """The Cholesky factor and the blocks change nothing: solving for the free columns anew each time gives the same."""
    weight, inputs = layer(rows=8, columns=32, seed=seed, tokens=tokens)
    ours = quantize.gptq(weight.double(), inputs.double(), bits, group, symmetric=symmetric)
    direct = gptq_direct(weight, inputs, bits, group, symmetric=symmetric)
    assert torch.equal(ours.codes, direct.codes)
    torch.testing.assert_close(ours.scale, direct.scale)
    single = quantize.gptq(weight, inputs, bits, group, symmetric=symmetric)  # float32, as the paper runs it
    assert layer_error(weight, single, inputs) == pytest.approx(layer_error(weight, direct, inputs), rel=0.1)


def test_act_order_helps_where_few_features_are_large():
    plain, ordered = 0.0, 0.0
    for seed in range(8):
        weight, inputs = layer(seed=seed, outliers=4)
        plain += error(quantize.gptq, weight, inputs, 3, None)
        ordered += error(quantize.gptq, weight, inputs, 3, None, act_order=True)
    assert ordered < 0.8 * plain


def test_act_order_says_which_columns_share_a_scale():
    weight, inputs = layer(outliers=4)
    q = quantize.gptq(weight, inputs, 4, 16, act_order=True)
    assert q.group_of.bincount().tolist() == [16] * 4
    first = damped_hessian(inputs, 0.01).diagonal().argsort(descending=True)[:16]
    assert set(q.group_of[first].tolist()) == {0}, "the largest inputs are the first group"
    direct = (q.codes.float() - q.zero[:, q.group_of]) * q.scale[:, q.group_of]
    assert torch.equal(q.dequantize(), direct)


def test_with_uncorrelated_inputs_gptq_is_rounding():
    weight, _ = layer()
    inputs = torch.eye(64) * 3.0
    assert torch.equal(quantize.gptq(weight, inputs, 4, 16, damping=0.0).codes, rtn(weight, 4, 16).codes)


def test_a_row_of_the_factor_is_what_a_column_does_to_the_free_ones():
    _, inputs = layer(columns=16)
    hessian = damped_hessian(inputs.double(), 0.01)
    U = inverse_factor(hessian)
    torch.testing.assert_close(U.T @ U, torch.linalg.inv(hessian))
    free = torch.linalg.inv(hessian[5:, 5:])  # Optimal Brain Surgeon's correction, column 5 first
    torch.testing.assert_close(U[5, 5:] / U[5, 5], free[0] / free[0, 0])


def test_a_feature_that_is_never_on_is_rounded_on_its_own():
    weight, inputs = layer()
    inputs[:, 7] = 0
    q = quantize.gptq(weight, inputs, 4, None)
    assert (q.dequantize()[:, 7] - weight[:, 7]).abs().max() <= q.scale.max() * 0.51


# ---- AWQ


@settings(max_examples=5)
@given(seed=st.integers(0, 2**31), bits=st.sampled_from([2, 3, 4]))
def test_awq_is_the_best_of_the_scales_it_tries_and_never_worse_than_rounding(seed, bits):
    weight, inputs = layer(seed=seed, outliers=4)
    ours = error(quantize.awq, weight, inputs, bits, 16)
    tried = []
    for step in range(20):
        scale = column_scale(inputs.abs().mean(dim=0), step / 20)
        tried.append(layer_error(weight, rtn(weight * scale, bits, 16).dequantize() / scale, inputs))
    assert ours == pytest.approx(min(tried), rel=1e-4) and ours <= 1.0001 * tried[0]


def test_awq_protects_what_meets_large_inputs():
    weight, inputs = layer(outliers=4)
    q = quantize.awq(weight, inputs, 3, 16)
    outliers = inputs.abs().mean(dim=0).topk(4).indices
    assert set(q.input_scale.topk(4).indices.tolist()) == set(outliers.tolist())
    off, plain = ((x.dequantize() - weight)[:, outliers].square().mean() for x in (q, rtn(weight, 3, 16)))
    assert off < 0.3 * plain and layer_error(weight, q, inputs) < 0.5 * layer_error(weight, rtn(weight, 3, 16), inputs)
    scaled = (q.codes - q.zero.repeat_interleave(16, 1)) * q.scale.repeat_interleave(16, 1)
    torch.testing.assert_close((inputs / q.input_scale) @ scaled.T, inputs @ q.dequantize().T, rtol=1e-4, atol=1e-4)


# ---- HQQ


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), bits=st.sampled_from([2, 3, 4]))
def test_hqq_loses_less_than_rounding_without_any_data(seed, bits):
    weight, _ = layer(seed=seed)
    ours, plain = hqq(weight, bits, 16), rtn(weight, bits, 16)
    off = [(q.dequantize() - weight).abs().pow(0.7).reshape(-1, 16).mean(dim=1) for q in (ours, plain)]
    assert (off[0] <= off[1] * 1.0001).all() and off[0].sum() < off[1].sum()
    assert torch.equal(ours.scale, plain.scale), "only the zeros moved"


# ---- training with quantization


@pytest.mark.parametrize("zero", [0.0, 8.0])
def test_fake_quantization_is_torchs_own_forward_and_backward(zero):
    x = torch.linspace(-2, 2, 401)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    scale = torch.tensor(0.125)  # a power of two: torch multiplies by its inverse, we divide
    y = FakeQuantize.apply(mine, scale, torch.tensor(zero), 4)
    expected = torch.fake_quantize_per_tensor_affine(theirs, 0.125, int(zero), 0, 15)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    assert (mine.grad == 0).any() and (mine.grad != 0).any(), "clipped values learn nothing, the others do"


def test_without_the_estimator_rounding_has_no_gradient():
    x = torch.linspace(-1, 1, 32, requires_grad=True)
    ((x / 0.125).round() * 0.125).sum().backward()
    assert not x.grad.any()
    FakeQuantize.apply(x, torch.tensor(0.25), torch.tensor(8.0), 4).sum().backward()
    assert (x.grad == 1).all()


# ---- what cannot be


def test_a_hessian_without_inverse_is_refused():
    weight, inputs = layer(tokens=10)
    with pytest.raises(SpecError, match="no inverse"):
        quantize.gptq(weight, inputs.round() * 0 + torch.eye(10, 64), 4, 16, damping=0.0)
    with pytest.raises(SpecError, match="damping=-1"):
        quantize.gptq(weight, inputs, 4, 16, damping=-1)


def test_importing_the_package_imports_no_torch():
    import subprocess
    import sys

    code = """import sys, llmlab.course.quantize as q
assert not {"torch", "numpy"} & set(sys.modules)
import llmlab.course.quantize.algorithms.gptq, llmlab.course.quantize.algorithms.awq
assert callable(q.gptq) and callable(q.awq) and q.nf4.encode and q.gguf.encode"""
    subprocess.run([sys.executable, "-c", code], check=True)
