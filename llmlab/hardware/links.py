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
from .gpu import GPU, gpu
from .tables import named, read_table, values_of

GPUS_PER_NODE = 8  # NVIDIA's DGX and HGX, with one InfiniBand adapter for each GPU; the caller describes other nodes
GIVEN = "given"  # the source of a rate that is one's own
SWITCHED = (GPUS_PER_NODE, 72)  # GPUs of nodes whose switches join all: HGX, and the racks called NVL72


@dataclass(frozen=True)
class Link:
    """One class of link. `kind`: "nvlink", "pcie" or "network".

    `bandwidth`: bytes/s in one direction, from the data sheet; `reached`: the same, measured with large messages.
    `switched`: bus bandwidth of an all-reduce over a whole node whose switches add up the values, None where they do
    not. `step`, `tree_step`: seconds that any message takes to the next rank of a ring, or of a tree. `waited`: seconds
    more for each node of a ring, where the next kernel waits for the message. `nodes_of`: the architectures whose usual
    nodes it connects.
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

    def __hash__(self) -> int:  # of few fields: an estimate looks links up in several caches
        return hash((self.name, self.reached))


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: `per_node` of them in each of `nodes` nodes.

    `inside`, `across`: the links within a node and between nodes (None in one node). `adapters`: how many network
    adapters of a node serve this group while all groups of its kind communicate at once; it can be a fraction.
    """

    ranks: int
    per_node: int
    inside: Link
    across: Link | None = None
    adapters: float = 1.0

    def __hash__(self) -> int:  # as that of links
        return hash((self.ranks, self.per_node, self.inside.reached, self.adapters))

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.per_node)

    @property
    def bandwidth(self) -> float:
        """Bytes/s that a rank passes on, in rings over all ranks: what nccl-tests call bus bandwidth.

        Each adapter of a node ends one ring, and all rings run through all GPUs of the node.
        """
        if self.across is None:
            return self.inside.reached
        network = self.adapters * self.across.reached
        return network if self.per_node == 1 else min(self.inside.reached, network)

    @property
    def switched(self) -> float | None:
        """Bus bandwidth, in bytes/s, of an all-reduce whose sums the node's switches compute; None where ranks do.

        Ranks do where the switches cannot, between nodes, and among fewer than all GPUs of a node: no gain there.
        """
        return self.inside.switched if self.across is None and self.ranks in SWITCHED else None


@dataclass(frozen=True)
class Cluster:
    """Nodes of `gpus` GPUs, connected by `inside`, each with `adapters` network adapters.

    `across` connects the nodes; None is a single node.
    """

    inside: Link
    across: Link | None = None
    gpus: int = GPUS_PER_NODE
    adapters: int = GPUS_PER_NODE

    def group(self, ranks: int, stride: int = 1) -> Group:
        """Return the group of `ranks` ranks, each `stride` devices from the next.

        Tensor-parallel ranks are neighbours, stride 1; data-parallel ones are tp devices apart. Raises NotAvailable
        where they are on several nodes that nothing connects.
        """
        return _group(self, ranks, stride)

    def reaching(self, rate: float) -> Cluster:
        """Return these nodes with GPUs that pass on `rate` bytes/s to one another, whatever was measured elsewhere."""
        return _reaching(self, rate)


@lru_cache(maxsize=1024, typed=True)  # an estimate asks for the same groups of the same nodes again and again
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
    card: GPU | str,
    network: Link | str | None = None,
    gpus: int | None = None,
    adapters: int | None = None,
    inside: Link | str | None = None,
    nvls: bool = True,
    reached: float | None = None,
    reached_across: float | None = None,
) -> Cluster:
    """Return nodes of `gpus` such cards, connected by `network`, with `adapters` network adapters in each node.

    Without `gpus` a node has as many as the maker's has: 72 of a GB200 or GB300, else 8. Without a network it is the
    card's usual one, or none where there is no usual one: then there is one node. Without `adapters` there is one for
    each GPU; without `inside`, what connects the GPUs of a node, it is the card's own. `nvls` False lets ranks add
    where switches could (NCCL_NVLS_ENABLE=0). `reached`, in bytes/s, is what nccl-tests measure in such a node of one's
    own, the bus bandwidth of large messages over all its GPUs: it stands for all that the tables have. Nodes that PCIe
    alone joins differ so much (`pcie_rates`) that it is worth measuring. `reached_across` is the bus bandwidth of an
    all-reduce over all GPUs of several nodes.
    Raises UnknownName for a card or link that is not in the tables, NotAvailable for a card whose link is not, and
    SpecError for a rate that is not above 0.

    >>> cluster("T4", "Ethernet-25", gpus=4).inside.name, cluster("H100").across.name
    ('PCIe-3', 'InfiniBand-NDR')
    """
    gpus = gpu(card).node_gpus if gpus is None else gpus
    adapters = gpus if adapters is None else adapters
    check_counts(gpus=gpus, adapters=adapters)
    between = _usual_network(card) if network is None else _of_kind(network, "network", across=True)
    within = node_link(card) if inside is None else _of_kind(inside, "link", across=False)
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
    """Bytes/s that a rank passes on in published nodes: one in ten is slower than `slow`, one in ten faster than
    `fast`. `nodes`: how many there are."""

    slow: float
    median: float
    fast: float
    nodes: int


@cache
def pcie_rates(inside: Link, ranks: int, peer_access: bool) -> Rates | None:
    """Return what `ranks` GPUs of a node that PCIe joins reach at a time, with `peer_access` to one another's memory or
    without; None for other links, and for one whose `reached` is one's own.

    Of each node of pcie_nodes.toml with the same access counts the measurement of the number of ranks that is nearest,
    as a share of its slots' bandwidth: generations differ less than hosts. A slot of fewer lanes is `inside`'s, and
    limits what the host could.

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
    among = max(tenths[0], min(shares)), tenths[4], min(tenths[8], max(shares))
    whole = link(inside.name.partition("-x")[0])
    most = inside.bandwidth if inside == whole else inside.reached
    slow, middle, fast = (min(share * whole.bandwidth, most) for share in among)
    return Rates(slow, middle, fast, len(shares))


def _usual_network(card: GPU | str) -> Link | None:
    """Return what connects the nodes that the card's maker sells, None where there are none."""
    found = gpu(card)
    if node_link(found).kind != "nvlink":
        return None
    return next((each for each in links().values() if found.architecture in each.nodes_of), None)


def _of_kind(given: Link | str, what: str, across: bool) -> Link:
    """Return the link `given`, by its name too; SpecError where it does not connect nodes (`across`), or GPUs."""
    found = link(given) if isinstance(given, str) else given
    if (found.kind == "network") != across:
        fitting = ", ".join(each.name for each in links().values() if (each.kind == "network") == across)
        connects = "nodes" if across else "the GPUs of a node"
        raise SpecError(f"{what}={found.name} does not connect {connects}; give one of {fitting}")
    return found


@cache
def node_link(card: GPU | str) -> Link:
    """Return what connects such cards inside a node: NVLink with the card's bandwidth, else its PCIe.

    NVLink on a GeForce card, a PCIe board, as the A30 and A40 are, or an NVL is a bridge between two; a ring of more
    goes through PCIe.
    """
    found = gpu(card)
    bridge = found.name.endswith(("PCIe", "NVL")) or found.name.startswith(("RTX", "A30", "A40"))
    for each in links().values():
        if found.nvlink and not bridge and found.architecture in each.architectures:
            share = found.nvlink / each.bandwidth  # an H800 has 8 of an H100's 18 links
            switched = each.switched and each.switched * share
            return replace(each, bandwidth=found.nvlink, reached=each.reached * share, switched=switched)
        if (bridge or not found.nvlink) and each.kind == "pcie" and each.bandwidth == found.pcie:
            return each
    raise NotAvailable(f"no link is known for {found.name}; name one with --link (in Python build a Cluster from a "
                       "Link)")  # fmt: skip


@cache
def links() -> dict[str, Link]:
    """Return every link by its name."""
    table = read_table("links.toml")
    return {entry["name"]: Link(**values_of(entry, table)) for entry in table["link"]}


def link(name: str) -> Link:
    """Return the link called `name`; case does not count. Raises UnknownName with the nearest ones."""
    return named("link", name, links())


def base_seconds() -> float:
    """Return the seconds that a collective takes before its first step."""
    return read_table("links.toml")["base_us"] * 1e-6
