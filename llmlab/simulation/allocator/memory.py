"""The allocator interface that the engine needs, the out-of-memory error, and the CPU's allocator without a cache."""

from __future__ import annotations

from typing import Protocol

from ...base.units import show_bytes


class Memory(Protocol):
    """The methods of an allocator that the engine calls."""

    @property
    def allocated(self) -> int: ...

    def malloc(self, size: int, stream: int = 0) -> int: ...

    def free(self, address: int) -> None: ...


class HostMemory:
    """The CPU's allocator, which neither caches nor rounds, so `allocated` is the sum of the requests."""

    def __init__(self) -> None:
        self.allocated = 0
        self._next = 64
        self._sizes: dict[int, int] = {}

    def malloc(self, size: int, stream: int = 0) -> int:
        """Allocate `size` bytes and return their address, which was never used before."""
        address, self._next = self._next, self._next + size
        self._sizes[address] = size
        self.allocated += size
        return address

    def free(self, address: int) -> None:
        """Free the block at an address from malloc."""
        self.allocated -= self._sizes.pop(address)


class AllocatorOutOfMemory(MemoryError):
    """The driver has too little memory left, even after the cached segments were released; sizes in bytes.

    `requested` is the size passed to malloc, and `segment` the size requested from the driver (torch's "Tried to
    allocate"). `capacity` is the limit that was hit; `allocated` and `reserved` describe the state at the failure.
    `total` is the GPU's memory, of which the driver has `left`.
    """

    def __init__(
        self, requested: int, segment: int, allocated: int, reserved: int, capacity: int, total: int, left: int
    ) -> None:
        self.requested, self.segment, self.total, self.left = requested, segment, total, left
        self.allocated, self.reserved, self.capacity = allocated, reserved, capacity
        state = f"{show_bytes(reserved)} of {show_bytes(capacity)} are reserved, {show_bytes(allocated)} allocated"
        super().__init__(f"no room for a segment of {show_bytes(segment)}: {state}")

    @property
    def lacked(self) -> int:
        """The bytes by which the segment exceeds the memory that the driver has left below the limit."""
        return self.segment - (self.capacity - self.reserved)

    def as_torch_says(self) -> str:
        """Return the message of c10/cuda/CUDACachingAllocator.cpp, malloc (torch 2.13)."""
        return (
            f"CUDA out of memory. Tried to allocate {_size(self.segment)}. GPU 0 has a total capacity of "
            f"{_size(self.total)} of which {_size(self.left)} is free. Including non-PyTorch memory, this process has "
            f"{_size(self.total - self.left)} memory in use. Of the allocated memory {_size(self.allocated)} is "
            f"allocated by PyTorch, and {_size(self.reserved - self.allocated)} is reserved by PyTorch but "
            "unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
            "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


def _size(size: int) -> str:
    """format_size of c10/cuda/CUDACachingAllocator.cpp."""
    for limit, unit in ((1 << 10, "bytes"), (1 << 20, "KiB"), (1 << 30, "MiB")):
        if size <= limit:
            return f"{size} bytes" if unit == "bytes" else f"{size / (limit >> 10):.2f} {unit}"
    return f"{size / (1 << 30):.2f} GiB"
