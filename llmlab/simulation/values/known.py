"""Known values of fake tensors that code reads: positions, masks, lengths, single numbers.

A fake tensor has no bytes. If all inputs of an operator are known, it runs a second time, for real and unseen by the
engine, and the fake tensor stores the result. Results that the GPU computes from unknown values are unknown. Masks
created on the host, padding masks and vectors of lengths are known, so operators whose output size depends on them can
run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.compat import FakeTensor, arg_tree_leaves, disable_current_modes, tree_map_only

aten = torch.ops.aten
VALUE = "simulated_value"  # the attribute of a fake tensor that holds the real one
LOAN = "simulated_loan"  # the attribute with the `Loan`, if the values belong to another tensor
VALUES_LIMIT = 1 << 22  # elements of an integer tensor whose values are followed
FILLED = 1 << 17  # elements of a tensor that a factory fills, such as a padding mask of ones
SMALL = 1024  # elements of any other
INTEGERS = (torch.int64, torch.bool, torch.int32)
FACTORIES = frozenset((
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.scalar_tensor.default,
    aten.zeros.default, aten.ones.default, aten.full.default, aten.linspace.default,
))  # fmt: skip
# A GradScaler asks whether a gradient is infinite: simulated ones are finite.
KEEPS_VALUES = frozenset((aten._amp_foreach_non_finite_check_and_unscale_.default,))


class Loan:
    """The values of a large tensor on the host, which its copies on the GPU and their views share without a real copy;
    `ended` once either side was written to."""

    def __init__(self, lender: Tensor) -> None:
        self.lender, self.version, self.ended = lender, lender._version, False

    @property
    def holds(self) -> bool:
        return not self.ended and self.lender._version == self.version


def known(tensor: Any) -> Tensor | None:
    """Return the real tensor with the values of a fake one, None if they are unknown; return a real tensor as it is."""
    if isinstance(tensor, FakeTensor):
        loan = getattr(tensor, LOAN, None)
        if loan is not None and not loan.holds:
            forget(tensor)
        return getattr(tensor, VALUE, None)
    return None if tensor.is_meta else tensor


def know(tensor: Tensor, value: Tensor, loan: Loan | None = None) -> None:
    """Let a fake tensor share the values of a real one; with a `loan`, they belong to the lender."""
    setattr(tensor, VALUE, value)
    if loan is not None:
        setattr(tensor, LOAN, loan)


def forget(tensor: Tensor) -> None:
    """Make the values of a fake tensor unknown."""
    vars(tensor).pop(VALUE, None)
    vars(tensor).pop(LOAN, None)


def is_followed(tensor: Tensor, limit: int = SMALL) -> bool:
    """Return whether the values of `tensor` are followed: integers, masks, and up to `limit` other elements."""
    return tensor.dtype in INTEGERS or tensor.numel() <= limit


def follow(func: Any, args: tuple, kwargs: dict[str, Any], out: Any, limit: int) -> None:
    """Store the known values of `out`, the output of operator `func`, or of the arguments that it changes.

    `limit`: the most elements of a floating-point output that is followed; SMALL if there are several outputs.
    """
    if type(out) is FakeTensor:
        if func is aten.isnan.default and known(args[0]) is None and out.numel() <= VALUES_LIMIT:
            # All results of the GPU are assumed to be finite.
            with disable_current_modes():
                know(out, torch.zeros(tuple(out.shape), dtype=torch.bool))
        elif args and out is args[0]:
            _follow_change(func, args, kwargs)
        elif (loan := _loan_among(args)) is not None and (func.is_view or out.numel() > SMALL):
            _lend(func, args, kwargs, out, loan)
        elif is_followed(out, max(limit, FILLED) if func in FACTORIES else limit):
            _follow_value(func, args, kwargs, out)
    elif out is None:
        _follow_change(func, args, kwargs)
    elif type(out) in (tuple, list) and out and type(out[0]) is FakeTensor and is_followed(out[0]):
        _follow_value(func, args, kwargs, out)


def _loan_among(args: tuple) -> Loan | None:
    return next((vars(arg)[LOAN] for arg in args if isinstance(arg, FakeTensor) and LOAN in vars(arg)), None)


def _lend(func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor, loan: Loan) -> None:
    """Let a copy or a view of lent values share them, too. Other large results are not followed."""
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
    """Compute the outputs for real if all inputs are known."""
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
    """Change the values of known tensors as the in-place `func` does; forget them if one of its inputs is unknown."""
    written = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
    changed = [tensor for tensor in written if isinstance(tensor, Tensor) and known(tensor) is not None]
    for tensor in changed:
        if LOAN in vars(tensor):  # the host's own values stay what they are
            vars(tensor)[LOAN].ended = True
    changed = [tensor for tensor in changed if known(tensor) is not None]
    if func is aten.copy_.default and not changed:
        _learn(*args[:2])
        return
    if changed and func not in KEEPS_VALUES and _for_real(func, args, kwargs, _tensors(args, kwargs)) is NotImplemented:
        for tensor in changed:
            forget(tensor)


def _learn(target: Tensor, source: Tensor) -> None:
    """Let a few whole numbers be known once they are copied from where they are known, such as DDP's map of the
    parameters that a step has used. A view has only part of its tensor's values, and learns none."""
    value = known(source)
    if value is not None and target.dtype in INTEGERS and target.numel() <= SMALL and not target._is_view():
        with disable_current_modes():
            know(target, value.to(target.dtype).expand(target.shape).clone())


def sized_by_value(run: Callable[..., Any], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the outputs of operator `func` if the values that decide their sizes are known, else NotImplemented.

    `run` runs an operator as the engine does, so that its outputs use memory.
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
    """native/PackedSequence.cpp, _pack_padded_sequence: a copy per run of steps with equal batch size, and one of all.

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
    columns: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            columns.append(index)
            continue
        if known(index) is None:
            return NotImplemented
        places = run(aten.nonzero.default, index)
        columns += [run(aten.select.int, places, 1, number) for number in range(index.dim())]
    return run(aten.index.Tensor, x, columns)


def _tensors(args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    return [leaf for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]


def _for_real(func: Any, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """Return the result of `func` on the values of its `tensors`, NotImplemented if one of them is unknown."""
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
