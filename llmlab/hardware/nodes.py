"""The table of hosts: the machines whose memory and drives GPUs offload to.

>>> host_of("A100").name, round(host_of("A100").share / 1e9)
('DGX-A100', 51)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import median

from ..base.errors import NotAvailable
from .gpu import GPU, gpu
from .links import links
from .tables import named, read_table, values_of


@dataclass(frozen=True)
class Host:
    """A machine with `gpus` GPUs. `memory`: bytes; `bandwidth`: bytes/s of its memory, from the data sheet."""

    name: str
    gpus: int
    memory: int
    bandwidth: float
    cards: tuple[str, ...] = ()
    source: str = ""
    checked: str = ""

    @property
    def share(self) -> float:
        """Bytes/s of memory for each GPU where all do the same work, from the data sheet."""
        return self.bandwidth / self.gpus


@dataclass(frozen=True)
class Drive:
    """All drives of one host together: bytes/s that large asynchronous transfers reach."""

    read: float
    write: float
    source: str = ""


@cache
def hosts() -> dict[str, Host]:
    """Return every host by its name."""
    table = read_table("nodes.toml")
    return {entry["name"]: Host(**values_of(entry, table)) for entry in table["host"]}


def host(name: str) -> Host:
    """Return the host called `name`; case does not count. Raises UnknownName with the nearest ones."""
    return named("host", name, hosts())


def host_of(card: GPU | str) -> Host:
    """Return the host that such cards are sold in; NotAvailable where the table has none."""
    found = gpu(card)
    for each in hosts().values():
        if found.name in each.cards:
            return each
    raise NotAvailable(f"no host is known for {found.name}; build a Host with its figures")


def usual_host(card: GPU | str) -> Host:
    """Return the host that such cards are sold in, or where the table has none for them one whose GPUs have as much of
    its memory and bandwidth as in the table's median, without a source."""
    try:
        return host_of(card)
    except NotAvailable:
        gpus, listed = gpu(card).node_gpus, hosts().values()
        memory, share = median(each.memory / each.gpus for each in listed), median(each.share for each in listed)
        return Host("a median host", gpus, int(memory * gpus), share * gpus)


def nvme() -> Drive:
    """Return the drives of the table."""
    return Drive(**values_of(read_table("nodes.toml")["nvme"], {"documents": {}}))


def adam_share() -> float:
    """Return the share of a host's bandwidth that Adam reaches on its CPUs."""
    return read_table("nodes.toml")["adam_share"]


def to_host(card: GPU | str, pinned: bool = True) -> float:
    """Return the bytes/s between a card and its host's memory, in one direction, for pinned or pageable memory.

    Raises NotAvailable for a card whose PCIe generation is not in the table of links.
    """
    found = gpu(card)
    if not pinned:
        return read_table("nodes.toml")["pageable_gb_s"] * 1e9
    for each in links().values():
        if each.kind == "pcie" and each.bandwidth == found.pcie:
            return each.reached
    raise NotAvailable(f"no PCIe link is known for {found.name}, and offloading needs one")
