"""GPT-2 from top to bottom (Radford et al. 2019): embeddings, blocks of attention and MLP, a norm, the tied head.

    B  sequences                 h  hidden size           a  heads              V  vocabulary
    S  tokens per sequence       f  width of the MLP      d  size of a head
    C  tokens that can be attended to: those in the KV cache, then the S given

A tensor's name ends with its dimensions: `q_BaSd` has the shape (B, a, S, d). The modules have the names that
transformers uses, so weights can be copied between the two (the "Conv1D" of GPT-2 is a Linear stored transposed).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.errors import SpecError
from ...specs.model import ModelLike, ModelSpec, model

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

ATTENTIONS = ("eager", "sdpa")


class Cache(Protocol):
    """The part of a KV cache that `forward` needs; llmlab/course/inference/cache.py has three caches."""

    @property
    def length(self) -> int:
        """The number of tokens in the cache, per sequence."""

    def update(self, layer: int, k_BaSd: Tensor, v_BaSd: Tensor, /) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens for `layer`; return those of all its tokens, (B, a, C, d) each."""


def visible(S: int, C: int, real_BC: Tensor | None = None, device: torch.device | str | None = None) -> Tensor:
    """Return which of C tokens each of the last S of them may attend to: bool, (S, C), or (B, 1, S, C) with padding.

    `real_BC` is False at padding. Every token may attend to itself. If a row were all False, its softmax would be NaN,
    and other tokens would read it: NaN times a weight of 0 is NaN.
    """
    device = device if real_BC is None else real_BC.device
    causal_SC = torch.ones(S, C, dtype=torch.bool, device=device).tril(C - S)
    if real_BC is None:
        return causal_SC
    itself_SC = torch.eye(C, dtype=torch.bool, device=device)[C - S :]
    return causal_SC & (real_BC[:, None, None, :] | itself_SC)


def attend(
    q_BaSd: Tensor, k_BaCd: Tensor, v_BaCd: Tensor, mask: Tensor | None, kind: str = "sdpa", dropout: float = 0.0
) -> Tensor:
    """Return softmax(q kᵀ / √d) v, (B, a, S, d): "Attention Is All You Need", equation 1, under a causal mask.

    `mask` is bool and broadcasts to (B, a, S, C), True where a query may attend to a key; None is the causal mask.
    "eager" stores the S × C scores; "sdpa" calls a function of torch whose fused kernels never store all of them.
    """
    S, C = q_BaSd.shape[2], k_BaCd.shape[2]
    if kind == "sdpa":
        if mask is None and 1 < S < C:  # is_causal=True would start the diagonal at the top left
            mask = visible(S, C, device=q_BaSd.device)
        causal = mask is None and S > 1  # a single token is the last one, which attends to all
        return F.scaled_dot_product_attention(q_BaSd, k_BaCd, v_BaCd, mask, dropout_p=dropout, is_causal=causal)
    if mask is None:
        mask = visible(S, C, device=q_BaSd.device)
    scores_BaSC = q_BaSd @ k_BaCd.transpose(2, 3) / math.sqrt(q_BaSd.shape[3])  # else their variance would be d
    scores_BaSC = scores_BaSC.masked_fill(~mask, float("-inf"))
    weights_BaSC = F.softmax(scores_BaSC, dim=-1, dtype=torch.float32).to(q_BaSd.dtype)
    return F.dropout(weights_BaSC, dropout) @ v_BaCd


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = layer, kind
        self.attend = attend  # a later chapter puts its own kernel here
        self.heads, self.dropout = spec.heads, spec.attention_dropout
        self.c_attn = nn.Linear(spec.hidden, 3 * spec.hidden)  # q, k, v in one matrix
        self.c_proj = nn.Linear(spec.hidden, spec.hidden)
        self.resid_dropout = nn.Dropout(spec.dropout)

    def forward(self, x_BSh: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor:
        B, S, h = x_BSh.shape
        # Each head has its own d of the h channels.
        three = self.c_attn(x_BSh).split(h, dim=2)
        split = (t.view(B, S, self.heads, -1).transpose(1, 2) for t in three)
        q_BaSd, k_BaCd, v_BaCd = split
        if cache is not None:
            k_BaCd, v_BaCd = cache.update(self.layer, k_BaCd, v_BaCd)
        dropout = self.dropout if self.training else 0.0
        y_BaSd = self.attend(q_BaSd, k_BaCd, v_BaCd, mask, self.kind, dropout)
        y_BSh = y_BaSd.transpose(1, 2).reshape(B, S, h)  # heads side by side again
        return self.resid_dropout(self.c_proj(y_BSh))


class MLP(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.c_fc = nn.Linear(spec.hidden, spec.intermediate)
        self.c_proj = nn.Linear(spec.intermediate, spec.hidden)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x_BSh: Tensor) -> Tensor:
        h_BSf = F.gelu(self.c_fc(x_BSh), approximate="tanh")  # as GPT-2 was trained
        return self.dropout(self.c_proj(h_BSf))


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int, kind: str, eps: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(spec.hidden, eps)
        self.attn = Attention(spec, layer, kind)
        self.ln_2 = nn.LayerNorm(spec.hidden, eps)
        self.mlp = MLP(spec)

    def forward(self, x_BSh: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor:
        # Pre-norm: each branch begins with a norm, and the residual stream has none
        # until the end of the last block.
        x_BSh = x_BSh + self.attn(self.ln_1(x_BSh), mask, cache)
        return x_BSh + self.mlp(self.ln_2(x_BSh))


def in_order(blocks: Iterable[nn.Module], x_BSh: Tensor, *rest: Any) -> Tensor:
    """Run the blocks one after the other, each with the further arguments `rest`."""
    for block in blocks:
        x_BSh = block(x_BSh, *rest)
    return x_BSh


class GPT(nn.Module):
    """GPT-2 as a ModelSpec describes it, with random weights; `from_transformers` copies those of a GPT2LMHeadModel.

    `attention` is "eager" or "sdpa". `run_blocks` is `in_order`; another function with the same arguments may replace
    it, as activation checkpointing does. Raises SpecError for a spec of another family.
    """

    def __init__(self, spec: ModelSpec, attention: str = "sdpa") -> None:
        super().__init__()
        check_spec(spec, "gpt2", attention, GPT2_ONLY)
        self.spec = spec
        self.run_blocks = in_order
        eps = spec.config.get("layer_norm_epsilon", 1e-5)
        self.wte = nn.Embedding(spec.vocab, spec.hidden)
        self.wpe = nn.Embedding(spec.max_positions, spec.hidden)  # learned, one row per position
        self.drop = nn.Dropout(spec.embedding_dropout)
        self.h = nn.ModuleList(Block(spec, layer, attention, eps) for layer in range(spec.layers))
        self.ln_f = nn.LayerNorm(spec.hidden, eps)
        self.lm_head = nn.Linear(spec.hidden, spec.vocab, bias=False)
        if spec.tied:
            self.lm_head.weight = self.wte.weight
        init_weights(self, spec, last=("c_proj.weight",))

    def hidden(
        self, ids_BS: Tensor, cache: Cache | None = None, mask: Tensor | None = None, positions_BS: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states before the head, (B, S, h); the arguments are those of `forward`."""
        S = ids_BS.shape[1]
        past = cache.length if cache is not None else 0
        if past + S > self.spec.max_positions:
            raise SpecError(f"{past + S} tokens are beyond the {self.spec.max_positions} positions that were learned")
        if positions_BS is None:
            positions_BS = torch.arange(past, past + S, device=ids_BS.device)[None]  # (1, S)
        x_BSh = self.drop(self.wte(ids_BS) + self.wpe(positions_BS))
        return self.ln_f(self.run_blocks(self.h, x_BSh, mask, cache))

    def forward(
        self, ids_BS: Tensor, cache: Cache | None = None, mask: Tensor | None = None, positions_BS: Tensor | None = None
    ) -> Tensor:
        """Return the logits, (B, S, V): those at position t predict token t + 1.

        `mask` is a result of `visible`, or None for a causal mask without padding; `positions_BS` by default counts
        from the first token in the cache.
        """
        return self.lm_head(self.hidden(ids_BS, cache, mask, positions_BS))

    @classmethod
    def from_spec(cls, source: ModelLike, attention: str = "sdpa") -> GPT:
        """Return the model of anything `llmlab.model` accepts: a preset's name, a config dict, a spec."""
        return cls(model(source), attention)

    @classmethod
    def from_transformers(cls, theirs: GPT2LMHeadModel, attention: str = "sdpa") -> GPT:
        """Return a copy of a GPT2LMHeadModel, in its dtype and on its device."""
        ours = cls(model(theirs.config), attention).to(theirs.device, theirs.dtype)
        weights = {name.removeprefix("transformer."): weight for name, weight in theirs.state_dict().items()}
        ours.load_state_dict({name: w.t() if name.endswith(TURNED) else w for name, w in weights.items()})
        return ours.train(theirs.training)

    def transformers_state(self) -> dict[str, Tensor]:
        """Return the weights with GPT2LMHeadModel's names and layouts, without the head if it is tied."""
        state = {f"transformer.{name}": w.t() if name.endswith(TURNED) else w for name, w in self.state_dict().items()}
        head = state.pop("transformer.lm_head.weight")
        return state if self.spec.tied else {**state, "lm_head.weight": head}


TURNED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # transformers' Conv1D holds (inputs, outputs)

# Options that would change the logits and are not implemented here: the config's key, and its only allowed value, which
# is also the one where the key is absent.
GPT2_ONLY = {"activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}


def check_spec(spec: ModelSpec, family: str, attention: str, only: dict[str, Any]) -> None:
    """Raise SpecError for a spec of another family, or with an option that differs from its value in `only`."""
    if attention not in ATTENTIONS:
        raise SpecError(f"attention={attention!r} is not one of {', '.join(ATTENTIONS)}")
    if spec.family != family:
        raise SpecError(f"{spec.name} is a {spec.family}; this class is {family}")
    for key, value in only.items():
        if (given := spec.config.get(key, value)) != value:
            raise SpecError(f"{spec.name}: {key}={given!r} is not implemented here, only {value!r}")


@torch.no_grad()
def init_weights(module: nn.Module, spec: ModelSpec, last: tuple[str, ...]) -> None:
    """Draw matrices and embeddings from N(0, s²), where s is `initializer_range` of the config, and set biases to 0.

    Small logits make the first loss ln V. The matrices that end a branch, named by `last`, get s / √(2L), because 2L
    branches add up on the residual stream (section 2.3 of the GPT-2 paper).
    """
    std = spec.config.get("initializer_range", 0.02)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=std / math.sqrt(2 * spec.layers) if name.endswith(last) else std)
        elif name.endswith("bias"):
            parameter.zero_()
