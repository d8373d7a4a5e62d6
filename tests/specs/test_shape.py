"""Presets and random shapes against the model transformers builds: parameters, components, linear layers, KV cache.

Models are built on the meta device, with all their layers: shapes without memory.
"""

import warnings
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.specs.model import model, models


def component(name: str) -> str:
    """The component that a parameter of transformers' model, by its name, belongs to."""
    if "norm" in name or ".ln_" in name:
        return "norms"
    for sign, part in (
        ("wte", "embedding"),
        ("embed_tokens", "embedding"),
        ("wpe", "positions"),
        ("lm_head", "head"),
        ("mlp.gate.", "router"),
        ("mlp.experts.", "experts"),
        ("mlp.", "mlp"),
        ("attn.", "attention"),
    ):
        if sign in name:
            return part
    raise AssertionError(f"no component for {name}")


def linear_modules(module) -> Counter:
    """(name, inputs, outputs, bias, part) of every linear layer, and how many there are."""
    import torch
    from transformers.pytorch_utils import Conv1D

    found = Counter()
    for path, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear):
            outputs, inputs = layer.weight.shape
        elif isinstance(layer, Conv1D):
            inputs, outputs = layer.weight.shape
        else:
            continue
        found[path.rpartition(".")[2], inputs, outputs, layer.bias is not None, component(path + ".")] += 1
    return found


def assert_equals_transformers(spec) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**spec.config)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    assert spec.parameters == sum(p.numel() for p in module.parameters())
    counted = dict.fromkeys(spec.parameters_by_component, 0)
    for name, parameter in module.named_parameters():
        counted[component(name)] += parameter.numel()
    assert spec.parameters_by_component == counted
    linears = Counter()
    for one in spec.linears:
        linears[one.name, one.inputs, one.outputs, one.bias, one.part] += one.count
    assert linears == linear_modules(module)


@pytest.fixture
def transformers_log(caplog):
    """caplog, with transformers' logger passing its records on."""
    from transformers.utils import logging

    logging.enable_propagation()
    yield caplog
    logging.disable_propagation()


@pytest.mark.parametrize("name", [name for name in models() if model(name).has_formulas])
def test_a_preset_is_the_model_that_transformers_builds(name, transformers_log):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equals_transformers(model(name))
    assert not transformers_log.records, transformers_log.text


SIZES = st.integers(1, 40)
SHAPES = st.fixed_dictionaries({"layers": st.integers(1, 4), "vocab": SIZES, "width": SIZES, "positions": SIZES})
HEADS = st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([2, 4, 8]))  # kv heads, group, head_dim


@settings(deadline=None, max_examples=25)
@given(SHAPES, HEADS, st.booleans(), st.booleans())
def test_any_gpt2(shape, heads, tied, own_width):
    config = {
        "model_type": "gpt2", "n_embd": heads[0] * heads[2], "n_head": heads[0], "n_layer": shape["layers"],
        "vocab_size": shape["vocab"], "n_positions": shape["positions"], "tie_word_embeddings": tied,
        "n_inner": shape["width"] if own_width else None, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    assert_equals_transformers(model(config))


def llama_like(family, shape, heads, tied, **more):
    kv_heads, group, head_dim = heads
    return {
        "model_type": family, "hidden_size": kv_heads * group * head_dim, "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "num_hidden_layers": shape["layers"],
        "intermediate_size": shape["width"], "vocab_size": shape["vocab"], "tie_word_embeddings": tied,
        "max_position_embeddings": shape["positions"], "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
        **more,
    }  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3"]), SHAPES, HEADS, st.booleans(),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_any_dense_model(family, shape, heads, tied, attention_bias, mlp_bias):
    config = llama_like(family, shape, heads, tied, attention_bias=attention_bias, mlp_bias=mlp_bias)
    assert_equals_transformers(model(config))


@settings(deadline=None)
@given(st.sampled_from(["qwen2", "qwen3", "gemma2"]), SHAPES, st.booleans(), st.integers(0, 5))
def test_windows_are_on_the_layers_transformers_says(family, shape, windowed, from_layer):
    from transformers import AutoConfig

    window = {"use_sliding_window": windowed, "sliding_window": 16, "max_window_layers": from_layer}
    spec = model(llama_like(family, shape, (1, 2, 4), True, **window))
    kinds = AutoConfig.for_model(**spec.config).layer_types
    assert spec.window_layers == kinds.count("sliding_attention")
    assert spec.sliding_window == (16 if spec.window_layers else None)
    assert model({**spec.config, "layer_types": kinds}) == spec


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["mixtral", "qwen3_moe", "deepseek_v3"]), SHAPES, HEADS, st.booleans(),
    st.integers(1, 6), SIZES, st.integers(1, 3), st.integers(0, 5), st.booleans(),
)  # fmt: skip
def test_any_mixture_of_experts(family, shape, heads, tied, experts, moe_width, step, dense, direct_queries):
    more = {"num_experts_per_tok": 1}
    if family == "mixtral":
        more["num_local_experts"] = experts
    elif family == "qwen3_moe":
        more |= {"num_experts": experts, "moe_intermediate_size": moe_width, "decoder_sparse_step": step,
                 "mlp_only_layers": [dense]}  # fmt: skip
    else:
        more |= {"n_routed_experts": experts, "n_shared_experts": step, "moe_intermediate_size": moe_width,
                 "first_k_dense_replace": dense, "n_group": 1, "topk_group": 1, "kv_lora_rank": 5,
                 "q_lora_rank": None if direct_queries else 7, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
                 "v_head_dim": 3, "attention_bias": tied}  # fmt: skip
    assert_equals_transformers(model(llama_like(family, shape, heads, tied, **more)))


@pytest.mark.parametrize("name", ["gpt2", "Llama-3.1-8B", "DeepSeek-V3", "gemma-2-2b", "Mixtral-8x7B", "Qwen2.5-0.5B"])
def test_transformers_caches_as_many_elements_as_the_spec_says(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = model(name)
    layers = {"n_layer": 2} if name == "gpt2" else {"num_hidden_layers": 2}
    small = model({**spec.config, **layers})
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small.config))
        tokens = torch.zeros(1, 3, dtype=torch.long)
        # The experts' loop asks which of them were hit, which meta tensors cannot say; the cache is attention's alone.
        for block in getattr(module, "transformer", getattr(module, "model", None)).get_submodule(
            "h" if name == "gpt2" else "layers"
        ):
            block.mlp = torch.nn.Identity()
        cache = module(tokens, use_cache=True).past_key_values
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert held == 3 * small.kv_elements_per_token
    assert small.kv_elements_per_token * spec.layers == spec.kv_elements_per_token * 2


@pytest.mark.parametrize("name", models())
def test_a_transformers_config_is_the_same_spec_as_the_preset(name):
    from transformers import AutoConfig

    spec = model(name)
    config = AutoConfig.for_model(**spec.config)
    assert replace(model(config), name=name) == spec
    assert replace(model(config.to_dict()), name=name) == spec
    config.name_or_path = spec.source
    assert model(config).name == model(spec.source).name == name
