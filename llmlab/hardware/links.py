"""The table of links between GPUs and between nodes, and how GPUs are wired to a cluster.

>>> link("NVLink-4").bandwidth / 1e9
450.0
>>> cluster("A100", "InfiniBand-HDR").group(64).nodes
8
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from ..base.errors import NotAvailable, SpecError, check_counts
from .gpu import GPU, gpu
from .tables import cited, named, read_table

GPUS_A_NODE = 8  # of NVIDIA's DGX and HGX, and with an InfiniBand adapter each; other nodes are named by the caller


@dataclass(frozen=True)
class Link:
    """One class of link. `bandwidth`, `reached`: bytes/s in one direction, of the data sheet, and for large messages;
    `switched`: bus bandwidth of an all-reduce over a whole node whose switches add, None where they do not.
    `step`, `tree_step`: s that any message takes to the next rank of a ring, of a tree. `kind`: "nvlink", "pcie" or
    "network". `nodes_of`: the architectures whose usual nodes it connects."""

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


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: `per_node` of them in each of `nodes` nodes.

    `inside`, `across`: the links within a node and between nodes (None in one node). `adapters`: how many network
    adapters of a node serve this group, where all groups of its kind communicate at once: a share can be a fraction.
    """

    ranks: int
    per_node: int
    inside: Link
    across: Link | None = None
    adapters: float = 1.0

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.per_node)

    @property
    def bandwidth(self) -> float:
        """Bytes/s a rank passes on in rings that lie over all ranks: what nccl-tests call bus bandwidth.

        Each adapter of a node ends one ring, and all rings run through all GPUs of the node.
        """
        if self.across is None:
            return self.inside.reached
        network = self.adapters * self.across.reached
        return network if self.per_node == 1 else min(self.inside.reached, network)

    @property
    def switched(self) -> float | None:
        """Bus bandwidth of an all-reduce that the node's switches add up, bytes/s; None where ranks do it themselves:
        on links whose switches cannot, between nodes, and among fewer than all GPUs of a node, where it gains nothing.
        """
        return self.inside.switched if self.across is None and self.ranks == GPUS_A_NODE else None


@dataclass(frozen=True)
class Cluster:
    """Nodes of `gpus` GPUs on `inside` links, with `adapters` network adapters on `across` links; None is one node."""

    inside: Link
    across: Link | None = None
    gpus: int = GPUS_A_NODE
    adapters: int = GPUS_A_NODE

    def group(self, ranks: int, stride: int = 1) -> Group:
        """Return the group of `ranks` ranks of which each is `stride` devices from the next.

        Tensor-parallel ranks are neighbours, stride 1; data-parallel ones are tp devices apart. Raises NotAvailable
        where they are on several nodes that nothing joins.
        """
        check_counts(ranks=ranks, stride=stride)
        per_node = min(ranks, max(1, self.gpus // stride))
        if per_node >= ranks:
            return Group(ranks, per_node, self.inside)
        if self.across is None:
            raise NotAvailable("no usual network joins such nodes; name one: cluster(card, network)")
        return Group(ranks, per_node, self.inside, self.across, self.adapters * per_node / self.gpus)


def cluster(card: GPU | str, network: Link | str, gpus: int = GPUS_A_NODE, adapters: int | None = None) -> Cluster:
    """Return nodes of `gpus` such cards, with as many network adapters (`adapters` None), or that many.

    Raises UnknownName for a card or link that is no table's, NotAvailable for a card whose links are not there.
    """
    adapters = gpus if adapters is None else adapters
    check_counts(gpus=gpus, adapters=adapters)
    across = link(network) if isinstance(network, str) else network
    if across.kind != "network":
        raise SpecError(f"network={across.name} does not connect nodes; give one of {', '.join(_networks())}")
    return Cluster(node_link(card), across, gpus, adapters)


def usual_cluster(card: GPU | str) -> Cluster:
    """Return nodes of eight such cards as their maker sells them: NVLink inside, an InfiniBand adapter a card.

    Raises NotAvailable for cards that no such node has: GeForce, PCIe boards, T4.

    >>> usual_cluster("H100").across.name
    'InfiniBand-NDR'
    """
    found = gpu(card)
    inside = node_link(found)
    for each in links().values():
        if inside.kind == "nvlink" and found.architecture in each.nodes_of:
            return Cluster(inside, each)
    raise NotAvailable(f"no usual network between nodes of {found.name}; name one: cluster({found.name!r}, network)")


def node_link(card: GPU | str) -> Link:
    """Return what connects such cards inside a node: NVLink with the card's bandwidth, else its PCIe.

    NVLink on a GeForce card or a PCIe board is a bridge between two; a ring of more goes through PCIe.
    """
    found = gpu(card)
    bridge = found.name.endswith("PCIe") or found.name.startswith("RTX")
    for each in links().values():
        if found.nvlink and not bridge and found.architecture in each.architectures:
            share = found.nvlink / each.bandwidth  # an H800 has 8 of an H100's 18 links
            switched = each.switched and each.switched * share
            return replace(each, bandwidth=found.nvlink, reached=each.reached * share, switched=switched)
        if (bridge or not found.nvlink) and each.kind == "pcie" and each.bandwidth == found.pcie:
            return each
    raise NotAvailable(f"no link in the table for {found.name}; build a Cluster from a Link with its figures")


@cache
def links() -> dict[str, Link]:
    """Return every link by its name."""
    table = read_table("links.toml")
    return {
        entry["name"]: Link(
            name=entry["name"],
            kind=entry["kind"],
            bandwidth=entry["gb_s"] * 1e9,
            reached=entry["reached_gb_s"] * 1e9,
            step=entry["step_us"] * 1e-6,
            tree_step=entry["tree_step_us"] * 1e-6,
            architectures=tuple(entry.get("architectures", ())),
            nodes_of=tuple(entry.get("nodes_of", ())),
            source=cited(entry["source"], table["documents"]),
            checked=table["checked"],
            switched=entry["switch_gb_s"] * 1e9 if "switch_gb_s" in entry else None,
        )
        for entry in table["link"]
    }


def link(name: str) -> Link:
    """Return the link called `name`; case does not count. Raises UnknownName with the nearest ones."""
    return named("link", name, links())


@cache
def base_seconds() -> float:
    """Return what a collective takes before its first step, in s."""
    return read_table("links.toml")["base_us"] * 1e-6


def _networks() -> list[str]:
    return [each.name for each in links().values() if each.kind == "network"]
