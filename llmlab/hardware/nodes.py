"""The table of hosts, to whose memory and drives GPUs can offload.

>>> host_of("A100").name, round(host_of("A100").share / 1e9)
('DGX-A100', 51)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import median

from ..base.errors import NotAvailable
from .gpu import GPU
from .gpu import gpu as find_gpu
from .links import links
from .tables import named, read_table, values_of


@dataclass(frozen=True)
class Host:
    """A machine with `gpus` GPUs. `memory`: bytes; `bandwidth`: bytes/s of its memory, from the data sheet."""

    name: str
    gpus: int
    memory: int
    bandwidth: float
    gpu_names: tuple[str, ...] = ()
    source: str = ""
    checked: str = ""

    @property
    def share(self) -> float:
        """Bytes/s of host memory per GPU, from the data sheet, while all GPUs do the same work."""
        return self.bandwidth / self.gpus


@dataclass(frozen=True)
class Drive:
    """All drives of one host together, with the bytes/s of large asynchronous transfers."""

    read: float
    write: float
    source: str = ""


@cache
def hosts() -> dict[str, Host]:
    """Return every host by its name."""
    table = read_table("nodes.toml")
    return {entry["name"]: Host(**values_of(entry, table)) for entry in table["host"]}


def host(name: str) -> Host:
    """Return the host called `name`; case is ignored. Raises UnknownName with the nearest names."""
    return named("host", name, hosts())


def host_of(gpu: GPU | str) -> Host:
    """Return the host in which such GPUs are sold; raises NotAvailable if the table has none."""
    device = find_gpu(gpu)
    for entry in hosts().values():
        if device.name in entry.gpu_names:
            return entry
    raise NotAvailable(f"no host is known for {device.name}; build a Host with its figures")


def usual_host(gpu: GPU | str) -> Host:
    """Return the host in which such GPUs are sold. If the table has none, return a host without a source, whose memory
    and bandwidth per GPU are the medians of the table."""
    try:
        return host_of(gpu)
    except NotAvailable:
        gpus, listed = find_gpu(gpu).node_gpus, hosts().values()
        memory, share = median(entry.memory / entry.gpus for entry in listed), median(entry.share for entry in listed)
        return Host("a median host", gpus, int(memory * gpus), share * gpus)


def nvme() -> Drive:
    """Return the drives of the table."""
    return Drive(**values_of(read_table("nodes.toml")["nvme"], {"documents": {}}))


def adam_share() -> float:
    """Return the share of a host's bandwidth that Adam reaches on its CPUs."""
    return read_table("nodes.toml")["adam_share"]


def to_host(gpu: GPU | str, pinned: bool = True) -> float:
    """Return the bytes/s between a GPU and host memory in one direction, for pinned or pageable memory.

    Raises NotAvailable for a GPU whose PCIe generation is not in the table of links.
    """
    device = find_gpu(gpu)
    if not pinned:
        return read_table("nodes.toml")["pageable_gb_s"] * 1e9
    for entry in links().values():
        if entry.kind == "pcie" and entry.bandwidth == device.pcie:
            return entry.reached
    raise NotAvailable(f"no PCIe link is known for {device.name}, and offloading needs one")
