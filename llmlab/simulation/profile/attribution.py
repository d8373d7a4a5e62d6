"""Attribution of allocations to modules: the one that runs, or in backward the one whose forward it undoes.

Hooks on every module call keep a stack of paths. Autograd numbers its nodes in the order forward makes them
(torch/csrc/autograd/function.h, sequence_nr), so the numbers at which modules begin and end say of a node that runs in
backward which module made it.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.optim import Optimizer

from ...base.compat import current_autograd_node, get_sequence_nr
from ..engine.engine import Engine

OUTSIDE = "(outside of modules)"


class Place(NamedTuple):
    """What asked for memory: the operator, and the path of the module in its model ("" outside of any)."""

    operator: str
    module: str

    def __str__(self) -> str:
        """Say it as a person would: "mm in lm_head" for aten.mm.default."""
        operator = self.operator.removeprefix("aten.").removesuffix(".default")
        return f"{operator} in {self.module}" if self.module else operator


class Places:
    """Knows where the operator that runs belongs, and tells the engine for each allocation."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.roots: list[weakref.ref[nn.Module]] = []  # modules that were called from no other one
        self._names: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._stack: list[str] = []
        self._numbers: list[int] = []  # of autograd nodes, ascending; with _paths, the module that runs from there on
        self._paths: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow module calls until the block ends."""
        handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        self.engine.place = self.place
        try:
            yield
        finally:
            self.engine.place = None
            for handle in handles:
                handle.remove()

    def place(self) -> Place:
        """Return where the operator that runs belongs."""
        return Place(str(self.engine.operator), self.path())

    def path(self) -> str:
        """Return the path of the module that runs, or whose backward does; "" outside of any."""
        if self._stack:
            return self._stack[-1]
        node = current_autograd_node()
        if node is None or not self._paths:
            return ""
        number = node._sequence_nr()
        if number > self._numbers[-1]:  # AccumulateGrad's, which no forward numbered
            return self._owner(getattr(node, "variable", None))
        found = bisect_right(self._numbers, number) - 1
        return self._paths[found] if found >= 0 else ""

    def own(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Let the parameters of `model`, their gradients and states belong to the modules that hold them."""
        for path, module in model.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    state = optimizer.state.get(parameter, {}) if optimizer else {}
                    for tensor in (parameter, parameter.grad, *state.values()):
                        if isinstance(tensor, Tensor):
                            self.engine.belongs(tensor, path or type(model).__name__)

    def _owner(self, parameter: Tensor | None) -> str:
        if parameter is None:
            return ""
        roots = [root for each in self.roots if (root := each()) is not None]
        modules = (item for root in roots for item in root.named_modules())
        return next((path for path, module in modules if _holds(module, parameter)), "")

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._run(self._name(module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()
        self._begin(self._stack[-1] if self._stack else "")

    def _run(self, path: str) -> None:
        self._stack.append(path)
        self._begin(path)

    def _begin(self, path: str) -> None:
        self._numbers.append(get_sequence_nr())
        self._paths.append(path)

    def _name(self, module: nn.Module) -> str:
        known = self._names.get(id(module))
        if known is None or known[0]() is not module:
            if not self._stack:
                self.roots.append(weakref.ref(module))
            for path, child in module.named_modules():
                self._names[id(child)] = weakref.ref(child), path or type(module).__name__
            known = self._names[id(module)]
        return known[1]


def _holds(module: nn.Module, parameter: Tensor) -> bool:
    return any(each is parameter for each in module._parameters.values())


def collapsed(path: str) -> str:
    """Return `path` with its layers' numbers as *, and cut below the layers' own modules.

    >>> collapsed("model.layers.31.mlp.down_proj"), collapsed("lm_head")
    ('model.layers.*.mlp', 'lm_head')
    """
    names = ["*" if name.isdigit() else name for name in path.split(".")]
    return ".".join(names[: names.index("*") + 2] if "*" in names else names[:3])
