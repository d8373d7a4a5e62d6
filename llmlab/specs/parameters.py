"""The number of parameters of a model, component by component, and its matrices.

Each function counts the parameters that transformers' model class creates; tests compare them with that class on the
meta device. Tied embeddings count once. Buffers (rotary frequencies, DeepSeek's expert-selection bias) do not count.

    h  hidden     f  MLP width     v  vocabulary     L  layers     d  head_dim
"""

from __future__ import annotations

from dataclasses import dataclass

from .sizes import Sizes

# Tensor parallelism divides their inputs (arXiv 1909.08053, section 3).
ROW_PARALLEL = ("o_proj", "c_proj", "down_proj")


@dataclass(frozen=True)
class Linear:
    """`count` matrices in the model that map `inputs` to `outputs` features: nn.Linear, or GPT-2's Conv1D.

    `name` is the last component of the module's path in transformers; `part` is its key in
    parameters_by_component. A tied lm_head is listed with part "head", although its parameters count for the embedding.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool
    count: int
    part: str

    @property
    def elements(self) -> int:
        """Elements of all `count` matrices, without biases."""
        return self.count * self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        """Parameters of all `count` matrices, including biases."""
        return self.count * self.outputs * (self.inputs + self.bias)


def linears(spec: Sizes) -> tuple[Linear, ...]:
    """Return every linear layer in the order of a block, without routed experts, which `components` counts."""
    attention = _latent_attention(spec) if spec.mla else _attention(spec)
    return (*attention, *_mlp(spec), Linear("lm_head", spec.hidden, spec.vocab, False, 1, "head"))


def _attention(spec: Sizes) -> list[Linear]:
    h, q, kv, L = spec.hidden, spec.query_width, spec.key_width, spec.layers
    if spec.fused_qkv:
        qkv, out = ("c_attn", "c_proj") if spec.family == "gpt2" else ("qkv_proj", "o_proj")
        inputs = [Linear(qkv, h, q + 2 * kv, spec.qkv_bias, L, "attention")]
    else:
        out = "o_proj"
        widths = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
        inputs = [Linear(name, h, width, spec.qkv_bias, L, "attention") for name, width in widths]
    return [*inputs, Linear(out, q, h, spec.output_bias, L, "attention")]


def _latent_attention(spec: Sizes) -> list[Linear]:
    """DeepSeek-V2, arXiv 2405.04434, section 2.1: projections to a latent, and from the latent to all heads."""
    m, h, L = spec.mla, spec.hidden, spec.layers
    assert m is not None
    q, kv = spec.query_width, spec.heads * (m.qk_nope_head_dim + m.v_head_dim)
    if m.q_lora_rank is None:
        queries = [Linear("q_proj", h, q, False, L, "attention")]
    else:
        queries = [
            Linear("q_a_proj", h, m.q_lora_rank, spec.qkv_bias, L, "attention"),
            Linear("q_b_proj", m.q_lora_rank, q, False, L, "attention"),
        ]
    return [
        *queries,
        Linear("kv_a_proj_with_mqa", h, m.kv_lora_rank + m.qk_rope_head_dim, spec.qkv_bias, L, "attention"),
        Linear("kv_b_proj", m.kv_lora_rank, kv, False, L, "attention"),
        Linear("o_proj", spec.heads * m.v_head_dim, h, spec.output_bias, L, "attention"),
    ]


def _mlp(spec: Sizes) -> list[Linear]:
    """Return the dense MLPs and the shared experts, which process every token."""
    h, f = spec.hidden, spec.intermediate
    if not spec.gated:
        matrices_per_mlp = [("c_fc", h, f), ("c_proj", f, h)]
    elif spec.fused_qkv:
        matrices_per_mlp = [("gate_up_proj", h, 2 * f), ("down_proj", f, h)]
    else:
        matrices_per_mlp = _gated(h, f)
    dense = spec.dense_layers if spec.experts else spec.dense_layers or spec.layers
    shared = _gated(h, spec.shared_experts * spec.moe_intermediate) if spec.shared_experts else []
    kinds = [(matrices_per_mlp, dense), (shared, spec.moe_layers)]
    return [Linear(*matrix, spec.mlp_bias, count, "mlp") for matrices, count in kinds if count for matrix in matrices]


def _gated(h: int, f: int) -> list[tuple[str, int, int]]:
    return [("gate_proj", h, f), ("up_proj", h, f), ("down_proj", f, h)]


def norm_parameters(spec: Sizes) -> int:
    """Return h per norm, including the last one, or 2h with LayerNorm's bias. Query-key norms are as wide as a head or
    a latent."""
    per_norm = spec.hidden * (2 if spec.norm == "layernorm" else 1)
    per_layer = spec.norms_per_layer * per_norm
    if spec.qk_norm:
        per_layer += 2 * spec.head_dim
    if spec.mla:
        per_layer += spec.mla.kv_lora_rank + (spec.mla.q_lora_rank or 0)
    return spec.layers * per_layer + per_norm


def components(spec: Sizes, linears: tuple[Linear, ...]) -> dict[str, int]:
    """Return the parameters of each component; a component that the model lacks, or shares (a tied head), is 0."""
    by_part = dict.fromkeys(("attention", "mlp", "head"), 0)
    for linear in linears:
        by_part[linear.part] += linear.parameters
    routed = spec.moe_layers * spec.experts
    towers = {"towers": spec.towers} if spec.towers else {}
    return towers | {
        "embedding": spec.vocab * spec.hidden,
        # Rotary positions have no parameters.
        "positions": spec.max_positions * spec.hidden if spec.learned_positions else 0,
        "attention": by_part["attention"],
        "mlp": by_part["mlp"],
        # transformers 5 keeps a layer's experts as two three-dimensional tensors (gate_up_proj, down_proj).
        "experts": routed * 3 * spec.hidden * spec.moe_intermediate,
        "router": routed * spec.hidden,
        "norms": norm_parameters(spec),
        "head": 0 if spec.tied else by_part["head"],
    }
