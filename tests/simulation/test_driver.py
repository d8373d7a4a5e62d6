"""The driver below the allocator."""

import pytest

from llmlab.base.errors import SpecError
from llmlab.base.units import MiB
from llmlab.simulation.allocator.caching import Allocator, AllocatorOutOfMemory
from llmlab.simulation.allocator.config import AllocatorConfig

EXPANDABLE = AllocatorConfig(expandable_segments=True)


def test_the_driver_hands_out_addresses_downwards_so_the_newest_of_equal_segments_serves_first():
    allocator = Allocator()
    first, second = allocator.malloc(30 * MiB), allocator.malloc(30 * MiB)
    assert second == first - 30 * MiB
    allocator.free(first)
    allocator.free(second)
    assert [allocator.malloc(30 * MiB), allocator.malloc(30 * MiB)] == [second, first]


def test_a_memory_fraction_is_a_limit_of_its_own():
    allocator = Allocator(capacity=100 * MiB)
    allocator.set_memory_fraction(0.5)
    allocator.malloc(40 * MiB)
    with pytest.raises(AllocatorOutOfMemory) as caught:
        allocator.malloc(20 * MiB)
    assert caught.value.capacity == 50 * MiB
    allocator.set_memory_fraction(1.0)
    allocator.malloc(20 * MiB)
    with pytest.raises(SpecError, match="memory fraction of"):
        allocator.set_memory_fraction(1.5)
    with pytest.raises(SpecError, match="capacity or total"):
        Allocator().set_memory_fraction(0.5)


def test_there_is_room_for_requests_that_could_each_have_a_segment_of_their_own():
    allocator = Allocator(capacity=100 * MiB)
    assert allocator.has_room([30 * MiB, 50 * MiB]) and not allocator.has_room([30 * MiB, 90 * MiB])
    allocator.set_memory_fraction(0.5)
    assert allocator.has_room([40 * MiB]) and not allocator.has_room([60 * MiB])
    assert not Allocator(capacity=100 * MiB, config=EXPANDABLE).has_room([1])  # whose pages go back one by one
