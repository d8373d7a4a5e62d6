"""Facts about the functions of yours/zero.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SUM = 1 + 2 + 3  # the gradients of three ranks are 1, 2 and 3 times those of the first


class Unit:
    """The unit of the page, except that `free` fills it with NaN: to read memory that is gone could end the process."""

    def __init__(self, parameters: Iterable[nn.Parameter], rank: int, dp: int) -> None:
        self.parameters, self.rank, self.dp = list(parameters), rank, dp
        self.sizes = [p.numel() for p in self.parameters]
        padded = -(-sum(self.sizes) // dp) * dp
        self.flat = self.parameters[0].detach().new_zeros(padded)
        for p, view in zip(self.parameters, self.flat[: sum(self.sizes)].split(self.sizes), strict=True):
            view.copy_(p.detach().flatten())
            p.data = view.view_as(p)
        self.chunk, self.freed = nn.Parameter(self.flat.chunk(dp)[rank].clone()), False

    def flat_gradient(self) -> Tensor:
        flat = self.flat.new_zeros(self.flat.numel())
        flat[: sum(self.sizes)] = torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])
        return flat

    def whole(self) -> bool:
        return not self.freed

    def free(self) -> None:
        self.flat.fill_(torch.nan)
        self.freed = True

    def gather(self, all_gather: Callable[[Tensor, Tensor], Any]) -> None:
        if self.freed:
            self.freed = False
            all_gather(self.flat, self.chunk.detach())


def _parameters(shapes: tuple) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def _flat(parameters: Iterable[Tensor]) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def _adamw(parameters: list) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def _sharded(
    optimizer: Callable[..., Any], shapes: tuple, rank: int, dp: int, zero: int = 1, steps: int = 3
) -> tuple[bool, int, int]:
    """Train on one rank of `dp`, whose all-gather adds the chunks of the others from a run on one process.

    Returns whether the weights are those of that run, the elements of the first moments, and the number of messages.
    """
    plain = _parameters(shapes)
    reference, unit, messages = _adamw(plain), Unit(_parameters(shapes), rank, dp), 0

    def all_gather(flat: Tensor, chunk: Tensor) -> None:
        nonlocal messages
        messages += 1
        own = chunk.detach().clone()
        flat.zero_()[: sum(unit.sizes)] = _flat(plain)
        flat.chunk(dp)[rank].copy_(own)

    sharded = optimizer([unit], _adamw, all_gather)
    for step in range(steps):
        sharded.zero_grad()
        torch.manual_seed(1 + step)
        for one, other in zip(plain, unit.parameters, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        if zero > 1:
            unit.chunk.grad = unit.flat_gradient().chunk(dp)[rank].clone()
            for parameter in unit.parameters:
                parameter.grad = None
        if zero == 3:
            unit.free()
        reference.step()
        sharded.step()
    if zero == 3:
        unit.gather(all_gather)
        messages -= 1
    moments = sum(state["exp_avg"].numel() for state in sharded.optimizer.state.values())
    return torch.allclose(_flat(unit.parameters), _flat(plain), atol=1e-6), moments, messages


ShardedOptimizer = {
    "the weights are those of AdamW on one process": lambda f: all(
        _sharded(f, ((4, 2), (8,)), rank, 2)[0] for rank in (0, 1)
    ),
    "so are 7 weights on 3 ranks": lambda f: all(_sharded(f, (5, 2), rank, 3)[0] for rank in range(3)),
    "each rank has one third of the states": lambda f: _sharded(f, (5, 4), 1, 3)[1] == 3,
    "there is one all-gather per step": lambda f: _sharded(f, (5, 4), 1, 3, steps=3)[2] == 3,
    "a chunk keeps the gradient that it has": lambda f: _sharded(f, (5, 4), 2, 3, zero=2)[0],
    "a freed unit stays free": lambda f: _sharded(f, (5, 4), 0, 3, zero=3)[::2] == (True, 0),
}


def _reduced(function: Callable[..., Any], shapes: tuple, rank: int = 0, passes: int = 1) -> tuple[Unit, list[int]]:
    """Return the unit of a rank of three after backward passes in which each gradient is 1 / elements, and for each
    message how many parameters had a gradient at that moment."""
    unit, messages = Unit([nn.Parameter(torch.ones(shape)) for shape in shapes], rank, 3), []

    def reduce_scatter(chunk: Tensor, flat: Tensor) -> None:
        messages.append(sum(parameter.grad is not None for parameter in unit.parameters))
        chunk.copy_(SUM * flat.chunk(3)[rank])

    function(unit, reduce_scatter)
    for _ in range(passes):
        torch.stack([parameter.mean() for parameter in unit.parameters]).sum().backward()
    return unit, messages


def _mean(unit: Unit, passes: int = 1) -> bool:
    expected = torch.zeros(unit.flat.numel())
    expected[: sum(unit.sizes)] = torch.cat([torch.full((size,), passes * SUM / 3 / size) for size in unit.sizes])
    grad = unit.chunk.grad
    return grad is not None and torch.allclose(grad, expected.chunk(3)[unit.rank])


reduce_in_backward = {
    "the chunk has the mean over ranks": lambda f: all(_mean(_reduced(f, ((2, 3), 3), rank)[0]) for rank in range(3)),
    "so does a padded one": lambda f: all(_mean(_reduced(f, (4, 3), rank)[0]) for rank in range(3)),
    "the whole gradients are gone": lambda f: all(p.grad is None for p in _reduced(f, (4, 3))[0].parameters),
    "one message, when all gradients are there": lambda f: _reduced(f, (4, 3, 2))[1] == [3],
    "micro-batches are summed": lambda f: _mean(_reduced(f, (4, 3), 1, passes=2)[0], passes=2),
}


def _gathered(function: Callable[..., Any], checkpointed: bool = False) -> dict[str, Any]:
    """Run two steps of two blocks whose units `function` gathers, and of the same blocks without it."""

    def blocks() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2)]

    plain, sharded = blocks(), blocks()
    units = [Unit(block.parameters(), 0, 2) for block in sharded]
    full, messages = [unit.flat.clone() for unit in units], [0, 0]

    def all_gather_of(number: int) -> Callable[[Tensor, Tensor], None]:
        def all_gather(flat: Tensor, chunk: Tensor) -> None:
            messages[number] += 1
            flat.copy_(full[number])

        return all_gather

    for number, (block, unit) in enumerate(zip(sharded, units, strict=True)):
        function(block, unit, all_gather_of(number))
    whole: dict[str, list[bool]] = {"start": [unit.whole() for unit in units]}
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    for step in range(2):
        outputs = []
        for chain in (plain, sharded):
            y = x.clone().requires_grad_()
            for number, block in enumerate(chain):
                y = checkpoint(block, y, use_reentrant=False) if checkpointed else block(y)
                if chain is sharded and number == 0 and not step:
                    whole["between"] = [unit.whole() for unit in units]
            outputs.append(y)
        whole["forward"] = [unit.whole() for unit in units]
        for y in outputs:
            y.square().sum().backward()
        whole["backward"] = [unit.whole() for unit in units]
    gradients = [_flat(p.grad for block in chain for p in block.parameters() if p.grad is not None)
                 for chain in (plain, sharded)]  # fmt: skip
    (one, other), (first, second) = gradients, outputs
    right = torch.equal(first, second) and one.shape == other.shape and torch.allclose(one, other)
    return {"right": right, "messages": messages, **whole}


gather_around = {
    "the unit is free at first": lambda f: _gathered(f)["start"] == [False, False],
    "outputs and gradients are right": lambda f: _gathered(f)["right"],
    "each unit is free after the forward pass": lambda f: (_gathered(f)["between"], _gathered(f)["forward"])
    == ([False, False], [False, False]),
    "it is free after the backward pass": lambda f: _gathered(f)["backward"] == [False, False],
    "two gathers per step": lambda f: _gathered(f)["messages"] == [4, 4],
    "the same with checkpointing": lambda f: _gathered(f, True)["right"] and _gathered(f, True)["messages"] == [4, 4],
}
