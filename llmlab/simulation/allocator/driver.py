"""The CUDA driver below the allocator: its capacity, its addresses, and torch's statistics of its calls."""

from __future__ import annotations

from collections.abc import Callable

from .blocks import Pool
from .statistics import Statistics

UNLIMITED = 2**64 - 1  # max_split_size if none is set
ADDRESSES_END = 0x7F00_0000_0000  # the first segment ends here


class Driver:
    """The memory behind cudaMalloc and the calls that map pages: `capacity` bytes, or None for no limit.

    `total` is the GPU's memory. If `on_event` is set, it receives torch's memory history: (action, address,
    size, stream).
    """

    def __init__(self, capacity: int | None, total: int | None) -> None:
        self.capacity, self.total = capacity, total
        self.oversize = UNLIMITED  # a segment of at least this size is never split
        self.on_event: Callable[[str, int, int, int], None] | None = None
        self.statistics = Statistics()
        self._lowest_address = ADDRESSES_END

    @property
    def reserved(self) -> int:
        """Bytes that the driver has provided and that were not released."""
        return self.statistics.all.reserved_bytes.current

    @property
    def left(self) -> int:
        """Bytes that the driver has left, counted from the GPU's memory if there is no capacity."""
        limit = self.total if self.capacity is None else self.capacity
        return (limit or 0) - self.reserved

    def has(self, size: int) -> bool:
        """Return whether the driver has `size` bytes left."""
        return self.capacity is None or self.reserved + size <= self.capacity

    def reserve_addresses(self, size: int, alignment: int) -> int:
        """Return the start of a range of unused addresses."""
        self._lowest_address = (self._lowest_address - size) // alignment * alignment
        return self._lowest_address

    def count_segment(self, pool: Pool, count: int, size: int) -> None:
        """Count a segment of `size` bytes from the driver; `count` and `size` are negative if it is released."""
        for stats in pool.stats:
            stats.segment.change(count)
        if abs(size) >= self.oversize:
            self.statistics.oversize_segments.change(count)
        self.count_reserved(pool, size)

    def count_reserved(self, pool: Pool, size: int) -> None:
        """Count one call to the driver, which provides `size` bytes, or releases them if `size` is negative."""
        if size > 0:
            self.statistics.num_device_alloc += 1
        else:
            self.statistics.num_device_free += 1
        for stats in pool.stats:
            stats.reserved_bytes.change(size)

    def tell(self, action: str, address: int, size: int, pool: Pool) -> None:
        """Report an event to `on_event`."""
        if self.on_event:
            self.on_event(action, address, size, pool.stream)
