"""The allocator on one screen gives the same answers as the complete one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlab.course.techniques.caching_allocator import CachingAllocator, MiB
from llmlab.simulation.allocator.caching import Allocator
from llmlab.simulation.allocator.memory import AllocatorOutOfMemory

sizes = st.integers(1, 4096) | st.integers(1, 2 * MiB) | st.integers(MiB, 40 * MiB)
# An allocation of that size; or the number of a live allocation to free; or None for empty_cache.
requests = st.lists(st.tuples(st.just("malloc"), sizes) | st.tuples(st.just("free"), st.integers(0, 99))
                    | st.tuples(st.just("empty_cache"), st.just(0)), max_size=60)  # fmt: skip
capacities = st.none() | st.integers(2 * MiB, 200 * MiB)


@given(requests, capacities)
def test_the_screen_and_the_whole_allocator_agree_after_every_request(stream, capacity):
    ours, whole, live = CachingAllocator(capacity), Allocator(capacity), []
    for what, number in stream:
        if what == "malloc":
            try:
                theirs = whole.malloc(number)
            except AllocatorOutOfMemory:
                with pytest.raises(MemoryError):
                    ours.malloc(number)
            else:
                live.append((ours.malloc(number), theirs))
        elif what == "free" and live:
            mine, theirs = live.pop(number % len(live))
            ours.free(mine)
            whole.free(theirs)
        elif what == "empty_cache":
            ours.empty_cache()
            whole.empty_cache()
        assert (ours.allocated, ours.reserved) == (whole.allocated, whole.reserved)


def test_the_sizes_that_the_chapter_asks_for():
    cost = {}
    for request in (1, MiB, 9 * MiB, 21 * MiB):
        allocator = CachingAllocator()
        allocator.malloc(request)
        cost[request] = (allocator.allocated, allocator.reserved)
    assert cost == {1: (512, 2 * MiB), MiB: (MiB, 2 * MiB), 9 * MiB: (9 * MiB, 20 * MiB),
                    21 * MiB: (22 * MiB, 22 * MiB)}  # fmt: skip
