"""The bytes that torch's allocator gives in addition to those requested, without expandable segments.

A request of more than 1 MiB gets the smallest free block that is large enough, or a new segment. A segment has 20 MiB,
or from 10 MiB on the requested size, rounded up to a multiple of 2 MiB. The rest of a block is split off if it is
larger than 1 MiB; otherwise it stays with the request (c10/cuda/CUDACachingAllocator.cpp, get_allocation_size,
should_split). Smaller requests get exactly what they ask for. `simulation.allocator` is the whole allocator; this is
the part that a formula needs. """

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from ...base.units import MiB


class Segments:
    """Free blocks, by address and by size. A block that is given back merges with free neighbors."""

    def __init__(self) -> None:
        self.rooms: dict[int, int] = {}
        self.by_size: list[tuple[int, ...]] = []
        self.lowest = 0

    def _new(self, room: int) -> None:
        self.lowest -= room + 1  # segments are not adjacent, and each is below the previous ones
        self._free(self.lowest, room)

    def _free(self, at: int, room: int) -> None:
        self.rooms[at] = room
        insort(self.by_size, (room, at))

    def _use(self, at: int) -> int:
        room = self.rooms.pop(at)
        self.by_size.remove((room, at))
        return room

    def take(self, size: int) -> tuple[int, int]:
        """Return the address and the bytes of the block for a request of more than 1 MiB."""
        if not self.by_size or self.by_size[-1][0] < size:
            self._new(20 * MiB if size < 10 * MiB else -(-size // (2 * MiB)) * 2 * MiB)
        at = self.by_size[bisect_left(self.by_size, (size,))][1]
        room = self._use(at)
        if room - size > MiB:
            self._free(at + size, room - size)
            room = size
        return at, room

    def give(self, at: int, room: int) -> None:
        """Free a block that `take` returned."""
        if at + room in self.rooms:
            room += self._use(at + room)
        for start, its in self.rooms.items():
            if start + its == at:
                at, room = start, room + self._use(start)
                break
        self._free(at, room)


def granted(size: int) -> float:
    """Return the size of the block that a new segment gives to a request of `size` bytes, as a multiple of `size`."""
    return Segments().take(size)[1] / size if size > MiB else 1


def slack(made: Iterable[tuple[int, ...]]) -> int:
    """Return the bytes that tensors occupy beyond their sizes if they are created one after another.

    Each tuple describes how one tensor is created: the sizes that are allocated, in order, and -1 to free the first of
    them, -2 the second, and so on. The others stay.

    >>> slack([(11 * MiB,)] * 3), slack([(44 * MiB, -1), *[(11 * MiB,)] * 3])
    (3145728, 0)
    """
    segments, more = Segments(), 0
    for steps in made:
        taken: list[tuple[int, int, int]] = []
        for size in steps:
            if size >= 0:
                at, room = segments.take(size) if size > MiB else (0, 0)
                taken.append((at, room, max(0, room - size)))
                more += taken[-1][2]
            else:
                at, room, spared = taken[-size - 1]
                more -= spared
                if room:
                    segments.give(at, room)
    return more
