"""Facts about the functions of yours/three_d.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...specs.mesh import coordinates
from ...specs.run import Training

ORDER = ("tp", "cp", "dp", "pp")


def _places(function: Callable[..., Any], **sizes: int) -> bool:
    run = Training(**sizes)  # type: ignore[arg-type]
    of = {axis: getattr(run, axis) for axis in ORDER}
    return all(function(rank, of) == coordinates(run, rank) for rank in range(run.world_size))


place_of = {
    "rank 5 of 2 × 2 × 2": lambda f: f(5, {"tp": 2, "dp": 2, "pp": 2}) == {"tp": 1, "dp": 0, "pp": 1},
    "the 512 ranks of the job": lambda f: _places(f, tp=4, dp=32, pp=4),
    "four axes": lambda f: _places(f, tp=2, cp=3, dp=4, pp=2),
    "another axis innermost": lambda f: f(1, {"pp": 2, "tp": 2}) == {"pp": 1, "tp": 0},
}


def _groups(function: Callable[..., Any], axes: Sequence[str], **sizes: int) -> bool:
    """Whether the groups are those of ranks with the same coordinates along all other axes, each group once."""
    run, together = Training(**sizes), {}  # type: ignore[arg-type, var-annotated]
    for rank in range(run.world_size):
        place = coordinates(run, rank)
        together.setdefault(tuple(place[axis] for axis in ORDER if axis not in axes), []).append(rank)
    result = function({axis: getattr(run, axis) for axis in ORDER}, axes)
    return bool(sorted(sorted(group) for group in result) == sorted(together.values()))


groups_over = {
    "one axis": lambda f: all(_groups(f, [axis], tp=2, cp=2, dp=3, pp=4) for axis in ORDER),
    "tp and pp together, for the norm of all gradients": lambda f: _groups(f, ["tp", "pp"], tp=8, dp=2, pp=4),
    "dp and cp together, for copies of the weights": lambda f: _groups(f, ["dp", "cp"], tp=2, cp=2, dp=4, pp=2),
    "no axis: each rank alone": lambda f: _groups(f, [], tp=2, pp=2),
    "all axes: one group": lambda f: _groups(f, ORDER, tp=2, pp=2),
    "another axis innermost": lambda f: sorted(map(sorted, f({"pp": 2, "tp": 2}, ["pp"]))) == [[0, 1], [2, 3]],
}


def _summed(function: Callable[..., Any], split: bool, sequence_parallel: bool) -> tuple[float, set[str]]:
    """Return the gradient of a parameter, whose gradient is 1 on each of dp × cp × tp = 3 × 2 × 4 ranks, and the axes
    over which it was summed. There are two stages, over which nothing is summed."""
    sizes = {"tp": 4, "cp": 2, "dp": 3, "pp": 2}
    summed_axes: set[str] = set()
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)

    def all_reduce(tensor: Tensor, axes: Sequence[str]) -> None:
        for axis in set(axes) - summed_axes:
            tensor.mul_(sizes[axis])
        summed_axes.update(axes)

    function([(parameter, split)], sizes, sequence_parallel, all_reduce)
    return parameter.grad[0].item(), summed_axes


average_over_mesh = {
    "a split matrix is averaged over dp and cp": lambda f: _summed(f, True, False) == (1.0, {"dp", "cp"}),
    "with sequence parallelism, too": lambda f: _summed(f, True, True) == (1.0, {"dp", "cp"}),
    "a norm is averaged over dp and cp": lambda f: _summed(f, False, False) == (1.0, {"dp", "cp"}),
    "with sequence parallelism, it is also summed over tp": lambda f: _summed(f, False, True)
    == (4.0, {"dp", "cp", "tp"}),
}
