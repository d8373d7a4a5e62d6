"""The registry of workspaces: for each operator, the function that yields the allocations of its kernel.

A workspace function receives the operator's call `op` and the GPU `gpu`. It yields the requests of the kernel in order:

- the bytes of a buffer, which is freed when the operator ends;
- FREE, when the kernel frees its last buffer earlier;
- OUTPUTS, exactly once, when the outputs are allocated;
- a `Handle` of a library;
- a `Library`, which decides about its workspace at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple, TypeVar

from ...base.compat import OpOverload, OpOverloadPacket

FREE = -1  # yielded instead of a size


class Outputs(NamedTuple):
    """The allocation of the outputs among the requests.

    `order` lists the positions of the outputs in order of allocation, if they are returned in a different order. `fake`
    creates the outputs from the call, if their shapes, dtypes or devices on CUDA differ from those of the CPU kernel.
    """

    order: tuple[int, ...] = ()
    fake: Callable[[Operator], Any] | None = None


class Handle(NamedTuple):
    """The handle of a library, which allocates a workspace of `size` bytes at its first use and never frees it."""

    library: str
    size: int


class Library(NamedTuple):
    """A library that chooses its algorithm and workspace at run time; a note says that they are not counted."""

    name: str


OUTPUTS = Outputs()
Step = int | Outputs | Handle | Library
Workspace = Callable[["Operator", Any], Iterable[Step]]
Function = TypeVar("Function", bound=Workspace)

WORKSPACES: dict[str, Workspace] = {}  # of CUDA kernels, by operator name: "aten::mm", "aten::sum.dim_IntList"
CPU_WORKSPACES: dict[str, Workspace] = {}
SOURCES: dict[Workspace, str] = {}  # the source file that a function follows


class Operator:
    """The call of an operator: its arguments are attributes named as in the schema, with defaults filled in.

    After OUTPUTS, `out` is the operator's result, even if an argument has that name.
    """

    __slots__ = ("args", "func", "kwargs", "out")

    def __init__(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any = None) -> None:
        self.func, self.args, self.kwargs, self.out = func, args, kwargs, out

    def __getattr__(self, name: str) -> Any:
        try:
            position, default = _parameters(self.func)[name]
        except KeyError:
            names = ", ".join(_parameters(self.func))
            raise AttributeError(f"{self.func} has no argument {name!r}; it has {names}") from None
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def has(self, name: str) -> bool:
        """Return whether the schema has an argument of this name."""
        return name in _parameters(self.func)

    def run(self) -> Any:
        """Return the result of torch's own fake kernel."""
        return self.func(*self.args, **self.kwargs)


@cache
def _parameters(func: Any) -> dict[str, tuple[int, Any]]:
    """Return the position and the default of each argument in the schema of `func`, by name."""
    return {argument.name: (place, argument.default_value) for place, argument in enumerate(func._schema.arguments)}


def workspace(
    *operators: OpOverload | OpOverloadPacket | str, source: str, table: dict[str, Workspace] = WORKSPACES
) -> Callable[[Function], Function]:
    """Register a function as the workspace of `operators`; aten.mm stands for aten.mm.default.

    `source` is the file that the function follows, in aten/src/ATen/native of torch 2.13 or in the library that it
    names. Operators of a library that may not be installed are given by name. A second function for an operator in the
    same `table` raises ValueError.
    """

    def register(function: Function) -> Function:
        for name in map(name_of, operators):
            if name in table:
                names = f"{table[name].__qualname__} and {function.__qualname__}"
                raise ValueError(f"{name} would have two workspaces, {names}")
            table[name] = function
        SOURCES[function] = source
        return function

    return register


def name_of(operator: OpOverload | OpOverloadPacket | str) -> str:
    """Return the key of `operator` in the tables."""
    if isinstance(operator, OpOverloadPacket):
        operator = operator.default
    return operator if isinstance(operator, str) else operator.name()
