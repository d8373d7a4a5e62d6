"""Llama 3 from top to bottom (arXiv 2407.21783): GPT-2 with four parts replaced. The rest is imported from gpt.py.

    LayerNorm           -> RMSNorm: no mean, no bias           (Zhang and Sennrich, arXiv 1910.07467)
    learned positions   -> RoPE: q and k are rotated           (Su et al., arXiv 2104.09864)
    GELU MLP            -> SwiGLU: one more matrix, a gate     (Shazeer, arXiv 2002.05202)
    a key for each head -> grouped-query attention             (Ainslie et al., arXiv 2305.13245)

Dimensions as in gpt.py, and k key/value heads, each shared by a/k query heads. There is no dropout, and no bias.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.errors import SpecError
from ...specs.model import ModelLike, ModelSpec, model
from .gpt import Cache, attend, check_spec, in_order, init_weights

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x_BSh: Tensor) -> Tensor:
        x = x_BSh.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(x_BSh.dtype)


def rope_settings(spec: ModelSpec) -> dict[str, Any]:
    """Return `rope_theta`, `rope_type` and that type's settings; SpecError unless it is "default" or "llama3"."""
    config = spec.config
    rope = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    rope |= config.get("rope_parameters") or {}  # transformers 5 writes all settings here
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise SpecError(f"{spec.name}: rope_type={kind!r} is not implemented here, only 'default' and 'llama3'")
    return {**rope, "rope_type": kind, "rope_theta": rope["rope_theta"] or 10000.0}


def frequencies(rope: dict[str, Any], head_dim: int, device: torch.device | None = None) -> Tensor:
    """Return the radians per position for each pair of channels, fp32, (d/2,): θ^(−2i/d), equation 15 of RoFormer.

    Llama 3.1 slows the low frequencies for its longer context: wavelengths above original / low_freq_factor tokens get
    `factor` times as long, those below original / high_freq_factor stay, and between them the two frequencies are
    mixed (the reference code is transformers' modeling_rope_utils.py).
    """
    turns = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    if rope["rope_type"] == "default":
        return turns
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    periods = rope["original_max_position_embeddings"] * turns / (2 * math.pi)  # full turns in the original context
    unscaled = ((periods - low) / (high - low)).clamp(0, 1)
    return turns * unscaled + turns / rope["factor"] * (1 - unscaled)


def turn(rope: dict[str, Any], head_dim: int, positions_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each position's angles, (B, S, d) each, in `dtype`.

    The angles are computed in fp32 in each call: a buffer would become bf16 with the model, and bf16 cannot represent
    all whole numbers above 256.
    """
    turns = frequencies(rope, head_dim, positions_BS.device)
    angles_BSd = (positions_BS[..., None].float() * turns).repeat(1, 1, 2)
    return angles_BSd.cos().to(dtype), angles_BSd.sin().to(dtype)


def rotate(x_BaSd: Tensor, cos_BSd: Tensor, sin_BSd: Tensor) -> Tensor:
    """Rotate each pair of channels (i, i + d/2) by its angle.

    Hugging Face orders the weights of Llama in these halves.
    """
    left, right = x_BaSd.chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    return x_BaSd * cos_BSd[:, None] + turned * sin_BSd[:, None]


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int, kind: str) -> None:
        super().__init__()
        self.layer, self.kind, self.dropout = layer, kind, spec.attention_dropout
        self.attend = attend  # a later chapter puts its own kernel here
        self.head_dim, self.group = spec.head_dim, spec.heads // spec.kv_heads
        q_width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden, q_width, bias=False)
        self.k_proj = nn.Linear(spec.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(spec.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, spec.hidden, bias=False)

    def forward(self, x_BSh: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None) -> Tensor:
        B, S, _ = x_BSh.shape
        projected = (self.q_proj(x_BSh), self.k_proj(x_BSh), self.v_proj(x_BSh))
        q_BaSd, k_BkCd, v_BkCd = (t.view(B, S, -1, self.head_dim).transpose(1, 2) for t in projected)
        q_BaSd, k_BkCd = rotate(q_BaSd, *turn), rotate(k_BkCd, *turn)
        if cache is not None:  # keys are cached after the rotation: a position's angle never changes
            k_BkCd, v_BkCd = cache.update(self.layer, k_BkCd, v_BkCd)
        if self.group > 1:  # SDPA's enable_gqa would avoid the copies, but not all of its kernels support it
            k_BkCd, v_BkCd = (t.repeat_interleave(self.group, dim=1) for t in (k_BkCd, v_BkCd))
        dropout = self.dropout if self.training else 0.0
        y_BaSd = self.attend(q_BaSd, k_BkCd, v_BkCd, mask, self.kind, dropout)
        return self.o_proj(y_BaSd.transpose(1, 2).reshape(B, S, -1))


class MLP(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden, spec.intermediate, bias=False)
        self.up_proj = nn.Linear(spec.hidden, spec.intermediate, bias=False)
        self.down_proj = nn.Linear(spec.intermediate, spec.hidden, bias=False)

    def forward(self, x_BSh: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSh)) * self.up_proj(x_BSh))


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int, kind: str, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden, eps)
        self.self_attn = Attention(spec, layer, kind)
        self.post_attention_layernorm = RMSNorm(spec.hidden, eps)  # transformers' name: it stands before the MLP
        self.mlp = MLP(spec)

    def forward(self, x_BSh: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None) -> Tensor:
        x_BSh = x_BSh + self.self_attn(self.input_layernorm(x_BSh), turn, mask, cache)
        return x_BSh + self.mlp(self.post_attention_layernorm(x_BSh))


class Llama(nn.Module):
    """Llama as a ModelSpec describes it, with random weights; `from_transformers` copies those of a LlamaForCausalLM.

    `attention` is "eager" or "sdpa"; `run_blocks` as in GPT. Raises SpecError for a spec of another family.
    """

    def __init__(self, spec: ModelSpec, attention: str = "sdpa") -> None:
        super().__init__()
        check_spec(spec, "llama", attention, LLAMA_ONLY)
        self.spec = spec
        self.run_blocks = in_order
        self.rope = rope_settings(spec)
        eps = spec.config.get("rms_norm_eps", 1e-6)
        self.embed_tokens = nn.Embedding(spec.vocab, spec.hidden)
        self.layers = nn.ModuleList(Block(spec, layer, attention, eps) for layer in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, eps)
        self.lm_head = nn.Linear(spec.hidden, spec.vocab, bias=False)
        if spec.tied:
            self.lm_head.weight = self.embed_tokens.weight
        init_weights(self, spec, last=("o_proj.weight", "down_proj.weight"))

    def hidden(
        self, ids_BS: Tensor, cache: Cache | None = None, mask: Tensor | None = None, positions_BS: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states before the head, (B, S, h); the arguments are those of `forward`."""
        x_BSh = self.embed_tokens(ids_BS)
        if positions_BS is None:
            past = cache.length if cache is not None else 0
            positions_BS = torch.arange(past, past + ids_BS.shape[1], device=ids_BS.device)[None]  # (1, S)
        turned = turn(self.rope, self.spec.head_dim, positions_BS, x_BSh.dtype)
        return self.norm(self.run_blocks(self.layers, x_BSh, turned, mask, cache))

    def forward(
        self, ids_BS: Tensor, cache: Cache | None = None, mask: Tensor | None = None, positions_BS: Tensor | None = None
    ) -> Tensor:
        """Return the logits, (B, S, V): those at position t predict token t + 1. Arguments as in GPT.forward."""
        return self.lm_head(self.hidden(ids_BS, cache, mask, positions_BS))

    @classmethod
    def from_spec(cls, source: ModelLike, attention: str = "sdpa") -> Llama:
        """Return the model of anything `llmlab.model` accepts: a preset's name, a config dict, a spec."""
        return cls(model(source), attention)

    @classmethod
    def from_transformers(cls, theirs: LlamaForCausalLM, attention: str = "sdpa") -> Llama:
        """Return a copy of a LlamaForCausalLM, in its dtype and on its device."""
        ours = cls(model(theirs.config), attention).to(theirs.device, theirs.dtype)
        ours.load_state_dict({name.removeprefix("model."): weight for name, weight in theirs.state_dict().items()})
        return ours.train(theirs.training)

    def transformers_state(self) -> dict[str, Tensor]:
        """Return the weights with LlamaForCausalLM's names, without the head if it is tied."""
        state = {f"model.{name}": weight for name, weight in self.state_dict().items()}
        head = state.pop("model.lm_head.weight")
        return state if self.spec.tied else {**state, "lm_head.weight": head}


# Options that would change the logits and are not implemented here, as in GPT2_ONLY.
LLAMA_ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
