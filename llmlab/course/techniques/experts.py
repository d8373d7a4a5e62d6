"""Mixture of experts from scratch: each token is processed by a few of many MLPs, which may be on other ranks.

Shazeer et al. (arXiv 1701.06538) choose K of E experts per token. Mixtral (arXiv 2401.04088, section 2.1) applies the
softmax to the scores of the chosen ones. Switch Transformer (arXiv 2101.03961, section 2.2) introduces the capacity and
the balancing loss. GShard (arXiv 2006.16668, section 2.2) distributes experts over ranks: one all-to-all sends tokens
to their experts, and another one sends the outputs back.

    T  tokens of this rank    h  hidden size    f  width of an expert    E  experts    K  experts per token
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.errors import SpecError


def route(logits_TE: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Return the K most probable experts of each token, int64 (T, K), and their weights, fp32 (T, K), with sum 1."""
    probabilities, experts = torch.topk(F.softmax(logits_TE.float(), dim=-1), K)
    return experts, probabilities / probabilities.sum(-1, keepdim=True)


def capacity(tokens: int, experts: int, K: int, factor: float) -> int:
    """Return how many tokens an expert serves: `factor` times an equal share, rounded up (Switch, equation 3)."""
    return math.ceil(factor * tokens * K / experts)


def within_capacity(experts_TK: Tensor, experts: int, most: int) -> Tensor:
    """Return which choices are served, bool (T, K): an expert serves the first `most` tokens that choose it.

    All first choices come before all second ones, as in GShard's algorithm 1. A token that no expert serves skips the
    layer, and the residual stream carries it on unchanged.
    """
    choices = F.one_hot(experts_TK.T, experts).flatten(0, 1)  # (K · T, E), first choices first
    earlier = (choices.cumsum(0) - 1)[choices.bool()]  # (K · T,): number of earlier choices of the same expert
    return (earlier < most).view(experts_TK.shape[1], -1).T


def balancing_loss(logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Return E · Σ (share of choices · mean probability) over experts (Switch, equation 4, counting K choices).

    Equal shares give K, the smallest value as long as choices follow probabilities. Only the probabilities have a
    gradient.
    """
    experts = logits_TE.shape[1]
    share_E = torch.bincount(experts_TK.flatten(), minlength=experts) / len(logits_TE)
    return experts * (share_E * F.softmax(logits_TE.float(), dim=-1).mean(0)).sum()


class Experts(nn.Module):
    """`count` SwiGLU MLPs, stacked: w_down · (silu(w_gate · x) ⊙ w_up · x), with w_gate and w_up in one tensor."""

    def __init__(self, count: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, hidden).normal_(std=0.02))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, width).normal_(std=0.02))

    def forward(self, x_rows: Tensor, counts: list[int]) -> Tensor:
        """Process rows that are sorted by expert, `counts[e]` of them for expert e: (rows, h) -> (rows, h)."""
        outputs = []
        for x, gate_up, down in zip(x_rows.split(counts), self.gate_up_proj, self.down_proj, strict=True):
            gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, down))
        return torch.cat(outputs)


class MoE(nn.Module):
    """Router and experts that replace an MLP: (B, S, h) -> (B, S, h).

    `factor` sets the `capacity` of an expert; None serves every token. With `parallel`, this rank has E / ep of the
    experts, and every rank must call forward. After a forward pass, `logits` (T, E), `chosen` (T, K) and `dropped`, the
    fraction of choices that were not served, describe the routing. Raises SpecError for sizes that do not fit.
    """

    def __init__(
        self, hidden: int, width: int, experts: int, K: int, factor: float | None = None, parallel: bool = False
    ) -> None:
        super().__init__()
        if not 1 <= K <= experts:
            raise SpecError(f"K={K} experts per token: give 1 to {experts}, the number of experts")
        if factor is not None and not factor > 0:
            raise SpecError(f"factor={factor} is not above 0; None serves every token")
        self.ranks = dist.get_world_size() if parallel else 1
        if experts % self.ranks:
            fits = [n for n in range(1, experts + 1) if experts % n == 0]
            raise SpecError(f"ep={self.ranks} does not divide experts={experts}; give ep one of {fits}")
        self.count, self.K, self.factor = experts, K, factor
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(experts // self.ranks, hidden, width)

    def forward(self, x_BSh: Tensor) -> Tensor:
        x_Th = x_BSh.flatten(0, 1)
        self.logits = self.gate(x_Th)
        self.chosen, weights_TK = route(self.logits, self.K)
        served_TK = torch.ones_like(self.chosen, dtype=torch.bool)
        if self.factor is not None:
            served_TK = within_capacity(self.chosen, self.count, capacity(len(x_Th), self.count, self.K, self.factor))
        self.dropped = 1 - served_TK.float().mean().item()
        order = torch.argsort(self.chosen[served_TK], stable=True)
        token = served_TK.nonzero()[order, 0]  # (rows,): the token of each row; rows are sorted by expert
        counts = torch.bincount(self.chosen[served_TK], minlength=self.count)
        x_rows = x_Th[token]
        y_rows = self.experts(x_rows, counts.tolist()) if self.ranks == 1 else self._on_all_ranks(x_rows, counts)
        y_rows = y_rows * weights_TK[served_TK][order, None]
        return torch.zeros_like(x_Th).index_add(0, token, y_rows.to(x_Th.dtype)).view_as(x_BSh)

    def _on_all_ranks(self, x_rows: Tensor, counts: Tensor) -> Tensor:
        incoming = torch.empty_like(counts)  # (E,): how many rows each rank has for each of this rank's experts
        dist.all_to_all_single(incoming, counts)
        sent, arriving = (c.view(self.ranks, -1).sum(1).tolist() for c in (counts, incoming))
        received = AllToAll.apply(x_rows, sent, arriving)
        # Rows arrive sorted by rank, then by expert; `experts` needs them sorted by expert.
        expert = torch.arange(len(incoming)).remainder(self.count // self.ranks).repeat_interleave(incoming)
        by_expert = torch.argsort(expert, stable=True)
        outputs = self.experts(received[by_expert], incoming.view(self.ranks, -1).sum(0).tolist())
        return AllToAll.apply(torch.empty_like(outputs).index_copy(0, by_expert, outputs), arriving, sent)


class AllToAll(torch.autograd.Function):
    """Sends `sent[r]` rows to rank r and receives `arriving[r]` rows from it; gradients travel back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], arriving: list[int]) -> Tensor:
        ctx.sent, ctx.arriving = sent, arriving
        out = rows.new_empty(sum(arriving), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), arriving, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        back = grad.new_empty(sum(ctx.sent), grad.shape[1])
        dist.all_to_all_single(back, grad.contiguous(), ctx.sent, ctx.arriving)
        return back, None, None
