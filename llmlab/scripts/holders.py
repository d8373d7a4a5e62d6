"""Finds variables that keep tensors of earlier steps: those whose tensors or autograd graphs grow with each step."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from inspect import CO_OPTIMIZED
from itertools import islice
from linecache import getlines
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import ProxyType

from torch import Tensor

from ..base.compat import DisableTorchFunction
from ..base.files import is_library

VISITS = 10_000  # objects examined per variable, the last ones first
CALLS = "append|appendleft|add|extend|insert|update|setdefault"
GROWS = rf"\b{{name}}\b(.*\.({CALLS})\(|\[.+\]\s*=[^=]|\s*[+*|-]=|\s*=.*\b{{name}}\b)"
OWN = ("_parameters", "_buffers", "_modules")  # attributes of a module that contain its weights


class Holder(NamedTuple):
    """A variable, or an attribute of one, and the file that writes to it; `has_graph`: whether its tensors keep
    autograd nodes."""

    name: str
    file: str
    has_graph: bool

    def __str__(self) -> str:
        """Return the place where it grows: the first line of the file that adds to it."""
        grows = re.compile(GROWS.format(name=re.escape(self.name)))
        for number, line in enumerate(getlines(self.file), 1):
            if grows.search(line):
                return f"{os.path.basename(self.file)}, line {number}, `{line.strip()}`"
        return f"`{self.name}` in {os.path.basename(self.file)}"


def holders(on_gpu: Callable[[Tensor], bool]) -> dict[Holder, int]:
    """Return the number of GPU tensors and autograd nodes that each variable of the user's running functions keeps."""
    counts: dict[Holder, int] = {}
    frame: FrameType | None = sys._getframe(1)
    with DisableTorchFunction():  # so that reading an attribute runs no user code
        while frame is not None:
            file = frame.f_code.co_filename
            if not is_library(file) and not file.startswith("<"):
                local = frame.f_locals
                for name, writer, value in _variables(frame.f_globals | local, file):
                    tensors, nodes = _counted(value, on_gpu)
                    if tensors:
                        counts[Holder(name, writer, nodes > 0)] = tensors + nodes
                if frame.f_code.co_flags & CO_OPTIMIZED and isinstance(local, dict):
                    local.clear()  # before Python 3.13, the frame keeps this copy and its tensors
            frame = frame.f_back
    return counts


def _variables(scope: Mapping[str, Any], file: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the name, the writing file and the value of each variable, or of its attributes if it is an object."""
    for name, value in list(scope.items()):
        if name.startswith("__") or issubclass(type(value), (ModuleType, FunctionType, type, ProxyType)):
            continue
        if isinstance(value, (Tensor, Mapping, Collection)):
            yield name, file, value
        elif hasattr(value, "__dict__"):
            module = sys.modules.get(type(value).__module__)
            writer = getattr(module, "__file__", None) or file
            yield from ((key, writer, attribute) for key, attribute in list(vars(value).items()) if key not in OWN)


def _counted(value: Any, on_gpu: Callable[[Tensor], bool]) -> tuple[int, int]:
    """Return the number of GPU tensors in `value`, and the number of autograd nodes that they keep."""
    tensors = nodes = 0
    waiting, visits = [value], 0
    while waiting and visits < VISITS:
        visits += 1
        item = waiting.pop()
        if isinstance(item, Tensor) and on_gpu(item):
            tensors += 1
            nodes += _nodes(item)
        elif isinstance(item, Mapping) and _is_plain(item):
            waiting += islice(item.values(), VISITS)
        elif isinstance(item, Collection) and _is_plain(item):
            waiting += islice(item, VISITS)
    return tensors, nodes


def _is_plain(container: Collection[Any]) -> bool:
    """Return whether iterating over `container` runs only built-in code; a data set, for example, would load rows."""
    return type(container).__module__ in ("builtins", "collections") and not isinstance(container, (str, bytes))


def _nodes(tensor: Tensor) -> int:
    visited = set()
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in visited:
            visited.add(node)
            waiting += [following for following, _ in node.next_functions]
    return len(visited)
