"""The CUDA driver under the allocator: how much it can give, at which addresses, and what torch counts of its calls."""

from __future__ import annotations

from collections.abc import Callable

from .blocks import Pool
from .statistics import Statistics

UNLIMITED = 2**64 - 1  # max_split_size where none is set
ADDRESSES_END = 0x7F00_0000_0000  # the first segment ends here


class Driver:
    """What cudaMalloc and the calls that map pages have left: `capacity` bytes, or no end where None.

    `total` is the card's memory. `on_event`, where set, gets torch's memory history: (action, address, size, stream).
    """

    def __init__(self, capacity: int | None, total: int | None) -> None:
        self.capacity, self.total = capacity, total
        self.oversize = UNLIMITED  # bytes from which on a segment is never split
        self.on_event: Callable[[str, int, int, int], None] | None = None
        self.statistics = Statistics()
        self._lowest_address = ADDRESSES_END

    @property
    def reserved(self) -> int:
        """Bytes that the driver gave and has not got back."""
        return self.statistics.all.reserved_bytes.current

    @property
    def left(self) -> int:
        """Bytes that the driver has left, where it has an end; else those of the card."""
        end = self.total if self.capacity is None else self.capacity
        return (end or 0) - self.reserved

    def has(self, size: int) -> bool:
        """Return whether the driver has `size` bytes left."""
        return self.capacity is None or self.reserved + size <= self.capacity

    def reserve_addresses(self, size: int, alignment: int) -> int:
        """Return the start of a range of addresses that nothing had before."""
        self._lowest_address = (self._lowest_address - size) // alignment * alignment
        return self._lowest_address

    def count_segment(self, pool: Pool, count: int, size: int) -> None:
        """Count a segment of `size` bytes that the driver gave; one less, and bytes below 0, that it took back."""
        for stats in pool.stats:
            stats.segment.change(count)
        if abs(size) >= self.oversize:
            self.statistics.oversize_segments.change(count)
        self.count_reserved(pool, size)

    def count_reserved(self, pool: Pool, size: int) -> None:
        """Count one call to the driver, which gave `size` bytes, or took them back."""
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
