"""Sizes of any language model in transformers, read from its config without importing transformers.

`families.json`, written by tools/families.py, lists for each model_type its class, its own names for transformers'
usual ones, and the sizes that its config may omit. For a family without its own formulas, the sizes describe a plain
transformer of the same width and depth, without its special parts (convolutions, linear attention, adapters between
towers). A simulation uses the real class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from json import loads
from typing import Any

from ..base.errors import SpecError

UNBOUNDED = 2**30  # positions of a model without a position table
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k")
EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
SHARED = ("n_shared_experts", "num_shared_experts")
BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # the letters of Nemotron-H's hybrid_override_pattern
WIDTH = ("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "mlp_dim")


@cache
def families() -> Mapping[str, Mapping[str, Any]]:
    """Return what is known of each model_type: classes, names, sizes, nested."""
    return _table()["families"]


@cache
def release() -> str:
    """Return the release of transformers from which the families were read."""
    return _table()["transformers"]


@cache
def _table() -> dict[str, Any]:
    return loads(files(__package__).joinpath("families.json").read_text(encoding="utf-8"))


def auto_class(family: str) -> str | None:
    """Return the name of the auto class for a language model of `family`, such as "AutoModelForCausalLM"."""
    return families().get(family, {}).get("class")


def architecture(family: str) -> str | None:
    """Return the name of transformers' class that makes a language model of `family`.

    >>> architecture("gpt2")
    'GPT2LMHeadModel'
    """
    return families().get(family, {}).get("architecture")


def is_rotary(family: str) -> bool:
    """Return whether transformers' class of `family` uses rotary positions."""
    return families().get(family, {}).get("rotary", False)


def attentions(family: str) -> tuple[str, ...]:
    """Return the values of `attention` that transformers' class of `family` supports.

    >>> attentions("gemma2")
    ('eager', 'flash')
    """
    supported = families().get(family, {}).get("attention", ())
    return (*supported, "efficient") if "sdpa" in supported else tuple(supported)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the language model: the whole config, or a nested one.

    >>> text_config({"model_type": "llava", "text_config": {"model_type": "llama"}})
    {'model_type': 'llama'}
    """
    for key, nested in _nested(config).items():
        if any(word in key for word in ("text", "llm", "language", "decoder")):
            return nested
    return config


def _nested(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the nested configs of a config by key, each with its model_type."""
    kinds = families().get(str(config.get("model_type")), {}).get("nested", {})
    configs: dict[str, Mapping[str, Any]] = {}
    for key, kind in kinds.items():
        nested_config = config.get(key) or {}
        if not isinstance(nested_config, Mapping):
            raise SpecError(f"{key}={nested_config!r} is not a config; give an object with the sizes of {kind}")
        configs[key] = {"model_type": kind, **nested_config}
    return configs


def generic_sizes(config: Mapping[str, Any], family: str, where: str) -> dict[str, Any]:
    """Return ModelSpec's fields for a `config` of `family`, with transformers' defaults for missing sizes.

    Raises SpecError for a model_type without a language model in transformers, and for invalid sizes.
    """
    if auto_class(family) is None:
        near = get_close_matches(family, [name for name, entry in families().items() if "class" in entry], n=3)
        nearest = f"; nearest: {', '.join(near)}" if near else ""
        raise SpecError(f"{where}: transformers {release()} has no language model of model_type={family!r}{nearest}")
    text = text_config(config)
    read = ConfigSizes(text, where)
    hidden, layers = read.size("hidden_size"), read.layers()
    heads = read.size("num_attention_heads", default=max(1, hidden // 64))
    intermediate = read.size(*WIDTH, default=4 * hidden)
    activation = read.text("hidden_act", "hidden_activation", "activation_function", "feed_forward_proj")
    projection = read.text("feed_forward_proj")  # of T5
    gated = projection.startswith("gated") if projection else read.gated
    head_dim = read.size("head_dim", "d_kv", default=max(1, hidden // heads))
    kinds = read.value("layers_block_type") or [BLOCKS.get(code, "") for code in read.text("hybrid_override_pattern")]
    if "mlp" in kinds:  # Nemotron-H: each layer is a mixer or an MLP, and the MLPs have no gate
        gated = False
    mixture = _mixture(read, layers, intermediate, kinds)
    if not mixture and (shared := read.size("shared_intermediate_size", default=0, least=0)):
        intermediate, gated = shared, True  # a Granite without experts has only the shared expert
    towers = sum(_tower(ConfigSizes(nested, where)) for nested in _nested(config).values() if nested != text)
    encoder, decoder = read.stacks()
    if encoder:
        towers += decoder * 4 * hidden * heads * head_dim  # cross-attention
    return dict(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=min(heads, read.size("num_key_value_heads", default=heads)),
        head_dim=head_dim,
        intermediate=read.size("intermediate_size_mlp", default=intermediate),  # for layers of Llama 4 without experts
        vocab=read.size("vocab_size", default=1),
        max_positions=read.size("max_position_embeddings", "max_target_positions", default=UNBOUNDED),
        tied=bool(read.value("tie_word_embeddings", config.get("tie_word_embeddings", True))),
        norm="rmsnorm" if gated else "layernorm",
        gated=gated,
        activation=activation or "silu",
        towers=towers,
        **(mixture or {"dense_layers": sum(kind == "mlp" for kind in kinds)}),
    )


def _mixture(read: ConfigSizes, layers: int, intermediate: int, kinds: Sequence[str]) -> dict[str, int]:
    """Return ModelSpec's fields of a mixture of experts; an empty dict for a model without experts."""
    experts = read.size(*EXPERTS, default=0, least=0)
    # The class of Nemotron-H has a default number of experts.
    if not experts or (kinds and "moe" not in kinds and "mlp" in kinds):
        return {}
    width = read.size(*EXPERT_WIDTH, default=intermediate)
    shared = read.size("shared_expert_intermediate_size", "shared_intermediate_size", default=0, least=0)
    dense = read.size("first_k_dense_replace", default=0, least=0)
    if step := read.size("interleave_moe_layer_step", default=0, least=0):  # Llama 4, which has a shared expert too
        shared, dense = width, layers - layers // step
    return dict(
        experts=experts,
        experts_per_token=min(experts, read.size(*PER_TOKEN, default=1)),
        moe_intermediate=width,
        shared_experts=shared // width if shared else read.size(*SHARED, default=0, least=0),
        dense_layers=min(layers, dense),
    )


def _tower(read: ConfigSizes) -> int:
    """Return the approximate parameters of an image or audio encoder: 4 w² + 2 w f for each block of width w."""
    width, layers, inner = _tower_sizes(read)
    return layers * width * (4 * width + 2 * inner)


def tower_sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the width, the number of blocks, and the MLP width of the image encoder in a `config`.

    >>> tower_sizes({"model_type": "qwen3_vl"})
    (1152, 27, 4304)
    """
    return _tower_sizes(ConfigSizes(_nested(config)["vision_config"], "vision_config"))


def _tower_sizes(read: ConfigSizes) -> tuple[int, int, int]:
    # Qwen2-VL's hidden_size is that of the text model.
    width = read.size("embed_dim", "hidden_size", "d_model", default=0, least=0)
    layers = read.size("num_hidden_layers", "depth", "num_layers", "encoder_layers", default=0, least=0)
    ratio = read.value("mlp_ratio", 4)
    inner = read.size(*WIDTH, default=round(ratio * width) if isinstance(ratio, (int, float)) else 4 * width, least=0)
    return width, layers, inner


class ConfigSizes:
    """Reads sizes by transformers' usual names from a config, or else from the family's defaults."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where
        entry = families().get(str(config.get("model_type")), {})
        self.names, self.defaults = entry.get("names", {}), entry.get("sizes", {})
        self.gated = bool(entry.get("gated", True))

    def value(self, name: str, default: Any = None) -> Any:
        family_name = self.names.get(name, name)
        for source in (self.config, self.defaults):
            for key in (family_name, name):
                if source.get(key) is not None:
                    return source[key]
        return default

    def size(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return the size under the first of `names` in the config; of a list with a size per layer, the largest."""
        for name in names:
            value = self.value(name)
            if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
                value = max(value)
            if value is None or (value == 0 and default is not None):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SpecError(f"{self.where}: {name}={value!r} is not a whole number >= {least}")
            return value
        if default is None:
            raise SpecError(f"{self.where} lacks {names[0]!r}; give a whole number >= {least}")
        return default

    def layers(self) -> int:
        """Return the number of blocks, summed over encoder and decoder if a model has both."""
        kinds = self.value("layer_types") or self.value("layers_block_type") or ()
        return sum(self.stacks()) or (len(kinds) if kinds else self.size("num_hidden_layers", "num_layers"))

    def stacks(self) -> tuple[int, int]:
        """Return the numbers of encoder blocks and of decoder blocks that attend to its output; zeros for one stack."""
        if self.value("num_decoder_layers"):
            encoder = self.size("num_layers", "num_encoder_layers", "num_hidden_layers", default=0, least=0)
            return encoder, self.config.get("num_decoder_layers") or encoder  # by default T5's decoder is as deep
        return self.size("encoder_layers", default=0, least=0), self.size("decoder_layers", default=0, least=0)

    def text(self, *names: str) -> str:
        return next((value for name in names if isinstance(value := self.value(name), str)), "")
