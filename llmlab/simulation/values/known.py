"""Known values of fake tensors, because code asks for them: positions, masks, lengths, single numbers.

A fake tensor has no bytes. Where all that an operator takes is known it runs a second time, for real and out of sight
of the engine, and the fake tensor keeps what that gave. What the card computes from unknown values is not known. Masks
made on the host, padding masks and vectors of lengths are, so operators whose output they size can run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.compat import FakeTensor, arg_tree_leaves, disable_current_modes, tree_map_only

aten = torch.ops.aten
VALUE = "simulated_value"  # the attribute of a fake tensor that holds the real one
LOAN = "simulated_loan"  # the attribute that says whose values they are, where they are not its own
VALUES_LIMIT = 1 << 22  # elements of an integer tensor whose values are followed
SMALL = 1024  # elements of any other
INTEGERS = (torch.int64, torch.bool, torch.int32)
FACTORIES = frozenset((
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.scalar_tensor.default,
    aten.zeros.default, aten.ones.default, aten.full.default, aten.linspace.default,
))  # fmt: skip
# A GradScaler asks whether a gradient is infinite: simulated ones are finite.
KEEPS_VALUES = frozenset((aten._amp_foreach_non_finite_check_and_unscale_.default,))


class Loan:
    """The values of a large tensor on the host, which copies on the card and their views look at and nobody copied;
    `ended` once either side was written to."""

    def __init__(self, lender: Tensor) -> None:
        self.lender, self.version, self.ended = lender, lender._version, False

    @property
    def holds(self) -> bool:
        return not self.ended and self.lender._version == self.version


def known(tensor: Any) -> Tensor | None:
    """Return the real tensor behind a fake one, where it is known, and a real tensor as it is."""
    if isinstance(tensor, FakeTensor):
        loan = getattr(tensor, LOAN, None)
        if loan is not None and not loan.holds:
            forget(tensor)
        return getattr(tensor, VALUE, None)
    return None if tensor.is_meta else tensor


def know(tensor: Tensor, value: Tensor, loan: Loan | None = None) -> None:
    """Let a fake tensor have the values of a real one, which it shares; those of a `loan` are not its own."""
    setattr(tensor, VALUE, value)
    if loan is not None:
        setattr(tensor, LOAN, loan)


def forget(tensor: Tensor) -> None:
    """Let the values of a fake tensor be unknown."""
    vars(tensor).pop(VALUE, None)
    vars(tensor).pop(LOAN, None)


def is_followed(tensor: Tensor, limit: int = SMALL) -> bool:
    """Return whether values of such a tensor are kept: integers and masks, and up to `limit` other elements."""
    return tensor.dtype in INTEGERS or tensor.numel() <= limit


def follow(func: Any, args: tuple, kwargs: dict[str, Any], out: Any, limit: int) -> None:
    """Keep what is known of `out`, which operator `func` gave, or of its arguments where it changes them.

    `limit`: elements of a floating-point tensor that is followed; of several outputs it is SMALL.
    """
    if type(out) is FakeTensor:
        if func is aten.isnan.default and known(args[0]) is None and out.numel() <= VALUES_LIMIT:
            # What the card computes is finite.
            with disable_current_modes():
                know(out, torch.zeros(tuple(out.shape), dtype=torch.bool))
        elif args and out is args[0]:
            _follow_change(func, args, kwargs)
        elif (loan := _loan_among(args)) is not None and (func.is_view or out.numel() > SMALL):
            _lend(func, args, kwargs, out, loan)
        elif is_followed(out, limit):
            _follow_value(func, args, kwargs, out)
    elif out is None:
        _follow_change(func, args, kwargs)
    elif type(out) in (tuple, list) and out and type(out[0]) is FakeTensor and is_followed(out[0]):
        _follow_value(func, args, kwargs, out)


def _loan_among(args: tuple) -> Loan | None:
    return next((vars(arg)[LOAN] for arg in args if isinstance(arg, FakeTensor) and LOAN in vars(arg)), None)


def _lend(func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor, loan: Loan) -> None:
    """Let a copy or a view of lent values look at them too; what else would be made of so many is not followed."""
    if func.is_view:
        value = _for_real(func, args, kwargs, _tensors(args, kwargs))
        if value is not NotImplemented:
            know(out, value, loan)
    elif func is aten._to_copy.default and (lent := known(args[0])) is not None:
        if out.dtype == lent.dtype:
            know(out, lent, loan)
        elif out.numel() <= VALUES_LIMIT:
            know(out, lent.to(out.dtype))


def _follow_value(func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor | Sequence[Tensor]) -> None:
    """Compute the outputs for real where all they come from is known."""
    outputs = [out] if isinstance(out, Tensor) else out
    if outputs[0].numel() > VALUES_LIMIT or func._schema.is_mutable or func.namespace != "aten":
        return
    tensors = _tensors(args, kwargs)
    if not tensors and func not in FACTORIES:
        return
    values = _for_real(func, args, kwargs, tensors)  # a view's value shares its base's, so that both change together
    if values is NotImplemented:
        return
    for tensor, value in zip(outputs, [values] if isinstance(out, Tensor) else values, strict=True):
        if isinstance(tensor, Tensor):
            know(tensor, value)


def _follow_change(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Change the values of known tensors as the in-place `func` does; forget them where it takes unknown ones."""
    written = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
    changed = [tensor for tensor in written if isinstance(tensor, Tensor) and known(tensor) is not None]
    for tensor in changed:
        if LOAN in vars(tensor):  # the host's own values stay what they are
            vars(tensor)[LOAN].ended = True
    changed = [tensor for tensor in changed if known(tensor) is not None]
    if changed and func not in KEEPS_VALUES and _for_real(func, args, kwargs, _tensors(args, kwargs)) is NotImplemented:
        for tensor in changed:
            forget(tensor)


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
    if func is aten._pack_padded_sequence.default:
        return _packed(run, *args)
    tensors = _tensors(args, kwargs)
    values = _for_real(func, args, kwargs, tensors) if tensors else NotImplemented

    def made(value: Tensor) -> Tensor:
        fake = run(
            aten.empty_strided.default, value.size(), value.stride(), dtype=value.dtype, device=tensors[0].device
        )
        if not isinstance(fake, FakeTensor):  # on the host, whose tensors are real
            return value
        know(fake, value)
        return fake

    return tree_map_only(Tensor, made, values)


def _packed(run: Callable[..., Any], x: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    """native/PackedSequence.cpp, _pack_padded_sequence: a copy for each number of sequences that go on, and one of all.

    Lengths and batch sizes are on the host, where tensors are real.
    """
    length = known(lengths)
    if length is None:
        return NotImplemented
    x = run(aten.transpose.int, x, 0, 1) if batch_first else x
    with disable_current_modes():
        sizes = aten._pack_padded_sequence(torch.zeros(x.shape[:2]), length, False)[1]
        groups = torch.stack(sizes.unique_consecutive(return_counts=True), 1).tolist()
    steps: list[Tensor] = []
    begin = 0
    for batch, times in groups:
        step = run(aten.slice.Tensor, run(aten.slice.Tensor, x, 0, begin, begin + times), 1, 0, batch)
        if not step.is_contiguous():
            step = run(aten.clone.default, step, memory_format=torch.contiguous_format)
        steps.append(run(aten.view.default, step, [batch * times, *x.shape[2:]]))
        begin += times
    return run(aten.cat.default, steps), sizes


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
        found += [run(aten.select.int, places, 1, number) for number in range(index.dim())]
    return run(aten.index.Tensor, x, found)


def _tensors(args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    return [leaf for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]


def _for_real(func: Any, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """Return what `func` gives of the values of its `tensors`, NotImplemented where one of them is not known."""
    if any(known(tensor) is None for tensor in tensors):
        return NotImplemented
    args, kwargs = tree_map_only(Tensor, known, (args, {**kwargs}))
    for name in ("device", "pin_memory"):
        kwargs.pop(name, None)
    with disable_current_modes():
        try:
            return func(*args, **kwargs)
        except NotImplementedError:  # the host has no kernel for it: mm.dtype
            return NotImplemented
