"""What a script asks of a DTensor: where it is, of this rank's part, and a number, of the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..values.known import know, known

Function = Callable[..., Any]
NUMBERS = (Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__format__)


def of_dtensors(special: Mapping[Any, Function]) -> dict[Any, Function]:
    """Return, by torch function, what it gives of a DTensor; `special` is the same of tensors on the card."""
    of: Any = Tensor
    places = of.is_cuda.__get__, of.is_cpu.__get__, Tensor.get_device
    return {
        **{place: _of_part(special[place]) for place in places},
        **{name: _of_whole(special[name]) for name in NUMBERS},
        **{
            each: _by_value(each, function)
            for each, function in special.items()
            if getattr(each, "__name__", "").strip("_") in COMPARED
        },
    }


# A norm is asked whether it is finite, and compared with a bound.
COMPARED = frozenset(("isnan", "isinf", "isposinf", "isneginf", "isfinite", "gt", "lt", "ge", "le", "eq", "ne"))


def _of_part(function: Function) -> Function:
    return lambda dtensor, *args, **kwargs: function(dtensor._local_tensor, *args, **kwargs)


def _of_whole(function: Function) -> Function:
    return lambda dtensor, *args, **kwargs: function(dtensor.full_tensor(), *args, **kwargs)


def _by_value(asked: Function, function: Function) -> Function:
    """Run `asked` as DTensor does, and let its result have the value that `function` gives of the parts."""

    def call(*args: Any, **kwargs: Any) -> Any:
        out = asked(*args, **kwargs)
        part = getattr(out, "_local_tensor", None)
        if part is not None and part.numel() == 1:
            with torch.no_grad():
                value = known(function(*(getattr(arg, "_local_tensor", arg) for arg in args), **kwargs))
            if value is not None:
                know(part, value)
        return out

    return call
