"""From the dict of a config.json to a model's sizes, each checked.

A size that is missing is refused, though transformers would fill in a default of its own: a default size would be
somebody else's model. Everything else that is missing takes the default of transformers' config class of that family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..base.errors import SpecError
from .generic import generic_sizes

# transformers' model_type; all but the first have a Llama's keys in their configs.
FAMILIES = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "phi3", "deepseek_v3")

# Where transformers' class has a number for a key that may be missing: its default.
HEAD_DIM = {"qwen3": 128, "gemma2": 256}
SLIDING_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096, "qwen3_moe": 4096, "gemma2": 4096}
KV_HEADS_OPTIONAL = ("llama", "phi3")  # missing means as many as heads; elsewhere transformers has a number


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values from one latent.

    `q_lora_rank` is None where queries are projected directly. A query and key head has `qk_nope_head_dim` elements
    without and `qk_rope_head_dim` with rotary position, a value head `v_head_dim`.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


def shape_of(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return ModelSpec's fields as `config`, a transformers config dict, gives them; `where` names it in errors.

    Raises SpecError for a model_type that transformers lacks, a missing size, a size that is not a whole number
    >= 1, heads that do not divide.
    """
    read = _Reader(config, where)
    family = config.get("model_type")
    if family is None:
        raise SpecError(f"{where} lacks 'model_type'; give transformers' name of the family, such as 'llama'")
    if family not in FAMILIES:
        return {"family": str(family), **generic_sizes(config, str(family), where)}
    return {"family": family, **(_gpt2(read) if family == "gpt2" else _llama_like(read, family))}


@dataclass(frozen=True)
class _Reader:
    """Reads and checks single values of a config."""

    config: Mapping[str, Any]
    where: str

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number >= least, or the default, if there is one, for a missing key or null."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if key not in self.config:
            raise SpecError(f"{self.where} lacks {key!r}; give a whole number >= {least}")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SpecError(f"{self.where}: {key}={value!r} is not a whole number >= {least}")
        return value

    def optional_size(self, key: str, default: int | None) -> int | None:
        """Return a whole number >= 1 or None: the default for a missing key, None for null."""
        return None if self.config.get(key, default) is None else self.size(key, default)

    def rate(self, key: str, default: float) -> float:
        """Return a dropout probability."""
        return float(self._checked(key, default, lambda x: _is_number(x) and 0 <= x < 1, f"outside 0 <= {key} < 1"))

    def cap(self, key: str, default: float) -> float | None:
        """Return the positive number that tanh caps scores or logits at, or None for no cap."""
        wrong = "neither null nor a number > 0"
        value = self._checked(key, default, lambda x: x is None or (_is_number(x) and x > 0), wrong)
        return None if value is None else float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        return self._checked(key, default, lambda x: isinstance(x, bool), "not true or false")

    def text(self, key: str, default: str) -> str:
        return self._checked(key, default, lambda x: isinstance(x, str), "not a name")

    def _checked(self, key: str, default: Any, fine: Callable[[Any], bool], wrong: str) -> Any:
        """Return the value, or the default where the key is missing; SpecError says what is `wrong` with others."""
        value = self.config.get(key, default)
        if not fine(value):
            raise SpecError(f"{self.where}: {key}={value!r} is {wrong}")
        return value

    def divides(self, key: str, part: int, size_key: str, size: int, advice: str) -> None:
        if size % part:
            raise SpecError(f"{self.where}: {size_key}={size} is not divisible by {key}={part}; {advice}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _gpt2(read: _Reader) -> dict[str, Any]:
    hidden, heads = read.size("n_embd"), read.size("n_head")
    read.divides("n_head", heads, "n_embd", hidden, "each head takes an equal share")
    if read.flag("add_cross_attention"):
        raise SpecError(f"{read.where}: add_cross_attention=true is not supported; give a decoder-only model")
    return dict(
        hidden=hidden,
        layers=read.size("n_layer"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=read.size("n_inner", default=4 * hidden),
        vocab=read.size("vocab_size"),
        max_positions=read.size("n_positions"),
        tied=read.flag("tie_word_embeddings", True),
        norm="layernorm",
        gated=False,
        activation=read.text("activation_function", "gelu_new"),
        learned_positions=True,
        fused_qkv=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        dropout=read.rate("resid_pdrop", 0.1),
        embedding_dropout=read.rate("embd_pdrop", 0.1),
        attention_dropout=read.rate("attn_pdrop", 0.1),
    )


def _llama_like(read: _Reader, family: str) -> dict[str, Any]:
    hidden, heads, layers = read.size("hidden_size"), read.size("num_attention_heads"), read.size("num_hidden_layers")
    # null is "as many as heads" for every family that allows it; a missing key only for some.
    optional = family in KV_HEADS_OPTIONAL or "num_key_value_heads" in read.config
    kv_heads = read.size("num_key_value_heads", default=heads if optional else None)
    read.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads, "heads share keys in equal groups")
    intermediate = read.size("intermediate_size")
    mla = None
    if family == "deepseek_v3":
        widths = (read.size(key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        mla = MLA(read.optional_size("q_lora_rank", 1536), *widths)
    window, window_layers = _window(read, family, layers)
    attention_bias = family not in ("mistral", "mixtral", "phi3", "qwen2") and read.flag("attention_bias")
    gemma = family == "gemma2"
    return dict(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else _head_dim(read, family, hidden, heads),
        intermediate=intermediate,
        vocab=read.size("vocab_size"),
        max_positions=read.size("max_position_embeddings"),
        tied=read.flag("tie_word_embeddings", gemma),
        norm="rmsnorm",
        norms_per_layer=4 if gemma else 2,
        gated=True,
        activation=read.text("hidden_activation", "gelu_pytorch_tanh") if gemma else read.text("hidden_act", "silu"),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        fused_qkv=family == "phi3",
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=family == "llama" and read.flag("mlp_bias"),
        dropout=read.rate("resid_pdrop", 0.0) if family == "phi3" else 0.0,
        attention_dropout=read.rate("attention_dropout", 0.0),
        attention_softcap=read.cap("attn_logit_softcapping", 50.0) if gemma else None,
        logit_softcap=read.cap("final_logit_softcapping", 30.0) if gemma else None,
        sliding_window=window,
        window_layers=window_layers,
        mla=mla,
        **_experts(read, family, layers, intermediate),
    )


def _head_dim(read: _Reader, family: str, hidden: int, heads: int) -> int:
    head_dim = read.config.get("head_dim", HEAD_DIM.get(family))
    if head_dim is None or family in ("llama", "gemma2"):  # these two require divisibility even if head_dim is given
        advice = "each head takes an equal share" if head_dim is not None else "change one of them or give head_dim"
        read.divides("num_attention_heads", heads, "hidden_size", hidden, advice)
    return read.size("head_dim", default=HEAD_DIM.get(family, hidden // heads))


def _window(read: _Reader, family: str, layers: int) -> tuple[int | None, int]:
    """Return the sliding window in tokens, or None, and the number of layers that have it."""
    if family in ("llama", "deepseek_v3") or (family.startswith("qwen") and not read.flag("use_sliding_window")):
        return None, 0
    window = read.optional_size("sliding_window", SLIDING_WINDOW.get(family))
    if window is None:
        return None, 0
    if family in ("mistral", "mixtral", "phi3", "qwen3_moe"):
        return window, layers
    if kinds := read.config.get("layer_types"):
        with_window = sum(kind == "sliding_attention" for kind in kinds)
    elif family == "gemma2":
        with_window = (layers + 1) // 2  # every second layer, from the first
    else:
        with_window = max(0, layers - read.size("max_window_layers", default=28, least=0))
    return (window, with_window) if with_window else (None, 0)


def _experts(read: _Reader, family: str, layers: int, intermediate: int) -> dict[str, int]:
    """Return the fields of a mixture of experts; an empty dict for a dense model."""
    if family == "mixtral":
        experts = read.size("num_local_experts")
        shape = dict(experts=experts, moe_intermediate=intermediate)
    elif family == "qwen3_moe":
        # transformers 5 writes the second of these names into the config.json it saves
        experts = read.size("num_local_experts" if "num_local_experts" in read.config else "num_experts")
        step, dense = read.size("decoder_sparse_step", default=1), read.config.get("mlp_only_layers") or ()
        with_dense = sum(i in dense or (i + 1) % step != 0 for i in range(layers))
        shape = dict(experts=experts, moe_intermediate=read.size("moe_intermediate_size"), dense_layers=with_dense)
    elif family == "deepseek_v3":
        experts = read.size("n_routed_experts")
        shape = dict(
            experts=experts,
            moe_intermediate=read.size("moe_intermediate_size"),
            shared_experts=read.size("n_shared_experts"),
            dense_layers=min(layers, read.size("first_k_dense_replace", least=0)),
        )
    else:
        return {}
    per_token = read.size("num_experts_per_tok")
    if per_token > experts:
        raise SpecError(f"{read.where}: num_experts_per_tok={per_token} is more than the {experts} experts")
    return {**shape, "experts_per_token": per_token}
