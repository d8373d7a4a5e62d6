"""Virtual files: code can find, rename, copy and remove checkpoints that are kept in memory.

Scripts write a checkpoint to a temporary name and os.replace() it, copy the best one, and delete the oldest one. Files
on disk keep behaving as usual.
"""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from ..values.placeholders import PLACEHOLDER, Unknown


class KeptFile(io.BytesIO):
    """A file in memory; `keep` is called with its content when it is closed."""

    def __init__(self, keep: Callable[[bytes], None]) -> None:
        super().__init__()
        self.keep = keep

    def close(self) -> None:
        if not self.closed:
            self.keep(self.getvalue())
        super().close()


@dataclass(frozen=True)
class _Entry:
    """An entry of os.scandir for a file in memory, or for a folder that exists only because of such files."""

    name: str
    path: str
    is_folder: bool

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self.is_folder

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return not self.is_folder

    def is_symlink(self) -> bool:
        return False


class Entries:
    """The iterator that os.scandir returns, over entries on disk and in memory."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Entries:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *raised: Any) -> None: ...

    def close(self) -> None: ...


class VirtualFiles:
    """Functions of os, os.path, pathlib and shutil that also find the files in `kept`, by absolute path."""

    def __init__(self, contents: dict[str, Any]) -> None:
        self.contents = contents
        self.began = time.time()

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Replace the libraries' own functions."""
        wrapped = {
            self._renaming: ((os, "replace"), (os, "rename"), (shutil, "move")),
            self._copying: ((shutil, "copy"), (shutil, "copy2"), (shutil, "copyfile")),
            self._removing: ((os, "remove"), (os, "unlink")),
            self._looking: (
                (os.path, "exists"), (os.path, "lexists"), (os.path, "isfile"), (Path, "exists"), (Path, "is_file"),
            ),
            self._measuring: ((os.path, "getsize"),),
            self._dating: ((os.path, "getmtime"), (os.path, "getctime")),
            self._listing: ((os, "listdir"),),
            self._scanning: ((os, "scandir"),),
            self._clearing: ((shutil, "rmtree"),),
        }  # fmt: skip
        with ExitStack() as stack:
            for wrap, places in wrapped.items():
                for module, name in places:
                    stack.enter_context(mock.patch.object(module, name, wrap(getattr(module, name))))
            yield

    def _kept_name(self, path: Any) -> str | None:
        name = os.path.abspath(path) if isinstance(path, (str, os.PathLike)) else None
        return name if name in self.contents else None

    def _inside(self, folder: Any) -> list[str]:
        start = os.path.join(os.path.abspath(folder), "")
        return [name for name in self.contents if name.startswith(start)]

    def _listing(self, real: Callable) -> Callable:
        def listdir(path: Any = ".") -> list[Any]:
            inside = self._inside(path) if isinstance(path, (str, os.PathLike)) else []
            if not inside:
                return real(path)
            parts = len(Path(os.path.abspath(path)).parts)
            names = real(path) if os.path.isdir(path) else []
            return list(dict.fromkeys([*names, *(Path(name).parts[parts] for name in inside)]))

        return listdir

    def _scanning(self, real: Callable) -> Callable:
        """For glob, os.walk and pathlib."""

        def scandir(path: Any = ".") -> Any:
            inside = self._inside(path) if isinstance(path, (str, os.PathLike)) else []
            if not inside:
                return real(path)
            parts = len(Path(os.path.abspath(path)).parts)
            names: dict[str, Any] = {}
            if os.path.isdir(path):
                with real(path) as entries:
                    names = {entry.name: entry for entry in entries}
            for name in inside:
                below = Path(name).parts[parts:]
                names.setdefault(below[0], _Entry(below[0], os.path.join(path, below[0]), is_folder=len(below) > 1))
            return Entries(names.values())

        return scandir

    def _clearing(self, real: Callable) -> Callable:
        def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
            inside = self._inside(path)
            for name in inside:
                del self.contents[name]
            if not inside or os.path.isdir(path):
                real(path, *args, **kwargs)

        return rmtree

    def _renaming(self, real: Callable) -> Callable:
        def rename(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            name, to = self._kept_name(source), os.path.abspath(target)
            if name is not None:
                self.contents[to] = self.contents.pop(name)
                return None
            result = real(source, target, *args, **kwargs)
            for entry in self._inside(source):  # files of a renamed folder
                self.contents[os.path.join(to, os.path.relpath(entry, source))] = self.contents.pop(entry)
            return result

        return rename

    def _copying(self, real: Callable) -> Callable:
        def copy(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            name = self._kept_name(source)
            if name is None:
                return real(source, target, *args, **kwargs)
            if os.path.isdir(target):
                target = os.path.join(target, os.path.basename(name))
            self.contents[os.path.abspath(target)] = self.contents[name]
            return target

        return copy

    def _removing(self, real: Callable) -> Callable:
        def remove(path: Any, *args: Any, **kwargs: Any) -> None:
            name = self._kept_name(path)
            if name is None:
                real(path, *args, **kwargs)
            else:
                del self.contents[name]

        return remove

    def _looking(self, real: Callable) -> Callable:
        return lambda path, *args, **kwargs: self._kept_name(path) is not None or real(path, *args, **kwargs)

    def _dating(self, real: Callable) -> Callable:
        def date(path: Any) -> float:
            name = self._kept_name(path)
            return real(path) if name is None else self.began + list(self.contents).index(name)  # later files are newer

        return date

    def _measuring(self, real: Callable) -> Callable:
        return lambda path: Unknown(PLACEHOLDER) if self._kept_name(path) is not None else real(path)
