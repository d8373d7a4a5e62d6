"""Facts about the functions of yours/ddp.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler


def _averaged(
    function: Callable[..., Any], shapes: tuple, bucket_bytes: int, passes: int = 1
) -> tuple[list[nn.Parameter], list[tuple[int, int]]]:
    """Return the parameters after backward passes on rank 0 of three, and its messages as pairs: elements, and how
    many parameters had a gradient at that moment.

    The backward pass reaches the last parameter first. The gradients of rank 0 are 1 / elements, and those of the other
    ranks are 2 and 3 times as large.
    """
    parameters: list[nn.Parameter] = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    messages = []

    def all_reduce(flat: Tensor) -> None:
        messages.append((flat.numel(), sum(parameter.grad is not None for parameter in parameters)))
        flat.mul_(1 + 2 + 3)

    function(parameters, 3, all_reduce, bucket_bytes)
    for _ in range(passes):
        loss = torch.ones(())
        for parameter in parameters:
            loss = loss * parameter.mean()
        loss.backward()
    return parameters, messages


def _means(parameters: list[nn.Parameter]) -> bool:
    return all(p.grad is not None and torch.allclose(p.grad, torch.full_like(p, 2 / p.numel())) for p in parameters)


def _sizes(messages: list[tuple[int, int]]) -> list[int]:
    return [elements for elements, _ in messages]


average_in_backward = {
    "gradients are means": lambda f: _means(_averaged(f, (3, 5, 2), 100)[0]),
    "parameters do not change": lambda f: all(bool((p == 1).all()) for p in _averaged(f, (3, 5, 2), 100)[0]),
    "any shape": lambda f: _means(_averaged(f, ((2, 3), (4,), (1, 1, 5)), 16)[0]),
    "buckets are full": lambda f: _sizes(_averaged(f, (2, 2, 2, 2), 16)[1]) == [4, 4],
    "buckets begin with the last parameter": lambda f: _sizes(_averaged(f, (4, 2, 2), 16)[1]) == [4, 4],
    "a large gradient travels alone": lambda f: _sizes(_averaged(f, (1, 9, 1), 8)[1]) == [1, 9, 1],
    "messages start during the backward pass": lambda f: [n for _, n in _averaged(f, (1, 1, 1), 4)[1]] == [1, 2, 3],
    "each backward pass sends": lambda f: len(_averaged(f, (2, 2, 2), 8, passes=2)[1]) == 6,
}


def _by_torch(count: int, rank: int, dp: int, epoch: int) -> list[int]:
    sampler: DistributedSampler = DistributedSampler(range(count), num_replicas=dp, rank=rank)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return list(sampler)


share = {
    "each of 4 ranks reads 3 of 10 examples": lambda f: {len(f(10, rank, 4, 0)) for rank in range(4)} == {3},
    "together they read all": lambda f: {i for rank in range(4) for i in f(10, rank, 4, 0)} == set(range(10)),
    "another epoch has another order": lambda f: f(100, 0, 4, 0) != f(100, 0, 4, 1),
    "2 examples are enough for 5 ranks": lambda f: [len(f(2, rank, 5, 0)) for rank in range(5)] == [1] * 5,
    "the result is that of DistributedSampler": lambda f: all(
        f(count, rank, dp, epoch) == _by_torch(count, rank, dp, epoch)
        for count, dp, epoch in ((10, 4, 0), (12, 3, 7), (2, 5, 1))
        for rank in range(dp)
    ),
}
