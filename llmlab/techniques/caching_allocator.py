"""PyTorch's caching allocator on one screen: round, best fit, split, merge. No streams, no options.

`llmlab.simulation.allocator.caching` is the whole of it, function by function; a test holds both to the same answers.
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
        self.segments: list[list[Block]] = []  # what the driver gave; each a list of blocks in order of address

    def malloc(self, request: int) -> Block:
        """Return a block of at least `request` bytes."""
        size = -(-request // 512) * 512  # blocks are multiples of 512 bytes
        small = size <= MiB
        fitting = [b for s in self.segments for b in s if b.free and b.small == small and b.size >= size]
        block = min(fitting, key=lambda b: b.size, default=None)  # best fit: the smallest that is large enough
        if block is None:
            block = self.new_segment(size, small)
        rest = block.size - size
        if rest >= 512 if small else rest > MiB:  # a large block keeps a rest of up to 1 MiB: waste, but no splinters
            block.size = size
            place = block.segment.index(block) + 1
            block.segment.insert(place, Block(block.segment, block.address + size, rest, small))
        block.free = False
        return block

    def new_segment(self, size: int, small: bool) -> Block:
        """Take memory from the driver: 2 MiB for small requests to share, 20 MiB for medium ones, else a fit."""
        whole = 2 * MiB if small else 20 * MiB if size < 10 * MiB else -(-size // (2 * MiB)) * 2 * MiB
        segment: list[Block] = []
        segment.append(Block(segment, 0, whole, small))
        self.segments.append(segment)
        return segment[0]

    def free(self, block: Block) -> None:
        """Mark a block free and merge it with free neighbours. The segment stays: that is the cache."""
        block.free = True
        place = block.segment.index(block)
        for left in (place, place - 1):  # first with the block after it, then with the one before
            if 0 <= left < len(block.segment) - 1 and block.segment[left].free and block.segment[left + 1].free:
                block.segment[left].size += block.segment.pop(left + 1).size

    def empty_cache(self) -> None:
        """Give the driver back every segment that is free from end to end, and only those."""
        self.segments = [s for s in self.segments if not (len(s) == 1 and s[0].free)]

    @property
    def allocated(self) -> int:
        return sum(b.size for s in self.segments for b in s if not b.free)

    @property
    def reserved(self) -> int:
        return sum(b.size for s in self.segments for b in s)
