"""Restore of modules first imported inside the block: the patches they took are replaced by torch's own functions.

So `from torch.cuda import is_available` leaves nothing of ours behind. What is ours, and in whose place, nobody has to
list: it is what the end of the block changes in a module.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

OURS = "llmlab.simulation"
ASK = ("is_", "has_", "_is_", "_has_")  # so begin the names of functions that answer yes or no, and may keep the answer


@contextmanager
def swept(*also: str) -> Iterator[Callable[[], None]]:
    """Enter it before all patches; what it gives is to be called when the block has ended, before they go.

    The modules named `also` are swept too, though they were there before.
    """
    before = sys.modules.keys() - set(also)
    patched: dict[str, dict[str, Any]] = {}

    def look() -> None:
        if sys.modules.keys() - before:
            patched.update(_names())

    try:
        yield look
    finally:
        originals: dict[int, dict[str, Any]] = {}  # by ours, which `patched` keeps alive, and the name it stood for
        now = _names() if patched else {}
        for module, names in patched.items():
            for name, value in names.items():
                original = now.get(module, {}).get(name, value)
                if original is not value and (callable(value) or isinstance(value, str)):
                    originals.setdefault(id(value), {}).setdefault(name, original)
        for name in sys.modules.keys() - before if originals else ():
            if not name.startswith(OURS) and isinstance(found := sys.modules[name], ModuleType):
                _put_back(found, originals)


def _names() -> dict[str, dict[str, Any]]:
    modules = [(name, module) for name, module in sys.modules.items() if isinstance(module, ModuleType)]
    return {name: dict(vars(module)) for name, module in modules}


def _put_back(module: ModuleType, originals: dict[int, dict[str, Any]]) -> None:
    """Put the originals in the place of ours: in the module, its dictionaries, its classes, its functions' defaults."""

    def original(name: str, value: Any) -> Any:
        places = originals.get(id(value))
        return value if places is None else places.get(name, next(iter(places.values())))

    def defaults(function: Any) -> None:
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            if function.__defaults__:
                function.__defaults__ = tuple(original("", each) for each in function.__defaults__)
            if function.__kwdefaults__:
                function.__kwdefaults__ = {name: original(name, each) for name, each in function.__kwdefaults__.items()}

    for name, value in list(vars(module).items()):
        if id(value) in originals:
            vars(module)[name] = original(name, value)
        elif type(value) is dict and not name.startswith("__"):
            value.update({key: original(name, each) for key, each in value.items() if id(each) in originals})
        elif isinstance(value, functools._lru_cache_wrapper) and name.startswith(ASK):
            value.cache_clear()
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for own, each in list(vars(value).items()):
                function = each.__func__ if isinstance(each, (staticmethod, classmethod)) else each
                if id(function) in originals:
                    put = original(own, function)
                    setattr(value, own, put if function is each else type(each)(put))
                defaults(function)
        defaults(value)
