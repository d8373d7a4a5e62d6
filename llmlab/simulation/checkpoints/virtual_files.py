"""Virtual files: checkpoints kept in memory exist for code that looks for them, renames, copies or removes them.

Scripts write to a temporary name and os.replace() it, copy the best one, delete the oldest. Files on the disk stay.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from ..values.placeholders import PLACEHOLDER, Unknown


@contextmanager
def kept_files(kept: dict[str, Any]) -> Iterator[None]:
    """Let os, os.path, pathlib and shutil find what is in `kept`, by absolute path, besides what is on the disk."""

    def found(path: Any) -> str | None:
        name = os.path.abspath(path) if isinstance(path, (str, os.PathLike)) else None
        return name if name in kept else None

    def renaming(real: Callable) -> Callable:
        def rename(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            name, to = found(source), os.path.abspath(target)
            if name is not None:
                kept[to] = kept.pop(name)
                return None
            done = real(source, target, *args, **kwargs)
            inside = os.path.abspath(source) + os.sep  # of a folder that is renamed
            for each in [each for each in kept if each.startswith(inside)]:
                kept[os.path.join(to, each[len(inside) :])] = kept.pop(each)
            return done

        return rename

    def copying(real: Callable) -> Callable:
        def copy(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            name = found(source)
            if name is None:
                return real(source, target, *args, **kwargs)
            if os.path.isdir(target):
                target = os.path.join(target, os.path.basename(name))
            kept[os.path.abspath(target)] = kept[name]
            return target

        return copy

    def removing(real: Callable) -> Callable:
        def remove(path: Any, *args: Any, **kwargs: Any) -> None:
            name = found(path)
            if name is None:
                real(path, *args, **kwargs)
            else:
                del kept[name]

        return remove

    def looking(real: Callable) -> Callable:
        return lambda path, *args, **kwargs: found(path) is not None or real(path, *args, **kwargs)

    def measuring(real: Callable) -> Callable:
        return lambda path: Unknown(PLACEHOLDER) if found(path) is not None else real(path)

    wrapped = {
        renaming: ((os, "replace"), (os, "rename"), (shutil, "move")),
        copying: ((shutil, "copy"), (shutil, "copy2"), (shutil, "copyfile")),
        removing: ((os, "remove"), (os, "unlink")),
        looking: ((os.path, "exists"), (os.path, "isfile"), (pathlib.Path, "exists"), (pathlib.Path, "is_file")),
        measuring: ((os.path, "getsize"),),
    }
    with ExitStack() as stack:
        for wrap, places in wrapped.items():
            for module, name in places:
                stack.enter_context(mock.patch.object(module, name, wrap(getattr(module, name))))
        yield
