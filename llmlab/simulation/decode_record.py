"""The record of a decode step: its requests to the allocator, its kernels, and the tensors that outlive it."""

from __future__ import annotations

from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.compat import tree_flatten
from ..traces.kernels import Kernel
from .engine.engine import Engine
from .workspaces.registry import Operator


class Request(NamedTuple):
    """One event of a step. Its kind is one of:

    - "malloc" of `size` bytes, with its own `number`
    - "free" of malloc `number` or, if `number` is negative, of tensor -1 - `number` of the cache before the step
    - "scratch" of operator `func` before its outputs, "more scratch" after them, and "free scratch"; `number` is the
      operator's
    """

    kind: str
    number: int
    size: int = 0
    place: Any = None
    func: Any = None
    leaves: tuple = ()  # of the arguments and the outputs, with an `Argument` for each tensor
    form: Any = None


class Argument(NamedTuple):
    """The shape and dtype of a tensor among an operator's arguments or outputs."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Living(NamedTuple):
    """A tensor that outlives the step, in the memory of malloc `number`; `size` is the bytes of its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    size: int
    dtype: torch.dtype
    number: int


class DecodeStep(NamedTuple):
    """The record of a step: its requests and kernels, the tensors that outlive it (the cache's, then the logits), and
    the counters of the cache's layers."""

    requests: tuple[Request, ...]
    kernels: tuple[Kernel, ...]
    living: tuple[Living, ...]
    counters: tuple[tuple[tuple[str, int], ...], ...]


class StepRecorder:
    """Records the requests of a step to `engine`, as its observer."""

    def __init__(self, engine: Engine, cached: list[Tensor]) -> None:
        self.engine = engine
        self.requests: list[Request] = []
        # By address: the number of a malloc that was not freed, or -1 - n for tensor n of the cache before the step.
        self.alive = {engine.address(tensor) or 0: -1 - number for number, tensor in enumerate(cached)}
        self.complete = True  # whether all freed addresses were known
        self._new = count(1)
        self._numbers: dict[int, int] = {}  # of operators that have scratch, by id
        self._in_scratch = False

    def living(self, tensor: Tensor) -> Living:
        """Return the record of a tensor after the step; its `number` is 0 if its memory is not known."""
        number, size = self.alive.get(self.engine.address(tensor) or 0, 0), tensor.untyped_storage().nbytes()
        return Living(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), size, tensor.dtype, number)

    def allocated(self, address: int, size: int) -> None:
        if not self._in_scratch:
            number = self.alive[address] = next(self._new)
            self.requests.append(Request("malloc", number, size, self.engine.asked))

    def freed(self, address: int) -> None:
        if self._in_scratch:
            return
        if address in self.alive:
            self.requests.append(Request("free", self.alive.pop(address)))
        else:
            self.complete = False

    def scratch_begins(self, op: Operator, freeing: bool) -> None:
        self._in_scratch = True
        if freeing:
            self.requests.append(Request("free scratch", self._numbers.pop(id(op))))
            return
        kind = "more scratch" if id(op) in self._numbers else "scratch"
        number = self._numbers.setdefault(id(op), next(self._new))
        leaves, form = tree_flatten((op.args, op.kwargs, op.out))
        shapes = tuple(Argument(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        place = self.engine.place() if self.engine.place else None
        self.requests.append(Request(kind, number, 0, place, op.func, shapes, form))

    def scratch_ends(self) -> None:
        self._in_scratch = False


def on_line(one: Any, other: Any, steps: int) -> Any:
    """Return the value `steps` steps after `one`, by linear extrapolation from `one` and the next step's `other`. In a
    tuple, each element is extrapolated."""
    if one == other:
        return one
    if isinstance(one, int):
        return one + (other - one) * steps
    values = [on_line(a, b, steps) for a, b in zip(one, other, strict=True)]
    return type(one)(*values) if hasattr(one, "_fields") else tuple(values)


def alike(one: Any, other: Any) -> bool:
    """Whether two values are the same except for the integers in them."""
    if one == other or (type(one) is int and type(other) is int):
        return True
    tuples = isinstance(one, tuple) and type(one) is type(other) and len(one) == len(other)
    return tuples and all(map(alike, one, other))
