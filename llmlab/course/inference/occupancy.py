"""The number of requests in a cache over time: a queue, and requests that grow and end in limited memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

STEP = 16  # tokens that a request generates per tick


@dataclass(eq=False)
class Stay:
    """A request: the tokens that it has in memory, at first its prompt, and their number in the end."""

    written: int
    total: int
    place: Any = None


class Places(Protocol):
    """Memory that requests enter, in which they grow, and which they leave."""

    def enter(self, request: Stay) -> Any:
        """Return a place for the request, or raise an error if there is no room."""

    def extend(self, place: Any, tokens: list[int]) -> Any:
        """Make room for more tokens, or raise an error."""

    def release(self, place: Any) -> None:
        """Free the place."""


@dataclass(frozen=True)
class Occupancy:
    """The `requests` in memory and the tokens `written`, as means over all ticks; the number of requests `sent_back` to
    the queue; and `layout`, the memory at the last moment at which a request had to wait."""

    requests: float
    written: float
    sent_back: int
    layout: Any


def occupancy(
    places: Places,
    lengths: Iterable[tuple[int, int]],
    full: type[Exception] | tuple[type[Exception], ...],
    layout: Callable[[Places, list[Stay]], Any],
    ticks: int = 300,
) -> Occupancy:
    """Run requests of these lengths (prompt, total) through `places`.

    At each tick the requests that fit enter in the order of the queue, and each one in memory writes STEP tokens. If
    there is no room for them (`full` is raised), the request that entered last goes back to the queue.
    """
    queue, inside = deque(Stay(*pair) for pair in lengths), list[Stay]()
    count, written, sent_back, picture = 0, 0, 0, None
    for _ in range(ticks):
        while queue:
            try:
                queue[0].place = places.enter(queue[0])
            except full:
                picture = layout(places, inside)
                break
            inside.append(queue.popleft())
        count, written = count + len(inside), written + sum(stay.written for stay in inside)
        for stay in list(inside):
            new = min(STEP, stay.total - stay.written)
            while stay in inside:
                try:
                    places.extend(stay.place, [0] * new)
                    break
                except full:
                    queue.appendleft(inside.pop())
                    sent_back += 1
                    places.release(queue[0].place)
            else:
                continue
            stay.written += new
            if stay.written == stay.total:
                places.release(stay.place)
                inside.remove(stay)
    return Occupancy(count / ticks, written / ticks, sent_back, picture)
