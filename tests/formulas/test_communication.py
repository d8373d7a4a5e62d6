"""Collectives by the alpha-beta model, held to theory: bounds, sums of each other, latency and bandwidth."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.base.errors import NotAvailable, SpecError, UnknownName
from llmlab.formulas.time.communication import ALGORITHMS, COLLECTIVES, bytes_sent, seconds
from llmlab.formulas.time.data_parallel import buckets_finished
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
    if collective not in ("broadcast", "reduce"):  # no rank has a faster way out; a switch that adds is sent all once
        sent = more if collective == "all-reduce" and group.switched else bytes_sent(collective, more, ranks)
        assert seconds(collective, more, group) >= 0.999 * sent / group.inside.reached


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


# NCCL 2.29.2 (A100: 2.27.3), fp16, 8 GPUs: MiB and µs, of aiconfigurator-core 0.12.0 (PyPI, Apache-2.0),
# systems/data/*/comm/nccl/*/nccl_perf.parquet, read 2026-11-22.
MEASURED = {
    ("H100", "all-reduce"): {32: 199.8, 64: 324.5, 128: 578.7, 256: 1092.1, 512: 2111.1},
    ("H200", "all-reduce"): {32: 197.3, 64: 319.6, 128: 564.5, 256: 1052.6, 512: 2040.3},
    ("B200", "all-reduce"): {128: 398.4, 256: 715.4, 512: 1334.6},
    ("A100", "all-reduce"): {128: 1169.1, 256: 2182.5, 512: 4225.9},
}


@pytest.mark.parametrize(("card", "collective"), MEASURED, ids=" ".join)
def test_large_all_reduces_in_a_node_take_what_nccl_took(card, collective):
    """H100 and newer: their switches add (NVLink SHARP), and NCCL lets them by default."""
    group = cluster(card, "InfiniBand-NDR").group(8)
    for mebibytes, microseconds in MEASURED[card, collective].items():
        assert seconds(collective, mebibytes * 2**20, group) * 1e6 == pytest.approx(microseconds, rel=0.12), mebibytes


def test_nvlink_switches_add_only_for_all_reduce_of_a_whole_node():
    """NVIDIA/nccl-tests, issue 212: rings reach 370 GB/s on an H100, an all-reduce over 8 with the switch some 480."""
    size, node = 8 * 2**30, CLUSTER.group(8)
    bus = {
        each: bytes_sent(each, size, 8) / seconds(each, size, node)
        for each in ("all-reduce", "all-gather", "reduce-scatter")
    }
    assert bus["all-reduce"] == pytest.approx(480e9, rel=0.03)
    assert bus["all-gather"] == pytest.approx(370e9, rel=0.02) and bus["reduce-scatter"] == bus["all-gather"]
    ring = bytes_sent("all-reduce", size, 8) / seconds("all-reduce", size, node, "ring")
    assert ring == pytest.approx(370e9, rel=0.02)
    for group in (CLUSTER.group(4), CLUSTER.group(16), cluster("A100", "InfiniBand-HDR").group(8)):
        without = [seconds("all-reduce", size, group, algorithm) for algorithm in ("ring", "tree")]
        assert seconds("all-reduce", size, group) == min(without)
        with pytest.raises(SpecError, match="'switch'"):
            seconds("all-reduce", size, group, "switch")
    # NVIDIA/nccl, issue 1374: 8 H800s, whose links are 200 GB/s, reach 215 GB/s.
    h800 = Cluster(node_link("H800")).group(8)
    assert bytes_sent("all-reduce", size, 8) / seconds("all-reduce", size, h800) == pytest.approx(215e9, rel=0.03)


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


def test_all_to_all_sends_most_of_it_through_the_network():
    group, size = CLUSTER.group(64), 64 * 10**8
    assert seconds("all-to-all", size, group) == pytest.approx(56 * 10**8 / 48e9, rel=0.02)
    assert seconds("all-to-all", size, CLUSTER.group(8)) == pytest.approx(7 / 8 * size / 370.8e9, rel=0.01)


@given(st.integers(1, 60), st.floats(0, 0.2), st.floats(0, 2), st.floats(0.01, 1))
def test_buckets_are_messages_that_follow_one_another(messages, cost, backward, share):
    ready = [backward * min(1, (i + 1) / messages / share) for i in range(messages)]
    free = 0.0  # when the link is
    for when in ready:
        free = max(free, when) + cost
    assert buckets_finished(messages, cost, backward, share) == pytest.approx(free, abs=1e-9)


def test_bad_collectives_are_refused():
    group = CLUSTER.group(8)
    with pytest.raises(UnknownName, match="all-gather"):
        seconds("allgather", 1, group)
    with pytest.raises(SpecError, match="size=-1"):
        bytes_sent("all-reduce", -1, 8)
    with pytest.raises(SpecError, match="'tree' of all-gather"):
        seconds("all-gather", 1, group, "tree")
    assert set(ALGORITHMS) == set(COLLECTIVES)


def test_one_node_needs_no_network_and_several_do():
    nodes = Cluster(node_link("T4"))
    assert nodes.group(8).across is None
    with pytest.raises(NotAvailable, match="network"):
        nodes.group(16)
