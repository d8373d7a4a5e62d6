"""On the small trained model: what each algorithm loses, layer by layer and in perplexity, beside the libraries."""

import copy

import pytest
import torch
from torch import nn

from llmlab import data
from llmlab.base.errors import SpecError
from llmlab.course import quantize
from llmlab.course.architectures.small import small_ids, small_model
from llmlab.course.evaluate.perplexity import perplexity
from llmlab.course.quantize.algorithms.rtn import layer_error, relative_error, rtn
from llmlab.course.quantize.algorithms.smoothquant import SmoothLinear
from llmlab.course.quantize.formats import affine, kv, nf4
from llmlab.course.quantize.formats.int8 import Int8Linear
from llmlab.course.quantize.whole import inputs_of, linears, quantize_model, replace_linears

GROUP = 64


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def calibration():
    return data.windows(small_ids()[0], micro_batch=4, seq_len=256, seed=1)


@pytest.fixture(scope="module")
def inputs(model, calibration):
    return inputs_of(model, calibration, linears(model))


@pytest.fixture(scope="module")
def held_out():
    return small_ids()[1][:2048]


def ppl(model, ids):
    return float(perplexity(model, ids, 512, 512))


def weights(model):
    return {name: linear.weight.detach() for name, linear in linears(model).items()}


# ---- algorithms


@pytest.mark.parametrize("bits", [3, 2])
def test_gptq_and_awq_lose_less_than_rounding_on_every_layer(model, inputs, bits):
    for name, weight in weights(model).items():
        plain = layer_error(weight, rtn(weight, bits, GROUP), inputs[name])
        assert layer_error(weight, quantize.gptq(weight, inputs[name], bits, GROUP), inputs[name]) < plain, name
        if bits == 3:
            best = layer_error(weight, quantize.awq(weight, inputs[name], bits, GROUP), inputs[name])
            assert best <= 1.0001 * plain, name


def test_fewer_bits_cost_more_and_gptq_costs_less_than_rounding(model, held_out):
    """With enough calibration: on 1000 tokens for 768 features GPTQ fits their noise, and text it has not seen pays."""
    exact = ppl(model, held_out)
    rounded = {b: ppl(quantize_model(model, lambda w, _, b=b: rtn(w, b, GROUP)), held_out) for b in (8, 4, 3, 2)}
    assert abs(rounded[8] / exact - 1) < 2e-3 and rounded[4] < rounded[3] < rounded[2]
    assert rounded[2] > 1.02 * exact
    many = data.windows(small_ids()[0], micro_batch=16, seq_len=256, seed=1)
    text = small_ids()[1][-4096:]
    plain = ppl(quantize_model(model, lambda w, _: rtn(w, 2, None)), text)  # one scale per row: more to correct
    solved = ppl(quantize_model(model, lambda w, x: quantize.gptq(w, x, 2, None), many), text)
    assert solved - ppl(model, text) < 0.75 * (plain - ppl(model, text))


def test_a_quantized_copy_leaves_the_model_alone_and_its_head_exact(model, calibration):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    solved = quantize_model(model, lambda w, x: quantize.gptq(w, x, 3, GROUP), calibration)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert torch.equal(solved.lm_head.weight, model.lm_head.weight)
    changed = [name for name, weight in weights(solved).items() if not torch.equal(weight, weights(model)[name])]
    assert changed == list(linears(model)) and len(changed) == 7 * model.spec.layers
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_later_blocks_see_what_the_quantized_ones_before_them_make(model, calibration):
    seen = []
    solved = quantize_model(model, lambda w, x: (seen.append(x), rtn(w, 2, GROUP))[1], calibration)
    names = list(linears(model))
    first, last = names.index("layers.0.self_attn.q_proj"), names.index("layers.2.mlp.gate_proj")
    exact = inputs_of(model, calibration, names)
    assert torch.equal(seen[first], exact[names[first]])
    assert 0.05 < relative_error(seen[last], exact[names[last]]) < 1
    assert len(seen) == len(names) and ppl(solved, small_ids()[1][:512]) > 1


def test_a_layers_inputs_take_no_pass_beyond_it(model, calibration):
    beyond = []
    hook = model.get_submodule("layers.1.mlp.gate_proj").register_forward_pre_hook(lambda *_: beyond.append(1))
    query = "layers.1.self_attn.q_proj"
    try:
        found = inputs_of(model, calibration, [query])
        assert not beyond and torch.equal(found[query], inputs_of(model, calibration, linears(model))[query])
        assert beyond
    finally:
        hook.remove()


# ---- activations


@pytest.fixture(scope="module")
def loud():
    """A layer's weight (32, 64) and inputs (200, 64) with two channels 100 times as large as the others."""
    torch.manual_seed(0)
    x = torch.randn(200, 64)
    x[:, [7, 50]] *= 100
    return torch.randn(32, 64), x


def test_the_small_models_own_outliers_cost_plain_int8_less_than_half_a_percent(model, calibration, held_out):
    """Chapter 19 says so: only larger models need LLM.int8() or SmoothQuant."""
    ids, name = held_out[:1024], "layers.1.mlp.down_proj"
    x = inputs_of(model, calibration, [name])[name]
    assert x.abs().max() > 30 * x.square().mean().sqrt()
    plain = replace_linears(model, lambda _, linear: Int8Linear(linear, 0))
    assert ppl(plain, ids) == pytest.approx(ppl(model, ids), rel=5e-3)


def test_awq_saves_what_loud_channels_multiply(loud):
    weight, x = loud
    plain = layer_error(weight, rtn(weight, 4, GROUP), x)
    assert layer_error(weight, quantize.awq(weight, x, 4, GROUP), x) < 0.6 * plain


@pytest.mark.parametrize("make", [Int8Linear, lambda linear: SmoothLinear(linear, torch.randn(20, 16))])
def test_int8_layers_take_any_batch_and_add_the_bias(make):
    torch.manual_seed(0)
    linear = nn.Linear(16, 8)
    x = torch.randn(2, 5, 16)
    y = make(linear)(x)
    assert y.shape == (2, 5, 8) and relative_error(y, linear(x)) < 0.02


def test_keys_lose_least_a_channel_at_a_time_and_two_bits_cost_little(model, held_out):
    def cost(bits, keys="channel"):
        changed = copy.deepcopy(model)
        for block in changed.layers:
            block.self_attn.attend = kv.attend_quantized(bits, 32, keys)
        return ppl(changed, held_out) / exact - 1

    exact = ppl(model, held_out)
    assert abs(cost(8)) < 2e-3 and cost(4) < cost(2) < cost(2, "token")


# ---- the libraries


def test_bitsandbytes_holds_the_same_weights_and_the_same_perplexity(model, held_out):
    import bitsandbytes as bnb

    def four_bits(_, linear):
        theirs = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, quant_type="nf4", compute_dtype=torch.float32,
            compress_statistics=False,
        )  # fmt: skip
        theirs.load_state_dict({"weight": linear.weight.data})
        return theirs.to("cpu")

    theirs = replace_linears(model, four_bits)
    ours = quantize_model(model, lambda w, _: nf4.decode(*nf4.encode(w), w.shape))
    for name in linears(model):
        packed = theirs.get_submodule(name).weight
        restored = bnb.functional.dequantize_4bit(packed.data, packed.quant_state)
        assert torch.equal(restored, ours.get_submodule(name).weight), name
    assert ppl(theirs, held_out) == pytest.approx(ppl(ours, held_out), rel=0.02)  # its CPU kernel sums in bf16


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_torchao_rounds_as_we_do(model, bits):
    ao = pytest.importorskip("torchao.quantization")

    theirs = copy.deepcopy(model)
    config = ao.IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{bits}"), granularity=ao.PerGroup(GROUP),
        mapping_type=ao.MappingType.ASYMMETRIC,
    )  # fmt: skip
    ao.quantize_(theirs, config, filter_fn=lambda module, name: name in linears(model))
    for name, weight in weights(model).items():
        ours = affine.quantize(weight, bits, "group", GROUP, symmetric=False)
        off = (theirs.get_submodule(name).weight.dequantize() - ours.dequantize()).abs()
        step = ours.scale.repeat_interleave(GROUP, 1)
        assert (off <= 1.01 * step).all() and (off > 0.01 * step).float().mean() < 2e-3, "but for weights at a tie"


# ---- time


def test_a_model_without_layers_is_refused():
    with pytest.raises(SpecError, match="no linear layer"):
        quantize_model(nn.Sequential(nn.ReLU()), lambda w, _: w)
