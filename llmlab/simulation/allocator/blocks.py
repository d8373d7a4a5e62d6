"""Blocks of the caching allocator, linked to their neighbours in a segment, and the pools of free ones.

Source: Block, BlockPool and try_merge_blocks in c10/cuda/CUDACachingAllocator.cpp, torch 2.6 to 2.13.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

from .statistics import Stats

ADDRESS = attrgetter("address")


class Block:
    """A piece of a segment: in use, cached, or (in an expandable segment) addresses without memory behind them."""

    __slots__ = ("address", "allocated", "mapped", "next", "pool", "prev", "requested", "size")

    def __init__(self, address: int, size: int, pool: Pool, mapped: bool = True) -> None:
        self.address, self.size, self.pool, self.mapped = address, size, pool, mapped
        self.requested, self.allocated = 0, False
        self.prev: Block | None = None
        self.next: Block | None = None

    def cut(self, size: int) -> Block:
        """Keep the first `size` bytes, and return the rest as a new block."""
        rest = Block(self.address + size, self.size - size, self.pool, self.mapped)
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next, self.size = rest, size
        return rest


class Pool:
    """The free blocks of one size class and stream (BlockPool)."""

    __slots__ = ("blocks", "page", "small", "stats", "stream", "unmapped")

    def __init__(self, small: bool, stream: int, page: int, stats: tuple[Stats, Stats]) -> None:
        self.small, self.stream, self.page, self.stats = small, stream, page, stats
        self.blocks: list[tuple[int, int, Block, int]] = []  # (size, address, block, clock when inserted), sorted
        self.unmapped: list[Block] = []  # sorted by address

    def insert(self, block: Block) -> None:
        """Add a free block."""
        if block.mapped:
            insort(self.blocks, (block.size, block.address, block, self.stats[1].clock))
        else:
            insort(self.unmapped, block, key=ADDRESS)

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        if block.mapped:
            del self.blocks[bisect_left(self.blocks, (block.size, block.address))]
        else:
            self.unmapped.remove(block)

    def merge(self, block: Block, other: Block | None) -> int:
        """Merge `other`, a free neighbour, into `block`; return the bytes it gained (try_merge_blocks)."""
        if other is None or other.allocated or other.mapped != block.mapped:
            return 0
        self.remove(other)
        if block.prev is other:
            block.address, block.prev = other.address, other.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.prev = block
        block.size += other.size
        return other.size


def is_whole(block: Block) -> bool:
    """Return whether `block` spans its whole segment."""
    return block.prev is None and block.next is None


def mapped_from(block: Block | None) -> Iterator[Block]:
    """Yield `block` and its successors, up to the end of the segment or the first unmapped one."""
    while block is not None and block.mapped:
        yield block
        block = block.next


def describe_segment(blocks: Iterable[Block], expandable: bool) -> dict[str, Any]:
    """Return one entry of torch.cuda.memory._snapshot()["segments"] from a segment's blocks, by address."""
    blocks = list(blocks)
    in_use = [block for block in blocks if block.allocated]
    pool, allocated = blocks[0].pool, sum(block.size for block in in_use)
    return {
        "device": 0,
        "address": blocks[0].address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(block.requested for block in in_use),
        "stream": pool.stream,
        "segment_type": "small" if pool.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": expandable,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": "active_allocated" if block.allocated else "inactive",
                "frames": [],
            }
            for block in blocks
        ],
    }
