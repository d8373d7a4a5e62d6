"""The GPUs of a plan, parsed from text such as "2x8xA100-80GB", and the GPUs that a plan compares."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..base.errors import NotAvailable, SpecError
from ..hardware.gpu import GPU, gpus
from ..hardware.gpu import gpu as find_gpu
from ..hardware.links import GPUS_PER_NODE, Cluster, cluster


@dataclass(frozen=True, repr=False)
class Machines:
    """GPUs of one kind: `nodes` nodes with `per_node` GPUs each."""

    gpu: GPU
    nodes: int
    per_node: int

    @property
    def total(self) -> int:
        return self.nodes * self.per_node

    @cached_property
    def cluster(self) -> Cluster | None:
        return cluster(self.gpu, gpus=self.per_node) if self.total > 1 else None

    @property
    def usd_per_hour(self) -> float | None:
        """Rent of all GPUs in US dollars per hour; None for a GPU without a price."""
        return None if self.gpu.usd_per_hour is None else self.gpu.usd_per_hour * self.total

    def __str__(self) -> str:
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.per_node}x{self.gpu.name}"

    def __repr__(self) -> str:
        return f"<Machines: {self}>"


def machines(text: str) -> Machines:
    """Return the GPUs that "T4", "8xH100-80GB" or "2x8xA100-80GB" (nodes, GPUs per node) names. Without a number of
    nodes, more than 8 GPUs are divided into nodes of 8. Raises SpecError for any other text."""
    if not isinstance(text, str):
        raise SpecError(f"gpus={text!r} is a {type(text).__name__}; give 'T4', '8xH100-80GB' or '2x8xA100-80GB'")
    counts = re.match(r"\s*(?:(\d+)\s*x\s*)?(?:(\d+)\s*x\s*)?(?=\S)", text, re.IGNORECASE)
    if not counts:
        raise SpecError(f"gpus={text!r} names no GPUs; give 'T4', '8xH100-80GB' or '2x8xA100-80GB'")
    numbers = [int(number) for number in counts.groups() if number]
    gpu = find_gpu(text[counts.end() :])
    if any(number < 1 for number in numbers):
        raise SpecError(f"gpus={text!r}: give at least one GPU")
    if len(numbers) == 2:
        return Machines(gpu, *numbers)
    total = numbers[0] if numbers else 1
    if total > GPUS_PER_NODE and total % GPUS_PER_NODE:
        raise SpecError(f"gpus={text!r}: nodes have 8 GPUs; give a multiple of 8, or nodes and GPUs: '3x4x{gpu.name}'")
    return of_total(gpu, total)


def of_total(device: GPU, total: int) -> Machines:
    """Return `total` GPUs in nodes of eight."""
    return Machines(device, -(-total // GPUS_PER_NODE), min(total, GPUS_PER_NODE))


def priced(most: Machines) -> Iterator[Machines]:
    """Yield every GPU with an hourly price, in each number up to that of `most`: 1, 2, 4, 8, then whole nodes.

    A kind of GPU without links in the table is yielded only as a single GPU.
    """
    inside = [n for n in (1, 2, 4, 8) if n < most.per_node]
    shapes = [(1, n) for n in inside] + [(2**i, most.per_node) for i in range(most.nodes.bit_length())]
    if shapes[-1] != (most.nodes, most.per_node):
        shapes.append((most.nodes, most.per_node))
    for device in gpus():
        for nodes, per_node in shapes if device.usd_per_hour is not None else ():
            candidate = Machines(device, nodes, per_node)
            if joined(candidate):
                yield candidate


def joined(candidate: Machines) -> bool:
    """Return whether the tables contain the links between these GPUs."""
    if candidate.total == 1:
        return True
    try:
        nodes = candidate.cluster
    except NotAvailable:
        return False
    return nodes is not None and (candidate.nodes == 1 or nodes.across is not None)
