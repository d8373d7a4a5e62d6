"""The interface of an allocator to the engine, and the CPU's, which caches nothing. Sizes in bytes."""

from __future__ import annotations

from typing import Protocol


class Memory(Protocol):
    """What the engine asks of an allocator."""

    @property
    def allocated(self) -> int: ...

    def malloc(self, size: int, stream: int = 0) -> int: ...

    def free(self, address: int) -> None: ...


class HostMemory:
    """A CPU's allocator, which keeps nothing back and rounds nothing up: `allocated` is the sum of the requests."""

    def __init__(self) -> None:
        self.allocated = 0
        self._next = 64
        self._sizes: dict[int, int] = {}

    def malloc(self, size: int, stream: int = 0) -> int:
        """Return the address of `size` bytes, which nothing had before."""
        address, self._next = self._next, self._next + size
        self._sizes[address] = size
        self.allocated += size
        return address

    def free(self, address: int) -> None:
        """Take back what malloc gave."""
        self.allocated -= self._sizes.pop(address)
