"""GPTQ's 4 bits beside AutoGPTQ's layer: its tensors, what unpacking moves, what autograd keeps, what is refused."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import llmlab as lab
from llmlab.engines.tuners import axolotl_config, llama_factory_config
from llmlab.formulas import gptq
from llmlab.formulas.memory.states import states
from llmlab.planning.files.script import kind
from llmlab.step import model as step_model

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CARD = "A100-80GB"
RUN = lab.Training(2, 512, "fp16", lora=lab.LoRA(8, ("q_proj", "v_proj")), quantization="gptq")
LLAMA = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 4, "intermediate_size": 2048, "vocab_size": 2048,
         "max_position_embeddings": 2048}  # fmt: skip


class Layer(nn.Linear):
    """What AutoGPTQ's QuantLinear of 4 bits stores and computes (0.7.1, nn_modules/qlinear/qlinear_cuda_old.py), as a
    linear layer, on which peft puts the same adapter as on that."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype, device: str = "meta") -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = inputs, outputs
        shapes = {"qweight": (inputs // 32 * 4, outputs), "qzeros": (inputs // 128, outputs // 32 * 4),
                  "scales": (inputs // 128, outputs), "g_idx": (inputs,)}  # fmt: skip
        for name, shape in shapes.items():
            kind = dtype if name == "scales" else torch.int32
            self.register_buffer(name, torch.zeros(shape, dtype=kind, device=device))
        self.register_buffer("bias", torch.zeros(outputs, dtype=dtype, device=device) if bias else None)
        self.shifts: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        return self.scales

    def forward(self, x: Tensor) -> Tensor:
        if self.shifts is None:
            self.shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=x.device).unsqueeze(0)
        shape, dtype = (*x.shape[:-1], self.out_features), x.dtype
        x = x.reshape(-1, x.shape[-1])
        words = self.qzeros.unsqueeze(2).expand(-1, -1, 8)
        zeros = torch.bitwise_right_shift(words, self.shifts.unsqueeze(0)).to(torch.int8)
        zeros = zeros + 1
        zeros = torch.bitwise_and(zeros, 15)
        zeros = zeros.reshape(-1, 1, zeros.shape[1] * zeros.shape[2])
        scales = self.scales.reshape(-1, 1, self.scales.shape[-1])
        words = self.qweight.unsqueeze(1).expand(-1, 8, -1)
        weight = torch.bitwise_right_shift(words, self.shifts.unsqueeze(-1)).to(torch.int8)
        weight = torch.bitwise_and(weight, 15)
        weight = weight.reshape(-1, 128, weight.shape[2])
        weight = scales * (weight - zeros)
        weight = weight.reshape(weight.shape[0] * weight.shape[1], weight.shape[2])
        out = torch.matmul(x, weight)
        out = out.to(dtype=dtype).reshape(shape)
        return out + self.bias if self.bias is not None else out


def pack(weight: Tensor, scales: Tensor, layer: Layer) -> None:
    """Pack whole multiples of a group's scale, -8 to 7 of them, into the layer, whose zero is 8 for all."""
    codes = ((weight / scales.repeat_interleave(128, 0)).round() + 8).to(torch.int64)
    words = sum(codes[place::8] << 4 * place for place in range(8))
    layer.qweight.copy_(torch.where(words >= 1 << 31, words - (1 << 32), words))
    layer.qzeros.fill_(0x77777777)  # one less than each zero
    layer.scales.copy_(scales)


def test_the_layer_here_multiplies_by_what_was_packed():
    torch.manual_seed(0)
    layer, scales = Layer(256, 64, False, torch.float32, "cpu"), torch.rand(2, 64) + 0.1
    weight = torch.randint(-8, 8, (256, 64)) * scales.repeat_interleave(128, 0)
    pack(weight, scales, layer)
    x = torch.randn(3, 256)
    torch.testing.assert_close(layer(x), x @ weight)


def test_a_layer_takes_what_its_buffers_do():
    layer = Layer(4096, 11008, False, torch.float16)
    assert gptq.tensors(4096, 11008, 2) == tuple(each.nbytes for each in layer.buffers())


@pytest.mark.parametrize(("precision", "width"), [("fp16", 2), ("mixed-fp16", 2), ("autocast-fp16", 4)])
def test_blocks_linears_are_packed_and_the_rest_is_as_it_was_loaded(precision, width):
    """peft casts nothing to fp32; adapters are fp32."""
    spec = lab.model({**LLAMA, "attention_bias": True})
    packed = sum(sum(gptq.tensors(each.inputs, each.outputs, width)) * each.count for each in spec.block_linears)
    rest = spec.parameters - spec.block_linear_elements
    sizes = states(spec, replace(RUN, precision=precision))
    assert sizes.trained == 4 * 8 * (512 + 512 + 512 + 256)
    assert sizes.weights == packed + width * rest + 4 * sizes.trained


@pytest.fixture
def simulated(monkeypatch):
    """Return the report of a step whose blocks have the layer here, which `lab.simulate` refuses."""
    on_meta = step_model.on_meta

    def packed(spec, run):
        model = on_meta(spec, run)
        for block in model.model.layers:
            for module in list(block.modules()):
                for name, each in list(module.named_children()):
                    if isinstance(each, nn.Linear):
                        bias = each.bias is not None
                        made = Layer(each.in_features, each.out_features, bias, each.weight.dtype)
                        setattr(module, name, made)
        return model

    def simulate(model, run, card):
        monkeypatch.setattr(step_model, "on_meta", packed)
        monkeypatch.setattr(step_model, "_check_libraries", lambda *given: None)
        return lab.simulate(model, replace(run, quantization=None, lora=run.lora), card)

    return simulate


@pytest.mark.parametrize(("precision", "checkpointing", "targets"), [
    ("fp16", None, ("q_proj", "v_proj")), ("fp16", "full", ALL), ("fp16", "selective", ("up_proj",)),
    ("fp16", "full", ("down_proj",)), ("autocast-fp16", "full", ("q_proj",)), ("autocast-fp16", None, ALL),
])  # fmt: skip
def test_the_formula_is_the_simulation_of_a_step(simulated, precision, checkpointing, targets):
    run = replace(RUN, precision=precision, checkpointing=checkpointing, lora=lab.LoRA(8, targets))
    model = {**LLAMA, "num_hidden_layers": 3, "attention_bias": True}
    formula, traced = lab.estimate(model, run, CARD), simulated(model, run, CARD)
    assert formula.phases["load"] == pytest.approx(traced.phases["load"], rel=0.02)
    assert formula.peak_allocated == pytest.approx(traced.peak_allocated, rel=0.025)
    for parts in (("products", "elementwise"), ("launches",)):  # unpacking is among products, and elementwise there
        seconds = [sum(each.time[part] for part in parts) for each in (formula, traced)]
        assert seconds[0] == pytest.approx(seconds[1], rel=0.06)


@pytest.mark.parametrize("checkpointing", [None, "full"])
def test_the_formula_is_the_simulation_where_weights_are_most(simulated, checkpointing):
    """Two blocks of Llama 2 7B on 512 tokens: without checkpointing autograd keeps all that is unpacked, 2 bytes of
    each weight; with it those of one block."""
    model = {**LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 2,
             "num_attention_heads": 32, "num_key_value_heads": 32}  # fmt: skip
    run = replace(RUN, micro_batch=1, checkpointing=checkpointing)
    formula, traced = lab.estimate(model, run, CARD), simulated(model, run, CARD)
    assert formula.peak_allocated == pytest.approx(traced.peak_allocated, rel=0.005)
    plain = lab.estimate(model, replace(run, quantization=None), CARD)
    spec = lab.model(model)
    assert formula.parts["activations"] - plain.parts["activations"] > 0.8 * spec.block_linear_elements * (
        1 if checkpointing else 2)  # fmt: skip


@pytest.mark.parametrize(("verb", "where"), [(lab.simulate, CARD), (lab.measure, "cpu")])
def test_what_runs_the_model_needs_a_package_that_is_gone(verb, where):
    with pytest.raises(lab.NotAvailable, match=r"quantization='gptq' needs AutoGPTQ.*lab.estimate"):
        verb(LLAMA, RUN, where)


@pytest.mark.parametrize("write", [partial(axolotl_config, model="m"), partial(llama_factory_config, model="m"), kind],
                         ids=["Axolotl", "LLaMA-Factory", "the script"])  # fmt: skip
def test_no_file_is_written_that_would_load_another_layer(write):
    with pytest.raises(lab.SpecError, match=r"quantization='gptq'.*AutoGPTQ's layer.*GPT-QModel"):
        write(RUN)


def test_unpacking_moves_the_words_and_each_operators_result():
    """AutoGPTQ's QuantLinear.forward. A word of eight weights is read as int32 and shifted; then each weight is cast to
    int8, masked, reduced by its zero, multiplied by its scale. A group of 128 has a zero, to which one is added."""
    weights, groups = 4096 * 11008, 4096 * 11008 / 128
    per_weight, per_zero = (4 + 1) + (1 + 1) + (1 + 1) + (1 + 2), (4 + 1) + (1 + 1) + (1 + 1) + (1 + 2)
    shifted = 4.5 * (weights + groups)
    assert gptq.moved(4096, 11008, 2, 2) == (shifted, per_weight * weights + per_zero * groups)
    in_fp32, zero = per_weight + 2 + (4 + 2), per_zero + 2  # the result in fp32, and autocast's copy of it
    assert gptq.moved(4096, 11008, 4, 2) == (shifted, in_fp32 * weights + zero * groups)
