"""What a pass of a model that generates takes beside weights and cache."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, DynamicCache, StaticCache

import llmlab as lab
from llmlab.archive import figure
from llmlab.formulas.inference import kv_cache_bytes, loaded_bytes, working_bytes

WIDE = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 16384, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512,
        "max_position_embeddings": 512}  # fmt: skip


def test_eager_attentions_weights_and_its_mask_are_alive_while_the_mlp_runs():
    """The block's forward has them in variables (modeling_llama.py); the mask is one for all heads. The MLP is so wide
    that it is the peak."""
    eager, fused = (
        working_bytes(lab.model(WIDE), lab.Inference(2, 256, 1, attention=attention), kernel, 256, 256)
        for attention, kernel in (("eager", "eager"), ("sdpa", "flash"))
    )
    assert eager - fused == 2 * 2 * 256**2 * (4 + 1)


# ---- the cache


LONG = 4600  # tokens: beyond every preset's sliding window


def held(cache: DynamicCache | StaticCache) -> int:
    """Bytes of memory under a cache's tensors: a view keeps the whole memory that it looks into."""
    return sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))


def first_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that leave a config its first six layers: no pattern of windows is longer."""
    number = {key: min(config[key], 6) for key in ("num_hidden_layers", "n_layer") if key in config}
    return {**number, **({"layer_types": config["layer_types"][:6]} if config.get("layer_types") else {})}


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in lab.models() if lab.model(name).has_formulas])
def test_the_bytes_are_transformers_for_every_preset(name: str) -> None:
    """Its first attention layers read a prompt and a token on the meta device, without MLPs, which no cache sees."""
    spec = lab.model({**lab.model(name).config, **first_layers(lab.model(name).config)})
    config = AutoConfig.for_model(**{**spec.config, "bos_token_id": None, "eos_token_id": None})
    with torch.device("meta"):
        model = AutoModel.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    for layer in getattr(model, "layers", None) or model.h:
        layer.mlp = nn.Identity()
    prompt = min(LONG, spec.max_positions) - 1
    run = lab.Inference(prompt_len=prompt, new_tokens=1)
    grows, static = DynamicCache(config=config), StaticCache(config=config, max_cache_len=prompt + 1)

    def read(tokens: int, cache: DynamicCache | StaticCache) -> None:
        model(torch.zeros(1, tokens, dtype=torch.long, device="meta"), past_key_values=cache, use_cache=True)

    read(prompt, grows)
    assert held(grows) == kv_cache_bytes(spec, run, prompt, windowed=False)
    read(1, grows)
    assert held(grows) == kv_cache_bytes(spec, run)
    read(1, static)
    assert held(static) == kv_cache_bytes(spec, run)


@pytest.mark.parametrize(
    ("kv", "bits"), [("fp32", 32), ("fp16", 16), ("bf16", 16), ("fp8", 8), ("int8", 8.5), ("int4", 4.5)]
)
def test_bits_a_number(kv: str, bits: float) -> None:
    """A scale and a smallest value of 16 bits each for 64 numbers are half a bit a number."""
    for name in ("meta-llama/Llama-3.1-8B", "deepseek-ai/DeepSeek-V3"):
        spec = lab.model(name)
        assert kv_cache_bytes(spec, lab.Inference(kv=kv), 1000) == spec.kv_elements_per_token * 1000 * bits / 8


def test_quantized_weights_leave_embedding_and_head_in_16_bit() -> None:
    spec = lab.model("meta-llama/Llama-2-7b-hf")
    parts = spec.parameters_by_component
    wide = 2 * (parts["embedding"] + parts["head"] + parts["norms"])
    rest = parts["attention"] + parts["mlp"]
    assert loaded_bytes(spec, lab.Inference(weights="nf4")) == wide + rest * 4.5 / 8
    assert loaded_bytes(spec, lab.Inference(weights="bf16")) == 2 * spec.parameters


def test_one_new_token_has_no_decode() -> None:
    """The last token goes through no model."""
    assert "decode" not in lab.estimate("gpt2", lab.Inference(prompt_len=8, new_tokens=1)).phases
    assert "decode" in lab.estimate("gpt2", lab.Inference(prompt_len=8, new_tokens=2)).phases


BLOCKS = figure("kv-blocks")


@pytest.mark.parametrize("label", [label.removesuffix(": blocks") for label in BLOCKS.values if "blocks" in label])
def test_published_numbers_of_blocks(label: str) -> None:
    """The bytes that an engine logged as free for its cache, over the formula's for one block, give its blocks."""
    name, _, tp = label.split(", ")[0].partition(" × ")
    run = lab.Inference(tp=int(tp or 1))
    block = kv_cache_bytes(lab.model(name), run, tokens=16)
    room, blocks, rounding = BLOCKS[f"{label}: bytes"], BLOCKS[f"{label}: blocks"], 0.005 * 2**30
    slack = 0.015 * room if tp else 0  # of several workers the smallest counts; the log quotes one
    assert (room - rounding - slack) // block <= blocks <= (room + rounding) // block
