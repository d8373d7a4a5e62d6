"""PyTorch's caching allocator on one screen: round, best fit, split, merge. No streams, no options.

`llmlab.simulation.allocator.caching` is the complete version, function by function; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

MiB = 1 << 20


@dataclass
class Block:
    """A piece of a segment: `size` bytes at `address`, counted from the segment's start."""

    segment: list[Block]
    address: int
    size: int
    small: bool
    free: bool = True


class CachingAllocator:
    """Asks the driver for segments, cuts them into blocks, and never gives a segment back unless told to."""

    def __init__(self) -> None:
        self.segments: list[list[Block]] = []  # from the driver; each is a list of blocks in order of address

    def malloc(self, request: int) -> Block:
        """Return a block of at least `request` bytes."""
        size = -(-request // 512) * 512  # blocks are multiples of 512 bytes
        small = size <= MiB
        fitting = [b for s in self.segments for b in s if b.free and b.small == small and b.size >= size]
        block = min(fitting, key=lambda b: b.size, default=None)  # best fit: the smallest that is large enough
        if block is None:
            block = self.new_segment(size, small)
        remainder = block.size - size
        if remainder >= 512 if small else remainder > MiB:  # up to 1 MiB of a large block is wasted: less fragmentation
            block.size = size
            after = block.segment.index(block) + 1
            block.segment.insert(after, Block(block.segment, block.address + size, remainder, small))
        block.free = False
        return block

    def new_segment(self, size: int, small: bool) -> Block:
        """Get a segment from the driver: 2 MiB for small blocks, 20 MiB below 10 MiB, else the size in whole 2 MiB."""
        segment_size = 2 * MiB if small else 20 * MiB if size < 10 * MiB else -(-size // (2 * MiB)) * 2 * MiB
        segment: list[Block] = []
        segment.append(Block(segment, 0, segment_size, small))
        self.segments.append(segment)
        return segment[0]

    def free(self, block: Block) -> None:
        """Mark a block free and merge it with free neighbours. The segment is kept: that is the cache."""
        block.free = True
        index = block.segment.index(block)
        for left in (index, index - 1):  # first with the block after it, then with the one before
            if 0 <= left < len(block.segment) - 1 and block.segment[left].free and block.segment[left + 1].free:
                block.segment[left].size += block.segment.pop(left + 1).size

    def empty_cache(self) -> None:
        """Return to the driver every segment that is entirely free, and no other."""
        self.segments = [s for s in self.segments if not (len(s) == 1 and s[0].free)]

    @property
    def allocated(self) -> int:
        return sum(b.size for s in self.segments for b in s if not b.free)

    @property
    def reserved(self) -> int:
        return sum(b.size for s in self.segments for b in s)
