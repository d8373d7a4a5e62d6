"""Redirects the files that a script writes to a separate folder; the script finds them under its own paths.

A file that the script opens for writing, creates, renames or removes is stored under `folder`, at the same path, and
reading looks there first. Files from before the run stay as they are. The temporary folder and the caches of libraries
are not redirected, and neither are libraries that write with their own C code (sqlite3, pyarrow, h5py).
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from ..simulation.checkpoints.virtual_files import Entries
from ..simulation.patching.imports import on_import

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CACHES = (
    "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
    "XDG_CACHE_HOME", "MPLCONFIGDIR",
)  # fmt: skip
READING = ("stat", "lstat", "access", "readlink", "statvfs", "listxattr", "getxattr")
CHANGING = ("chmod", "utime", "setxattr")

real_open, real_descriptor, real_mkdir, real_chdir = io.open, os.open, os.mkdir, os.chdir
real_listdir, real_scandir, real_lstat, real_access = os.listdir, os.scandir, os.lstat, os.access
real_rmdir, real_truncate, real_rmtree = os.rmdir, os.truncate, shutil.rmtree


class WrittenFiles:
    """The files of one run, under `folder`; `removed` are the files from before the run that the script removed."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.abspath(folder)
        self.removed: set[str] = set()
        caches = [os.environ[name] for name in CACHES if os.environ.get(name)]
        places = [*caches, os.path.expanduser("~/.cache"), "/dev", "/proc", "/sys", self.folder]
        self._left_alone = tuple(os.path.abspath(place) for place in places)
        self._temporary = os.path.abspath(tempfile.gettempdir())
        self._in_temporary: str | None = None  # the part of it that has the script's own files
        if _is_in(os.getcwd(), self._temporary):
            first = os.path.relpath(os.getcwd(), self._temporary).split(os.sep)[0]
            self._in_temporary = os.path.normpath(os.path.join(self._temporary, first))

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Let open() and the functions of os and shutil see the files in both places until the block ends."""
        replaced: list[tuple[Any, str, Callable]] = [
            (builtins, "open", self._open), (io, "open", self._open), (os, "open", self._descriptor),
            (os, "mkdir", self._mkdir), (os, "listdir", self._listdir), (os, "scandir", self._scandir),
            (os, "chdir", self._chdir), (os, "truncate", self._truncate), (shutil, "rmtree", self._rmtree),
            *((os, name, self._reading(getattr(os, name))) for name in READING if hasattr(os, name)),
            *((os, name, self._changing(getattr(os, name))) for name in CHANGING if hasattr(os, name)),
            *((os, name, self._removing(getattr(os, name))) for name in ("remove", "unlink", "rmdir")),
            *((os, name, self._renaming(getattr(os, name))) for name in ("rename", "replace")),
            *((os, name, self._linking(getattr(os, name))) for name in ("symlink", "link")),
        ]  # fmt: skip
        with ExitStack() as stack:
            for module, name, function in replaced:
                stack.enter_context(mock.patch.object(module, name, function))
            hook = {"transformers.tokenization_utils_base": lambda: stack.enter_context(self._tokenizers())}
            stack.enter_context(on_import(hook))
            yield

    @contextmanager
    def _tokenizers(self) -> Iterator[None]:
        """Let a tokenizer, which writes its file with compiled code, save under `folder`."""
        from transformers import PreTrainedTokenizerBase

        real = PreTrainedTokenizerBase.save_pretrained

        @wraps(real)
        def save_pretrained(tokenizer: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            path = self._path(save_directory)
            if path is not None:
                os.makedirs(save_directory := self._written(path), exist_ok=True)
            return real(tokenizer, save_directory, *args, **kwargs)

        with mock.patch.object(PreTrainedTokenizerBase, "save_pretrained", save_pretrained):
            yield

    # ---- paths

    def _path(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return the absolute form of a path that is redirected; None for a descriptor, and for other paths."""
        if isinstance(path, int) or dir_fd is not None:
            return None
        name = os.path.abspath(os.fsdecode(path))
        if any(_is_in(name, place) for place in self._left_alone):
            return None
        if _is_in(name, self._temporary) and not (self._in_temporary and _is_in(name, self._in_temporary)):
            return None
        return name

    def _written(self, path: str) -> str:
        return self.folder + path

    def _is_there(self, path: str) -> bool:
        """Whether `path` existed before the run and was not removed in it."""
        gone = any(_is_in(path, folder) for folder in self.removed)
        return not gone and _exists(path)

    def _seen(self, path: str) -> str:
        """Return the real path at which `path` is read. Raises FileNotFoundError."""
        written = self._written(path)
        if _exists(written):
            return written
        if self._is_there(path):
            return path
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _exists(self, path: str) -> bool:
        return _exists(self._written(path)) or self._is_there(path)

    def _to_write(self, path: str, keep: bool) -> str:
        """Return the real path at which `path` is written; with `keep`, the file keeps its content. Raises
        FileNotFoundError if the folder does not exist, and IsADirectoryError for a folder."""
        self._seen(os.path.dirname(path))
        if os.path.isdir(path) and self._is_there(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        written = self._written(path)
        os.makedirs(os.path.dirname(written), exist_ok=True)
        if keep and not _exists(written) and self._is_there(path):
            shutil.copy2(path, written)
        return written

    def _file_exists(self, path: str) -> FileExistsError:
        return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    # ---- the functions

    def _open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        path = self._path(file)
        if path is None:
            return real_open(file, mode, *args, **kwargs)
        if not set(mode) & set("wax+"):
            return real_open(self._seen(path), mode, *args, **kwargs)
        if "x" in mode and self._exists(path):
            raise self._file_exists(path)
        if "r" in mode:
            self._seen(path)
        return real_open(self._to_write(path, keep="w" not in mode), mode, *args, **kwargs)

    def _descriptor(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        name = self._path(path, dir_fd)
        if name is None:
            return real_descriptor(path, flags, mode, dir_fd=dir_fd)
        if not flags & WRITING:
            return real_descriptor(self._seen(name), flags, mode)
        if flags & os.O_EXCL and self._exists(name):
            raise self._file_exists(name)
        if not flags & os.O_CREAT:
            self._seen(name)
        return real_descriptor(self._to_write(name, keep=not flags & os.O_TRUNC), flags, mode)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        name = self._path(path, dir_fd)
        if name is None:
            real_mkdir(path, mode, dir_fd=dir_fd)
            return
        if self._exists(name):
            raise self._file_exists(name)
        real_mkdir(self._to_write(name, keep=False), mode)

    def _listdir(self, path: Any = ".") -> list[Any]:
        name = self._path(path)
        if name is None:
            return real_listdir(path)
        names = [entry.name for entry in self._entries(name)]
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def _scandir(self, path: Any = ".") -> Any:
        name = self._path(path)
        return real_scandir(path) if name is None else Entries(self._entries(name))

    def _entries(self, path: str) -> list[os.DirEntry]:
        written, entries = self._written(path), {}
        self._seen(path)
        if self._is_there(path):
            entries = {entry.name: entry for entry in real_scandir(path)}
            entries = {name: entry for name, entry in entries.items() if self._is_there(os.path.join(path, name))}
        if _exists(written):
            entries |= {entry.name: entry for entry in real_scandir(written)}
        return list(entries.values())

    def _chdir(self, path: Any) -> None:
        name = self._path(path)
        real_chdir(path if name is None or self._is_there(name) else self._seen(name))

    def _reading(self, real: Callable) -> Callable:
        def read(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            name = self._path(path, dir_fd)
            if dir_fd is not None:
                kwargs["dir_fd"] = dir_fd
            if name is None:
                return real(path, *args, **kwargs)
            if real is real_access and not self._exists(name):
                return False
            return real(self._seen(name), *args, **kwargs)

        return read

    def _changing(self, real: Callable) -> Callable:
        def change(path: Any, *args: Any, **kwargs: Any) -> None:
            name = self._path(path)
            if name is None:
                real(path, *args, **kwargs)
            elif self._seen(name) != name:  # files from before the run keep their mode and times
                real(self._written(name), *args, **kwargs)

        return change

    def _truncate(self, path: Any, length: int) -> None:
        name = self._path(path)
        real_truncate(path if name is None else self._to_write(name, keep=True), length)

    def _removing(self, real: Callable) -> Callable:
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            name = self._path(path, dir_fd)
            if name is None:
                real(path, dir_fd=dir_fd)
                return
            self._seen(name)
            if real is real_rmdir and self._entries(name):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
            if _exists(self._written(name)):
                real(self._written(name))
            self._remove(name)

        return remove

    def _remove(self, path: str) -> None:
        if _exists(path):
            self.removed.add(path)

    def _rmtree(self, path: Any, *args: Any, **kwargs: Any) -> None:
        name = self._path(path)
        if name is None or not self._exists(name):
            real_rmtree(path, *args, **kwargs)
            return
        if _exists(self._written(name)):
            real_rmtree(self._written(name), *args, **kwargs)
        self._remove(name)

    def _renaming(self, real: Callable) -> Callable:
        def rename(source: Any, target: Any, **kwargs: Any) -> None:
            old, new = self._path(source), self._path(target)
            if old is None and new is None:
                real(source, target, **kwargs)
                return
            real_source = source if old is None else self._seen(old)
            real_target = target if new is None else self._to_write(new, keep=False)
            if real_source != old:
                real(real_source, real_target)
            elif os.path.isdir(real_source):
                shutil.copytree(real_source, real_target, symlinks=True)
            else:
                shutil.copy2(real_source, real_target)
            if old is not None:
                self._remove(old)

        return rename

    def _linking(self, real: Callable) -> Callable:
        def link(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            name = self._path(target)
            if name is not None and self._exists(name):
                raise self._file_exists(name)
            if os.path.isabs(source) and (source_path := self._path(source)) is not None and self._exists(source_path):
                source = self._seen(source_path)
            real(source, target if name is None else self._to_write(name, keep=False), *args, **kwargs)

        return link


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


def _exists(path: str) -> bool:
    try:
        real_lstat(path)
    except (OSError, ValueError):
        return False
    return True
