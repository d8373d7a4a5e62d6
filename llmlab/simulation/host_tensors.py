"""Memory of the simulated tensors on the host: parameters before they move, offloaded states, and copies from the GPU.

Tensors with values (data sets, batches) are the machine's own, and are not counted.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from os.path import basename

from torch import Tensor, UntypedStorage

from ..base.files import is_library

_uncounted = ContextVar("uncounted", default=False)


@contextmanager
def uncounted() -> Iterator[None]:
    """Count no tensors on the host inside of this block: those of a checkpoint that stands for a downloaded one."""
    token = _uncounted.set(True)
    try:
        yield
    finally:
        _uncounted.reset(token)


class _Storage(weakref.ref):
    """A reference to a storage of `size` bytes that the code at `line` created; `key` is its number in `_live`."""

    __slots__ = ("key", "line", "size")
    key: int
    line: str
    size: int


class HostTensors:
    """The most bytes of simulated tensors on the host, `peak`, how many of them are pinned, and how many each line of
    the user's code created."""

    def __init__(self) -> None:
        self.peak = self.pinned_at_peak = 0
        self.lines_at_peak: dict[str, int] = {}
        self._live: dict[int, _Storage] = {}
        self._pinned: set[int] = set()
        self._lines: Counter[str] = Counter()
        self._size = 0

    def hold(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` until it dies, unless it is counted already."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live and storage.nbytes() and not _uncounted.get():
            self._count(storage, storage.nbytes(), _line())

    def pin(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` as pinned: PyTorch rounds its size up to a power of two
        (aten/src/ATen/core/CachingHostAllocator.h)."""
        storage = tensor.untyped_storage()
        record = self._live.pop(storage._cdata, None)
        if record is not None:
            self._add(record.line, -record.size)
            self._pinned.add(record.key)
            self._count(storage, 1 << (record.size - 1).bit_length(), record.line)

    def _count(self, storage: UntypedStorage, size: int, line: str) -> None:
        record = self._live[storage._cdata] = _Storage(storage, self._died)
        record.key, record.size, record.line = storage._cdata, size, line
        self._add(line, size)
        if self._size > self.peak:
            self.peak = self._size
            self.pinned_at_peak = sum(self._live[key].size for key in self._pinned)
            self.lines_at_peak = {line: size for line, size in self._lines.most_common() if size}

    def _add(self, line: str, size: int) -> None:
        self._lines[line] += size
        self._size += size

    def _died(self, record: _Storage) -> None:
        if self._live.get(record.key) is record:
            del self._live[record.key]
            self._pinned.discard(record.key)
            self._add(record.line, -record.size)


def _line() -> str:
    """Return the innermost line of the user's code that runs."""
    frame = sys._getframe(2)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else "a library"
