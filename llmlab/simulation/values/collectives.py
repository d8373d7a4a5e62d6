"""Results of collectives: the other ranks, which do not exist, are assumed to have the same values as this rank.

So all_gather fills each rank's slot with this rank's tensor, and all_to_all fills each slot with the part that is meant
for this rank. A sum is the value times the number of ranks; the average, minimum and maximum of equal values are the
value itself. Code exchanges sizes this way, and allocates memory accordingly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...base.compat import FakeTensor, disable_current_modes, symbol
from ...base.errors import NotAvailable
from .known import forget, know, known
from .placeholders import located

COLLECTIVES = frozenset(("c10d", "_c10d_functional"))  # namespaces of torch.ops


def exchange(func: Any, args: tuple, out: Any) -> None:
    """Set the values of tensors that collective `func` writes (torch.ops.c10d) or returns (_c10d_functional), or forget
    them if they are unknown."""
    space, _, name = func._schema.name.partition("::")
    rule = (RULES if space == "c10d" else FUNCTIONAL).get(name)
    if rule is not None:
        with disable_current_modes():
            rule(*(args if space == "c10d" else (out, *args)))


def _put(target: Tensor, value: Tensor | None) -> None:
    if not isinstance(target, FakeTensor):
        if value is not None:
            target.copy_(value.reshape(target.shape))
    elif value is not None:
        know(target, value.reshape(target.shape).to(target.dtype).clone())
    else:
        forget(target)


def _group(boxed: Any) -> Any:
    from torch.distributed import ProcessGroup

    return boxed if isinstance(boxed, ProcessGroup) else ProcessGroup.unbox(boxed)


def _all_gather(outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any) -> None:
    for targets, mine in zip(outputs, inputs, strict=False):
        for target in targets:
            _put(target, known(mine))


def _all_gather_into(output: Tensor, mine: Tensor, *_: Any) -> None:
    value = known(mine)
    ranks = output.numel() // max(1, mine.numel())
    _put(output, None if value is None else value.reshape(-1).repeat(ranks))


def _all_to_all_single(
    output: Tensor, mine: Tensor, group: Any, output_sizes: list[int], input_sizes: list[int], *_: Any
) -> None:
    value, ranks, rank = known(mine), _group(group).size(), _group(group).rank()
    if value is not None:
        part = value.split(input_sizes)[rank] if input_sizes else value.chunk(ranks)[rank]
        value = torch.cat([part] * ranks)
    _put(output, value if value is not None and value.numel() == output.numel() else None)


def _all_to_all(outputs: list[Tensor], inputs: list[Tensor], group: Any, *_: Any) -> None:
    value = known(inputs[_group(group).rank()])
    for target in outputs:
        _put(target, value if value is not None and value.numel() == target.numel() else None)


def _received(tensors: list[Tensor], *_: Any) -> None:
    for tensor in tensors:
        if not isinstance(tensor, FakeTensor) and not tensor.is_floating_point():
            raise located(NotAvailable(
                "torch.distributed.recv of whole numbers that another rank would send, which are unknown here: let "
                "this rank compute them, or lab.measure it"
            ))  # fmt: skip
        _put(tensor, None)


def _scatter(outputs: list[Tensor], inputs: list[list[Tensor]], group: Any, *_: Any) -> None:
    _put(outputs[0], known(inputs[0][_group(group).rank()]) if inputs and inputs[0] else None)


def summed(tensor: Tensor, ranks: int) -> None:
    """Multiply the values of `tensor`, if they are known, by `ranks`: the sum over ranks that all have these values."""
    with disable_current_modes():
        if (value := known(tensor)) is not None:
            _put(tensor, value * ranks)


def _by_name(name: Any) -> Any:
    return symbol("torch.distributed.distributed_c10d._resolve_process_group")(name)


def _reduced(value: Tensor, operation: str, group: str) -> Tensor:
    return value * _by_name(group).size() if operation == "sum" else value


def _all_reduce(out: Tensor, mine: Tensor, operation: str, group: str) -> None:
    value = known(mine)
    _put(out, None if value is None else _reduced(value, operation, group))


def _reduce_scatter(out: Tensor, mine: Tensor, operation: str, ranks: int, group: str) -> None:
    value = known(mine)
    _put(out, None if value is None else _reduced(value, operation, group).chunk(ranks)[_by_name(group).rank()])


FUNCTIONAL: dict[str, Callable[..., None]] = {
    "wait_tensor": lambda out, mine: _put(out, known(mine)),
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather_into,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": lambda out, mine, outputs, inputs, group: _all_to_all_single(
        out, mine, _by_name(group), outputs, inputs
    ),
}
RULES: dict[str, Callable[..., None]] = {
    "allgather_": _all_gather,
    "_allgather_base_": _all_gather_into,
    "alltoall_base_": _all_to_all_single,
    "alltoall_": _all_to_all,
    "scatter_": _scatter,
    "recv_": _received,
    "recv_any_source_": _received,
}
