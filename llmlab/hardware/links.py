"""The table of links between GPUs and between nodes, and how GPUs are wired to a cluster.

>>> link("NVLink-4").bandwidth / 1e9
450.0
>>> cluster("A100", "InfiniBand-HDR").group(64).nodes
8
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import inf, log
from statistics import quantiles
from typing import NamedTuple

from ..base.errors import NotAvailable, SpecError, check_counts
from .gpu import GPU
from .gpu import gpu as find_gpu
from .tables import named, read_table, values_of

GPUS_PER_NODE = 8  # NVIDIA's DGX and HGX, with one InfiniBand adapter per GPU; callers describe other nodes
GIVEN = "given"  # the source of a rate that the user passed
SWITCHED = (GPUS_PER_NODE, 72)  # number of GPUs that switches connect: HGX nodes, and NVL72 racks


@dataclass(frozen=True)
class Link:
    """One class of link. `kind`: "nvlink", "pcie" or "network".

    `bandwidth`: bytes/s in one direction, from the data sheet; `reached`: the same, measured with large messages.
    `switched`: bus bandwidth of an all-reduce over a whole node whose switches add up the values, or None if they do
    not. `step`, `tree_step`: latency in seconds of a message to the next rank of a ring, or of a tree. `waited`:
    additional seconds for each node of a ring if the next kernel waits for the message. `nodes_of`: the architectures
    whose usual nodes it connects.
    """

    name: str
    kind: str
    bandwidth: float
    reached: float
    step: float
    tree_step: float
    architectures: tuple[str, ...] = ()
    nodes_of: tuple[str, ...] = ()
    source: str = ""
    checked: str = ""
    switched: float | None = None
    waited: float = 0.0

    def __hash__(self) -> int:  # few fields, because an estimate looks up links in several caches
        return hash((self.name, self.reached))


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: `per_node` of them in each of `nodes` nodes.

    `inside`, `across`: the links within a node and between nodes (None for one node). `adapters`: the number of network
    adapters of a node for this group while all groups of its kind communicate at the same time; it can be a fraction.
    """

    ranks: int
    per_node: int
    inside: Link
    across: Link | None = None
    adapters: float = 1.0

    def __hash__(self) -> int:  # few fields, as for links
        return hash((self.ranks, self.per_node, self.inside.reached, self.adapters))

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.per_node)

    @property
    def bandwidth(self) -> float:
        """Bytes/s that a rank passes on, in rings over all ranks: the bus bandwidth of nccl-tests.

        Each adapter of a node ends one ring, and all rings run through all GPUs of the node.
        """
        if self.across is None:
            return self.inside.reached
        network = self.adapters * self.across.reached
        return network if self.per_node == 1 else min(self.inside.reached, network)

    @property
    def switched(self) -> float | None:
        """Bus bandwidth, in bytes/s, of an all-reduce whose sums the switches compute; None if the ranks compute them.

        The ranks compute them if the switches cannot, between nodes, and in groups of fewer than all GPUs of a node,
        where switches bring no gain.
        """
        return self.inside.switched if self.across is None and self.ranks in SWITCHED else None


@dataclass(frozen=True)
class Cluster:
    """Nodes of `gpus` GPUs, connected by `inside`, each with `adapters` network adapters.

    `across` connects the nodes; None means a single node.
    """

    inside: Link
    across: Link | None = None
    gpus: int = GPUS_PER_NODE
    adapters: int = GPUS_PER_NODE

    def group(self, ranks: int, stride: int = 1) -> Group:
        """Return the group of `ranks` ranks, each `stride` devices from the next.

        Tensor-parallel ranks are neighbours, stride 1; data-parallel ranks are tp devices apart. Raises NotAvailable
        if they are on several nodes without a network.
        """
        return _group(self, ranks, stride)

    def reaching(self, rate: float) -> Cluster:
        """Return these nodes with a measured `rate`, in bytes/s, between their GPUs, which replaces that of the
        tables."""
        return _reaching(self, rate)


@lru_cache(maxsize=1024, typed=True)  # an estimate needs the same groups many times
def _group(nodes: Cluster, ranks: int, stride: int) -> Group:
    check_counts(ranks=ranks, stride=stride)
    per_node = min(ranks, max(1, nodes.gpus // stride))
    if per_node >= ranks:
        return Group(ranks, per_node, nodes.inside)
    if nodes.across is None:
        raise NotAvailable("the network between such nodes is unknown; name one with --network (in Python cluster=)")
    return Group(ranks, per_node, nodes.inside, nodes.across, nodes.adapters * per_node / nodes.gpus)


@lru_cache(maxsize=256)
def _reaching(nodes: Cluster, rate: float) -> Cluster:
    return replace(nodes, inside=replace(nodes.inside, reached=rate, switched=None, source=GIVEN))


def cluster(
    gpu: GPU | str,
    network: Link | str | None = None,
    gpus: int | None = None,
    adapters: int | None = None,
    inside: Link | str | None = None,
    nvls: bool = True,
    reached: float | None = None,
    reached_across: float | None = None,
) -> Cluster:
    """Return nodes of `gpus` GPUs of the kind `gpu`, connected by `network`, with `adapters` network adapters per
    node.

    By default a node has as many GPUs as the vendor's node: 72 GB200 or GB300, 4 H100-94GB, else 8. The default network
    is the usual one of the GPU; if there is none, the cluster is a single node. By default there is one adapter per
    GPU, and `inside`, the link between the GPUs of a node, is that of the GPU. With `nvls=False`, ranks compute the
    sums that switches could compute (NCCL_NVLS_ENABLE=0). `reached`, in bytes/s, is the bus bandwidth that nccl-tests
    report on your own node for large messages over all its GPUs, and replaces the rates of the tables. Nodes with PCIe
    alone differ so much (`pcie_rates`) that measuring is worthwhile. `reached_across` is the bus bandwidth of an
    all-reduce over all GPUs of several nodes.
    Raises UnknownName for a GPU or link that is not in the tables, NotAvailable for a GPU whose link is unknown, and
    SpecError for a rate that is not above 0.

    >>> cluster("T4", "Ethernet-25", gpus=4).inside.name, cluster("H100").across.name
    ('PCIe-3', 'InfiniBand-NDR')
    """
    gpus = find_gpu(gpu).node_gpus if gpus is None else gpus
    adapters = gpus if adapters is None else adapters
    check_counts(gpus=gpus, adapters=adapters)
    between = _usual_network(gpu) if network is None else _checked_link(network, "network", across=True)
    within = node_link(gpu) if inside is None else _checked_link(inside, "link", across=False)
    if not nvls:
        within = replace(within, switched=None)
    for name, rate in (("reached", reached), ("reached_across", reached_across)):
        if rate is not None and not 0 < rate < inf:
            raise SpecError(f"{name}={rate!r} is not a rate in bytes/s; give, for a busbw of 12 GB/s, 12e9")
    if reached_across is not None:
        if between is None:
            raise SpecError("reached_across= is the rate of a network, and these nodes have none; give network=, too")
        between = replace(between, reached=reached_across / adapters, source=GIVEN)
    nodes = Cluster(within, between, gpus, adapters)
    return nodes if reached is None else nodes.reaching(reached)


class Rates(NamedTuple):
    """Bytes/s that a rank passes on in published nodes: one in ten is slower than `slow`, and one in ten faster than
    `fast`. `nodes` is the number of nodes."""

    slow: float
    median: float
    fast: float
    nodes: int


@cache
def pcie_rates(inside: Link, ranks: int, peer_access: bool) -> Rates | None:
    """Return the rates of `ranks` GPUs in a node with PCIe, with or without `peer_access` to each other's memory; None
    for other links, and for a link whose `reached` was given by the user.

    Each node of pcie_nodes.toml with the same access contributes the measurement with the nearest number of ranks, as a
    share of the bandwidth of its slots, because generations differ less than hosts. If `inside` is a slot with fewer
    lanes, its rate limits that of the host.

    >>> rates = pcie_rates(link("PCIe-4"), 8, peer_access=True)
    >>> rates.slow < 12e9 < rates.median < rates.fast < 31.5e9
    True
    """
    if inside.kind != "pcie" or inside != links().get(inside.name):
        return None
    shares = []
    for node in read_table("pcie_nodes.toml")["node"]:
        if node["peer_access"] == peer_access:
            measured = {int(count): rate for count, rate in node["busbw_gb_s"].items()}
            nearest = min(measured, key=lambda count: (abs(log(count / ranks)), count))
            shares.append(measured[nearest] * 1e9 / link(node["link"]).bandwidth)
    tenths = quantiles(shares, n=10)
    typical = max(tenths[0], min(shares)), tenths[4], min(tenths[8], max(shares))
    whole = link(inside.name.partition("-x")[0])
    limit = inside.bandwidth if inside == whole else inside.reached
    slow, middle, fast = (min(share * whole.bandwidth, limit) for share in typical)
    return Rates(slow, middle, fast, len(shares))


def _usual_network(gpu: GPU | str) -> Link | None:
    """Return the network between the nodes that the vendor of the GPU sells; None if it sells none."""
    device = find_gpu(gpu)
    if node_link(device).kind != "nvlink":
        return None
    return next((network for network in links().values() if device.architecture in network.nodes_of), None)


def _checked_link(name: Link | str, argument: str, across: bool) -> Link:
    """Return the link `name`; raise SpecError if it does not connect nodes (for `across`) or GPUs."""
    fitting = {entry.name: entry for entry in links().values() if (entry.kind == "network") == across}
    chosen = {key.lower(): entry for key, entry in links().items()}.get(name.lower()) if isinstance(name, str) else name
    if chosen is None:
        return named(argument, str(name), fitting)
    if (chosen.kind == "network") != across:
        connects = "nodes" if across else "the GPUs of a node"
        raise SpecError(f"{argument}={chosen.name} does not connect {connects}; give one of {', '.join(fitting)}")
    return chosen


@cache
def node_link(gpu: GPU | str) -> Link:
    """Return the link between such GPUs inside a node: NVLink with the GPU's bandwidth, else its PCIe.

    On GeForce GPUs, on PCIe boards such as the A30 and A40, and on NVL boards, NVLink is a bridge between two GPUs, so
    a ring of more than two uses PCIe.
    """
    device = find_gpu(gpu)
    bridge = device.name.endswith(("PCIe", "NVL")) or device.name.startswith(("RTX", "A30", "A40"))
    for entry in links().values():
        if device.nvlink and not bridge and device.architecture in entry.architectures:
            share = device.nvlink / entry.bandwidth  # an H800 has 8 of an H100's 18 links
            switched = entry.switched and entry.switched * share
            return replace(entry, bandwidth=device.nvlink, reached=entry.reached * share, switched=switched)
        if (bridge or not device.nvlink) and entry.kind == "pcie" and entry.bandwidth == device.pcie:
            return entry
    raise NotAvailable(f"no link is known for {device.name}; name one with --link (in Python build a Cluster from a "
                       "Link)")  # fmt: skip


@cache
def links() -> dict[str, Link]:
    """Return every link by its name."""
    table = read_table("links.toml")
    return {entry["name"]: Link(**values_of(entry, table)) for entry in table["link"]}


def link(name: str) -> Link:
    """Return the link called `name`; case is ignored. Raises UnknownName with the nearest names."""
    return named("link", name, links())


def base_seconds() -> float:
    """Return the seconds of a collective before its first step."""
    return read_table("links.toml")["base_us"] * 1e-6
