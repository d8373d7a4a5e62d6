"""What the engine asks of an operator before it runs it: is it made of others, where are its tensors, does it cast."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...base.compat import (
    ELEMENTWISE_TYPE_PROMOTION_KIND,
    DispatchKey,
    FakeTensor,
    dispatch_has_kernel_for_dispatch_key,
    elementwise_dtypes,
)

COPY = torch.ops.aten._foreach_copy_.default  # the one that goes from device to device
# Elementwise, but with operands of dtypes that stay what they are: a mask, a source.
KEEP_DTYPES = frozenset(("copy_", "copy", "_to_copy", "masked_fill", "masked_fill_", "where"))


@cache
def is_composite(func: Any) -> bool:
    """Whether an operator has no kernel and is made of others, by C++ (func.decompose() also knows Python's).

    Inference mode leaves these to the engine. Three have both, silu_backward among them: what stands in for other
    devices is not what the card runs.
    """
    name, has_kernel = func.name(), dispatch_has_kernel_for_dispatch_key
    return has_kernel(name, DispatchKey.CompositeImplicitAutograd) and not has_kernel(name, DispatchKey.CPU)


def decomposed(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run what the composite operator `func` is made of: with autograd's kernels, if a patch put it there."""
    patched = dispatch_has_kernel_for_dispatch_key(func.name(), DispatchKey.AutogradCPU)
    return func._op_dk(DispatchKey.AutogradCPU if patched else DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def cast_copies(func: Any, args: tuple) -> list[int]:
    """Return the bytes of the copies that an elementwise `func` makes on a CPU of its operands, and of its first one's
    new value.

    aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::compute_types: on a CPU an operand that is not of the common
    dtype is cast into a copy first, and a result of another dtype is computed into one; CUDA's kernels cast as they
    read and write.
    """
    if torch.Tag.pointwise not in func.tags:
        return []
    operands = [arg for arg in args if isinstance(arg, Tensor)]
    if len(operands) < 2 or len({operand.dtype for operand in operands}) == 1:
        return []
    if func._opname in KEEP_DTYPES:
        return []
    numbers = [arg for arg in args if isinstance(arg, (Tensor, int, float))]
    common = elementwise_dtypes(*numbers, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)[1]
    copied = [operand for operand in operands if operand.dtype != common]
    if func._schema.is_mutable and operands[0].dtype != common:
        copied.append(operands[0])
    return [tensor.numel() * common.itemsize for tensor in copied]


# ---- operators over lists of tensors (_foreach_, _fused_)


def mixed_devices(func: Any, args: tuple) -> tuple[torch.device, torch.device] | None:
    """Return the two devices that `func` finds among tensors it would put together, None where it finds one.

    Each position of the lists is an operation of its own. Torch's fake mode does not look: an optimizer whose states
    stayed on the host when the model went to the card would step.
    """
    if not _takes_lists(func) or func is COPY:
        return None
    for row in zip(*_lists(args), strict=False):
        devices = list(dict.fromkeys(_device(tensor) for tensor in row if tensor.dim()))  # numbers may lie on the host
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
    if len({*map(len, lists)}) != 1 or any(type(tensor) is not FakeTensor for tensors in lists for tensor in tensors):
        return False
    # Where shapes differ torch broadcasts or refuses, and integers take no floats: it is to say which.
    alike = (len({tensor.shape for tensor in row}) == 1 for row in zip(*lists, strict=True))
    return all(alike) and all(tensor.is_floating_point() for tensors in lists for tensor in tensors)


def _lists(args: tuple) -> list[Any]:
    return [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]


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
