"""PyTorch's CUDA caching allocator: which segments it takes from the driver, and how it cuts them into blocks.

It follows DeviceCachingAllocator in c10/cuda/CUDACachingAllocator.cpp (torch 2.6 to 2.13) function by function, and the
docstrings name the C++ functions. Left out: the private pools of CUDA graphs, and record_stream, so that every active
block is an allocated one. The address of a segment is the driver's choice, and of cached blocks that fit equally well
the lowest is taken: the driver goes downwards, each segment lies below all earlier ones. With that order the reserved
bytes of the published T4 records come out to the byte, with the opposite one up to 9 % off.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

from ...base.errors import SpecError
from .blocks import ADDRESS, Block, Pool, describe_segment, mapped_from
from .config import MIN_BLOCK, ROUND_LARGE, SMALL_SEGMENT, SMALL_SIZE, AllocatorConfig, round_size, segment_size
from .driver import UNLIMITED, Driver
from .memory import AllocatorOutOfMemory
from .segments import can_grow_to, collect_garbage, grow, release_available, release_blocks


class Allocator:
    """The caching allocator of one GPU. `capacity`: bytes that the driver can give it, None for no limit.

    `total` is the card's memory, of which a memory fraction is taken; it defaults to `capacity`. `driver.on_event`,
    where set, gets the events of torch's memory history as they happen: (action, address, size, stream).
    """

    def __init__(
        self, capacity: int | None = None, config: AllocatorConfig | None = None, total: int | None = None
    ) -> None:
        self.driver = Driver(capacity, capacity if total is None else total)
        self.statistics = self.driver.statistics
        self.late_config: Callable[[], AllocatorConfig] | None = None  # asked at the first request
        self._live: dict[int, Block] = {}  # blocks in use, by address
        self._pools: dict[int, tuple[Pool, Pool]] = {}  # by stream: the large pool, the small pool
        self.configure(config or AllocatorConfig())

    def configure(self, config: AllocatorConfig) -> None:
        """Let `config` hold from the next request on."""
        self.config = config
        self.driver.oversize = self._max_split = config.max_split_size or UNLIMITED
        self.statistics.max_split_size = -1 if config.max_split_size is None else config.max_split_size
        self._expandable = config.expandable_segments
        self.set_memory_fraction(config.per_process_memory_fraction)

    # ---- the interface: bytes in, addresses out

    def malloc(self, size: int, stream: int = 0) -> int:
        """Return the address of `size` bytes (malloc, alloc_found_block); 0 bytes are at address 0.

        Raises AllocatorOutOfMemory, and SpecError for a negative size.
        """
        if size <= 0:
            if size < 0:
                raise SpecError(f"cannot allocate {size} bytes; a size is 0 or more.")
            return 0
        pools = self._pools.get(stream) or self._open_stream(stream)
        rounded = round_size(size, self.config)
        pool = pools[rounded <= SMALL_SIZE]
        block = self._get_free_block(pool, rounded) or self._get_new_block(pool, rounded, size)
        rest = block.size - rounded
        was_split = block.prev is not None or block.next is not None
        split = self._should_split(pool, rounded, rest)
        if split:
            pool.insert(block.cut(rounded))
        if split or was_split:
            self._count_inactive(pool, split - was_split, -block.size if was_split else rest)
        block.allocated, block.requested = True, size
        self._live[block.address] = block
        self._count_allocation(pool, 1, block.size, size)
        self.driver.tell("alloc", block.address, size, pool)
        return block.address

    def stream_of(self, address: int) -> int | None:
        """Return the stream whose block is in use at `address`, None where none is."""
        block = self._live.get(address)
        return block.pool.stream if block is not None else None

    def free(self, address: int) -> None:
        """Take back what malloc gave; free neighbours become one block with it (free, free_block).

        Raises SpecError for an address that is not in use.
        """
        if not address:
            return
        block = self._live.pop(address, None)
        if block is None:
            raise SpecError(f"{address:#x} is not allocated; free takes an address from malloc, once.")
        pool, size, requested = block.pool, block.size, block.requested
        self.driver.tell("free_requested", address, requested, pool)
        self.driver.tell("free_completed", address, requested, pool)
        block.allocated = False
        before, after = pool.merge(block, block.prev), pool.merge(block, block.next)
        pool.insert(block)
        is_split = block.prev is not None or block.next is not None
        if is_split or before or after:
            count = is_split - (before > 0) - (after > 0)
            self._count_inactive(pool, count, (block.size if is_split else 0) - before - after)
        self._count_allocation(pool, -1, size, requested)

    def empty_cache(self) -> None:
        """Give back the segments, or pages of expandable ones, that no block uses (release_cached_blocks)."""
        self.statistics.num_sync_all_streams += 1
        for pool in [pools[small] for small in (False, True) for pools in self._pools.values()]:
            release_blocks(self.driver, pool, self._expandable)

    def set_memory_fraction(self, fraction: float) -> None:
        """Reserve at most `fraction` of `total` from now on (setMemoryFraction); 1 sets no limit. Raises SpecError."""
        if not 0 <= fraction <= 1:
            raise SpecError(f"a memory fraction of {fraction} cannot be; give 0 to 1.")
        allowed = garbage_limit = None
        if fraction < 1:
            if self.driver.total is None:
                raise SpecError("a memory fraction needs the GPU's memory; give Allocator its capacity or total.")
            allowed = int(fraction * self.driver.total)
            if (threshold := self.config.garbage_collection_threshold) is not None:
                garbage_limit = int(threshold * allowed)
        self._allowed, self._garbage_limit = allowed, garbage_limit

    def stats(self) -> dict[str, int]:
        """Return torch.cuda.memory_stats, key by key."""
        return self.statistics.as_dict()

    def reset_peak(self) -> None:
        """Start the peaks at the current values: torch.cuda.reset_peak_memory_stats."""
        self.statistics.reset_peak()

    def small_pool(self, stream: int = 0) -> tuple[Any, ...]:
        """Return the number of segments for small requests, and the size and address of each free block in them."""
        segments = self.statistics.small_pool.segment.current
        return segments, *[(size, address) for size, address, _, _ in self._pools[stream][1].blocks]

    def has_room(self, sizes: Iterable[int]) -> bool:
        """Return whether no request of `sizes` makes the allocator give cached segments back: whether each could get a
        segment of its own. In expandable segments, whose pages are given back one by one, this is never certain."""
        needed = sum(segment_size(round_size(size, self.config), self.config) for size in sizes)
        within = self._allowed is None or self.reserved + needed <= self._allowed
        return within and self.driver.has(needed) and not self._expandable

    def segments(self) -> list[dict]:
        """Return torch.cuda.memory._snapshot()["segments"] (snapshot), without stack frames."""
        free = [entry[2] for pools in self._pools.values() for pool in pools for entry in pool.blocks]
        heads = [block for block in (*free, *self._live.values()) if block.prev is None or not block.prev.mapped]
        return [describe_segment(mapped_from(head), self._expandable) for head in sorted(heads, key=ADDRESS)]

    @property
    def allocated(self) -> int:
        """Bytes of the blocks in use: torch.cuda.memory_allocated."""
        return self.statistics.all.allocated_bytes.current

    @property
    def peak_allocated(self) -> int:
        """The most bytes in use since reset_peak: torch.cuda.max_memory_allocated."""
        return self.statistics.all.allocated_bytes.peak

    @property
    def reserved(self) -> int:
        """Bytes of the segments: torch.cuda.memory_reserved."""
        return self.driver.reserved

    @property
    def peak_reserved(self) -> int:
        """The most bytes reserved since reset_peak: torch.cuda.max_memory_reserved."""
        return self.statistics.all.reserved_bytes.peak

    # ---- where a block comes from

    def _get_free_block(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block of at least `size`, and of equals the lowest (get_free_block)."""
        blocks = pool.blocks
        if self._garbage_limit is not None:
            pool.stats[1].clock += 1
        index = bisect_left(blocks, (size,))
        if index == len(blocks):
            return None
        if self._expandable:  # a block counts with what it can grow to
            while index + 1 < len(blocks) and can_grow_to(blocks[index + 1][2]) < can_grow_to(blocks[index][2]):
                index += 1
        found, oversize = blocks[index][0], self._max_split
        if found >= oversize and (size < oversize or found >= size + self.config.max_non_split_rounding):
            return None
        return blocks.pop(index)[2]

    def _should_split(self, pool: Pool, size: int, rest: int) -> bool:
        """Return whether a block for `size` bytes is cut off where `rest` would be left (should_split)."""
        if pool.small or self._expandable:
            return rest >= MIN_BLOCK
        return rest > SMALL_SIZE and size < self._max_split

    def _get_new_block(self, pool: Pool, size: int, requested: int) -> Block:
        """Ask the driver; where it has too little, release cached segments and ask again (malloc)."""
        if self._garbage_limit is not None and not self._expandable:
            collect_garbage(self.driver, [large for large, _ in self._pools.values()], self._garbage_limit)
        block = self._alloc_block(pool, size)
        oversize = None if self._expandable else self.config.max_split_size
        if block is None and oversize is not None and release_available(self.driver, pool, size, oversize):
            block = self._alloc_block(pool, size)
        if block is None:
            self.empty_cache()
            self.statistics.num_alloc_retries += 1
            block = self._alloc_block(pool, size)
        if block is None:
            self.statistics.num_ooms += 1
            driver, segment = self.driver, segment_size(size, self.config)
            limit = min(limit for limit in (driver.capacity, self._allowed) if limit is not None)
            driver.tell("oom", limit - driver.reserved, size, pool)  # torch puts the free bytes where an address is
            raise AllocatorOutOfMemory(
                requested, segment, self.allocated, driver.reserved, limit, driver.total or limit, driver.left
            )
        return block

    def _alloc_block(self, pool: Pool, size: int) -> Block | None:
        """Return a new segment, or new pages of an expandable one; None where there is no room (alloc_block)."""
        segment = segment_size(size, self.config)
        if self._allowed is not None and self.reserved + segment > self._allowed:
            return None
        if self._expandable:
            return grow(self.driver, pool, size)
        if not self.driver.has(segment):
            return None
        block = Block(self.driver.reserve_addresses(segment, ROUND_LARGE), segment, pool)
        self.driver.count_segment(pool, 1, segment)
        self.driver.tell("segment_alloc", block.address, segment, pool)
        return block

    def _open_stream(self, stream: int) -> tuple[Pool, Pool]:
        if self.late_config is not None and not self._pools:
            self.configure(self.late_config())
        both = self.statistics.all
        large = Pool(False, stream, self.config.large_segment_size, (both, self.statistics.large_pool))
        small = Pool(True, stream, SMALL_SEGMENT, (both, self.statistics.small_pool))
        self._pools[stream] = large, small
        return large, small

    def _count_allocation(self, pool: Pool, sign: int, size: int, requested: int) -> None:
        for stats in pool.stats:
            stats.allocation.change(sign)
            stats.allocated_bytes.change(sign * size)
            stats.requested_bytes.change(sign * requested)
        if size >= self._max_split:
            self.statistics.oversize_allocations.change(sign)

    def _count_inactive(self, pool: Pool, count: int, size: int) -> None:
        if not self._expandable:  # whose free pages can always go back
            for stats in pool.stats:
                stats.inactive_split.change(count)
                stats.inactive_split_bytes.change(size)
