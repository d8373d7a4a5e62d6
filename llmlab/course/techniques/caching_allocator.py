"""PyTorch's caching allocator on one screen: round, best fit, split, merge, and return free segments before an error.

It has no streams and no options. `llmlab.simulation.allocator.caching` is the complete model, which follows PyTorch's
C++ code function by function; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

MiB = 1 << 20


@dataclass
class Block:
    """A piece of a segment: `size` bytes at `address`, counted from the start of the segment."""

    segment: list[Block]
    address: int
    size: int
    small: bool
    free: bool = True


class CachingAllocator:
    """Allocates segments from the driver, divides them into blocks, and keeps segments whose blocks are free."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity  # bytes that the driver has, None for no limit
        self.segments: list[list[Block]] = []  # each is a list of blocks in the order of their addresses

    def malloc(self, request: int) -> Block:
        """Return a block of at least `request` bytes; raise MemoryError if there is none and no room for a segment."""
        size = -(-request // 512) * 512  # blocks are multiples of 512 bytes
        small = size <= MiB
        fitting = [b for s in self.segments for b in s if b.free and b.small == small and b.size >= size]
        block = min(fitting, key=lambda b: b.size, default=None)  # best fit: the smallest that is large enough
        if block is None:
            block = self.new_segment(size, small)
        remainder = block.size - size
        if remainder >= 512 if small else remainder > MiB:  # a large block keeps a remainder of up to 1 MiB
            block.size = size
            after = block.segment.index(block) + 1
            block.segment.insert(after, Block(block.segment, block.address + size, remainder, small))
        block.free = False
        return block

    def new_segment(self, size: int, small: bool) -> Block:
        """Allocate a segment: 2 MiB for small blocks, 20 MiB below 10 MiB, else `size` rounded up to 2 MiB."""
        segment_size = 2 * MiB if small else 20 * MiB if size < 10 * MiB else -(-size // (2 * MiB)) * 2 * MiB
        if self.capacity is not None and self.reserved + segment_size > self.capacity:
            self.empty_cache()
            if self.reserved + segment_size > self.capacity:
                raise MemoryError("out of memory, also after returning the free segments")
        segment: list[Block] = []
        segment.append(Block(segment, 0, segment_size, small))
        self.segments.append(segment)
        return segment[0]

    def free(self, block: Block) -> None:
        """Mark a block as free and merge it with free neighbors. Its segment stays in the cache."""
        block.free = True
        index = block.segment.index(block)
        for left in (index, index - 1):  # first with the block after it, then with the one before
            if 0 <= left < len(block.segment) - 1 and block.segment[left].free and block.segment[left + 1].free:
                block.segment[left].size += block.segment.pop(left + 1).size

    def empty_cache(self) -> None:
        """Return each segment without a used block to the driver, and no other."""
        self.segments = [s for s in self.segments if not (len(s) == 1 and s[0].free)]

    @property
    def allocated(self) -> int:
        """Bytes of all used blocks."""
        return sum(b.size for s in self.segments for b in s if not b.free)

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return sum(b.size for s in self.segments for b in s)
