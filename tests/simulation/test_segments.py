"""Segments grow by pages, and cached ones are released."""

import pytest

from llmlab.base.units import MiB
from llmlab.simulation.allocator.caching import Allocator, AllocatorOutOfMemory
from llmlab.simulation.allocator.config import AllocatorConfig

EXPANDABLE = AllocatorConfig(expandable_segments=True)


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MiB),
        (9 * MiB, 9 * MiB, 20 * MiB),
        (20 * MiB - 512, 20 * MiB - 512, 20 * MiB),
        (21 * MiB, 21 * MiB, 40 * MiB),
    ],
)
def test_an_expandable_segment_grows_by_pages_of_2_and_20_mib_and_splits_to_the_byte(asked, allocated, reserved):
    allocator = Allocator(config=EXPANDABLE)
    allocator.malloc(asked)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)
    assert allocator.stats()["segment.all.current"] == 0, "torch counts only segments from cudaMalloc"


def fragmented(config):
    """Return an allocator of 80 MiB whose free 40 MiB lie apart: every other one of four 20 MiB pieces of two 40s."""
    allocator = Allocator(capacity=80 * MiB, config=config)
    for address in [allocator.malloc(40 * MiB), allocator.malloc(40 * MiB)]:
        allocator.free(address)
    pieces = [allocator.malloc(20 * MiB) for _ in range(4)]
    for address in pieces[1::2]:
        allocator.free(address)
    assert (allocator.allocated, allocator.reserved) == (40 * MiB, 80 * MiB)
    return allocator


def test_expandable_segments_cure_that_fragmentation():
    allocator = fragmented(EXPANDABLE)
    allocator.malloc(40 * MiB)
    assert (allocator.allocated, allocator.reserved, allocator.statistics.num_ooms) == (80 * MiB, 80 * MiB, 0)


def test_an_expandable_segment_lets_a_longer_batch_grow_where_segments_pile_up():
    """torch's Note [Expandable Segments]: each step a little longer, no cached segment of the last one is enough."""
    plain, expandable = Allocator(), Allocator(config=EXPANDABLE)
    for allocator in (plain, expandable):
        for step in range(20, 40, 4):
            allocator.free(allocator.malloc(step * MiB))
    assert (plain.reserved, expandable.reserved) == ((20 + 24 + 28 + 32 + 36) * MiB, 40 * MiB)


def test_empty_cache_returns_the_free_pages_inside_an_expandable_segment():
    allocator = Allocator(config=EXPANDABLE)
    pieces = [allocator.malloc(20 * MiB) for _ in range(3)]
    allocator.free(pieces[1])
    allocator.empty_cache()
    assert allocator.reserved == 40 * MiB
    assert [segment["total_size"] for segment in allocator.segments()] == [20 * MiB, 20 * MiB]
    assert allocator.malloc(20 * MiB) == pieces[1], "the hole is mapped again before the segment grows"
    assert [segment["total_size"] for segment in allocator.segments()] == [60 * MiB]


def test_a_hole_is_filled_before_the_growing_end_of_an_expandable_segment_is_cut():
    """get_free_block: at the end a block counts with all the addresses behind it, so the larger hole fits better."""
    allocator = Allocator(config=EXPANDABLE)
    hole, _, end = (allocator.malloc(size * MiB) for size in (20, 20, 10))
    allocator.free(hole)
    assert [block["size"] // MiB for block in allocator.segments()[0]["blocks"]] == [20, 20, 10, 10]
    assert allocator.malloc(5 * MiB) == hole
    assert allocator.malloc(16 * MiB) == end + 10 * MiB, "and the end grows by what it lacks"
    assert allocator.reserved == 80 * MiB


def test_an_expandable_segment_gives_up_all_its_pages_and_gets_them_again():
    allocator = Allocator(config=EXPANDABLE)
    address = allocator.malloc(30 * MiB)
    allocator.free(address)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segments()) == (0, [])
    assert allocator.malloc(30 * MiB) == address
    assert allocator.reserved == 40 * MiB


def test_a_partly_used_page_of_an_expandable_segment_stays():
    allocator = Allocator(config=EXPANDABLE)
    first, second = allocator.malloc(30 * MiB), allocator.malloc(5 * MiB)
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MiB, "the first page goes back; 10 MiB of the second are cached beside 5 in use"
    allocator.free(second)


def test_max_split_size_releases_just_enough_oversize_blocks_before_the_whole_cache():
    allocator = Allocator(capacity=300 * MiB, config=AllocatorConfig(max_split_size=64 * MiB))
    for address in [allocator.malloc(size * MiB) for size in (30, 70, 80, 100)]:
        allocator.free(address)
    allocator.malloc(120 * MiB)  # needs 120 of 20 free: 100 and 80 go, from the largest down
    assert sorted(segment["total_size"] // MiB for segment in allocator.segments()) == [30, 70, 120]
    assert (allocator.statistics.num_alloc_retries, allocator.stats()["num_sync_all_streams"]) == (0, 0)


def test_garbage_collection_releases_the_segments_unused_for_longest_and_only_beside_a_fraction():
    def reserved_after(fraction):
        config = AllocatorConfig(garbage_collection_threshold=0.5, per_process_memory_fraction=fraction)
        allocator = Allocator(capacity=400 * MiB, config=config)
        old, recent = allocator.malloc(100 * MiB), allocator.malloc(60 * MiB)
        allocator.free(old)
        for _ in range(10):
            allocator.free(recent)
            recent = allocator.malloc(60 * MiB)
        allocator.free(recent)
        allocator.malloc(120 * MiB)  # 160 MiB reserved: still below the threshold of 180
        allocator.malloc(120 * MiB)  # 280 MiB: above it, so the 100 MiB that were idle go, the 60 stay
        return sorted(segment["total_size"] // MiB for segment in allocator.segments())

    assert reserved_after(fraction=0.9) == [60, 120, 120]
    assert reserved_after(fraction=1.0) == [60, 100, 120, 120]


def test_fragmentation_fails_a_request_that_the_free_memory_would_hold():
    allocator = fragmented(AllocatorConfig())
    assert allocator.stats()["inactive_split_bytes.all.current"] == 40 * MiB
    with pytest.raises(AllocatorOutOfMemory) as caught:
        allocator.malloc(40 * MiB)
    error = caught.value
    assert error.reserved - error.allocated == error.segment == error.requested == 40 * MiB
    assert (error.capacity, allocator.statistics.num_ooms) == (80 * MiB, 1)
