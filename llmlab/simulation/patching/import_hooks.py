"""Import hooks: a library that is first imported inside the block finds no driver, as outside of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from ...base.compat import check

# They load a CUDA library, or ask for its version, when they are imported with a card there.
LOOK_FOR_DRIVERS = frozenset((
    "apex", "bitsandbytes", "deepspeed", "flash_attn", "kernels", "liger_kernel", "torchao", "transformer_engine",
    "triton", "xformers",
))  # fmt: skip


class _Finder(MetaPathFinder):
    def __init__(
        self, then: Mapping[str, Callable[[], Any]], hidden: Callable[[], AbstractContextManager] | None
    ) -> None:
        self.then, self.hidden = then, hidden

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        hidden = self.hidden if name in LOOK_FOR_DRIVERS else None
        if hidden is None and name not in self.then:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader, run = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the class has it
            with hidden() if hidden else nullcontext():
                run(module)
            if name in self.then:
                check(name)
                self.then[name]()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def on_import(
    then: Mapping[str, Callable[[], Any]], hidden: Callable[[], AbstractContextManager] | None = None
) -> Iterator[None]:
    """Call `then[name]` when module `name` has been imported, now where it is already; `hidden` hides the card from
    those that would load a driver."""
    for name, call in then.items():
        if name in sys.modules:
            check(name)
            call()
    finder = _Finder(then, hidden)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
