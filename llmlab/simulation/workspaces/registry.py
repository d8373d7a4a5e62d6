"""The registry of workspaces: by operator, the function that says what its kernel allocates besides its outputs.

A workspace function takes the operator's call `op` and the card `gpu`. It yields the kernel's requests in their order:
the bytes of a buffer, which is freed when the operator ends; FREE where the kernel frees its last buffer earlier;
OUTPUTS where the outputs are allocated, exactly once; a library's `Handle`; a `Library` that decides when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple, TypeVar

from ...base.compat import OpOverload, OpOverloadPacket

FREE = -1  # in the place of a size


class Outputs(NamedTuple):
    """The place of the outputs among the requests.

    `order`: their positions in the order in which they are allocated, where they are returned in another. `fake` makes
    them of the call, where CUDA's have other shapes, dtypes or devices than those of the CPU's kernel.
    """

    order: tuple[int, ...] = ()
    fake: Callable[[Operator], Any] | None = None


class Handle(NamedTuple):
    """The handle of a library, which allocates a workspace of `size` bytes at its first use and keeps it."""

    library: str
    size: int


class Library(NamedTuple):
    """A library that chooses an algorithm, and with it a workspace, when it runs: a note says it is not counted."""

    name: str


OUTPUTS = Outputs()
Step = int | Outputs | Handle | Library
Workspace = Callable[["Operator", Any], Iterable[Step]]
Function = TypeVar("Function", bound=Workspace)

WORKSPACES: dict[str, Workspace] = {}  # of CUDA's kernels, by the operator's name: "aten::mm", "aten::sum.dim_IntList"
CPU_WORKSPACES: dict[str, Workspace] = {}
SOURCES: dict[Workspace, str] = {}  # the file that a function follows


class Operator:
    """The call of an operator: its arguments are attributes, by their names in the schema, defaults filled in.

    `out` is what it returned, from OUTPUTS on, also where an argument has that name.
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
        """Whether the schema has an argument of this name."""
        return name in _parameters(self.func)

    def run(self) -> Any:
        """Return what the operator returns by torch's own fake kernel."""
        return self.func(*self.args, **self.kwargs)


@cache
def _parameters(func: Any) -> dict[str, tuple[int, Any]]:
    """Return the position and the default of each argument in the schema of `func`, by name."""
    return {argument.name: (place, argument.default_value) for place, argument in enumerate(func._schema.arguments)}


def workspace(
    *operators: OpOverload | OpOverloadPacket | str, source: str, table: dict[str, Workspace] = WORKSPACES
) -> Callable[[Function], Function]:
    """Register a function as the workspace of `operators`; aten.mm stands for aten.mm.default.

    `source`: the file it follows, of torch 2.13 under aten/src/ATen/native, or of the library that it names.
    Operators of a library that may not be installed are given by name. A second function for an operator of the same
    `table` raises ValueError.
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
    """Return the name by which the tables know `operator`."""
    if isinstance(operator, OpOverloadPacket):
        operator = operator.default
    return operator if isinstance(operator, str) else operator.name()
