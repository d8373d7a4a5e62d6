"""The sizes of a model, as fields: what config.json says, under one name for all families."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from .shape import MLA


@dataclass(frozen=True)
class Sizes:
    """What `ModelSpec` is made of; every field below `source` is read from the config and checked.

    `dense_layers` is how many layers of a mixture of experts have a dense MLP (without experts: how many have an MLP,
    where not all do), `shared_experts` how many experts every token goes through, `moe_intermediate` one expert's
    width. `head_dim` is a query and key head's (values of `mla` have their own). `window_layers` of the layers see only
    the last `sliding_window` tokens. `source` is the Hugging Face repository or the file the config is from.
    """

    name: str
    config_json: str = field(repr=False, compare=False)  # as text: transformers writes into nested dicts it is given
    source: str = field(default="", repr=False, compare=False)
    checkpoint: str = field(default="", repr=False, compare=False)  # how its linear layers are published, if quantized
    family: str = field(init=False)
    hidden: int = field(init=False)
    layers: int = field(init=False)
    heads: int = field(init=False)
    kv_heads: int = field(init=False)
    head_dim: int = field(init=False)
    intermediate: int = field(init=False)
    vocab: int = field(init=False)
    max_positions: int = field(init=False)
    tied: bool = field(init=False)
    norm: str = field(init=False)  # "layernorm" or "rmsnorm"
    norms_per_layer: int = field(init=False, default=2)
    gated: bool = field(init=False)
    activation: str = field(init=False)
    qk_norm: bool = field(init=False, default=False)
    learned_positions: bool = field(init=False, default=False)
    fused_qkv: bool = field(init=False, default=False)  # one matrix for q, k, v (and, where gated, for gate and up)
    qkv_bias: bool = field(init=False, default=False)
    output_bias: bool = field(init=False, default=False)
    mlp_bias: bool = field(init=False, default=False)
    dropout: float = field(init=False, default=0.0)  # of each block's two residual branches
    embedding_dropout: float = field(init=False, default=0.0)
    attention_dropout: float = field(init=False, default=0.0)
    attention_softcap: float | None = field(init=False, default=None)
    logit_softcap: float | None = field(init=False, default=None)
    sliding_window: int | None = field(init=False, default=None)
    window_layers: int = field(init=False, default=0)
    experts: int = field(init=False, default=0)
    experts_per_token: int = field(init=False, default=0)
    moe_intermediate: int = field(init=False, default=0)
    shared_experts: int = field(init=False, default=0)
    dense_layers: int = field(init=False, default=0)
    mla: MLA | None = field(init=False, default=None)
    towers: int = field(init=False, default=0)  # about the parameters of other encoders and of cross-attention

    @cached_property
    def query_width(self) -> int:
        """Features of all query heads together, Q."""
        return self.heads * self.head_dim

    @cached_property
    def key_width(self) -> int:
        """Features of all key heads together, K; values are as wide, but with latent attention."""
        return self.kv_heads * self.head_dim

    @cached_property
    def token_mlp_width(self) -> int:
        """Width of the MLP that one token goes through: of all its routed experts together, or of the dense MLP."""
        return self.experts_per_token * self.moe_intermediate if self.experts else self.intermediate

    @property
    def moe_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        return self.layers - self.dense_layers if self.experts else 0
