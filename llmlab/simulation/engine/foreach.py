"""Operators over lists of tensors (_foreach_, _fused_): which devices they accept, and which only change values."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...base.compat import FakeTensor

COPY = torch.ops.aten._foreach_copy_.default  # the one that goes from device to device


def mixed_devices(func: Any, args: tuple) -> tuple[torch.device, torch.device] | None:
    """Return the two devices that `func` finds among tensors it would put together, None where it finds one.

    Each position of the lists is an operation of its own. Torch's fake mode does not look: an optimizer whose states
    stayed on the host when the model went to the card would step.
    """
    if not _takes_lists(func) or func is COPY:
        return None
    for row in zip(*_lists(args), strict=False):
        devices = list(dict.fromkeys(_device(each) for each in row if each.dim()))  # numbers may lie on the host
        if len(devices) > 1:
            return devices[0], devices[1]
    return None


def changes_values_alone(func: Any, args: tuple) -> bool:
    """Whether `func` writes into lists of fake tensors: it gives nothing, and there are no values to change.

    Of an optimizer's step, several times hundreds of tensors, torch's fake mode would look at each.
    """
    if not _writes_lists(func):
        return False
    lists = _lists(args)
    if len({*map(len, lists)}) != 1 or any(type(each) is not FakeTensor for tensors in lists for each in tensors):
        return False
    # Where shapes differ torch broadcasts or refuses, and integers take no floats: it is to say which.
    alike = (len({each.shape for each in row}) == 1 for row in zip(*lists, strict=True))
    return all(alike) and all(each.is_floating_point() for tensors in lists for each in tensors)


def _lists(args: tuple) -> list[Any]:
    return [each for each in args if isinstance(each, (list, tuple)) and each and isinstance(each[0], Tensor)]


def _device(tensor: Tensor) -> torch.device:
    # The attribute: of a fake tensor `device` is an operator, which the engine would be asked for.
    return tensor.fake_device if type(tensor) is FakeTensor else tensor.device


@cache
def _takes_lists(func: Any) -> bool:
    return func._schema.name.startswith(("aten::_foreach_", "aten::_fused_"))


@cache
def _writes_lists(func: Any) -> bool:
    name = func._schema.name
    return name.startswith("aten::_foreach_") and name.endswith("_")
