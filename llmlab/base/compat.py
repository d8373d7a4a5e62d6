"""Private names of torch that llmlab uses by their path, so that a release that moves one fails in one place.

Public names of torch (torch.utils.checkpoint, DeviceMesh) and its operators (torch.ops.aten._x) need no entry. A name
that is expensive to import, or that somebody may patch before it is called, is looked up by `symbol` where it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from .errors import NotAvailable

TESTED = {"torch": "2.13.0"}  # as in constraints.txt, which is not in the wheel


def lacks(library: str, version: str, name: str) -> NotAvailable:
    """Return the error for `name`, which `library` of this `version` does not have."""
    tested = TESTED[library]
    return NotAvailable(
        f"{library} {version} lacks {name}, which llmlab needs; it was tested with {library} {tested}: "
        f"pip install {library}=={tested}"
    )


def symbol(path: str) -> Any:
    """Return what a dotted name of torch stands for, as it is at the moment of the call.

    Raises NotAvailable, with torch's version and the missing name.
    """
    names = path.split(".")
    value: Any = import_module(names[0])
    for index, name in enumerate(names[1:], 2):
        try:
            if not hasattr(value, name):
                import_module(".".join(names[:index]))
            value = getattr(value, name)
        except (ImportError, AttributeError) as error:
            raise lacks(names[0], torch.__version__, ".".join(names[:index])) from error
    return value


try:
    from torch import _C as C
    from torch import _VF as VF
    from torch._C import DisableTorchFunction, DispatchKey, DispatchKeySet
    from torch._C import _AutoDispatchBelowAutograd as AutoDispatchBelowAutograd
    from torch._C import _DisableTorchDispatch as DisableTorchDispatch
    from torch._C import _ExcludeDispatchKeyGuard as ExcludeDispatchKeyGuard
    from torch._C import _len_torch_dispatch_stack as len_torch_dispatch_stack
    from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedOperatorException,
        in_kernel_invocation_manager,
    )
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._pytree import arg_tree_leaves, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

    GLOBAL_DEVICE_CONTEXT = torch._GLOBAL_DEVICE_CONTEXT
    current_autograd_node = C._current_autograd_node
    current_graph_task_id = C._current_graph_task_id
    dispatch_get_registrations_for_dispatch_key = C._dispatch_get_registrations_for_dispatch_key
    dispatch_has_kernel_for_dispatch_key = C._dispatch_has_kernel_for_dispatch_key
    get_sequence_nr = torch.autograd._get_sequence_nr
    parse_to = C._nn._parse_to
    set_throw_on_mutable_data_ptr = C._set_throw_on_mutable_data_ptr
    set_warn_deprecated_on_mutable_data_ptr = C._set_warn_deprecated_on_mutable_data_ptr
    storage_use_count = C._storage_Use_Count
except ImportError as error:
    raise lacks("torch", torch.__version__, f"a name ({error})") from error
except AttributeError as error:
    raise lacks("torch", torch.__version__, f"{getattr(error.obj, '__name__', 'torch')}.{error.name}") from error

__all__ = [
    "AutoDispatchBelowAutograd", "C", "DataDependentOutputException", "DisableTorchDispatch", "DisableTorchFunction",
    "DispatchKey", "DispatchKeySet", "DynamicOutputShapeException", "ELEMENTWISE_TYPE_PROMOTION_KIND",
    "ExcludeDispatchKeyGuard", "FakeTensor", "FakeTensorMode", "GLOBAL_DEVICE_CONTEXT", "HigherOrderOperator",
    "OpOverload", "OpOverloadPacket", "TorchDispatchMode", "UnsupportedOperatorException", "VF", "arg_tree_leaves",
    "current_autograd_node", "current_graph_task_id", "disable_current_modes",
    "dispatch_get_registrations_for_dispatch_key", "dispatch_has_kernel_for_dispatch_key", "elementwise_dtypes",
    "get_sequence_nr", "get_unwrapped", "in_kernel_invocation_manager", "is_functorch_wrapped_tensor", "lacks",
    "len_torch_dispatch_stack", "parse_to", "set_throw_on_mutable_data_ptr",
    "set_warn_deprecated_on_mutable_data_ptr", "storage_use_count", "symbol", "tree_flatten", "tree_leaves",
    "tree_map_only", "tree_unflatten",
]  # fmt: skip
