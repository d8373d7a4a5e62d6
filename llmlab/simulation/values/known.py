"""Known values of fake tensors, because code asks for them: positions, masks, lengths, single numbers.

A fake tensor has no bytes. Where all that an operator takes is known it runs a second time, for real and out of sight
of the engine, and the fake tensor keeps what that gave. What the card computes from unknown values is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.compat import FakeTensor, arg_tree_leaves, disable_current_modes, tree_map_only

aten = torch.ops.aten
VALUE = "simulated_value"  # the attribute of a fake tensor that holds the real one
VALUES_LIMIT = 1 << 22  # elements of an integer tensor whose values are followed
SMALL = 1024  # elements of any other
INTEGERS = (torch.int64, torch.bool, torch.int32)
FACTORIES = frozenset((
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.scalar_tensor.default,
    aten.zeros.default, aten.ones.default, aten.full.default, aten.linspace.default,
))  # fmt: skip
# A GradScaler asks whether a gradient is infinite: simulated ones are finite.
KEEPS_VALUES = frozenset((aten._amp_foreach_non_finite_check_and_unscale_.default,))


def known(tensor: Any) -> Tensor | None:
    """Return the real tensor behind a fake one, where it is known, and a real tensor as it is."""
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, VALUE, None)
    return None if tensor.is_meta else tensor


def know(tensor: Tensor, value: Tensor) -> None:
    """Let a fake tensor have the values of a real one, which it shares."""
    setattr(tensor, VALUE, value)


def forget(tensor: Tensor) -> None:
    """Let the values of a fake tensor be unknown."""
    vars(tensor).pop(VALUE, None)


def is_followed(tensor: Tensor, limit: int = SMALL) -> bool:
    """Return whether values of such a tensor are kept: integers and masks, and up to `limit` other elements."""
    return tensor.dtype in INTEGERS or tensor.numel() <= limit


def follow(func: Any, args: tuple, kwargs: dict[str, Any], out: Any, limit: int) -> None:
    """Keep what is known of `out`, which operator `func` gave, or of its arguments where it changes them.

    `limit`: elements of a floating-point tensor that is followed; of several outputs it is SMALL.
    """
    if type(out) is FakeTensor:
        if args and out is args[0]:
            _follow_change(func, args, kwargs)
        elif is_followed(out, limit):
            _follow_value(func, args, kwargs, out)
    elif out is None:
        _follow_change(func, args, kwargs)
    elif type(out) in (tuple, list) and out and type(out[0]) is FakeTensor and is_followed(out[0]):
        _follow_value(func, args, kwargs, out)


def _follow_value(func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor | Sequence[Tensor]) -> None:
    """Compute the outputs for real where all they come from is known."""
    outputs = [out] if isinstance(out, Tensor) else out
    if outputs[0].numel() > VALUES_LIMIT or func._schema.is_mutable or func.namespace != "aten":
        return
    tensors = [each for each in arg_tree_leaves(*args, **kwargs) if isinstance(each, Tensor)]
    if (not tensors and func not in FACTORIES) or any(known(each) is None for each in tensors):
        return
    args, kwargs = tree_map_only(Tensor, known, (args, {**kwargs}))
    for name in ("device", "pin_memory"):
        kwargs.pop(name, None)
    with disable_current_modes():
        # A view's value shares its base's, so that both change together.
        values = func(*args, **kwargs)
    for tensor, value in zip(outputs, [values] if isinstance(out, Tensor) else values, strict=True):
        if isinstance(tensor, Tensor):
            know(tensor, value)


def _follow_change(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Change the values of known tensors as the in-place `func` does; forget them where it takes unknown ones."""
    written = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
    changed = [each for each in written if isinstance(each, Tensor) and known(each) is not None]
    if not changed or func in KEEPS_VALUES:
        return
    tensors = [each for each in arg_tree_leaves(*args, **kwargs) if isinstance(each, Tensor)]
    if any(known(each) is None for each in tensors):
        for each in changed:
            forget(each)
        return
    args, kwargs = tree_map_only(Tensor, known, (args, {**kwargs}))
    with disable_current_modes():
        func(*args, **kwargs)
