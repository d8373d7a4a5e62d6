"""The caching allocator: what must hold of every stream of requests, and what torch documents of single ones."""

import re
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from llmlab.base.errors import SpecError
from llmlab.base.units import KiB, MiB
from llmlab.simulation.allocator.caching import Allocator, AllocatorOutOfMemory
from llmlab.simulation.allocator.config import MIN_BLOCK, SMALL_SIZE, AllocatorConfig, round_size, segment_size

EXPANDABLE = AllocatorConfig(expandable_segments=True)
CONFIGS = (
    AllocatorConfig(),
    EXPANDABLE,
    AllocatorConfig(max_split_size=32 * MiB),
    AllocatorConfig(max_split_size=40 * MiB, expandable_segments=True),
    AllocatorConfig(roundup_power2_divisions=4, garbage_collection_threshold=0.5, per_process_memory_fraction=0.9),
)


def stream(seed):
    """Return 120 requests: (size, stream) allocates, a number frees one of the live blocks, None empties the cache.

    Drawn by hand: lists that hypothesis draws keep few blocks alive at once, and hardly ever run out of memory.
    """
    random = Random(seed)
    typical = [100, 1024, 300 * KiB, SMALL_SIZE, 3 * MiB, 9 * MiB, 20 * MiB, 35 * MiB]
    requests = []
    for _ in range(120):
        size = random.choice([random.choice(typical), random.randint(1, 2 * MiB), random.randint(1, 70 * MiB)])
        allocate, free = (size, random.choice([0, 0, 0, 1])), random.randrange(1000)
        requests += random.choices([allocate, free, None], weights=[52, 46, 2])
    return requests


REQUESTS = st.integers(0, 2**32).map(stream)
CAPACITIES = st.sampled_from([300 * MiB, 100 * MiB, 1 << 40])


def play(allocator, requests, after_each=lambda live: None):
    """Make `requests`; return the live blocks, address: size asked. What does not fit is left out, as a user would."""
    live = {}
    for request in requests:
        if request is None:
            allocator.empty_cache()
        elif isinstance(request, tuple):
            try:
                address = allocator.malloc(*request)
            except AllocatorOutOfMemory:
                continue
            assert address not in live
            live[address] = request[0]
        elif live:
            address = sorted(live)[request % len(live)]
            allocator.free(address)
            del live[address]
        after_each(live)
    return live


def requested(allocator):
    return allocator.stats()["requested_bytes.all.current"]


def consistent(allocator, live):
    """Assert what holds at every moment, from the snapshot alone."""
    segments = allocator.segments()
    blocks = [block for segment in segments for block in segment["blocks"]]
    end = 0
    for segment in segments:
        assert segment["address"] >= end, "segments overlap"
        end = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == end, "blocks overlap, or leave a gap"
            assert block["size"] % MIN_BLOCK == 0 and block["size"] > 0
            end += block["size"]
        assert end == segment["address"] + segment["total_size"]
        in_use = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
        assert segment["allocated_size"] == segment["active_size"] == sum(block["size"] for block in in_use)
        assert segment["requested_size"] == sum(block["requested_size"] for block in in_use)
        states = [block["state"] for block in segment["blocks"]]
        assert ("inactive", "inactive") not in pairwise(states), "two free neighbours not merged"
    used = {block["address"]: block for block in blocks if block["state"] == "active_allocated"}
    assert {address: block["requested_size"] for address, block in used.items()} == live
    assert all(block["size"] >= live[address] for address, block in used.items())
    assert sum(segment["total_size"] for segment in segments) == allocator.reserved
    assert sum(block["size"] for block in used.values()) == allocator.allocated
    assert sum(live.values()) == requested(allocator) <= allocator.allocated <= allocator.reserved
    assert allocator.peak_allocated >= allocator.allocated and allocator.peak_reserved >= allocator.reserved
    assert allocator.reserved <= allocator.driver.capacity
    counted_right(allocator, segments)


def counted_right(allocator, segments):
    """Assert that the statistics say what the segments say."""
    stats = allocator.stats()
    for metric in ("allocation", "allocated_bytes", "requested_bytes", "segment", "reserved_bytes", "inactive_split"):
        parts = [stats[f"{metric}.{pool}.current"] for pool in ("small_pool", "large_pool")]
        assert stats[f"{metric}.all.current"] == sum(parts)
        assert all(part >= 0 for part in parts)
    assert all(stats[key.replace("freed", "allocated")] >= stats[key] for key in stats if key.endswith(".freed"))
    if allocator.config.expandable_segments:
        return
    split = [s for s in segments if len(s["blocks"]) > 1]
    inactive = [block["size"] for s in split for block in s["blocks"] if block["state"] == "inactive"]
    assert stats["segment.all.current"] == len(segments)
    assert stats["inactive_split.all.current"] == len(inactive)
    assert stats["inactive_split_bytes.all.current"] == sum(inactive)


@given(REQUESTS, st.sampled_from(CONFIGS), CAPACITIES)
def test_blocks_tile_their_segments_and_the_statistics_add_up_after_every_request(requests, config, capacity):
    allocator = Allocator(capacity, config)
    play(allocator, requests, lambda live: consistent(allocator, live))


@given(REQUESTS, st.sampled_from(CONFIGS), CAPACITIES)
@example([(i * MiB, 0) for i in range(1, 12)] + [0, 2, 4, 0, 1, (30 * MiB, 0)], EXPANDABLE, 100 * MiB)
def test_freeing_everything_leaves_one_block_a_segment_and_empty_cache_nothing(requests, config, capacity):
    allocator = Allocator(capacity, config)
    for address in play(allocator, requests):
        allocator.free(address)
    assert allocator.allocated == requested(allocator) == 0
    assert [len(segment["blocks"]) for segment in allocator.segments()] == [1] * len(allocator.segments())
    allocator.empty_cache()
    assert allocator.segments() == []
    assert allocator.reserved == 0
    assert {key for key, value in allocator.stats().items() if key.endswith(".current") and value} == set()


@given(REQUESTS, CAPACITIES)
def test_a_request_gets_the_smallest_free_block_that_holds_it_and_of_equals_the_lowest(requests, capacity):
    allocator = Allocator(capacity)
    live = play(allocator, requests)
    for size in (300, 5 * KiB, SMALL_SIZE, 3 * MiB, 19 * MiB, 33 * MiB):
        rounded = round_size(size, allocator.config)
        kind = "small" if rounded <= SMALL_SIZE else "large"
        fitting = [
            (block["size"], block["address"])
            for segment in allocator.segments()
            if segment["stream"] == 0 and segment["segment_type"] == kind
            for block in segment["blocks"]
            if block["state"] == "inactive" and block["size"] >= rounded
        ]
        before = allocator.reserved
        try:
            address = allocator.malloc(size)
        except AllocatorOutOfMemory:
            assert not fitting
            continue
        assert address not in live
        if fitting:
            assert address == min(fitting)[1]
            assert allocator.reserved == before


@given(REQUESTS, st.sampled_from(CONFIGS), CAPACITIES)
def test_out_of_memory_means_that_not_even_an_emptied_cache_leaves_room(requests, config, capacity):
    allocator = Allocator(capacity, config)
    for request in requests:
        if not isinstance(request, tuple):
            play(allocator, [request])
            continue
        ooms, retries = allocator.statistics.num_ooms, allocator.statistics.num_alloc_retries
        try:
            allocator.malloc(*request)
        except AllocatorOutOfMemory as error:
            assert error.requested == request[0]
            assert (error.allocated, error.reserved) == (allocator.allocated, allocator.reserved)
            assert error.segment == segment_size(round_size(request[0], allocator.config), allocator.config)
            assert (allocator.statistics.num_ooms, allocator.statistics.num_alloc_retries) == (ooms + 1, retries + 1)
            if not config.expandable_segments:
                assert error.reserved + error.segment > error.capacity
                assert all(s["allocated_size"] > 0 for s in allocator.segments()), "a free segment was kept"
        else:
            assert allocator.statistics.num_ooms == ooms


@given(REQUESTS, st.sampled_from(CONFIGS), CAPACITIES)
def test_the_events_add_up_to_the_state(requests, config, capacity):
    allocator, total = Allocator(capacity, config), Counter()
    allocator.driver.on_event = lambda action, address, size, stream: total.update({action: size})
    live = play(allocator, requests)
    assert total["alloc"] - total["free_completed"] == sum(live.values())
    assert total["free_requested"] == total["free_completed"]
    taken = total["segment_alloc"] + total["segment_map"]
    assert taken - total["segment_free"] - total["segment_unmap"] == allocator.reserved


# ---- sizes


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MiB),
        (512, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (1 * MiB, 1 * MiB, 2 * MiB),
        (1 * MiB + 1, 1 * MiB + 512, 20 * MiB),
        (9 * MiB, 9 * MiB, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),
        (21 * MiB, 22 * MiB, 22 * MiB),  # the last 1 MiB of a large segment is never split off, so it counts
        (21 * MiB - 512, 21 * MiB - 512, 22 * MiB),
    ],
)
def test_what_one_request_takes(asked, allocated, reserved):
    allocator = Allocator()
    allocator.malloc(asked)
    assert (allocator.allocated, allocator.reserved, requested(allocator)) == (allocated, reserved, asked)


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


def test_nothing_takes_nothing_and_what_is_not_in_use_cannot_be_freed():
    allocator = Allocator()
    assert allocator.malloc(0) == 0
    allocator.free(0)
    assert allocator.reserved == 0
    address = allocator.malloc(100)
    allocator.free(address)
    with pytest.raises(SpecError, match=f"{address:#x} is not allocated"):
        allocator.free(address)
    with pytest.raises(SpecError, match="-1 bytes"):
        allocator.malloc(-1)


def test_a_power_of_two_in_four_divisions_rounds_1200_up_to_1280():
    """The example in torch's notes on CUDA semantics, in KiB: below 2 KiB no such rounding happens."""
    allocator = Allocator(config=AllocatorConfig(roundup_power2_divisions=4))
    assert round_size(1200 * KiB, allocator.config) == 1280 * KiB
    assert round_size(1024 * KiB, allocator.config) == 1024 * KiB
    assert round_size(1025, allocator.config) == 1536
    by_size = Allocator(config=AllocatorConfig.parse("roundup_power2_divisions:[256:1,512:2,>:8]"))
    asked = (257 * MiB + 1, 513 * MiB, 1025 * MiB)
    assert [round_size(size, by_size.config) for size in asked] == [257 * MiB + 512, 768 * MiB, 1152 * MiB]


# ---- the cache


def test_the_driver_hands_out_addresses_downwards_so_the_newest_of_equal_segments_serves_first():
    allocator = Allocator()
    first, second = allocator.malloc(30 * MiB), allocator.malloc(30 * MiB)
    assert second == first - 30 * MiB
    allocator.free(first)
    allocator.free(second)
    assert [allocator.malloc(30 * MiB), allocator.malloc(30 * MiB)] == [second, first]


def test_what_is_free_stays_reserved_until_the_cache_is_emptied():
    allocator = Allocator()
    addresses = [allocator.malloc(30 * MiB), allocator.malloc(100)]
    for address in addresses:
        allocator.free(address)
    assert (allocator.allocated, allocator.reserved) == (0, 32 * MiB)
    assert allocator.malloc(30 * MiB) == addresses[0]
    allocator.empty_cache()
    assert allocator.reserved == 30 * MiB
    assert (allocator.peak_allocated, allocator.peak_reserved) == (30 * MiB + 512, 32 * MiB)
    allocator.reset_peak()
    assert (allocator.peak_allocated, allocator.peak_reserved) == (30 * MiB, 30 * MiB)


def test_a_failed_request_releases_the_cached_segments_and_asks_again():
    allocator = Allocator(capacity=80 * MiB)
    kept, *freed = (allocator.malloc(20 * MiB) for _ in range(4))
    for address in freed:
        allocator.free(address)
    allocator.malloc(60 * MiB)  # no block of 60 MiB is free, and the driver has none left
    assert (allocator.statistics.num_alloc_retries, allocator.statistics.num_ooms) == (1, 0)
    assert allocator.reserved == 80 * MiB
    assert allocator.stats()["num_device_free"] == 3
    allocator.free(kept)


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


def test_fragmentation_fails_a_request_that_the_free_memory_would_hold():
    allocator = fragmented(AllocatorConfig())
    assert allocator.stats()["inactive_split_bytes.all.current"] == 40 * MiB
    with pytest.raises(AllocatorOutOfMemory) as caught:
        allocator.malloc(40 * MiB)
    error = caught.value
    assert error.reserved - error.allocated == error.segment == error.requested == 40 * MiB
    assert (error.capacity, allocator.statistics.num_ooms) == (80 * MiB, 1)


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


def test_a_block_freed_on_one_stream_does_not_serve_another():
    allocator = Allocator()
    address = allocator.malloc(30 * MiB, stream=1)
    allocator.free(address)
    assert allocator.malloc(30 * MiB, stream=0) != address
    assert allocator.malloc(30 * MiB, stream=1) == address
    assert {segment["address"]: segment["stream"] for segment in allocator.segments()}[address] == 1


# ---- max_split_size, memory fraction, garbage collection


def test_max_split_size_keeps_oversize_blocks_whole_and_for_requests_of_about_their_size():
    allocator = Allocator(config=AllocatorConfig(max_split_size=64 * MiB))
    near = allocator.malloc(66 * MiB)
    allocator.free(near)
    assert allocator.malloc(60 * MiB) != near, "60 MiB would fit, but are below the limit that 66 are above"
    allocator.empty_cache()
    oversize = allocator.malloc(100 * MiB)
    assert allocator.stats()["oversize_segments.current"] == allocator.stats()["oversize_allocations.current"] == 1
    allocator.free(oversize)
    assert allocator.malloc(10 * MiB) != oversize, "a small request must not break an oversize block"
    assert allocator.malloc(70 * MiB) != oversize, "an oversize one takes at most 20 MiB more than it needs"
    allocated = allocator.allocated
    assert allocator.malloc(90 * MiB) == oversize
    assert allocator.allocated == allocated + 100 * MiB
    allocator.free(oversize)
    assert allocator.stats()["oversize_allocations.current"] == 1, "70 MiB are left"


def test_max_split_size_releases_just_enough_oversize_blocks_before_the_whole_cache():
    allocator = Allocator(capacity=300 * MiB, config=AllocatorConfig(max_split_size=64 * MiB))
    for address in [allocator.malloc(size * MiB) for size in (30, 70, 80, 100)]:
        allocator.free(address)
    allocator.malloc(120 * MiB)  # needs 120 of 20 free: 100 and 80 go, from the largest down
    assert sorted(segment["total_size"] // MiB for segment in allocator.segments()) == [30, 70, 120]
    assert (allocator.statistics.num_alloc_retries, allocator.stats()["num_sync_all_streams"]) == (0, 0)


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
        allocator.malloc(110 * MiB)  # 160 MiB reserved: still below the threshold of 180
        allocator.malloc(120 * MiB)  # 270 MiB: above it, so the 100 MiB that were idle go, the 60 stay
        return sorted(segment["total_size"] // MiB for segment in allocator.segments())

    assert reserved_after(fraction=0.9) == [60, 110, 120]
    assert reserved_after(fraction=1.0) == [60, 100, 110, 120]


# ---- what torch's own tools make of it


def used_allocator():
    allocator = Allocator()
    addresses = [allocator.malloc(size) for size in (100, 3 * MiB, 5 * MiB, 700 * KiB, 64 * MiB)]
    allocator.free(addresses[1])
    allocator.free(addresses[3])
    return allocator


def test_stats_have_the_keys_that_torch_documents():
    documented = set()
    for name in re.findall(r'^    - ``"(.*?)"``', torch.cuda.memory_stats.__doc__, re.MULTILINE):
        choices = re.findall(r"\{(.*?)\}", name)
        names = [re.sub(r"\{.*?\}", "{}", name)]
        for choice in choices:
            names = [each.replace("{}", one, 1) for each in names for one in choice.split(",")]
        documented |= set(names)
    # The documentation's "allocated" is "allocation" in what the function returns; private pools are not simulated.
    documented = {re.sub(r"^allocated\.", "allocation.", name) for name in documented}
    documented -= {"reserved_bytes_by_private_pools"}
    assert len(documented) > 100
    given_keys = set(used_allocator().stats())
    assert documented <= given_keys
    assert given_keys - documented <= {
        "num_sync_all_streams",
        "num_device_alloc",
        "num_device_free",
        "num_oom_rejections",
    }


def test_torch_prints_its_memory_summary_from_them(monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "memory_stats", lambda device=None: used_allocator().stats())
    monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda device, optional=False: 0)
    rows = [line.split("|") for line in torch.cuda.memory_summary().splitlines()]
    table = {row[1].strip(): [cell.strip() for cell in row[2:6]] for row in rows if len(row) > 5}
    assert table["GPU reserved memory"][0] in ("88064 KiB", "86 MiB")  # 2 + 20 + 64 MiB
    assert table["Allocations"] == ["3", "5", "5", "2"]
    assert table["GPU reserved segments"] == ["3", "3", "3", "0"]
    assert table["Non-releasable allocs"][0] == "3"  # what is free beside 100 B, and on both sides of 5 MiB


def test_peaks_and_totals_start_again_when_asked():
    allocator = used_allocator()
    allocator.statistics.reset_accumulated()
    stats = allocator.stats()
    assert stats["allocation.all.allocated"] == stats["num_device_alloc"] == 0
    assert stats["allocation.all.current"] == 3
    assert stats["max_split_size"] == -1
