"""Seconds and bytes of collectives, by the alpha-beta model: a message of S bytes takes alpha + S / beta.

    size    bytes of the whole tensor: on each rank, the input of all-reduce and reduce-scatter, the output of
            all-gather, and the input of all-to-all, which has a part for every rank
    alpha   s per step, for any message      beta   bytes/s that a rank passes on     N   ranks

Latency and bandwidth come from llmlab/hardware/links.toml. As in NCCL's tuner (src/graph/tuning.cc), the time of a
collective is a base time, plus the latencies of its steps, plus its bytes divided by the bandwidth. Unlike NCCL, the
model has only one protocol.
"""

from __future__ import annotations

from math import ceil, log2

from ...base.errors import SpecError, check_counts, unknown_name
from ...hardware.links import Group, base_seconds

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "all-to-all", "send")
ALGORITHMS = {
    "all-reduce": ("ring", "tree", "switch", "hierarchical"),
    "reduce-scatter": ("ring", "hierarchical"),
    "all-gather": ("ring", "hierarchical"),
    "broadcast": ("ring", "tree"),
    "reduce": ("ring", "tree"),
    "all-to-all": ("pairs",),
    "send": ("pairs",),
}
# The algorithms among which NCCL chooses for an all-reduce. Only all-reduce uses trees, or the switches of a node to
# compute sums. Across nodes, all-gather and reduce-scatter use rings only (src/graph/tuning.cc), the first of
# `ALGORITHMS`.
NCCL = ("ring", "tree", "switch")

TREE = 0.92  # of the rings' bandwidth in an all-reduce: src/graph/tuning.cc, busBw


def bytes_sent(collective: str, size: int, ranks: int) -> float:
    """Return the bytes that a rank sends on average, in a ring. Fewer are impossible if the ranks compute the sums.

    All-reduce sends each byte (N - 1) / N times to sum it, and as often to distribute the sum (Patarasuk and Yuan 2009,
    theorem 1). In broadcast and reduce, all ranks except one pass the tensor on. If a switch computes the sums, a rank
    sends and receives (1 + 1 / N) `size`: the switch reads all chunks of a rank, and the rank sends the sum of its own
    chunk to all others (NCCL issue 2140). nccl-tests still compute the bus bandwidth from the bytes of a ring.

    >>> bytes_sent("all-reduce", 1000, 4)
    1500.0
    """
    _check(collective, size)
    check_counts(ranks=ranks)
    if collective == "send":
        return float(size) if ranks > 1 else 0.0
    return (2 if collective == "all-reduce" else 1) * size * (ranks - 1) / ranks


def seconds(collective: str, size: float, group: Group, algorithm: str | None = None) -> float:
    """Return the seconds of `collective` with `size` bytes in `group`, by default with the fastest algorithm of NCCL.

    "ring" and "tree" include all ranks. "hierarchical" first sums inside each node, then across nodes among ranks with
    the same place in their nodes, and distributes the result inside; ZeRO++ (arXiv 2306.10209) uses it, NCCL does not.
    "switch" is NVLink SHARP with the latency of a ring, which agrees with measurements on eight H100s or H200s for 16
    MiB and more. A group of one rank takes no time. Raises SpecError or UnknownName.
    """
    _check(collective, size)
    allowed = ALGORITHMS[collective]
    if algorithm is not None and algorithm not in allowed:
        raise SpecError(f"algorithm={algorithm!r} of {collective} is not one of {', '.join(allowed)}, or None")
    if group.ranks == 1:
        return 0.0
    if algorithm == "switch" and group.switched is None:
        raise SpecError(f"algorithm='switch': the links of these {group.ranks} ranks have no switch that adds")
    if algorithm or collective != "all-reduce":
        return _seconds(collective, size, group, algorithm or allowed[0])
    tried = [algorithm for algorithm in NCCL if algorithm != "switch" or group.switched]
    return min([_seconds(collective, size, group, algorithm) for algorithm in tried])


def _seconds(collective: str, size: float, group: Group, algorithm: str) -> float:
    if algorithm == "hierarchical":
        return _hierarchical(collective, size, group)
    if algorithm == "tree":
        return _tree(collective, size, group)
    if collective == "send":
        link = group.across or group.inside
        return base_seconds() + link.step + size / (min(1.0, group.adapters) * link.reached)
    if collective == "all-to-all":
        return _all_to_all(size, group)
    ranks = group.ranks
    rounds = 2 if collective == "all-reduce" else 1
    # A broadcast sends the tensor in pieces, one after another, so the last rank finishes a ring's latency later.
    sent = size if collective in ("broadcast", "reduce") else rounds * (ranks - 1) / ranks * size
    bandwidth = group.switched if algorithm == "switch" and group.switched else group.bandwidth
    return base_seconds() + rounds * _ring_latency(group) + sent / bandwidth


def _ring_latency(group: Group) -> float:
    """Return the latency of one trip around the ring in seconds: N - 1 steps, some of them between nodes."""
    crossing = group.nodes - 1
    between = crossing * group.across.step if group.across else 0.0
    return (group.ranks - 1 - crossing) * group.inside.step + between


def _tree(collective: str, size: float, group: Group) -> float:
    """Return the seconds of a collective on a tree: all bytes go up, or down, or for an all-reduce up and then down.

    As in NCCL, each node has a chain, and a binary tree connects the nodes (Sanders et al. 2009: two trees, so that
    each rank is a leaf in one).
    """
    rounds = 2 if collective == "all-reduce" else 1
    depth = ceil(log2(group.nodes)) * group.across.tree_step if group.across else 0.0
    latency = (group.per_node - 1) * group.inside.tree_step + depth
    return base_seconds() + rounds * (latency + size / (TREE * group.bandwidth))


def _hierarchical(collective: str, size: float, group: Group) -> float:
    if group.across is None or group.per_node == 1:
        return _seconds(collective, size, group, "ring")
    inside = Group(group.per_node, group.per_node, group.inside)
    across = Group(group.nodes, 1, group.inside, group.across, group.adapters / group.per_node)
    part = size / group.per_node
    if collective == "all-reduce":
        outer = _seconds("reduce-scatter", size, inside, "ring") + _seconds("all-gather", size, inside, "ring")
        return outer + seconds("all-reduce", part, across)
    return _seconds(collective, size, inside, "ring") + _seconds(collective, part, across, "ring")


def _all_to_all(size: float, group: Group) -> float:
    """Return the seconds in which each rank sends every other rank a part of its own. Parts for the same node and for
    other nodes are sent at the same time."""
    part = size / group.ranks
    near = (group.per_node - 1) * (group.inside.step + part / group.inside.reached)
    if group.across is None:
        return base_seconds() + near
    rate = group.adapters / group.per_node * group.across.reached
    far = (group.ranks - group.per_node) * part / rate + (group.nodes - 1) * group.across.step
    return base_seconds() + max(near, far)


def _check(collective: str, size: float) -> None:
    if collective not in COLLECTIVES:
        raise unknown_name("collective", str(collective), list(COLLECTIVES), f"Known: {', '.join(COLLECTIVES)}.")
    if not size >= 0:
        raise SpecError(f"size={size!r} is not a number of bytes >= 0")
