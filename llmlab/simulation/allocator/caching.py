"""PyTorch's CUDA caching allocator: which segments it takes from the driver, and how it cuts them into blocks.

It follows DeviceCachingAllocator in c10/cuda/CUDACachingAllocator.cpp (torch 2.6 to 2.13) function by function, and the
docstrings name the C++ functions. The private pools of CUDA graphs and record_stream are left out, so every active
block is an allocated block. Among cached blocks that fit equally well, the allocator takes the one with the lowest
address, and the driver chooses the addresses of segments. Our driver places each segment below all earlier ones. With
that order the reserved bytes of the published T4 records match to the byte; with the opposite order they are up to 9 %
off.
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
    """The caching allocator of one GPU. `capacity` is the bytes that the driver can provide, or None for no limit.

    `total` is the GPU's memory, to which a memory fraction refers; it defaults to `capacity`. If `driver.on_event` is
    set, it receives the events of torch's memory history as they happen: (action, address, size, stream).
    """

    def __init__(
        self, capacity: int | None = None, config: AllocatorConfig | None = None, total: int | None = None
    ) -> None:
        self.driver = Driver(capacity, capacity if total is None else total)
        self.statistics = self.driver.statistics
        self.late_config: Callable[[], AllocatorConfig] | None = None  # called once, by `settle`
        self._live: dict[int, Block] = {}  # blocks in use, by address
        self._pools: dict[int, tuple[Pool, Pool]] = {}  # by stream: the large pool, the small pool
        self.configure(config or AllocatorConfig())

    def configure(self, config: AllocatorConfig) -> None:
        """Apply `config` to all further requests."""
        self.config = config
        self.driver.oversize = self._max_split = config.max_split_size or UNLIMITED
        self.statistics.max_split_size = -1 if config.max_split_size is None else config.max_split_size
        self._expandable = config.expandable_segments
        self.set_memory_fraction(config.per_process_memory_fraction)

    def settle(self) -> None:
        """Apply the settings of the environment, which torch reads when the GPU is first used."""
        if self.late_config is not None:
            config, self.late_config = self.late_config(), None
            self.configure(config)

    # ---- the interface: bytes in, addresses out

    def malloc(self, size: int, stream: int = 0) -> int:
        """Allocate `size` bytes and return their address (malloc, alloc_found_block); 0 bytes have address 0.

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
        remainder = block.size - rounded
        was_split = block.prev is not None or block.next is not None
        split = self._should_split(pool, rounded, remainder)
        if split:
            pool.insert(block.cut(rounded))
        if split or was_split:
            self._count_inactive(pool, split - was_split, -block.size if was_split else remainder)
        block.allocated, block.requested = True, size
        self._live[block.address] = block
        self._count_allocation(pool, 1, block.size, size)
        self.driver.tell("alloc", block.address, size, pool)
        return block.address

    def stream_of(self, address: int) -> int | None:
        """Return the stream of the block in use at `address`, or None if there is none."""
        block = self._live.get(address)
        return block.pool.stream if block is not None else None

    def free(self, address: int) -> None:
        """Free the block at an address from malloc, and merge it with free neighbours (free, free_block).

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
        """Release the segments, or pages of expandable segments, that no block uses (release_cached_blocks)."""
        self.statistics.num_sync_all_streams += 1
        for pool in [pools[small] for small in (False, True) for pools in self._pools.values()]:
            release_blocks(self.driver, pool, self._expandable)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit reserved memory to `fraction` of `total` (setMemoryFraction); 1 sets no limit. Raises SpecError."""
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
        """Reset the peaks to the current values: torch.cuda.reset_peak_memory_stats."""
        self.statistics.reset_peak()

    def small_pool(self, stream: int = 0) -> tuple[Any, ...]:
        """Return the number of segments for small requests, and the size and address of each free block in them."""
        segments = self.statistics.small_pool.segment.current
        return segments, *[(size, address) for size, address, _, _ in self._pools[stream][1].blocks]

    def has_room(self, sizes: Iterable[int]) -> bool:
        """Return whether requests of `sizes` certainly do not release cached segments, because each could get a segment
        of its own. With expandable segments, whose pages are released one by one, this is never certain."""
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

    # ---- free and new blocks

    def _get_free_block(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block of at least `size`, and among equals the lowest (get_free_block)."""
        blocks = pool.blocks
        if self._garbage_limit is not None:
            pool.stats[1].clock += 1
        index = bisect_left(blocks, (size,))
        if index == len(blocks):
            return None
        if self._expandable:  # compare the sizes to which blocks can grow
            while index + 1 < len(blocks) and can_grow_to(blocks[index + 1][2]) < can_grow_to(blocks[index][2]):
                index += 1
        block_size, oversize = blocks[index][0], self._max_split
        if block_size >= oversize and (size < oversize or block_size >= size + self.config.max_non_split_rounding):
            return None
        return blocks.pop(index)[2]

    def _should_split(self, pool: Pool, size: int, remainder: int) -> bool:
        """Return whether a block is split to serve `size` bytes if `remainder` bytes would remain (should_split)."""
        if pool.small or self._expandable:
            return remainder >= MIN_BLOCK
        return remainder > SMALL_SIZE and size < self._max_split

    def _get_new_block(self, pool: Pool, size: int, requested: int) -> Block:
        """Ask the driver for memory; if that fails, release cached segments and ask again (malloc)."""
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
            driver.tell("oom", limit - driver.reserved, size, pool)  # torch reports the free bytes as the address
            raise AllocatorOutOfMemory(
                requested, segment, self.allocated, driver.reserved, limit, driver.total or limit, driver.left
            )
        return block

    def _alloc_block(self, pool: Pool, size: int) -> Block | None:
        """Return a new segment, or new pages of an expandable segment; None if there is no room (alloc_block)."""
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
        self.settle()
        all_stats = self.statistics.all
        large = Pool(False, stream, self.config.large_segment_size, (all_stats, self.statistics.large_pool))
        small = Pool(True, stream, SMALL_SEGMENT, (all_stats, self.statistics.small_pool))
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
        if not self._expandable:  # the free pages of expandable segments can always be released
            for stats in pool.stats:
                stats.inactive_split.change(count)
                stats.inactive_split_bytes.change(size)
