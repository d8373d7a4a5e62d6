"""Paging fills the memory that reserving leaves empty, and loses no request."""

import random

import pytest

from llmlab.base.errors import SpecError
from llmlab.simulation.kv_occupancy import KINDS, occupancy

ROOM, LIMIT = 8192, 2048


def requests(count: int, seed: int = 0) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    prompts = [draw.randint(16, 900) for _ in range(count)]
    return [(prompt, prompt + draw.randint(16, 900)) for prompt in prompts]


def test_pages_hold_more_requests_than_any_contiguous_place() -> None:
    limit, length, paged = (occupancy(kind, requests(1000), ROOM, LIMIT) for kind in KINDS)
    assert limit.requests == ROOM / LIMIT < length.requests < paged.requests
    assert limit.written < length.written < 0.75 < 0.9 < paged.written <= 1
    assert paged.preempted > 0 == length.preempted == limit.preempted


def test_the_memory_pictured_is_the_room_and_has_holes_only_where_places_are_contiguous() -> None:
    sizes = {}
    for kind in KINDS:
        (segment,) = occupancy(kind, requests(1000), ROOM, LIMIT).memory
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"] == ROOM * 131072
        sizes[kind] = sum(block["size"] for block in segment["blocks"] if block["state"] == "inactive")
    assert sizes["length"] > 0.05 * ROOM * 131072 > sizes["paged"]


@pytest.mark.parametrize("kind", KINDS)
def test_when_all_have_written_their_tokens_nobody_is_inside(kind: str) -> None:
    some = occupancy(kind, requests(12), ROOM, LIMIT, ticks=400)
    long = occupancy(kind, requests(12), ROOM, LIMIT, ticks=800)
    assert long.requests == pytest.approx(some.requests / 2)  # the second half was empty
    assert long.written == pytest.approx(some.written / 2)


def test_a_request_that_can_never_fit_is_refused() -> None:
    with pytest.raises(SpecError, match="limit=100"):
        occupancy("paged", [(50, 101)], ROOM, 100)
    with pytest.raises(SpecError, match="the room, 8192"):
        occupancy("limit", [(1, 2)], ROOM, 10000)
    with pytest.raises(SpecError, match="kind='heap'"):
        occupancy("heap", [(1, 2)], ROOM, LIMIT)
