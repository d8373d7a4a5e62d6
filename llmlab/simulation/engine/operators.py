"""Questions that the engine asks before it runs an operator: is it composite, where are its tensors, does it cast?"""

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

COPY = torch.ops.aten._foreach_copy_.default  # the operator that copies between devices
# Elementwise operators with an operand that keeps its dtype: a mask, a source.
KEEP_DTYPES = frozenset(("copy_", "copy", "_to_copy", "masked_fill", "masked_fill_", "where"))


@cache
def is_composite(func: Any) -> bool:
    """Whether an operator has no kernel and calls others, in C++ (func.decompose() also knows Python decompositions).

    In inference mode, the engine must decompose these. Three operators have both forms, silu_backward among them; a GPU
    runs the kernel, and the composite form is for other devices.
    """
    name, has_kernel = func.name(), dispatch_has_kernel_for_dispatch_key
    return has_kernel(name, DispatchKey.CompositeImplicitAutograd) and not has_kernel(name, DispatchKey.CPU)


def decomposed(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run the operators that the composite `func` calls; use autograd's kernel for it, if a patch registered one."""
    patched = dispatch_has_kernel_for_dispatch_key(func.name(), DispatchKey.AutogradCPU)
    return func._op_dk(DispatchKey.AutogradCPU if patched else DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def cast_copies(func: Any, args: tuple) -> list[int]:
    """Return the bytes of each copy that an elementwise `func` creates on a CPU: of operands, and of the new value of
    the first operand.

    aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::compute_types: on a CPU, an operand that does not have the
    common dtype is first cast into a copy, and a result of another dtype is computed in a copy. CUDA kernels cast while
    they read and write.
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
    """Return two different devices of tensors that `func` would combine; None if each combination has one device.

    Each position of the lists is a separate operation. Torch's fake mode does not check this, so an optimizer whose
    states stayed on the host when the model moved to the GPU would run without an error.
    """
    if not _takes_lists(func) or func is COPY:
        return None
    for row in zip(*_lists(args), strict=False):
        devices = list(dict.fromkeys(_device(tensor) for tensor in row if tensor.dim()))  # numbers may be on the host
        if len(devices) > 1:
            return devices[0], devices[1]
    return None


def changes_values_alone(func: Any, args: tuple) -> bool:
    """Whether `func` only writes into lists of fake tensors: it returns nothing, and there are no values to change.

    An optimizer's step calls such operators several times on hundreds of tensors, and torch's fake mode would look at
    each of them.
    """
    if not _writes_lists(func):
        return False
    lists = _lists(args)
    if len({*map(len, lists)}) != 1 or any(type(tensor) is not FakeTensor for tensors in lists for tensor in tensors):
        return False
    # If shapes differ, or if floats are written to integers, torch must decide whether that is allowed.
    alike = (len({tensor.shape for tensor in row}) == 1 for row in zip(*lists, strict=True))
    return all(alike) and all(tensor.is_floating_point() for tensors in lists for tensor in tensors)


def _lists(args: tuple) -> list[Any]:
    return [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]


def _device(tensor: Tensor) -> torch.device:
    # The attribute, because `device` of a fake tensor is an operator, which would go through the engine.
    return tensor.fake_device if type(tensor) is FakeTensor else tensor.device


@cache
def _takes_lists(func: Any) -> bool:
    return func._schema.name.startswith(("aten::_foreach_", "aten::_fused_"))


@cache
def _writes_lists(func: Any) -> bool:
    name = func._schema.name
    return name.startswith("aten::_foreach_") and name.endswith("_")
