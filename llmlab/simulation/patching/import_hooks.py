"""Import hooks: a library that is first imported inside the block finds no driver, as outside of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

# They load a CUDA library, or ask for its version, when they are imported with a card there.
LOOK_FOR_DRIVERS = frozenset((
    "apex", "bitsandbytes", "deepspeed", "flash_attn", "kernels", "liger_kernel", "torchao", "transformer_engine",
    "triton", "xformers",
))  # fmt: skip


# It compiles torch's optimizers by TorchScript when it is imported, which would meet functions of ours.
COMPILES_OPTIMIZERS = "torch.distributed.optim"


class _Finder(MetaPathFinder):
    def __init__(
        self, then: Mapping[str, Callable[[], Any]], hidden: Callable[[], AbstractContextManager] | None
    ) -> None:
        self.then, self.hidden = then, hidden

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        around: Callable[[], AbstractContextManager] | None = self.hidden if name in LOOK_FOR_DRIVERS else None
        if name == COMPILES_OPTIMIZERS:
            around = _not_compiled
        if around is None and name not in self.then:
            return None
        # The other finders too: each block that is open inside another has one, and a module may concern several.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((each for each in found if each is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader, run = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the class has it
            with around() if around else nullcontext():
                run(module)
            if name in self.then:
                self.then[name]()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _not_compiled() -> AbstractContextManager:
    return mock.patch.object(sys.modules["torch"].jit, "script", lambda compiled, *args, **kwargs: compiled)


@contextmanager
def on_import(
    then: Mapping[str, Callable[[], Any]], hidden: Callable[[], AbstractContextManager] | None = None
) -> Iterator[None]:
    """Call `then[name]` when module `name` has been imported, now where it is already; `hidden` hides the card from
    those that would load a driver."""
    for name, call in then.items():
        if name in sys.modules:
            call()
    finder = _Finder(then, hidden)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
