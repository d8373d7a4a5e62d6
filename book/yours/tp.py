"""Your tensor parallelism: each rank stores a share of every matrix, and computes with it."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# ---- chapter 14


class Collectives:
    """The collectives of a group of ranks. Each returns a new tensor."""

    def __init__(self, group=None):
        self.group = group
        self.rank, self.tp = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, x):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=self.group)
        return x

    def maximum(self, x):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def all_gather(self, x_Bsh):  # (B, S / tp, h) -> (B, S, h)
        x_Bsh = x_Bsh.contiguous()
        pieces = [torch.empty_like(x_Bsh) for _ in range(self.tp)]
        dist.all_gather(pieces, x_Bsh, group=self.group)
        return torch.cat(pieces, dim=1)

    def reduce_scatter(self, x_BSh):  # (B, S, h) -> (B, S / tp, h)
        pieces = [piece.contiguous() for piece in x_BSh.chunk(self.tp, dim=1)]
        mine_Bsh = torch.empty_like(pieces[0])
        dist.reduce_scatter(mine_Bsh, pieces, group=self.group)
        return mine_Bsh


class Exchange(torch.autograd.Function):
    """Return forward(x). The gradient of x is backward(gradient)."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.exchange = backward
        return forward(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.exchange(gradient), None, None


def conjugates(collectives, sequence_parallel=False):
    """Return the functions f and g, which begin and end a pair of matmuls.

    Build both from `Exchange` and from the methods of `collectives`. Without
    `sequence_parallel`, f(x) returns x, and g(x) the sum over all ranks. With it, f joins
    the tokens of all ranks, and g returns this rank's tokens of the sum.
    """
    raise NotImplementedError


def shard_linear(linear, rank, tp, split, parts=1):
    """Return this rank's share of an nn.Linear, as a new nn.Linear.

    split="columns" divides the outputs, split="rows" the inputs. With columns, `linear` may
    hold several matrices, one above the other, as c_attn holds q, k and v: `parts` says how
    many, and a rank takes its share of each. With rows, the outputs are summed over the
    ranks later, so only rank 0 keeps the bias.
    """
    raise NotImplementedError


def vocabulary_loss(logits_Tv, targets_T, collectives):
    """Return the mean loss per token from this rank's V / tp columns of the logits.

    Rank r has the logits of the tokens from r * V / tp on. Exchange three numbers per token:
    the largest logit, without a gradient, the sum of the exponentials, and the logit of the
    target. `conjugates` returns a g that sums with the right gradient.
    """
    raise NotImplementedError


class Pair(nn.Module):
    """Two matmuls between f and g. The first is split by columns, the second by rows."""

    def __init__(self, f, first, between, second, g):
        super().__init__()
        self.f, self.first, self.between, self.second, self.g = f, first, between, second, g

    def forward(self, x):
        return self.g(self.second(self.between(self.first(self.f(x)))))


class ShardedGPT(nn.Module):
    """This rank's share of a GPT. It returns this rank's V / tp columns of the logits."""

    def __init__(self, gpt, collectives, sequence_parallel=False):
        super().__init__()
        rank, tp = collectives.rank, collectives.tp
        self.f, self.g = conjugates(collectives, sequence_parallel)
        self.h, self.ln_f = copy.deepcopy(gpt.h), copy.deepcopy(gpt.ln_f)
        for block in self.h:
            attn, mlp = block.attn, block.mlp
            qkv = shard_linear(attn.c_attn, rank, tp, "columns", parts=3)
            projection = shard_linear(attn.c_proj, rank, tp, "rows")
            heads = self.attention(attn.a // tp, attn.attend)
            block.attn = Pair(self.f, qkv, heads, projection, self.g)
            up = shard_linear(mlp.c_fc, rank, tp, "columns")
            down = shard_linear(mlp.c_proj, rank, tp, "rows")
            block.mlp = Pair(self.f, up, lambda x: F.gelu(x, approximate="tanh"), down, self.g)
        words = gpt.wte.weight.detach().chunk(tp)[rank].clone()  # (V / tp, h), also the head
        self.words, self.first_id = nn.Parameter(words), rank * len(words)
        self.wpe = copy.deepcopy(gpt.wpe) if rank == 0 else None  # added once, like a bias

    @staticmethod
    def attention(a, attend):
        """Return attention with `a` heads, from the output of the first matmul."""

        def between(qkv_BSc):
            B, S, _ = qkv_BSc.shape
            heads = (t.view(B, S, a, -1).transpose(1, 2) for t in qkv_BSc.chunk(3, dim=2))
            return attend(*heads).transpose(1, 2).reshape(B, S, -1)

        return between

    def embed(self, ids_BS):
        local_BS = ids_BS - self.first_id
        mine_BS = (local_BS >= 0) & (local_BS < len(self.words))
        x_BSh = F.embedding(local_BS * mine_BS, self.words) * mine_BS[..., None]
        if self.wpe is not None:
            x_BSh = x_BSh + self.wpe(torch.arange(ids_BS.shape[1], device=ids_BS.device))
        return self.g(x_BSh)

    def logits(self, x_BSh):
        return F.linear(self.f(self.ln_f(x_BSh)), self.words)

    def forward(self, ids_BS):
        x_BSh = self.embed(ids_BS)
        for block in self.h:
            x_BSh = block(x_BSh)
        return self.logits(x_BSh)

    def sum_norm_gradients(self, collectives):
        """With sequence parallelism, each rank has the norms' gradients of its own tokens."""
        for name, parameter in self.named_parameters():
            if "ln_" in name:
                parameter.grad = collectives.all_reduce(parameter.grad)
