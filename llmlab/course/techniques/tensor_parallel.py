"""Tensor and sequence parallelism from scratch: each rank stores a share of every matrix, and computes with it.

    python -m llmlab.course.experiments tensor_parallel --ranks 2 --steps 20 --sequence-parallel --json

Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3) splits the first matrix of a pair by columns and the second
one by rows. The activations between them, which are heads or the width of the MLP, then need no communication. Sequence
parallelism (Korthikanti et al., arXiv 2205.05198, section 4.2.2) also splits the activations outside of the pairs, by
tokens. f stands at the beginning of a pair and g at its end:

                          f                                g
    tensor parallel       forward: nothing                 forward: all-reduce
                          backward: all-reduce             backward: nothing
    sequence parallel     forward: all-gather              forward: reduce-scatter
                          backward: reduce-scatter         backward: all-gather

An all-reduce is a reduce-scatter and an all-gather, so both versions send the same bytes, as long as autograd saves the
gathered tensor, as it does here. Megatron-LM saves a share of it instead, and gathers it again in the backward pass.

    B  sequences    S  tokens per sequence    s  S / tp    h  hidden size    V  vocabulary    v  V / tp
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
ROWS = ("o_proj", "down_proj")  # split by input: their outputs are partial sums


# ---- the collectives


def identity(x: Tensor, group: Ranks) -> Tensor:
    return x.view_as(x)


def all_reduce(x: Tensor, group: Ranks) -> Tensor:
    """Return the sum over all ranks."""
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def all_gather(x_Bsh: Tensor, group: Ranks) -> Tensor:
    """Join the tokens of all ranks: (B, S / tp, h) -> (B, S, h)."""
    pieces = [torch.empty_like(x_Bsh, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, x_Bsh.contiguous(), group=group)
    return torch.cat(pieces, dim=1)


def reduce_scatter(x_BSh: Tensor, group: Ranks) -> Tensor:
    """Return this rank's tokens of the sum over all ranks: (B, S, h) -> (B, S / tp, h)."""
    tp = dist.get_world_size(group)
    pieces = torch.stack(x_BSh.tensor_split(tp, dim=1))  # one contiguous piece per rank
    mine_Bsh = torch.empty_like(pieces[0])
    dist.reduce_scatter_tensor(mine_Bsh, pieces.flatten(0, 1), group=group)
    return mine_Bsh


# ---- f and g


class Exchange(torch.autograd.Function):
    """Return forward(x, group). The gradient of x is backward(gradient, group)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Collective, backward: Collective, group: Ranks) -> Tensor:
        ctx.exchange, ctx.group = backward, group
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange(gradient, ctx.group), None, None, None


def copy_in(x: Tensor, group: Ranks) -> Tensor:
    """f: all ranks already have x. The gradient of x is the sum of what all shares of the pair contribute."""
    return Exchange.apply(x, identity, all_reduce, group)


def sum_out(x: Tensor, group: Ranks) -> Tensor:
    """g: add the partial sums of all ranks. The gradient of a sum is also the gradient of each term."""
    return Exchange.apply(x, all_reduce, identity, group)


def gather_in(x_Bsh: Tensor, group: Ranks) -> Tensor:
    """f of sequence parallelism: each rank has S / tp tokens, and the pair needs all of them."""
    return Exchange.apply(x_Bsh, all_gather, reduce_scatter, group)


def scatter_out(x_BSh: Tensor, group: Ranks) -> Tensor:
    """g of sequence parallelism: each rank continues with the sums of its own S / tp tokens."""
    return Exchange.apply(x_BSh, reduce_scatter, all_gather, group)


# ---- the vocabulary, split by rows: V / tp tokens per rank


class VocabularyEmbedding(nn.Module):
    """Look up the tokens that this rank stores. The others are zeros here, so the sum over ranks is the embedding."""

    def __init__(self, weight: nn.Parameter, leave: Collective, group: Ranks) -> None:
        super().__init__()
        self.weight, self.leave, self.group = weight, leave, group  # (V / tp, h)

    def forward(self, ids_BS: Tensor) -> Tensor:
        ids_BS = ids_BS - dist.get_rank(self.group) * len(self.weight)
        elsewhere = (ids_BS < 0) | (ids_BS >= len(self.weight))
        x_BSh = F.embedding(ids_BS.masked_fill(elsewhere, 0), self.weight)
        return self.leave(x_BSh.masked_fill(elsewhere[..., None], 0.0), self.group)


class VocabularyCrossEntropy(torch.autograd.Function):
    """Mean of -ln p(target) from logits that are split by vocabulary. Ranks exchange three numbers per token."""

    @staticmethod
    def forward(ctx: Any, logits_Tv: Tensor, targets_T: Tensor, group: Ranks) -> Tensor:
        maximum_T = logits_Tv.amax(-1)
        dist.all_reduce(maximum_T, op=dist.ReduceOp.MAX, group=group)
        exponentials_Tv = torch.exp(logits_Tv - maximum_T[:, None])
        local_T = targets_T - dist.get_rank(group) * logits_Tv.shape[-1]
        elsewhere_T = (local_T < 0) | (local_T >= logits_Tv.shape[-1])
        local_T = local_T.masked_fill(elsewhere_T, 0)
        target_T = logits_Tv.gather(1, local_T[:, None])[:, 0].masked_fill(elsewhere_T, 0.0)
        sums = torch.stack([exponentials_Tv.sum(-1), target_T])  # (2, T)
        dist.all_reduce(sums, group=group)
        total_T, target_T = sums
        ctx.save_for_backward(exponentials_Tv.div_(total_T[:, None]), local_T, elsewhere_T)
        return (total_T.log() + maximum_T - target_T).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        probabilities_Tv, local_T, elsewhere_T = ctx.saved_tensors
        dlogits_Tv = probabilities_Tv.clone()
        dlogits_Tv.scatter_add_(1, local_T[:, None], (~elsewhere_T).to(dlogits_Tv.dtype)[:, None] * -1)
        return dlogits_Tv * (gradient / len(local_T)), None, None


def next_token_loss(logits_BSv: Tensor, ids_BS: Tensor, group: Ranks = None) -> Tensor:
    """Return the mean loss per token of logits (B, S, V / tp), in nats: the same on all ranks."""
    return VocabularyCrossEntropy.apply(logits_BSv[:, :-1].flatten(0, 1).float(), ids_BS[:, 1:].flatten(), group)


# ---- the model


def check(spec: ModelSpec, tp: int, seq_len: int | None = None) -> None:
    """Raise SpecError if `tp` does not divide a size that is split. Give `seq_len` for sequence parallelism."""
    sizes = {name: getattr(spec, name) for name in ("heads", "kv_heads", "intermediate", "vocab")}
    if seq_len is not None:
        sizes["seq_len"] = seq_len
    for name, size in sizes.items():
        if size % tp:
            fits = [n for n in range(1, size + 1) if all(value % n == 0 for value in sizes.values())]
            raise SpecError(f"tp={tp} does not divide {name}={size} of {spec.name}; give tp one of {fits}")


def shard(model: Llama, sequence_parallel: bool = False, group: Ranks = None) -> Llama:
    """Split `model`, equal on all ranks of `group`, in place, and return it: a rank keeps 1 / tp of every matrix.

    Its logits are (B, S, V / tp): give them to `next_token_loss`. With `sequence_parallel`, norms and residual stream
    have S / tp tokens, so call `sum_norm_gradients` after backward. Raises SpecError if tp does not divide a size.
    """
    check(model.spec, dist.get_world_size(group))
    enter, leave = (gather_in, scatter_out) if sequence_parallel else (copy_in, sum_out)
    for name, linear in list(model.named_modules()):
        last = name.rpartition(".")[2]
        if last in COLUMNS:
            keep_share(linear, 0, group)
        elif last in ROWS:
            keep_share(linear, 1, group)
            linear.register_forward_hook(lambda _module, _inputs, x: leave(x, group))
    for block in model.layers:
        for name in ("self_attn", "mlp"):  # x enters a pair once, for q, k and v together
            pair = block.get_submodule(name)
            pair.register_forward_pre_hook(lambda _module, inputs: (enter(inputs[0], group), *inputs[1:]))
    embeddings = keep_share(model.embed_tokens, 0, group)
    model.set_submodule("embed_tokens", VocabularyEmbedding(embeddings, leave, group))
    if model.spec.tied:
        model.lm_head.weight = embeddings
    else:
        keep_share(model.lm_head, 0, group)
    model.lm_head.register_forward_pre_hook(lambda _module, inputs: enter(inputs[0], group))
    return model


def keep_share(module: nn.Module, dim: int, group: Ranks) -> nn.Parameter:
    """Replace the weight of a module by a copy of this rank's piece along `dim`, so that the whole weight is freed."""
    pieces = module.get_parameter("weight").detach().tensor_split(dist.get_world_size(group), dim)
    module.weight = nn.Parameter(pieces[dist.get_rank(group)].clone(memory_format=torch.contiguous_format))
    return module.weight


def sum_norm_gradients(model: nn.Module, group: Ranks = None) -> None:
    """After backward, sum the gradients of the norms over ranks: each rank has whole norms, but only its own tokens."""
    for parameter in model.parameters():
        if parameter.ndim == 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)


def clip_grad_norm(model: nn.Module, largest: float, group: Ranks = None) -> Tensor:
    """Scale the gradients so that their norm over all ranks is at most `largest`, and return the norm before that.

    The weights of norm layers are on all ranks and count once. Everything else is a share.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    split = sum((gradient.square().sum() for gradient in gradients if gradient.ndim > 1), torch.zeros(()))
    dist.all_reduce(split, group=group)
    norm = (split + sum(gradient.square().sum() for gradient in gradients if gradient.ndim == 1)).sqrt()
    for gradient in gradients:
        gradient.mul_((largest / (norm + 1e-6)).clamp(max=1.0))
    return norm
