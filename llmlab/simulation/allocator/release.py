"""Release of cached segments to the driver: all that are free, just enough for a request, or those unused for longest.

Source: release_cached_blocks, release_available_cached_blocks and garbage_collect_cached_blocks in
c10/cuda/CUDACachingAllocator.cpp, torch 2.6 to 2.13.
"""

from __future__ import annotations

from bisect import bisect_left

from .blocks import Block, Pool, is_whole
from .driver import Driver
from .expandable import unmap


def release_block(driver: Driver, block: Block) -> None:
    """Give back a segment that is one free block (release_block)."""
    block.pool.remove(block)
    driver.count_segment(block.pool, -1, -block.size)
    driver.tell("segment_free", block.address, block.size, block.pool)


def release_blocks(driver: Driver, pool: Pool, expandable: bool) -> None:
    """Give back a pool's free segments, or the free pages of expandable ones (release_blocks)."""
    for _, _, block, _ in list(pool.blocks):
        if expandable:
            unmap(driver, block)  # the addresses stay: after release_expandable_segment the driver gives the same
        elif is_whole(block):
            release_block(driver, block)


def release_available(driver: Driver, pool: Pool, size: int, oversize: int) -> bool:
    """Release just enough oversize blocks for `size`; False: that won't do (release_available_cached_blocks)."""
    needed, released = max(size, oversize), 0
    index = bisect_left(pool.blocks, (needed,))
    if index < len(pool.blocks):
        release_block(driver, pool.blocks[index][2])
        return True
    while released < needed and pool.blocks and pool.blocks[-1][0] >= oversize:
        released += pool.blocks[-1][0]
        release_block(driver, pool.blocks[-1][2])
    return released >= needed


def collect_garbage(driver: Driver, pools: list[Pool], limit: int) -> None:
    """Release the large segments unused for longest until `limit` bytes are reserved (garbage_collect_cached_blocks).

    `pools`: all large ones.
    """
    target = driver.reserved - limit
    now, reclaimed = driver.statistics.large_pool.clock, 0
    while reclaimed < target:
        free = [entry for large in pools for entry in large.blocks if is_whole(entry[2])]
        if not free:
            return
        mean = sum(now - since for _, _, _, since in free) / len(free)
        for size, _, block, since in free:
            if now - since >= mean:
                reclaimed += size
                release_block(driver, block)
