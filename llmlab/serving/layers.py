"""A model as a serving engine runs it: its kinds of layers, how often each comes, and what of them is cached.

Read from the config, without torch and for any family: what matters to an engine is which mixer (attention with or
without a window, latent attention, a recurrence) and which MLP (dense, experts) each layer has.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from ..base.errors import SpecError
from ..specs.generic import BLOCKS, ConfigSizes, text_config
from ..specs.model import ModelSpec, model


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention. `window`: tokens that a query sees, None for all; `gated`: its output has a gate."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    gated: bool = False


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek-V2's attention (arXiv 2405.04434, section 2.1): the cache has one latent and one rotary key a token.

    `selected`: tokens that a query attends to, chosen by an indexer of `index_heads` heads of `index_dim`
    (DeepSeek-V3.2, GLM-5); None for all.
    """

    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    selected: int | None = None
    index_heads: int = 0
    index_dim: int = 0


@dataclass(frozen=True)
class Recurrence:
    """Linear attention or a state-space layer: projections in and out, and a state per sequence, whatever its length.

    `projected`: outputs of the projection into it; `inner`: inputs of the one out of it; `state` elements in fp32 and
    `window` elements of the convolution in the model's dtype.
    """

    projected: int
    inner: int
    state: int
    window: int


@dataclass(frozen=True)
class DenseMLP:
    """An MLP of `width`; `gated`: with two projections into it."""

    width: int
    gated: bool


@dataclass(frozen=True)
class Experts:
    """Routed experts, and a shared MLP of `shared` width (0: none)."""

    count: int
    per_token: int
    width: int
    shared: int
    gated: bool


@dataclass(frozen=True)
class Layer:
    """A mixer and an MLP; either may be missing (Nemotron-H has one of them in a layer)."""

    mixer: Attention | LatentAttention | Recurrence | None
    mlp: DenseMLP | Experts | None


@dataclass(frozen=True)
class Layers:
    """The kinds of layers of a model, and how many there are of each."""

    hidden: int
    vocab: int
    kinds: tuple[tuple[Layer, int], ...]


@lru_cache(maxsize=256)
def layers_of(spec: ModelSpec) -> Layers:
    """Return the layers of `spec`, in groups of equal ones.

    >>> from llmlab.specs.model import model
    >>> for layer, count in layers_of(model("gpt-oss-20b")).kinds:
    ...     print(count, layer.mixer.window, layer.mlp.count)
    12 128 32
    12 None 32
    """
    read = ConfigSizes(text_config(spec.config), spec.name)
    counts = Counter(_layer(spec, read, number) for number in range(spec.layers))
    return Layers(spec.hidden, spec.vocab, tuple(counts.items()))


def _kind(read: ConfigSizes, number: int) -> str:
    """Return what the config calls layer `number`."""
    kinds = read.value("layer_types") or read.value("layers_block_type")
    if pattern := read.value("hybrid_override_pattern"):
        kinds = [BLOCKS[letter] for letter in pattern]
    if kinds:
        return str(kinds[number])
    if every := read.value("full_attention_interval"):  # Qwen3-Next, Qwen3.5
        return "full_attention" if (number + 1) % every == 0 else "linear_attention"
    if every := read.value("sliding_window_pattern"):  # Gemma 3
        return "full_attention" if (number + 1) % every == 0 else "sliding_attention"
    if read.value("attention_chunk_size") and read.value("interleave_moe_layer_step"):  # Llama 4: every fourth is full
        return "full_attention" if (number + 1) % 4 == 0 else "chunked_attention"
    return "attention"


def _mixer(spec: ModelSpec, read: ConfigSizes, number: int) -> Attention | LatentAttention | Recurrence | None:
    kind = _kind(read, number)
    if kind in ("mlp", "moe"):
        return None
    if kind in ("linear_attention", "mamba"):
        return _recurrence(spec, read, kind)
    if read.value("kv_lora_rank"):
        return LatentAttention(
            spec.heads,
            read.size("q_lora_rank", default=0, least=0),
            read.size("kv_lora_rank"),
            read.size("qk_nope_head_dim"),
            read.size("qk_rope_head_dim"),
            read.size("v_head_dim"),
            read.value("index_topk"),
            read.size("index_n_heads", default=0, least=0),
            read.size("index_head_dim", default=0, least=0),
        )
    window = None
    if kind == "sliding_attention" or (kind == "attention" and number >= spec.layers - spec.window_layers):
        window = spec.sliding_window or read.value("sliding_window")
    if kind == "chunked_attention":
        window = read.value("attention_chunk_size")
    gated = bool(read.value("attn_output_gate")) or read.config.get("model_type") == "qwen3_next"
    return Attention(spec.heads, spec.kv_heads, spec.head_dim, window, gated)


def _recurrence(spec: ModelSpec, read: ConfigSizes, kind: str) -> Recurrence:
    if kind == "linear_attention":  # a gated delta rule (arXiv 2412.06464): q, k, v, gate, and two numbers per head
        keys = read.size("linear_num_key_heads") * read.size("linear_key_head_dim")
        heads, width = read.size("linear_num_value_heads"), read.size("linear_value_head_dim")
        values = heads * width
        window = (2 * keys + values) * (read.size("linear_conv_kernel_dim", default=4) - 1)
        return Recurrence(2 * keys + 2 * values + 2 * heads, values, values * read.size("linear_key_head_dim"), window)
    heads = read.size("mamba_num_heads", "mamba_n_heads")  # Mamba 2 (arXiv 2405.21060): z, x, B, C, dt
    inner = heads * read.size("mamba_head_dim", "mamba_d_head")
    state, groups = read.size("ssm_state_size", "mamba_d_state"), read.size("n_groups", "mamba_n_groups", default=1)
    mixed = inner + 2 * groups * state
    window = mixed * (read.size("conv_kernel", "mamba_d_conv", default=4) - 1)
    return Recurrence(inner + mixed + heads, inner, inner * state, window)


def _mlp(spec: ModelSpec, read: ConfigSizes, number: int) -> DenseMLP | Experts | None:
    kind = _kind(read, number)
    if kind == "mlp" or ("hybrid_override_pattern" not in read.config and not _has_experts(spec, read, number)):
        return None if kind in ("mamba", "attention") and _one_part(read) else DenseMLP(spec.intermediate, spec.gated)
    if kind != "moe" and _one_part(read):
        return None
    shared = read.size("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", default=0, least=0)
    return Experts(
        spec.experts,
        spec.experts_per_token,
        spec.moe_intermediate,
        shared or spec.shared_experts * spec.moe_intermediate,
        read.text("mlp_hidden_act") != "relu2",  # Nemotron's have no gate
    )


def _one_part(read: ConfigSizes) -> bool:
    """Return whether a layer is either a mixer or an MLP."""
    kinds = read.value("layers_block_type") or ()
    return "hybrid_override_pattern" in read.config or "mlp" in kinds


def _has_experts(spec: ModelSpec, read: ConfigSizes, number: int) -> bool:
    if not spec.experts:
        return False
    if step := read.value("interleave_moe_layer_step"):  # Llama 4
        return (number + 1) % step == 0
    return number >= spec.dense_layers


def draft_of(spec: ModelSpec, draft: str) -> Layers:
    """Return the layers that propose tokens for `spec`; the head is the model's. Raises SpecError for "mtp" where the
    model has no layer for it, and UnknownName for a name of no model.

    EAGLE-3's layer has the model's attention and a dense MLP (arXiv 2503.01840); the layer for multi-token prediction
    is like the model's last (DeepSeek-V3, arXiv 2412.19437, section 2.2).
    """
    kind = draft.partition(":")[0]
    if kind in ("ngram", "suffix", "medusa"):
        raise SpecError(f'draft="{draft}" is not predicted; give "mtp", "eagle3" or the name of a smaller model')
    if kind not in ("mtp", "eagle3"):
        return layers_of(model(draft))
    read = ConfigSizes(text_config(spec.config), spec.name)
    last = _layer(spec, read, spec.layers - 1)
    if kind == "mtp" and not (read.value("num_nextn_predict_layers") or read.value("mtp_num_hidden_layers")):
        raise SpecError(f'draft="mtp": {spec.name} has no layer for it; give "eagle3" or a smaller model')
    layer = last if kind == "mtp" else Layer(last.mixer, DenseMLP(spec.intermediate, True))
    return Layers(spec.hidden, spec.vocab, ((layer, 1),))


def _layer(spec: ModelSpec, read: ConfigSizes, number: int) -> Layer:
    return Layer(_mixer(spec, read, number), _mlp(spec, read, number))
