"""Tensor and sequence parallelism from scratch: each rank has, and computes with, a share of every matrix.

    python -m llmlab.course.experiments tensor_parallel --ranks 2 --steps 20 --sequence-parallel --json

Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3): the first matrix of a pair is split by columns, the second by
rows, so the activations between them (heads, or the MLP's width) need no communication. Sequence parallelism
(Korthikanti et al., arXiv 2205.05198, section 4.2.2) also splits, by tokens, the activations outside the pairs.

                          into a pair                        out of a pair
    tensor parallel       forward: nothing                   forward: all-reduce
                          backward: all-reduce               backward: nothing
    sequence parallel     forward: all-gather of tokens      forward: reduce-scatter of tokens
                          backward: reduce-scatter           backward: all-gather

An all-reduce is a reduce-scatter and an all-gather, so both send the same bytes, as long as a rank keeps what it
gathered: here autograd saves it whole. Megatron-LM keeps a share, and gathers it again in backward.

    B  batch    T  tokens    C  hidden size    V  vocabulary    N  ranks of the group    … / N  a rank's share
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.errors import SpecError
from ...specs.model import ModelSpec
from ..architectures.llama import Llama

Ranks = dist.ProcessGroup | None  # None: all ranks
Collective = Callable[[Tensor, Ranks], Tensor]

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # split by output
ROWS = ("o_proj", "down_proj")  # split by input: their outputs are sums over ranks


# ---- communication: copied and summed, gathered and scattered, are each other's backward


def identity(x: Tensor, group: Ranks) -> Tensor:
    return x.view_as(x)


def all_reduce(x: Tensor, group: Ranks) -> Tensor:
    """Return the sum over ranks."""
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def all_gather(x_BtC: Tensor, group: Ranks) -> Tensor:
    """Join the tokens of all ranks, dimension 1: (B, T / N, C) -> (B, T, C)."""
    pieces = [torch.empty_like(x_BtC, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, x_BtC.contiguous(), group=group)
    return torch.cat(pieces, dim=1)


def reduce_scatter(x_BTC: Tensor, group: Ranks) -> Tensor:
    """Return this rank's tokens, dimension 1, of the sum over ranks: (B, T, C) -> (B, T / N, C)."""
    ranks = dist.get_world_size(group)
    pieces_NBtC = torch.stack(x_BTC.tensor_split(ranks, dim=1))  # one contiguous piece per rank
    mine_BtC = torch.empty_like(pieces_NBtC[0])
    dist.reduce_scatter_tensor(mine_BtC, pieces_NBtC.flatten(0, 1), group=group)
    return mine_BtC


class Exchange(torch.autograd.Function):
    """Returns forward(x, group); the gradient is backward(grad, group)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Collective, backward: Collective, group: Ranks) -> Tensor:
        ctx.exchange, ctx.group = backward, group
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange(grad, ctx.group), None, None, None


def copied(x: Tensor, group: Ranks) -> Tensor:
    """Into a pair, where all ranks have x. Each rank's gradient comes from its share of the outputs: sum them."""
    return Exchange.apply(x, identity, all_reduce, group)


def summed(x: Tensor, group: Ranks) -> Tensor:
    """Out of a pair: adds the partial sums of all ranks. The gradient of a sum is the gradient of each part."""
    return Exchange.apply(x, all_reduce, identity, group)


def gathered(x_BtC: Tensor, group: Ranks) -> Tensor:
    """Into a pair, where each rank has T / N tokens."""
    return Exchange.apply(x_BtC, all_gather, reduce_scatter, group)


def scattered(x_BTC: Tensor, group: Ranks) -> Tensor:
    """Out of a pair, where each rank keeps T / N tokens."""
    return Exchange.apply(x_BTC, reduce_scatter, all_gather, group)


# ---- the vocabulary, split by rows: V / N words per rank


class VocabularyEmbedding(nn.Module):
    """Embedding of this rank's words; other ranks' words give zeros here, so the sum over ranks is the embedding."""

    def __init__(self, weight: nn.Parameter, leave: Collective, group: Ranks) -> None:
        super().__init__()
        self.weight, self.leave, self.group = weight, leave, group  # (V / N, C)

    def forward(self, ids_BT: Tensor) -> Tensor:
        ids_BT = ids_BT - dist.get_rank(self.group) * len(self.weight)
        elsewhere = (ids_BT < 0) | (ids_BT >= len(self.weight))
        x_BTC = F.embedding(ids_BT.masked_fill(elsewhere, 0), self.weight)
        return self.leave(x_BTC.masked_fill(elsewhere[..., None], 0.0), self.group)


class VocabularyCrossEntropy(torch.autograd.Function):
    """Mean of −ln p(target) of logits split by vocabulary: ranks exchange three numbers per token, and no logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Ranks) -> Tensor:
        maximum = logits.amax(-1)  # (tokens,)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        exponentials = torch.exp(logits - maximum[:, None])  # (tokens, V / N)
        local = targets - dist.get_rank(group) * logits.shape[-1]
        elsewhere = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(elsewhere, 0)
        chosen = logits.gather(1, local[:, None])[:, 0].masked_fill(elsewhere, 0.0)
        sums = torch.stack([exponentials.sum(-1), chosen])  # (2, tokens)
        dist.all_reduce(sums, group=group)
        total, chosen = sums
        ctx.save_for_backward(exponentials.div_(total[:, None]), local, elsewhere)
        return (total.log() + maximum - chosen).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        probabilities, local, elsewhere = ctx.saved_tensors
        dlogits = probabilities.clone()
        dlogits.scatter_add_(1, local[:, None], (~elsewhere).to(dlogits.dtype)[:, None] * -1)
        return dlogits * (grad / len(local)), None, None


def next_token_loss(logits_BTv: Tensor, ids_BT: Tensor, group: Ranks = None) -> Tensor:
    """Return the mean of −ln p(token t + 1 | tokens to t), nats, of logits (B, T, V / N); the same on all ranks."""
    return VocabularyCrossEntropy.apply(logits_BTv[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten(), group)


# ---- the model


def check(spec: ModelSpec, ranks: int, seq_len: int | None = None) -> None:
    """Raise SpecError if `ranks` does not divide a size that is split; give `seq_len` for sequence parallelism."""
    sizes = {name: getattr(spec, name) for name in ("heads", "kv_heads", "intermediate", "vocab")}
    if seq_len is not None:
        sizes["seq_len"] = seq_len
    for name, size in sizes.items():
        if size % ranks:
            fits = [n for n in range(1, size + 1) if all(value % n == 0 for value in sizes.values())]
            raise SpecError(f"tp={ranks} does not divide {name}={size} of {spec.name}; give tp one of {fits}")


def shard(model: Llama, sequence_parallel: bool = False, group: Ranks = None) -> Llama:
    """Split `model`, equal on all ranks of `group`, in place: this rank keeps 1 / N of every matrix. Return the model.

    Its logits are (B, T, V / N): give them to `next_token_loss`. With `sequence_parallel`, norms and residual stream
    have T / N tokens: call `sum_norm_gradients` after backward. Raises SpecError if N does not divide a size.
    """
    check(model.spec, dist.get_world_size(group))
    enter, leave = (gathered, scattered) if sequence_parallel else (copied, summed)
    for name, linear in list(model.named_modules()):
        last = name.rpartition(".")[2]
        if last in COLUMNS:
            _keep(linear, 0, group)
        elif last in ROWS:
            _keep(linear, 1, group)
            linear.register_forward_hook(lambda _module, _inputs, x: leave(x, group))
    for block in model.layers:
        for name in ("self_attn", "mlp"):  # x is gathered once for q, k and v, not three times
            pair = block.get_submodule(name)
            pair.register_forward_pre_hook(lambda _module, inputs: (enter(inputs[0], group), *inputs[1:]))
    words = _keep(model.embed_tokens, 0, group)
    model.set_submodule("embed_tokens", VocabularyEmbedding(words, leave, group))
    if model.spec.tied:
        model.lm_head.weight = words
    else:
        _keep(model.lm_head, 0, group)
    model.lm_head.register_forward_pre_hook(lambda _module, inputs: enter(inputs[0], group))
    return model


def _keep(module: nn.Module, dim: int, group: Ranks) -> nn.Parameter:
    """Replace a module's weight by a copy of this rank's piece along `dim`, so that the whole weight is freed."""
    pieces = module.get_parameter("weight").detach().tensor_split(dist.get_world_size(group), dim)
    module.weight = nn.Parameter(pieces[dist.get_rank(group)].clone(memory_format=torch.contiguous_format))
    return module.weight


def sum_norm_gradients(model: nn.Module, group: Ranks = None) -> None:
    """After backward, sum over ranks the gradients of norms: each rank has whole norms, but only its own tokens."""
    for parameter in model.parameters():
        if parameter.ndim == 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)


def clip_grad_norm(model: nn.Module, largest: float, group: Ranks = None) -> Tensor:
    """Scale gradients so that their norm over all ranks of `group` is at most `largest`; return the norm before that.

    Each rank's own norm would scale the shares differently. Weights of norm layers are on all ranks, and count once.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    split = sum((gradient.square().sum() for gradient in gradients if gradient.ndim > 1), torch.zeros(()))
    dist.all_reduce(split, group=group)
    norm = (split + sum(gradient.square().sum() for gradient in gradients if gradient.ndim == 1)).sqrt()
    for gradient in gradients:
        gradient.mul_((largest / (norm + 1e-6)).clamp(max=1.0))
    return norm
