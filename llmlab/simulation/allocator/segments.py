"""Growth and release of segments: the pages of expandable segments, and the release of cached segments.

An expandable segment is a range of addresses to which memory is mapped page by page. So a cached block at its end can
grow, and no new segment is needed next to it. A page is 2 MiB in the small pool and 20 MiB in the large one. Source:
Note [Expandable Segments], release_cached_blocks, release_available_cached_blocks and garbage_collect_cached_blocks in
c10/cuda/CUDACachingAllocator.cpp, torch 2.6 to 2.13.
"""

from __future__ import annotations

from bisect import bisect_left

from ...base.units import GiB
from .blocks import Block, Pool, is_whole
from .driver import Driver

UNKNOWN_TOTAL = 4 * 1024 * GiB  # the GPU's memory if none is given; torch reserves addresses for 9/8 of it


def grow(driver: Driver, pool: Pool, size: int) -> Block | None:
    """Map memory to the lowest addresses where `size` fits (try_allocate_expandable_block)."""
    block = find_addresses(driver, pool, size)
    if not block.mapped and not map_pages(driver, block, min(block.size, size)):
        return None
    while block.size < size:
        following = block.next
        assert following is not None  # find_addresses found room in it
        if not map_pages(driver, following, min(size - block.size, following.size)):
            return None
        block = following  # map_pages merged the previous block into it
    pool.remove(block)
    return block


def find_addresses(driver: Driver, pool: Pool, size: int) -> Block:
    """Return the first of free or unmapped neighbours that together span `size` addresses (find_expandable_block)."""
    for unmapped in pool.unmapped:
        start = unmapped if unmapped.prev is None or unmapped.prev.allocated else unmapped.prev
        free = 0
        end: Block | None = start
        while free < size and end is not None and not end.allocated:
            free, end = free + end.size, end.next
        if free >= size:
            return start
    total = driver.total or UNKNOWN_TOTAL
    addresses = -(-(total + total // 8) // pool.page) * pool.page
    block = Block(driver.reserve_addresses(addresses, pool.page), addresses, pool, mapped=False)
    pool.insert(block)
    return block


def map_pages(driver: Driver, block: Block, size: int) -> bool:
    """Map whole pages to the first `size` bytes of an unmapped block; return False if memory is short (map_block)."""
    pool, address = block.pool, block.address
    size = -(-size // pool.page) * pool.page
    if not driver.has(size):
        return False
    pool.remove(block)
    if size < block.size:
        pool.insert(block.cut(size))
    block.mapped = True
    pool.merge(block, block.prev)
    pool.merge(block, block.next)
    pool.insert(block)
    driver.count_reserved(pool, size)
    driver.tell("segment_map", address, size, pool)
    return True


def unmap(driver: Driver, block: Block) -> None:
    """Release the whole pages inside a free block (unmap_block)."""
    pool = block.pool
    start = -(-block.address // pool.page) * pool.page
    end = (block.address + block.size) // pool.page * pool.page
    if start >= end:
        return
    pool.remove(block)
    if block.address < start:
        head, block = block, block.cut(start - block.address)
        pool.insert(head)
    if end < block.address + block.size:
        pool.insert(block.cut(end - start))
    block.mapped = False
    pool.merge(block, block.prev)
    pool.merge(block, block.next)
    pool.insert(block)
    driver.count_reserved(pool, start - end)
    driver.tell("segment_unmap", start, end - start, pool)


def can_grow_to(block: Block) -> int:
    """Return the bytes of a free block and of the unmapped block after it (expandable_size)."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)


# ---- release


def release_block(driver: Driver, block: Block) -> None:
    """Release a segment that consists of one free block (release_block)."""
    block.pool.remove(block)
    driver.count_segment(block.pool, -1, -block.size)
    driver.tell("segment_free", block.address, block.size, block.pool)


def release_blocks(driver: Driver, pool: Pool, expandable: bool) -> None:
    """Release a pool's free segments, or the free pages of expandable segments (release_blocks)."""
    for _, _, block, _ in list(pool.blocks):
        if expandable:
            unmap(driver, block)  # keep the addresses, which the driver would return again after a release
        elif is_whole(block):
            release_block(driver, block)


def release_available(driver: Driver, pool: Pool, size: int, oversize: int) -> bool:
    """Release just enough oversize blocks for `size`; return whether it sufficed (release_available_cached_blocks)."""
    target, released = max(size, oversize), 0
    index = bisect_left(pool.blocks, (target,))
    if index < len(pool.blocks):
        release_block(driver, pool.blocks[index][2])
        return True
    while released < target and pool.blocks and pool.blocks[-1][0] >= oversize:
        released += pool.blocks[-1][0]
        release_block(driver, pool.blocks[-1][2])
    return released >= target


def collect_garbage(driver: Driver, pools: list[Pool], limit: int) -> None:
    """Release the segments that were unused longest until at most `limit` bytes are reserved.

    `pools` are all large pools (garbage_collect_cached_blocks).
    """
    target = driver.reserved - limit
    clock, reclaimed = driver.statistics.large_pool.clock, 0
    while reclaimed < target:
        free = [entry for large in pools for entry in large.blocks if is_whole(entry[2])]
        if not free:
            return
        mean = sum(clock - since for _, _, _, since in free) / len(free)
        for size, _, block, since in free:
            if clock - since >= mean:
                reclaimed += size
                release_block(driver, block)
