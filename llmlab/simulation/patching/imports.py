"""Imports beside a simulated GPU: no library finds the GPU while it is imported, or remembers it after the block.

Modules first imported inside the block may have copied our patches, as `from torch.cuda import is_available` does.
`swept` replaces such copies by torch's own functions. No list of patches is needed, because the names that change in
torch's modules at the end of the block are exactly the patched ones.
"""

from __future__ import annotations

import builtins
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import torch

from ...base.compat import GLOBAL_DEVICE_CONTEXT, check
from ..compiled.dynamo import CUDA_GRAPHS
from ..compiled.inductor import forget_answers

MUON = "deepspeed.runtime.zero.muon.original_muon"  # every step imports it, and it compiles its functions
# These load a CUDA library, or ask for its version, when they are imported on a machine with a GPU.
LOOK_FOR_DRIVERS = frozenset((
    "apex", "bitsandbytes", "deepspeed", MUON, "flash_attn", "kernels", "liger_kernel", "torchao", "transformer_engine",
    "triton", "xformers",
))  # fmt: skip


# When imported, it compiles torch's optimizers with TorchScript, which would run into our functions.
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
        # The other finders come next, because nested blocks have one each, and several may handle the same module.
        later_finders = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in later_finders if hasattr(finder, "find_spec"))
        spec = next((candidate for candidate in specs if candidate is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader, run = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the class has it
            with around() if around else nullcontext():
                run(module)
            if around is self.hidden:  # torch caches the first answer of has_triton(), which torchao calls
                forget_answers("torch.utils._triton")
            if name in self.then:
                check(name)
                self.then[name]()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _not_compiled() -> AbstractContextManager:
    return mock.patch.object(torch.jit, "script", lambda compiled, *args, **kwargs: compiled)


@contextmanager
def on_import(
    then: Mapping[str, Callable[[], Any]], hidden: Callable[[], AbstractContextManager] | None = None
) -> Iterator[None]:
    """Call `then[name]` after module `name` was imported, or now if it was imported earlier; `hidden` hides the GPU
    from modules that would load a driver."""
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


# ---- caches of torch, accelerate and transformers that remember devices


@contextmanager
def default_device() -> Iterator[None]:
    """Undo torch.set_default_device."""
    context = getattr(GLOBAL_DEVICE_CONTEXT, "device_context", None)
    try:
        yield
    finally:
        if getattr(GLOBAL_DEVICE_CONTEXT, "device_context", None) is not context:
            torch.set_default_device(context.device if context else None)


@contextmanager
def devices_found() -> Iterator[None]:
    """Let accelerate and transformers detect their devices again, both here and after the block."""
    states = [dict(state) for state in _accelerate_states()]
    _forget()
    try:
        yield
    finally:
        _forget()
        for state, before in zip(_accelerate_states(), states, strict=False):  # empty before the first import
            state.update(before)


def _accelerate_states() -> list[dict[str, Any]]:
    """Return the dictionaries that all instances of accelerate's states share; none if it is not imported, or if an
    error ended its import, which leaves modules of it behind."""
    module = sys.modules.get("accelerate.state") if "accelerate" in sys.modules else None
    check("accelerate.state" if module else "")
    return [module.PartialState._shared_state, module.AcceleratorState._shared_state] if module else []


def _forget() -> None:
    for state in _accelerate_states():
        state.clear()
    checks = sys.modules.get("transformers.utils.import_utils")
    for name, function in vars(checks).items() if checks else ():
        if name.startswith("is_") and hasattr(function, "cache_clear"):
            function.cache_clear()


# ---- patches that modules keep


OURS = "llmlab.simulation"
ASK = ("is_", "has_", "_is_", "_has_")  # prefixes of functions that answer yes or no, and may cache the answer


@contextmanager
def swept(*also: str) -> Iterator[Callable[[], None]]:
    """Remove patches from newly imported modules. Enter it before all patches, and call the function it yields at the
    end of the block, before the patches are undone.

    The modules named in `also` are cleaned too, although they were imported earlier.
    """
    before = sys.modules.keys() - set(also)
    patched: dict[str, dict[str, Any]] = {}

    def look() -> None:
        if sys.modules.keys() - before - {CUDA_GRAPHS.__name__}:  # it is there only while patches are
            patched.update({n: dict(vars(m)) for n, m in sys.modules.items() if isinstance(m, ModuleType)})

    try:
        yield look
    finally:
        originals: dict[int, dict[str, Any]] = {}  # by id of the patch, which `patched` keeps alive, and by name
        for module_name, names in patched.items():
            there = sys.modules.get(module_name)
            now = vars(there) if isinstance(there, ModuleType) else {}
            if len(now) == len(names) and all(map(operator.is_, names.values(), now.values())):
                continue  # as nearly all modules: looking up each of 100,000 names would take as long as a small run
            for name, value in names.items():
                original = now.get(name, value)
                if original is value or vars(builtins).get(getattr(value, "__name__", "")) is value:
                    continue  # a builtin is never a patch: the module changed a variable of its own
                if callable(value) or isinstance(value, str):
                    originals.setdefault(id(value), {}).setdefault(name, original)
        for name in sys.modules.keys() - before if originals else ():
            if not name.startswith(OURS) and isinstance(module := sys.modules[name], ModuleType):
                _put_back(module, originals)


def _put_back(module: ModuleType, originals: dict[int, dict[str, Any]]) -> None:
    """Replace patches by the originals in the module, its dictionaries, its classes, and its functions' defaults."""

    def original(name: str, value: Any) -> Any:
        places = originals.get(id(value))
        return value if places is None else places.get(name, next(iter(places.values())))

    def defaults(function: Any) -> None:
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            if function.__defaults__:
                function.__defaults__ = tuple(original("", default) for default in function.__defaults__)
            if function.__kwdefaults__:
                defaults = function.__kwdefaults__.items()
                function.__kwdefaults__ = {name: original(name, default) for name, default in defaults}

    for name, value in list(vars(module).items()):
        if id(value) in originals:
            vars(module)[name] = original(name, value)
        elif type(value) is dict and not name.startswith("__"):
            value.update({key: original(name, item) for key, item in value.items() if id(item) in originals})
        elif isinstance(value, functools._lru_cache_wrapper) and name.startswith(ASK):
            value.cache_clear()
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for attribute, item in list(vars(value).items()):
                function = item.__func__ if isinstance(item, (staticmethod, classmethod)) else item
                if id(function) in originals:
                    restored = original(attribute, function)
                    setattr(value, attribute, restored if function is item else type(item)(restored))
                defaults(function)
        defaults(value)
