"""GPT-2 from top to bottom (Radford et al. 2019): embeddings, blocks of attention and MLP, a norm, the tied head.

    B  sequences            C  hidden size             H  heads         V  vocabulary
    T  tokens given         F  width of the MLP        D  size of a head
    S  tokens attended to: those in the cache, then the T given

A tensor's name ends with its dimensions: `q_BHTD` is (B, H, T, D). The modules have transformers' names, so weights can
be copied between the two (GPT-2's "Conv1D" is a Linear stored transposed).
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
    """What `forward` asks of a KV cache; llmlab/course/inference/cache.py has three."""

    @property
    def length(self) -> int:
        """The number of tokens in the cache, per sequence."""

    def update(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values of `layer`; return those of all its tokens, (B, H, S, D) each."""


def visible(T: int, S: int, real_BS: Tensor | None = None, device: torch.device | str | None = None) -> Tensor:
    """Return which of S tokens each of the last T of them may look at: bool, (T, S), or (B, 1, T, S) with padding.

    `real_BS` is False at padding. Every token sees itself: if a row were all False, its softmax would be NaN, and NaN
    times the weight 0 that other tokens give it is NaN again.
    """
    device = device if real_BS is None else real_BS.device
    causal_TS = torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
    if real_BS is None:
        return causal_TS
    itself_TS = torch.eye(S, dtype=torch.bool, device=device)[S - T :]
    return causal_TS & (real_BS[:, None, None, :] | itself_TS)


def attend(
    q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, mask: Tensor | None, kind: str = "sdpa", dropout: float = 0.0
) -> Tensor:
    """Return softmax(q kᵀ / √D) v, (B, H, T, D): "Attention Is All You Need", equation 1, under a causal mask.

    `mask` is bool and broadcasts to (B, H, T, S), True where a query may look; None is the causal mask alone.
    "eager" stores the T × S scores; "sdpa" calls torch's function, whose fused kernels never store them all.
    """
    T, S = q_BHTD.shape[2], k_BHSD.shape[2]
    if kind == "sdpa":
        if mask is None and 1 < T < S:  # is_causal=True would start the diagonal at the top left
            mask = visible(T, S, device=q_BHTD.device)
        causal = mask is None and T > 1  # a single token is the last: it sees all
        return F.scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD, mask, dropout_p=dropout, is_causal=causal)
    if mask is None:
        mask = visible(T, S, device=q_BHTD.device)
    scores_BHTS = q_BHTD @ k_BHSD.transpose(2, 3) / math.sqrt(q_BHTD.shape[3])  # else their variance would be D
    scores_BHTS = scores_BHTS.masked_fill(~mask, float("-inf"))
    weights_BHTS = F.softmax(scores_BHTS, dim=-1, dtype=torch.float32).to(q_BHTD.dtype)
    return F.dropout(weights_BHTS, dropout) @ v_BHSD


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = layer, kind
        self.attend = attend  # a later chapter puts its own kernel here
        self.heads, self.dropout = spec.heads, spec.attention_dropout
        self.c_attn = nn.Linear(spec.hidden, 3 * spec.hidden)  # q, k, v in one matrix
        self.c_proj = nn.Linear(spec.hidden, spec.hidden)
        self.resid_dropout = nn.Dropout(spec.dropout)

    def forward(self, x_BTC: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor:
        B, T, C = x_BTC.shape
        # Each head has its own slice of the channels; attention mixes tokens, not heads.
        three = self.c_attn(x_BTC).split(C, dim=2)
        split = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in three)
        q_BHTD, k_BHSD, v_BHSD = split
        if cache is not None:
            k_BHSD, v_BHSD = cache.update(self.layer, k_BHSD, v_BHSD)
        dropout = self.dropout if self.training else 0.0
        y_BHTD = self.attend(q_BHTD, k_BHSD, v_BHSD, mask, self.kind, dropout)
        y_BTC = y_BHTD.transpose(1, 2).reshape(B, T, C)  # heads side by side again
        return self.resid_dropout(self.c_proj(y_BTC))


class MLP(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.c_fc = nn.Linear(spec.hidden, spec.intermediate)
        self.c_proj = nn.Linear(spec.intermediate, spec.hidden)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        h_BTF = F.gelu(self.c_fc(x_BTC), approximate="tanh")  # as GPT-2 was trained
        return self.dropout(self.c_proj(h_BTF))


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int, kind: str, eps: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(spec.hidden, eps)
        self.attn = Attention(spec, layer, kind)
        self.ln_2 = nn.LayerNorm(spec.hidden, eps)
        self.mlp = MLP(spec)

    def forward(self, x_BTC: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor:
        # Pre-norm: each branch begins with a norm, and the residual path has none
        # until the last block's end.
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC), mask, cache)
        return x_BTC + self.mlp(self.ln_2(x_BTC))


def in_order(blocks: Iterable[nn.Module], x_BTC: Tensor, *rest: Any) -> Tensor:
    """Run the blocks one after the other; `rest` are the arguments that each takes besides x."""
    for block in blocks:
        x_BTC = block(x_BTC, *rest)
    return x_BTC


class GPT(nn.Module):
    """GPT-2 of a ModelSpec, with random weights; `from_transformers` copies those of a GPT2LMHeadModel.

    `attention` is "eager" or "sdpa". `run_blocks` is `in_order`; another function with the same arguments may replace
    it, as activation checkpointing does. Raises SpecError for a spec that is not GPT-2's.
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
        self, ids_BT: Tensor, cache: Cache | None = None, mask: Tensor | None = None, positions_BT: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states that the head reads, (B, T, C); the arguments are those of `forward`."""
        T = ids_BT.shape[1]
        past = cache.length if cache is not None else 0
        if past + T > self.spec.max_positions:
            raise SpecError(f"{past + T} tokens are beyond the {self.spec.max_positions} positions that were learned")
        if positions_BT is None:
            positions_BT = torch.arange(past, past + T, device=ids_BT.device)[None]  # (1, T)
        x_BTC = self.drop(self.wte(ids_BT) + self.wpe(positions_BT))
        return self.ln_f(self.run_blocks(self.h, x_BTC, mask, cache))

    def forward(
        self, ids_BT: Tensor, cache: Cache | None = None, mask: Tensor | None = None, positions_BT: Tensor | None = None
    ) -> Tensor:
        """Return the logits, (B, T, V): those at t predict token t + 1.

        `mask` is a result of `visible`, or None for a causal mask without padding; `positions_BT` by default counts
        from the first token in the cache.
        """
        return self.lm_head(self.hidden(ids_BT, cache, mask, positions_BT))

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
    """Draw matrices and embeddings from N(0, s²), s the config's initializer_range, and set biases to 0.

    Small logits make the first loss ln V. The matrices that end a branch, named by `last`, get s / √(2 · layers),
    because 2 · layers branches add up on the residual path (GPT-2's paper, section 2.3).
    """
    std = spec.config.get("initializer_range", 0.02)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=std / math.sqrt(2 * spec.layers) if name.endswith(last) else std)
        elif name.endswith("bias"):
            parameter.zero_()
