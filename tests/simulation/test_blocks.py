"""Blocks of a segment, and the pools of free ones."""

from llmlab.simulation.allocator.blocks import Block, Pool, describe_segment, is_whole, mapped_from
from llmlab.simulation.allocator.statistics import Stats


def pool(small=False):
    return Pool(small, 3, 2 << 20, (Stats(), Stats()))


def chain(block):
    out = [block]
    while out[-1].next is not None:
        assert out[-1].next.prev is out[-1]
        out.append(out[-1].next)
    return [(block.address, block.size) for block in out]


def test_blocks_that_are_cut_join_again_on_either_side():
    free = pool()
    first = Block(1000, 100, free)
    third = first.cut(60)
    second = first.cut(20)
    assert chain(first) == [(1000, 20), (1020, 40), (1060, 40)] and not is_whole(second)
    for block in (first, third):
        free.insert(block)
    assert free.merge(second, second.prev) == 20 and free.merge(second, second.next) == 40
    assert is_whole(second) and chain(second) == [(1000, 100)] and free.blocks == []


def test_a_neighbour_in_use_or_without_memory_does_not_join():
    free = pool()
    first = Block(0, 100, free)
    second = first.cut(50)
    second.allocated = True
    assert free.merge(first, second) == free.merge(first, None) == 0
    second.allocated, second.mapped = False, False
    assert free.merge(first, second) == 0 and list(mapped_from(first)) == [first]
    free.insert(second)
    assert free.unmapped == [second] and free.blocks == []
    free.remove(second)
    second.mapped = True
    assert free.unmapped == [] and list(mapped_from(first)) == [first, second]


def test_free_blocks_are_sorted_by_size_and_then_by_address():
    free = pool()
    blocks = [Block(address, size, free) for address, size in ((30, 512), (10, 1024), (20, 512))]
    for block in blocks:
        free.insert(block)
    assert [entry[2].address for entry in free.blocks] == [20, 30, 10]
    free.remove(blocks[0])
    assert [entry[2].address for entry in free.blocks] == [20, 10]


def test_a_segment_is_described_by_its_blocks():
    used = Block(1000, 100, pool(small=True))
    free = used.cut(40)
    used.allocated, used.requested = True, 33
    segment = describe_segment([used, free], expandable=False)
    assert (segment["address"], segment["total_size"], segment["allocated_size"], segment["requested_size"]) == (
        1000, 100, 40, 33)  # fmt: skip
    assert segment["stream"] == 3 and segment["segment_type"] == "small" and not segment["is_expandable"]
    assert [(block["address"], block["size"], block["state"]) for block in segment["blocks"]] == [
        (1000, 40, "active_allocated"), (1040, 60, "inactive")]  # fmt: skip
