"""Which rank is where in a mesh of data, tensor, pipeline and context parallelism, and which mesh is the fastest.

    axis            tensor    context    data           pipeline          experts
    ranks apart     1         tp         tp · cp        tp · cp · dp      tp · cp, among the data-parallel ones

Megatron-Core's order (parallel_state.py, initialize_model_parallel: "tp-cp-ep-dp-pp"): neighbours share what they send
most often, so that it stays on a node's links. Llama 3 (arXiv 2407.21783, section 3.3.2) puts data parallelism last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..check import check
from ..errors import SpecError
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu
from ..hardware.links import Cluster, Group, usual_cluster
from ..models.spec import ModelLike, ModelSpec
from ..models.spec import model as find_model
from ..runs import Training
from .distributed import Step, step
from .memory import training_moments
from .verdict import verdict

AXES = ("tp", "cp", "dp", "pp")  # neighbours first


def stride(run: Training, axis: str) -> int:
    """Return how many devices lie between a rank and the next one along `axis`: "tp", "cp", "dp", "pp" or "ep".

    >>> stride(Training(tp=8, pp=4, dp=2), "pp")
    16
    """
    before = AXES.index("dp" if axis == "ep" else axis)
    apart = 1
    for inner in AXES[:before]:
        apart *= getattr(run, inner)
    return apart


def coordinates(run: Training, rank: int) -> dict[str, int]:
    """Return where `rank` is along each axis.

    >>> coordinates(Training(tp=2, dp=2, pp=2), 5)
    {'tp': 1, 'cp': 0, 'dp': 0, 'pp': 1}
    """
    if not 0 <= rank < run.world_size:
        raise SpecError(f"rank={rank} is not one of the {run.world_size} of dp × tp × pp × cp")
    return {axis: rank // stride(run, axis) % getattr(run, axis) for axis in AXES}


def ranks_along(run: Training, axis: str, rank: int = 0) -> list[int]:
    """Return the ranks that communicate with `rank` along `axis`, itself among them.

    >>> ranks_along(Training(tp=2, dp=2, pp=2), "dp", 5)
    [5, 7]
    """
    apart, size = stride(run, axis), getattr(run, axis)
    first = rank - rank // apart % size * apart
    return [first + i * apart for i in range(size)]


def links_of(run: Training, cluster: Cluster) -> dict[str, Group]:
    """Return the group of ranks of every axis that has more than one, with the links it communicates over."""
    return {axis: cluster.group(size, stride(run, axis)) for axis in (*AXES, "ep") if (size := getattr(run, axis)) > 1}


@dataclass(frozen=True)
class Choice:
    """A mesh that was tried: its step's seconds by term, the bytes of the device that holds the most, and whether it
    surely fits (`verdict`)."""

    run: Training
    step: Step
    peak: int
    fits: bool

    @property
    def seconds(self) -> float:
        return self.step.seconds


def peak_of(spec: ModelSpec, run: Training, card: GPU | None) -> int:
    """Return the bytes of the device that holds the most, whichever stage it is in.

    Later stages hold fewer micro-batches and no more layers than the second.
    """
    stages = sorted({0, min(1, run.pp - 1), run.pp - 1})
    return max(moment.total for stage in stages for moment in training_moments(spec, run, card, False, stage))


def search(
    model: ModelLike,
    card: GPU | str,
    devices: int,
    batch: int,
    cluster: Cluster | None = None,
    overlap: tuple[str, ...] = ("data",),
    **settings: Any,
) -> list[Choice]:
    """Return every mesh of `devices` cards that trains `batch` sequences a step, the fastest that fits first.

    Tried are all degrees that divide what they cut, micro-batches that are powers of two, ZeRO 1 and, without a
    pipeline, 3, with and without recomputation; sequence parallelism goes with tensor parallelism. `settings` are those
    of `Training` that all have in common: seq_len, precision, ... `cp` and `ep` are 1 unless they are among them.
    Raises SpecError where nothing can be tried.
    """
    spec, gpu = find_model(model), find_gpu(card)
    nodes = cluster or usual_cluster(gpu)
    found = []
    for run in _runs(spec, gpu, devices, batch, settings):
        peak = peak_of(spec, run, gpu)
        fits = verdict(peak, gpu, devices).outcome == "fits"
        found.append(Choice(run, step(spec, run, gpu, nodes, overlap=overlap), peak, fits))
    if not found:
        raise SpecError(f"no mesh of {devices} devices trains batch={batch} sequences of {spec.name}; try a multiple")
    return sorted(found, key=lambda choice: (not choice.fits, choice.seconds))


def _runs(spec: ModelSpec, gpu: GPU, devices: int, batch: int, settings: dict[str, Any]) -> Iterator[Training]:
    cp = settings.get("cp", 1)
    for tp in _divisors(devices // cp):
        for pp in _divisors(devices // cp // tp):
            dp = devices // cp // tp // pp
            if batch % dp or any(size % tp for size in (spec.kv_heads, spec.intermediate, spec.vocab)):
                continue
            each = batch // dp
            for micro_batch in (2**n for n in range(each.bit_length()) if each % 2**n == 0):
                for zero in _stages(dp, pp):
                    for checkpointing in (None, "full"):
                        degrees = {"tp": tp, "pp": pp, "dp": dp, "zero": zero, "sequence_parallel": tp > 1}
                        degrees |= {"micro_batch": micro_batch, "accumulation": each // micro_batch}
                        try:
                            run = Training(**{**settings, **degrees, "checkpointing": checkpointing})
                            check(spec, run, gpu)
                        except SpecError:  # a stage without a layer, experts that are not divided
                            continue
                        yield run


def _stages(dp: int, pp: int) -> tuple[int, ...]:
    if dp == 1:
        return (0,)
    return (1,) if pp > 1 else (1, 3)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
