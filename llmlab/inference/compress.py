"""Pruning (weights set to 0) and low-rank factorization (a matrix as a product of two): smaller without fewer bits.

    I  inputs of a layer     O  its outputs     r  rank
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..base.errors import SpecError
from ..quantize.whole import Model, replace_linears

__all__ = ["low_rank", "low_rank_share", "prune", "prune_2_of_4", "sparse_bytes"]


def prune(model: Model, share: float) -> Model:
    """Return a copy in which each matrix of the blocks has the `share` of its weights nearest to 0 set to 0.

    Magnitude pruning (Han et al. 2015), without the training that should follow. It gives the same weights as
    torch.nn.utils.prune.l1_unstructured on each layer.
    """
    if not 0 <= share < 1:
        raise SpecError(f"share={share}: give the share of weights to remove, 0 <= share < 1")
    return replace_linears(model, lambda _, linear: _masked(linear, _largest(linear.weight, share)))


def prune_2_of_4(model: Model) -> Model:
    """Return a copy that keeps the two largest of every four weights along a row, as sparse tensor cores need it.

    Source: Mishra et al., arXiv 2104.08378. Raises SpecError for a layer whose inputs are not a multiple of 4.
    """
    return replace_linears(model, lambda _, linear: _masked(linear, _two_of_four(linear.weight)))


def low_rank(model: Model, rank: int) -> Model:
    """Return a copy whose blocks' matrices are products of (O, r) and (r, I): the best approximation of that rank.

    Best in the sum of squares (Eckart and Young 1936), from the singular value decomposition. A layer that would not
    get smaller stays as it is.
    """
    if rank < 1:
        raise SpecError(f"rank={rank}: give 1 or more")
    return replace_linears(model, lambda _, linear: _factored(linear, rank))


def low_rank_share(inputs: int, outputs: int, rank: int) -> float:
    """Return the size of the two factors as a share of the matrix's size: r (I + O) / (I · O).

    >>> low_rank_share(4096, 4096, 2048)
    1.0
    """
    return rank * (inputs + outputs) / (inputs * outputs)


def sparse_bytes(elements: int, share: float, value: int = 2) -> dict[str, int]:
    """Return the bytes of `elements` weights of `value` bytes each, `share` of them 0: dense and in 3 sparse formats.

    "list": each nonzero weight with a 2-byte column; "mask": one bit per weight, zero or not; "2:4": two bits per
    nonzero weight for its place among four.
    """
    kept = round(elements * (1 - share))
    return {
        "dense": elements * value,
        "list": kept * (value + 2),
        "mask": kept * value + elements // 8,
        "2:4": elements // 2 * value + elements // 8,
    }


@torch.no_grad()
def _masked(linear: nn.Linear, kept: Tensor) -> nn.Linear:
    linear.weight.mul_(kept)
    return linear


def _largest(weight: Tensor, share: float) -> Tensor:
    removed = round(share * weight.numel())
    kept = torch.ones(weight.numel(), dtype=torch.bool, device=weight.device)
    kept[weight.abs().flatten().topk(removed, largest=False).indices] = False
    return kept.view_as(weight)


def _two_of_four(weight: Tensor) -> Tensor:
    if weight.shape[1] % 4:
        raise SpecError(f"a layer of {weight.shape[1]} inputs: 2 of 4 needs a multiple of 4")
    fours = weight.abs().unflatten(1, (-1, 4))  # (O, I / 4, 4)
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(2, fours.topk(2).indices, True).view_as(weight)


@torch.no_grad()
def _factored(linear: nn.Linear, rank: int) -> nn.Module:
    O, I = linear.weight.shape  # noqa: E741
    if low_rank_share(I, O, rank) >= 1:
        return linear
    left, values, right = torch.linalg.svd(linear.weight.float(), full_matrices=False)
    down, up = nn.Linear(I, rank, bias=False), nn.Linear(rank, O, bias=linear.bias is not None)
    down.weight.copy_(right[:rank])
    up.weight.copy_(left[:, :rank] * values[:rank])
    if linear.bias is not None:
        up.bias.copy_(linear.bias)
    return nn.Sequential(down, up).to(linear.weight.dtype).to(linear.weight.device)
