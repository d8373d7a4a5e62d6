"""Occupancy of a KV cache as requests come and go: reserved at the limit, at their length, or in blocks.

Requests wait in a queue that never ends; each tick, those that fit come in, and each one inside writes `STEP` tokens.
Contiguous places are cut by PyTorch's allocator (`llmlab.simulation.allocator.caching`) out of one segment, best fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..base.errors import SpecError
from ..inference.blocks import BlockPool, CacheFull, Table
from .allocator.caching import Allocator, AllocatorOutOfMemory

__all__ = ["KINDS", "Occupancy", "occupancy"]

KINDS = ("limit", "length", "paged")
TOKEN = 131072  # bytes of one: Llama-3.1-8B's in bf16
STEP = 16  # tokens that a request writes per tick


@dataclass(frozen=True)
class Occupancy:
    """Means over the ticks: requests inside, and the share of the memory that holds written tokens; `memory` is how it
    looked when last a request had to wait, in the shape that `plots.plot_segments` reads."""

    requests: float
    written: float
    memory: list[dict[str, Any]]
    preempted: int


@dataclass
class _Request:
    prompt: int
    total: int
    place: Any = None  # an address, or a Table
    written: int = field(init=False)

    def __post_init__(self) -> None:
        self.written = self.prompt


def occupancy(kind: str, requests: Iterable[tuple[int, int]], room: int, limit: int, ticks: int = 300) -> Occupancy:
    """Return how full `room` tokens of memory are with `requests`, each (tokens of its prompt, tokens when done).

    `kind`: "limit" reserves `limit` tokens per request, "length" as many as it will have, were that known; "paged"
    takes blocks of 16 tokens as it writes them; where none is left, the request that came last goes back to the queue.
    Raises SpecError for another kind, and for a request longer than `limit` or the limit larger than the room.
    """
    if kind not in KINDS:
        raise SpecError(f"kind={kind!r}: give one of {', '.join(map(repr, KINDS))}")
    queue = deque(_Request(prompt, total) for prompt, total in requests)
    if limit > room or any(r.total > limit for r in queue):
        raise SpecError(f"limit={limit}: give at least the longest request, and at most the room, {room} tokens")
    places = _Blocks(room) if kind == "paged" else _Stretches(room, limit if kind == "limit" else None)
    inside: list[_Request] = []
    counts, shares, memory, preempted = [], [], places.memory(), 0
    for _ in range(ticks):
        while queue and places.take(queue[0]):
            inside.append(queue.popleft())
        memory = places.memory() if queue else memory
        counts.append(len(inside))
        shares.append(sum(r.written for r in inside) / room)
        for request in list(inside):
            while request in inside and not places.write(request, min(STEP, request.total - request.written)):
                last = inside.pop()
                places.give_back(last)
                queue.appendleft(_Request(last.written, last.total))
                preempted += 1
            if request in inside and request.written == request.total:
                places.give_back(request)
                inside.remove(request)
    return Occupancy(sum(counts) / ticks, sum(shares) / ticks, memory, preempted)


class _Stretches:
    """One contiguous place per request, of `limit` tokens or as long as the request will be."""

    def __init__(self, room: int, limit: int | None) -> None:
        self.limit = limit
        self.allocator = Allocator(capacity=room * TOKEN)
        self.allocator.free(self.allocator.malloc(room * TOKEN))  # one segment, all of it free

    def take(self, request: _Request) -> bool:
        try:
            request.place = self.allocator.malloc((self.limit or request.total) * TOKEN)
        except AllocatorOutOfMemory:
            return False
        return True

    def write(self, request: _Request, tokens: int) -> bool:
        request.written += tokens
        return True

    def give_back(self, request: _Request) -> None:
        self.allocator.free(request.place)

    def memory(self) -> list[dict[str, Any]]:
        return self.allocator.segments()


class _Blocks:
    """Blocks of a pool, taken as they are written."""

    def __init__(self, room: int) -> None:
        self.pool = BlockPool(room // 16, 16)

    def take(self, request: _Request) -> bool:
        request.place = Table()
        try:
            self.pool.extend(request.place, [0] * request.written)
        except CacheFull:
            return False
        return True

    def write(self, request: _Request, tokens: int) -> bool:
        try:
            self.pool.extend(request.place, [0] * tokens)
        except CacheFull:
            return False
        request.written += tokens
        return True

    def give_back(self, request: _Request) -> None:
        self.pool.release(request.place)

    def memory(self) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        for holders in self.pool.holders:
            state = "active_allocated" if holders else "inactive"
            if not blocks or blocks[-1]["state"] != state:
                blocks.append({"size": 0, "state": state})
            blocks[-1]["size"] += self.pool.size * TOKEN
        return [{"total_size": sum(block["size"] for block in blocks), "blocks": blocks}]
