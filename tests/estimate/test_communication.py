"""Collectives by the alpha-beta model, held to theory: bounds, sums of each other, latency and bandwidth."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.errors import NotAvailable, SpecError, UnknownName
from llmlab.estimate.communication import ALGORITHMS, COLLECTIVES, bytes_sent, finished, seconds
from llmlab.hardware.links import Cluster, base_seconds, cluster, node_link

CLUSTER = cluster("H100", "InfiniBand-NDR")
RANKS = st.sampled_from([2, 3, 4, 8, 16, 64, 512])
SIZES = st.integers(0, 10**11)


@given(st.integers(0, 10**15), st.integers(1, 10**4))
def test_all_reduce_is_reduce_scatter_and_all_gather(size, ranks):
    halves = bytes_sent("reduce-scatter", size, ranks) + bytes_sent("all-gather", size, ranks)
    assert bytes_sent("all-reduce", size, ranks) == pytest.approx(halves)
    assert halves <= 2 * size  # however many ranks there are


def test_bytes_of_four_ranks():
    sent = {collective: bytes_sent(collective, 4000, 4) for collective in COLLECTIVES}
    assert sent == {
        "all-reduce": 6000, "reduce-scatter": 3000, "all-gather": 3000, "broadcast": 3000, "reduce": 3000,
        "all-to-all": 3000, "send": 4000,
    }  # fmt: skip
    assert not any(bytes_sent(collective, 4000, 1) for collective in COLLECTIVES)


@given(st.sampled_from(COLLECTIVES), SIZES, SIZES, RANKS, st.sampled_from([1, 4, 8]))
@settings(max_examples=300)
def test_more_bytes_take_longer_and_never_less_than_the_wire(collective, one, other, ranks, stride):
    group = CLUSTER.group(ranks, stride)
    less, more = sorted((one, other))
    assert seconds(collective, less, group) <= seconds(collective, more, group)
    assert seconds(collective, less, group) > base_seconds()
    fastest = group.inside.reached  # no rank has a faster way out
    assert seconds(collective, more, group) >= 0.999 * bytes_sent(collective, more, ranks) / fastest * (
        0 if collective in ("broadcast", "reduce") else 1
    )


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_group_of_one_has_nothing_to_send(collective):
    assert seconds(collective, 10**9, CLUSTER.group(1)) == 0


def test_large_messages_reach_the_bandwidth_and_small_ones_wait():
    node = CLUSTER.group(8)
    size = 10**10
    bus = bytes_sent("all-reduce", size, 8) / seconds("all-reduce", size, node, "ring")
    assert bus == pytest.approx(node.bandwidth, rel=0.01)
    tiny = seconds("all-reduce", 1, node, "ring")
    assert tiny == pytest.approx(base_seconds() + 14 * node.inside.step, rel=1e-6)


def test_a_ring_waits_for_every_rank_and_a_tree_for_their_logarithm():
    ring = [seconds("all-reduce", 1, CLUSTER.group(n), "ring") for n in (64, 1024)]
    tree = [seconds("all-reduce", 1, CLUSTER.group(n), "tree") for n in (64, 1024)]
    assert ring[1] > 14 * ring[0]
    assert tree[1] < 2 * tree[0]
    assert seconds("all-reduce", 1, CLUSTER.group(1024)) == pytest.approx(min(tree[1], ring[1]), rel=0.5)


def test_summing_inside_first_saves_nothing_at_the_border():
    """A ring crosses each node's border once, whatever lies inside: the bytes there are the same."""
    size = 10**10
    lone = cluster("A100", "InfiniBand-HDR", adapters=1).group(64)
    ring, inner = (seconds("all-reduce", size, lone, each) for each in ("ring", "hierarchical"))
    assert ring == pytest.approx(2 * 63 / 64 * size / 24e9, rel=0.01)
    assert inner == pytest.approx(ring, rel=0.05)
    eight = cluster("A100", "InfiniBand-HDR").group(64)
    ring, inner = (seconds("all-reduce", size, eight, each) for each in ("ring", "hierarchical"))
    assert 1.5 < inner / ring < 2  # now the inside counts, and rings use both links at the same time


def test_across_nodes_nccl_gathers_in_rings_alone():
    """src/graph/tuning.cc considers no tree for all-gather and reduce-scatter: their latency grows with every rank."""
    for collective in ("all-gather", "reduce-scatter"):
        small = [seconds(collective, 1, CLUSTER.group(n)) for n in (64, 512)]
        assert small[1] == seconds(collective, 1, CLUSTER.group(512), "ring") > 6 * small[0]
        assert seconds(collective, 1, CLUSTER.group(512), "hierarchical") < small[1] / 2


def test_hierarchical_parts_add_up():
    group, size = CLUSTER.group(64), 8 * 10**9
    inside, across = CLUSTER.group(8), CLUSTER.group(8, stride=8)
    expected = (
        seconds("reduce-scatter", size, inside, "ring")
        + seconds("all-reduce", size / 8, across)
        + seconds("all-gather", size, inside, "ring")
    )
    assert seconds("all-reduce", size, group, "hierarchical") == pytest.approx(expected)


def test_all_to_all_sends_most_of_it_through_the_network():
    group, size = CLUSTER.group(64), 64 * 10**8
    assert seconds("all-to-all", size, group) == pytest.approx(56 * 10**8 / 48e9, rel=0.02)
    assert seconds("all-to-all", size, CLUSTER.group(8)) == pytest.approx(7 / 8 * size / 370.8e9, rel=0.01)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=20))
def test_what_overlaps_is_never_faster_than_either(messages):
    ready, costs = [when for when, _ in messages], [cost for _, cost in messages]
    end = finished(sorted(ready), costs)
    assert end >= max(sum(costs), max(ready)) - 1e-9
    assert end <= max(ready) + sum(costs) + 1e-9


def test_bad_collectives_are_refused():
    group = CLUSTER.group(8)
    with pytest.raises(UnknownName, match="all-gather"):
        seconds("allgather", 1, group)
    with pytest.raises(SpecError, match="size=-1"):
        bytes_sent("all-reduce", -1, 8)
    with pytest.raises(SpecError, match="'tree' of all-gather"):
        seconds("all-gather", 1, group, "tree")
    with pytest.raises(SpecError, match="2 times of readiness and 1 costs"):
        finished([1, 2], [1])
    assert set(ALGORITHMS) == set(COLLECTIVES)


def test_one_node_needs_no_network_and_several_do():
    nodes = Cluster(node_link("T4"))
    assert nodes.group(8).across is None
    with pytest.raises(NotAvailable, match="network"):
        nodes.group(16)
