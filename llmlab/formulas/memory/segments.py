"""What torch's allocator gives beyond what is asked for, where it is not told to expand segments.

A request of more than 1 MiB takes the smallest free block that holds it, or a new segment: of 20 MiB, or from 10 MiB on
of its own, in whole multiples of 2 MiB. What is left of a block is split off where it is more than 1 MiB; else it stays
with the request (c10/cuda/CUDACachingAllocator.cpp, get_allocation_size, should_split). Smaller requests are given what
they ask for. `simulation.allocator` is the whole allocator; this is what a formula needs of it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from ...base.units import MiB


class Segments:
    """Free blocks, by address and by size; what was taken can be given back, and becomes one with free neighbours."""

    def __init__(self) -> None:
        self.rooms: dict[int, int] = {}
        self.by_size: list[tuple[int, ...]] = []
        self.lowest = 0

    def _new(self, room: int) -> None:
        self.lowest -= room + 1  # segments are no neighbours, and each is below those before
        self._free(self.lowest, room)

    def _free(self, at: int, room: int) -> None:
        self.rooms[at] = room
        insort(self.by_size, (room, at))

    def _use(self, at: int) -> int:
        room = self.rooms.pop(at)
        self.by_size.remove((room, at))
        return room

    def take(self, size: int) -> tuple[int, int]:
        """Return the address and the bytes of the block that a request of more than 1 MiB is given."""
        if not self.by_size or self.by_size[-1][0] < size:
            self._new(20 * MiB if size < 10 * MiB else -(-size // (2 * MiB)) * 2 * MiB)
        at = self.by_size[bisect_left(self.by_size, (size,))][1]
        room = self._use(at)
        if room - size > MiB:
            self._free(at + size, room - size)
            room = size
        return at, room

    def give(self, at: int, room: int) -> None:
        """Take back what `take` gave."""
        if at + room in self.rooms:
            room += self._use(at + room)
        for start, its in self.rooms.items():
            if start + its == at:
                at, room = start, room + self._use(start)
                break
        self._free(at, room)


def granted(size: int) -> float:
    """Return how many times `size` bytes the block takes that a new segment is split for."""
    return Segments().take(size)[1] / size if size > MiB else 1


def beyond(made: Iterable[tuple[int, ...]]) -> int:
    """Return the bytes that tensors take beyond their sizes, made one after another.

    How one is made is the sizes of all that are taken, in order, and -1 where the first of them is given back, -2 the
    second, and so on: the others stay.

    >>> beyond([(11 * MiB,)] * 3), beyond([(44 * MiB, -1), *[(11 * MiB,)] * 3])
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
