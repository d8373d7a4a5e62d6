"""Seconds and bytes of collectives, by the alpha-beta model: a message of S bytes takes alpha + S / beta.

    size    bytes of the whole tensor: what all-reduce sums, what all-gather leaves on each rank, what reduce-scatter
            starts from on each rank, what a rank has for all the others before an all-to-all
    alpha   s per step, whatever is sent     beta   bytes/s that a rank passes on     N   ranks

Latency and bandwidth come from llmlab/hardware/links.toml. As in NCCL's tuner (src/graph/tuning.cc), a collective
takes a base time, its steps' latencies, and its bytes over the bandwidth; unlike NCCL there is one protocol only.
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
# What NCCL chooses from for an all-reduce: across nodes it gathers and scatters in rings alone (src/graph/tuning.cc),
# the first of `ALGORITHMS`, and lays trees, and lets a node's switches add, for all-reduce only.
NCCL = ("ring", "tree", "switch")

TREE = 0.92  # of the rings' bandwidth in an all-reduce: src/graph/tuning.cc, busBw


def bytes_sent(collective: str, size: int, ranks: int) -> float:
    """Return the bytes a rank sends on average: those of a ring, the least there can be where ranks add.

    All-reduce sends each byte (N - 1) / N times to be summed and as often to be spread (Patarasuk and Yuan 2009,
    theorem 1). Broadcast and reduce pass the tensor on, all ranks but one. Where a switch adds, a rank sends and
    receives (1 + 1 / N) `size`: the switch reads all chunks of a rank, and the rank sends the sum of its own chunk to
    all others (NCCL issue 2140). nccl-tests compute the bus bandwidth from the bytes of a ring all the same.

    >>> bytes_sent("all-reduce", 1000, 4)
    1500.0
    """
    _check(collective, size)
    check_counts(ranks=ranks)
    if collective == "send":
        return float(size) if ranks > 1 else 0.0
    return (2 if collective == "all-reduce" else 1) * size * (ranks - 1) / ranks


def seconds(collective: str, size: float, group: Group, algorithm: str | None = None) -> float:
    """Return the seconds that `collective` of `size` bytes takes in `group`; by default NCCL's quickest.

    "ring" and "tree" lie over all ranks; "hierarchical" sums inside each node first, then across nodes each rank with
    those in its place, and spreads the result inside: ZeRO++ (arXiv 2306.10209) does so, NCCL does not. "switch" is
    NVLink SHARP, with a ring's latency: this gives what was measured on eight H100s or H200s from 16 MiB on. A group of
    one takes no time. Raises SpecError or UnknownName.
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
    # A broadcast cuts the tensor into pieces that follow one another: the last rank is done a ring's latency later.
    sent = size if collective in ("broadcast", "reduce") else rounds * (ranks - 1) / ranks * size
    bandwidth = group.switched if algorithm == "switch" and group.switched else group.bandwidth
    return base_seconds() + rounds * _ring_latency(group) + sent / bandwidth


def _ring_latency(group: Group) -> float:
    """Return the seconds of a message once round the ring: N - 1 steps, some of them between nodes."""
    crossing = group.nodes - 1
    between = crossing * group.across.step if group.across else 0.0
    return (group.ranks - 1 - crossing) * group.inside.step + between


def _tree(collective: str, size: float, group: Group) -> float:
    """Up the tree and down again, as NCCL lays it: a chain in each node, a binary tree over nodes (Sanders et al. 2009,
    two trees, so that each rank is a leaf in one). All bytes go both ways."""
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
    """Each rank sends a part of its own to every other; those in its node and those elsewhere at the same time."""
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
