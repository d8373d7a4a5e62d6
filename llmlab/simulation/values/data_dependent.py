"""Operators whose output's size depends on values, for tensors whose values are known (values/known.py).

A mask made on the host, a padding mask or a vector of lengths is known; what the card computed is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...base.compat import arg_tree_leaves, disable_current_modes, tree_map_only
from .known import know, known

aten = torch.ops.aten


def sized_by_value(run: Callable[..., Any], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return what operator `func` returns where the values that size it are known, else NotImplemented.

    `run` runs an operator as the engine does, so that what it makes takes memory.
    """
    if func is aten.masked_select.default:
        x, mask = args
        shape = torch.broadcast_shapes(x.shape, mask.shape)
        args = run(aten.expand.default, x, shape), [run(aten.expand.default, mask, shape)]
        func = aten.index.Tensor
    if func is aten.index.Tensor:
        return _masked(run, *args)
    tensors = [each for each in arg_tree_leaves(*args, **kwargs) if isinstance(each, Tensor)]
    if not tensors or any(known(each) is None for each in tensors):
        return NotImplemented
    device = tensors[0].device
    args, kwargs = tree_map_only(Tensor, known, (args, {**kwargs}))
    with disable_current_modes():
        values = func(*args, **kwargs)
    return tree_map_only(Tensor, lambda value: _made(run, value, device), values)


def _made(run: Callable[..., Any], value: Tensor, device: torch.device) -> Tensor:
    fake = run(aten.empty_strided.default, value.size(), value.stride(), dtype=value.dtype, device=device)
    know(fake, value)
    return fake


def _masked(run: Callable[..., Any], x: Tensor, indices: list[Tensor | None]) -> Any:
    """native/TensorAdvancedIndexingUtils.h, expandTensors: x[mask] is x at nonzero(mask), one column per dimension."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
            continue
        if known(index) is None:
            return NotImplemented
        places = run(aten.nonzero.default, index)
        found += [run(aten.select.int, places, 1, each) for each in range(index.dim())]
    return run(aten.index.Tensor, x, found)
