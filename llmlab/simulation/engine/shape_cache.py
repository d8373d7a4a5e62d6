"""A cache of operators' outputs by the shapes of their inputs, so that torch computes the same form only once.

A model's layers, and every step after the first, run the same operators on tensors of the same shapes. torch's fake
mode has such a cache too, but its lookups would be most of a simulation's time. `Repeats` compares less: only what
determines an output's form if all inputs are plain strided fake tensors and everything else is a number, a dtype or the
like. New calls, and all calls with other inputs, go to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...base.compat import (
    DisableTorchDispatch,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    arg_tree_leaves,
    in_kernel_invocation_manager,
    len_torch_dispatch_stack,
    set_throw_on_mutable_data_ptr,
    set_warn_deprecated_on_mutable_data_ptr,
)

aten = torch.ops.aten
VIEW, NEW, CHANGE = "view", "new", "change"  # an operator returns: a view of its argument, a new storage, its argument
HASHABLE = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
NOT_REPEATED = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view))
# Its kernel returns a view (native/TensorShape.cpp), which its schema hides from autograd.
UNSAFE_VIEW = aten._unsafe_view.default
LEFT_TO_TORCH = ("aten::lift", "aten::lift_fresh")  # torch.tensor's last step, after which the number is known


class Form(NamedTuple):
    """The layout of a tensor that is alone in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Repeats:
    """Runs operators under `fake`, the active mode, and remembers the forms of their outputs."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self.fake = fake
        # By operator and inputs: the forms of the outputs (or the output itself, if it is a number or None) and their
        # type; None for a change in place; False if torch must run the operator each time.
        self._given: dict[tuple, tuple[tuple[Any, ...], type] | Literal[False] | None] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of the first fake tensor on a device
        guards = set_throw_on_mutable_data_ptr, set_warn_deprecated_on_mutable_data_ptr
        self._guard = guards[fake._allow_unsafe_data_ptr_access]

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any], fake: Callable[[], Any] | None = None) -> Any:
        """Return the outputs of `func`, like `func(*args, **kwargs)`; call it inside a dispatch mode.

        If there is a `fake`, it creates the outputs instead of `func`, from the same arguments.
        """
        gives = _gives(func)
        # Another mode below the engine, such as FlopCounterMode around a simulation, must see each operator.
        if gives is None or len_torch_dispatch_stack() != 1 or (fake and gives is not NEW):
            return fake() if fake else func(*args, **kwargs)
        if gives is VIEW:
            return self._view(func, args, kwargs) if self._is_plain(args[0]) else func(*args, **kwargs)
        inputs = [func, torch.get_default_dtype()]
        if not (self._describe(args, inputs) and self._describe(tuple(kwargs.items()), inputs)):
            return fake() if fake else func(*args, **kwargs)
        key = tuple(inputs)
        given = self._given.get(key, False)
        if given is None:
            return args[0]
        if given:
            forms, kind = given
            out = [self._made(form) if type(form) is Form else form for form in forms]
            return out if kind is list else tuple(out) if kind is tuple else out[0]
        out = fake() if fake else func(*args, **kwargs)
        if key not in self._given:
            self._given[key] = self._seen(gives, args, kwargs, out)
        return out

    def _view(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the output of a view, whose kernel is the same on every device, so the one for meta tensors runs."""
        with in_kernel_invocation_manager(self.fake):
            out = func(*args, **kwargs)
        device = args[0].fake_device
        if isinstance(out, Tensor):
            return self._faked(out, device)
        return type(out)(self._faked(item, device) for item in out)

    def _made(self, form: Form) -> FakeTensor:
        with DisableTorchDispatch():
            meta = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
        return self._faked(meta, form.device)

    def _faked(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """Return FakeTensor(self.fake, meta, device), with attributes copied from the first fake tensor on the device.

        The result is the same as from FakeTensor.__new__ (_subclasses/fake_tensor.py), which sets the attributes one by
        one through descriptors.
        """
        if device not in self._attributes:
            first = FakeTensor(self.fake, meta, device)
            self._attributes[device] = dict(first.__dict__)
            return first
        made = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
        self._guard(made)
        made.__dict__.update(self._attributes[device])
        return made

    def _is_plain(self, tensor: Any) -> bool:
        """Whether `tensor` is a fake tensor of this mode for which torch stores nothing but its form."""
        return (
            type(tensor) is FakeTensor
            and tensor.fake_mode is self.fake
            and tensor.constant is None
            and tensor.layout is torch.strided
            and not tensor.is_quantized
        )

    def _describe(self, values: Any, into: list) -> bool:
        """Append everything that determines an output's form to `into`; return False if that is not possible."""
        into.append(len(values))
        for value in values:
            if type(value) is FakeTensor:
                if not self._is_plain(value):
                    return False
                into += (FakeTensor, value.shape, value.stride(), value.dtype, value.fake_device)
            elif isinstance(value, HASHABLE):
                into += (type(value), value)  # 1, 1.0 and True are equal, but lead to different dtypes
            elif isinstance(value, (list, tuple)):
                if not self._describe(value, into):
                    return False
            else:
                return False
        return True

    def _seen(self, gives: str, args: tuple, kwargs: dict, out: Any) -> Any:
        """Return the cache entry for a first run."""
        if gives is CHANGE:
            return None if out is args[0] else False
        outputs: Any = [out] if isinstance(out, Tensor) else out
        if type(out) not in (FakeTensor, list, tuple):
            return False
        tensors = [tensor for tensor in outputs if not isinstance(tensor, (int, type(None)))]
        if not all(self._is_plain(tensor) and _form(tensor) for tensor in tensors):
            return False
        forms = tuple(_form(tensor) if isinstance(tensor, FakeTensor) else tensor for tensor in outputs)
        own = {tensor.untyped_storage()._cdata for tensor in tensors}
        taken = {leaf.untyped_storage()._cdata for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)}
        return (forms, type(out)) if len(own) == len(tensors) and own.isdisjoint(taken) else False


@cache
def _gives(func: Any) -> str | None:
    """Return VIEW, NEW or CHANGE for an operator; None if torch must run it each time."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return None
    schema = func._schema
    if not NOT_REPEATED.isdisjoint(func.tags) or schema.name in LEFT_TO_TORCH:
        return None
    if func is UNSAFE_VIEW or func.is_view:
        return VIEW
    written = [argument for argument in schema.arguments if argument.alias_info is not None]
    returned = [result for result in schema.returns if result.alias_info is not None]
    if not written and not returned:
        return NEW
    if schema.name.endswith("_") and len(written) == 1 == len(returned) == len(schema.returns):
        return CHANGE if written[0].name == "self" and schema.arguments[0].name == "self" else None
    return None


def _form(tensor: FakeTensor) -> Form | None:
    """Return the form of a tensor; None if it is not alone in its storage."""
    form = Form(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.fake_device)
    last = sum((size - 1) * step for size, step in zip(form.shape, form.stride, strict=True))
    size = (last + 1 if tensor.numel() else 0) * tensor.itemsize
    return form if tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == size else None
