"""Questions that a script asks a DTensor: this rank's part answers for the device, the whole tensor for a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..values.known import know, known

Function = Callable[..., Any]
NUMBERS = (Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__format__)


def of_dtensors(special: Mapping[Any, Function]) -> dict[Any, Function]:
    """Return the replacement of each torch function for DTensors; `special` are those for tensors on the GPU."""
    of: Any = Tensor
    places = of.is_cuda.__get__, of.is_cpu.__get__, Tensor.get_device
    return {
        **{place: _of_part(special[place]) for place in places},
        **{name: _of_whole(special[name]) for name in NUMBERS},
        **{
            operator: _by_value(operator, function)
            for operator, function in special.items()
            if getattr(operator, "__name__", "").strip("_") in COMPARED
        },
    }


# Scripts check that a norm is finite, and compare it with a bound.
COMPARED = frozenset(("isnan", "isinf", "isposinf", "isneginf", "isfinite", "gt", "lt", "ge", "le", "eq", "ne"))


def _of_part(function: Function) -> Function:
    return lambda dtensor, *args, **kwargs: function(dtensor._local_tensor, *args, **kwargs)


def _of_whole(function: Function) -> Function:
    return lambda dtensor, *args, **kwargs: function(dtensor.full_tensor(), *args, **kwargs)


def _by_value(operator: Function, function: Function) -> Function:
    """Run `operator` as DTensor does, and record the value that `function` computes from the local parts."""

    def call(*args: Any, **kwargs: Any) -> Any:
        out = operator(*args, **kwargs)
        part = getattr(out, "_local_tensor", None)
        if part is not None and part.numel() == 1:
            with torch.no_grad():
                value = known(function(*(getattr(arg, "_local_tensor", arg) for arg in args), **kwargs))
            if value is not None:
                know(part, value)
        return out

    return call
