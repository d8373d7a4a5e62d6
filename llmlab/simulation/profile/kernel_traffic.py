"""Bytes that operators and Triton kernels move between a card's memory and its multiprocessors, launch by launch.

PyTorch's operators move what `Operators` says: each argument and each result once. A Triton kernel moves what its
program loads and stores, seen in Triton's interpreter on a CPU: twice what it loads twice (`asked`), of which a cache
may spare the second time (`bytes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from ...base.compat import TorchDispatchMode, check
from ...base.errors import NotAvailable
from .operator_log import Operators


class Moved(NamedTuple):
    """What kernels moved: how many were launched; distinct bytes read and written, counted per launch; bytes of every
    load and store, those of repeated reads too."""

    launches: int
    bytes: int
    asked: int

    def __add__(self, other: Moved) -> Moved:  # type: ignore[override]
        return Moved(*(a + b for a, b in zip(self, other, strict=True)))


def moved(operators: Operators) -> Moved:
    """Return what PyTorch's operators moved; views move nothing."""
    ran = [kernel for kernel in operators if kernel.kind != "none"]
    total = sum(kernel.bytes for kernel in ran)
    return Moved(sum(kernel.launches for kernel in ran), total, total)


def count_moved(step: Callable[[], object]) -> Moved:
    """Run `step` once, on real CPU tensors, and return what its operators and its Triton kernels moved.

    Raises NotAvailable where Triton compiles: compiled kernels cannot be watched.
    """
    operators = Operators()
    with interpreted() as launches, _Watched(operators, launches):
        step()
    return sum((launch.moved() for launch in launches), moved(operators))


class _Launch:
    """The addresses that one launch's programs read and wrote, each access with the size of its values."""

    def __init__(self) -> None:
        self.running = True
        self.read: list[tuple[np.ndarray, int]] = []
        self.written: list[tuple[np.ndarray, int]] = []

    def moved(self) -> Moved:
        asked = sum(addresses.size * size for addresses, size in self.read + self.written)
        return Moved(1, _distinct(self.read) + _distinct(self.written), asked)


def _distinct(accesses: list[tuple[np.ndarray, int]]) -> int:
    sizes = {size for _, size in accesses}
    return sum(size * np.unique(np.concatenate([a for a, s in accesses if s == size])).size for size in sizes)


@contextmanager
def interpreted() -> Iterator[list[_Launch]]:
    """Give the list of the launches of Triton kernels inside the block; NotAvailable where Triton compiles."""
    from ...kernels.rungs import INTERPRETED

    if not INTERPRETED:
        raise NotAvailable("counting loads and stores needs Triton's interpreter: set TRITON_INTERPRET=1 before Python")
    check("triton.runtime.interpreter")
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.interpreter import interpreter_builder as builder

    launches: list[_Launch] = []
    load, store, run = builder.create_masked_load, builder.create_masked_store, GridExecutor.__call__

    def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
        launches.append(_Launch())
        run(executor, *args, **kwargs)
        launches[-1].running = False

    def loaded(pointers: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].read.append(_access(pointers, mask))
        return load(pointers, mask, *rest)

    def stored(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].written.append(_access(pointers, mask))
        return store(pointers, value, mask, *rest)

    accesses = mock.patch.multiple(builder, create_masked_load=loaded, create_masked_store=stored)
    with accesses, mock.patch.object(GridExecutor, "__call__", launched):
        yield launches


def _access(pointers: Any, mask: Any) -> tuple[np.ndarray, int]:
    return pointers.data[mask.data], pointers.get_element_ty().primitive_bitwidth // 8


class _Watched(TorchDispatchMode):
    def __init__(self, operators: Operators, launches: list[_Launch]) -> None:
        super().__init__()
        self.operators, self.launches = operators, launches

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not (self.launches and self.launches[-1].running):  # the interpreter copies arguments: a GPU does not
            self.operators(func, args, kwargs or {}, out)
        return out
