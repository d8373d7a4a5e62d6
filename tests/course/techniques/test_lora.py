"""LoRA from scratch does what peft's LoraModel does: outputs, gradients, merged weights, files."""

import peft
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import llmlab as lab
from llmlab.base.errors import SpecError, UnknownName
from llmlab.course.techniques.lora import LoRALinear, adapters, inject, load, merge, save, trained_parameters, unmerge
from llmlab.course.techniques.peft import METHODS, apply, insert, trained

CONFIG = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64,
          "tie_word_embeddings": False}  # fmt: skip
SPEC = lab.LoRA(rank=4, targets=("q_proj", "v_proj", "down_proj"), alpha=12)
IDS = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(1))


def build(config=CONFIG):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def loss(model):
    return model(input_ids=IDS, labels=IDS).loss


@pytest.fixture
def pair():
    """Ours and peft's around the same base, with the same A and B, not zero."""
    ours, base = inject(build(), SPEC), build()
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=list(SPEC.targets), task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, config)
    for name, layer in adapters(ours).items():
        twin = theirs.base_model.model.get_submodule(name)
        nn.init.normal_(layer.B, std=0.2)
        with torch.no_grad():
            twin.lora_A["default"].weight.copy_(layer.A)
            twin.lora_B["default"].weight.copy_(layer.B)
    return ours, theirs


def twin_of(theirs, name):
    return theirs.base_model.model.get_submodule(name)


def test_training_starts_from_the_model_itself():
    base = build()
    before = base(input_ids=IDS).logits
    assert torch.equal(inject(base, SPEC)(input_ids=IDS).logits, before)


def test_outputs_and_gradients_are_pefts(pair):
    ours, theirs = pair
    torch.testing.assert_close(ours(input_ids=IDS).logits, theirs(input_ids=IDS).logits)
    loss(ours).backward()
    loss(theirs).backward()
    for name, layer in adapters(ours).items():
        twin = twin_of(theirs, name)
        torch.testing.assert_close(layer.A.grad, twin.lora_A["default"].weight.grad)
        torch.testing.assert_close(layer.B.grad, twin.lora_B["default"].weight.grad)
    assert all(p.grad is None for n, p in ours.named_parameters() if not n.endswith((".A", ".B")))
    assert trained_parameters(ours) == trained_parameters(theirs) == 2 * 4 * (64 + 48 + 112)


def test_training_takes_pefts_steps(pair):
    for model in pair:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
    torch.testing.assert_close(loss(pair[0]), loss(pair[1]), rtol=1e-4, atol=1e-4)


def test_merged_weights_are_pefts_and_unmerging_brings_the_base_back(pair):
    ours, theirs = pair
    before = {name: layer.base.weight.clone() for name, layer in adapters(ours).items()}
    expected = ours(input_ids=IDS).logits
    merge(ours)
    theirs.merge_adapter()
    for name, layer in adapters(ours).items():
        torch.testing.assert_close(layer.base.weight, twin_of(theirs, name).base_layer.weight)
        assert not torch.equal(layer.base.weight, before[name])
    torch.testing.assert_close(ours(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)
    unmerge(ours)
    for name, layer in adapters(ours).items():
        torch.testing.assert_close(layer.base.weight, before[name])


def test_what_we_save_peft_loads_and_the_other_way_round(pair, tmp_path):
    ours, theirs = pair
    size = save(ours, tmp_path / "ours")
    assert size < 4 * trained_parameters(ours) + 4096, "the base is not in it"
    loaded = peft.PeftModel.from_pretrained(build(), tmp_path / "ours")
    torch.testing.assert_close(loaded(input_ids=IDS).logits, ours(input_ids=IDS).logits)
    theirs.save_pretrained(tmp_path / "theirs")
    back = load(inject(build(), lab.LoRA(rank=4, targets=SPEC.targets)), tmp_path / "theirs")  # alpha is in the file
    torch.testing.assert_close(back(input_ids=IDS).logits, theirs(input_ids=IDS).logits)


def test_the_scale_is_alpha_over_rank_and_alpha_twice_the_rank_unless_given():
    assert LoRALinear(nn.Linear(8, 8), lab.LoRA(rank=4)).scale == 2
    assert LoRALinear(nn.Linear(8, 8), lab.LoRA(rank=4, alpha=2)).scale == 0.5


def test_the_base_is_frozen_and_the_difference_is_not():
    layer = LoRALinear(nn.Linear(8, 8), lab.LoRA(rank=2))
    assert {name for name, p in layer.named_parameters() if p.requires_grad} == {"A", "B"}


def test_dropout_is_on_the_adapter_only():
    layer = LoRALinear(nn.Linear(64, 8), lab.LoRA(rank=4, dropout=0.5))
    nn.init.normal_(layer.B)
    x = torch.ones(1, 64)
    assert not torch.equal(layer(x), layer(x)) and torch.equal(layer.eval()(x), layer(x))
    assert torch.equal(layer.base(x), layer.base(x))


@pytest.mark.parametrize(("targets", "says"), [(("c_attn",), "c_attn name no layer"), (("norm",), "not an nn.Linear"),
                                               (("q_proj", "nope"), "its linears: down_proj")])  # fmt: skip
def test_targets_that_are_no_linears_are_refused_and_the_model_left_alone(targets, says):
    model = build()
    with pytest.raises(SpecError, match=says):
        inject(model, lab.LoRA(rank=4, targets=targets))
    assert trained_parameters(model) == lab.model(CONFIG).parameters
    assert not any(isinstance(module, LoRALinear) for module in model.modules())


def quantized_linear(form):
    import bitsandbytes as bnb

    weight = torch.randn(64, 64)
    if form == "int8":
        layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
        layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to("cpu")
    else:
        storage = torch.bfloat16 if form == "nf4 stored as bf16" else torch.uint8
        layer = bnb.nn.Linear4bit(64, 64, quant_type="nf4", quant_storage=storage)
        parts = {"requires_grad": False, "quant_type": "nf4", "quant_storage": storage}
        layer.weight = bnb.nn.Params4bit(weight, **parts).to("cpu")
    return layer


@pytest.mark.parametrize("form", ["nf4", "nf4 stored as bf16", "int8"])
def test_merging_into_a_quantized_base_is_refused_and_changes_nothing(form):
    model = nn.Sequential()
    model.add_module("plain", nn.Linear(64, 64))
    model.add_module("small", quantized_linear(form))
    inject(model, lab.LoRA(rank=4, targets=("plain", "small")))
    for layer in adapters(model).values():
        nn.init.normal_(layer.B)
    before = model.plain.base.weight.clone()
    with pytest.raises(SpecError, match="small has a quantized weight"):
        merge(model)
    assert torch.equal(model.plain.base.weight, before) and not model.plain.merged


def test_merging_twice_unmerging_first_and_no_adapter_are_refused(pair):
    ours, _ = pair
    with pytest.raises(SpecError, match="is not merged"):
        unmerge(ours)
    with pytest.raises(SpecError, match="already merged"):
        merge(merge(ours))
    with pytest.raises(SpecError, match="inject first"):
        merge(build())


def test_another_adapter_or_a_truncated_file_is_refused(pair, tmp_path):
    ours, _ = pair
    save(ours, tmp_path)
    with pytest.raises(SpecError, match="another rank"):
        load(inject(build(), lab.LoRA(rank=8, targets=SPEC.targets)), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(SpecError, match="no readable adapter"):
        load(ours, tmp_path)


# ---- the other methods, through peft


@pytest.mark.parametrize("method", METHODS)
def test_each_method_trains_what_its_formula_says(method):
    spec = lab.model(CONFIG)
    model = apply(method, build(), rank=4, tokens=5)
    assert trained_parameters(model) == trained(method, spec, rank=4, tokens=5)


def test_bitfit_trains_biases_and_a_llama_has_none():
    assert trained("bitfit", lab.model("Llama-3.1-8B")) == 0
    qwen = lab.model("Qwen2.5-0.5B")
    assert trained("bitfit", qwen) == qwen.layers * (qwen.heads + 2 * qwen.kv_heads) * qwen.head_dim


def test_methods_that_do_not_exist_are_refused():
    with pytest.raises(UnknownName, match="dora"):
        trained("doras", lab.model(CONFIG))
    with pytest.raises(SpecError, match="Llama-like"):
        trained("lora", lab.model("gpt2"))


@pytest.mark.parametrize("method", [m for m in METHODS if m != "bitfit"])
def test_each_method_learns_and_leaves_the_rest_alone(method):
    model = apply(method, build(), rank=4, tokens=5)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append(loss(model))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.001  # a prompt of 5 tokens learns least: 0.017 nats, rounding makes 1e-6
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


@pytest.mark.parametrize("method", ["lora", "dora", "adapter", "ia3"])
def test_methods_inside_the_layers_start_from_the_model_itself(method):
    before = build()(input_ids=IDS).logits
    torch.testing.assert_close(apply(method, build(), rank=4)(input_ids=IDS).logits, before)


def test_an_adapter_is_two_linears_and_a_skip_after_each_sublayer():
    model = insert(build(), 4)
    for layer in model.model.layers:
        for adapter, linear in ((layer.self_attn.o_proj, "o_proj"), (layer.mlp.down_proj, "down_proj")):
            nn.init.normal_(adapter.up.weight)
            x = torch.randn(3, adapter.base.in_features)
            y = adapter.base(x)
            bottleneck = torch.nn.functional.gelu(y @ adapter.down.weight.T + adapter.down.bias)
            expected = y + bottleneck @ adapter.up.weight.T + adapter.up.bias
            torch.testing.assert_close(adapter(x), expected, msg=linear)
    with pytest.raises(SpecError, match="no linear named o_proj"):
        insert(nn.Sequential(nn.Linear(4, 4)), 4)
    with pytest.raises(SpecError, match="width=0"):
        insert(build(), 0)
