"""In-place accumulation in autograd, which works in place on plain tensors and out of place on tensor subclasses.

A real step has plain tensors, so here the in-place form replaces the other, under autograd's own conditions. Sources:
torch/csrc/autograd/input_buffer.cpp, FunctionsManual.cpp and ATen/TensorSubclassLikeUtils.h.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...base.compat import TorchDispatchMode, current_autograd_node, disable_current_modes, storage_use_count
from ..workspaces.layout import is_dense

aten = torch.ops.aten
# By operator: the autograd nodes that apply it to a tensor that they have just created, and its in-place form.
# FunctionsManual.cpp: index_backward, value_selecting_reduction_backward, atan2_backward;
# TensorAdvancedIndexing.cpp: gather_backward.
FILLS: dict[Any, tuple[frozenset[str], Any]] = {
    aten.scatter_add.default: (frozenset(("GatherBackward0",)), aten.scatter_add_.default),
    aten.masked_fill.Scalar: (frozenset(("Atan2Backward0",)), aten.masked_fill_.Scalar),
    aten.index_put.default: (frozenset(("IndexBackward0",)), aten.index_put_.default),
    aten.scatter.src: (
        frozenset(("TopkBackward0", "SortBackward0", "SortBackward1", "MaxBackward0", "MinBackward0")),
        aten.scatter_.src,
    ),
}
CANDIDATES = frozenset((aten.add.Tensor, *FILLS))


def plain_form(func: Any, args: tuple, made_by: int | None) -> Any:
    """Return the operator that would run on plain tensors: `func` itself, or its in-place form.

    Call it inside the backward pass, for a `func` of CANDIDATES. `made_by` is the number of the autograd node that
    created the storage of args[0], or None if there was none.
    """
    node = current_autograd_node()
    if node is None or torch.is_grad_enabled():
        return func
    if func in FILLS:
        names, in_place = FILLS[func]
        return in_place if node.name() in names else func
    return aten.add_.Tensor if _is_sum_of_gradients(node, args, made_by) else func


def _is_sum_of_gradients(node: Any, args: tuple, made_by: int | None) -> bool:
    """Whether autograd's engine adds two gradients of one tensor, and may write into the first (input_buffer.cpp,
    accumulate and can_accumulate_inplace): it has no gaps, and only the engine refers to it.

    The engine adds the output of `node` to that of an earlier node, while a sum inside a node's own formula adds
    tensors that this node created. The two look the same only if two outputs of a node go to the same place.
    """
    if len(args) != 2 or not isinstance(args[1], Tensor) or args[0].shape != args[1].shape:
        return False
    if made_by == node._sequence_nr():
        targets = [target for target in node.next_functions if target[0] is not None]
        if len(set(targets)) == len(targets):
            return False
    count, storage = _counts(args[0])
    alone = (count, storage) == counts_alone()
    # References from Python, for example from a hook that stores gradients, show in comparison with the other one.
    alone = alone and sys.getrefcount(args[0]) <= sys.getrefcount(args[1])
    return alone and is_dense(args[0])


def _counts(tensor: Tensor) -> tuple[int, int]:
    # torch's stubs lack the method of csrc/autograd/python_variable.cpp.
    return tensor._use_count(), storage_use_count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


@cache
def counts_alone() -> tuple[int, int]:
    """Return the number of references to a gradient, and to its storage, that a mode sees if only the engine has any.

    The first call must be outside of any mode: inside one, autograd runs one call deeper.
    """
    seen = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            if func is aten.add.Tensor:
                seen.append(_counts(args[0]))
            return func(*args, **(kwargs or {}))

    with disable_current_modes(), torch.inference_mode(False), torch.enable_grad(), Look():
        x = torch.ones(2, requires_grad=True) * 1
        torch.autograd.backward([x * 2, x * 3], [torch.ones(2), torch.ones(2)])
    return seen[0]
