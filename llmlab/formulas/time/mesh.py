"""The fastest mesh of data, tensor, pipeline and context parallelism (specs/mesh.py says which rank is where)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...base.errors import SpecError
from ...hardware.gpu import GPU
from ...hardware.gpu import gpu as find_gpu
from ...hardware.links import Cluster
from ...hardware.links import cluster as cluster_of
from ...specs.check import check
from ...specs.model import ModelLike, ModelSpec
from ...specs.model import model as find_model
from ...specs.run import Training
from ..memory.share import share_of
from ..memory.step import step_memory
from ..verdict import plainness, verdict
from .distributed import Step, step


@dataclass(frozen=True)
class Choice:
    """A mesh that `search` tried: the seconds of its step, the peak bytes of its fullest device, and whether it
    certainly fits (`verdict`)."""

    run: Training
    step: Step
    peak: int
    fits: bool

    @property
    def seconds(self) -> float:
        return self.step.seconds


def peak_of(spec: ModelSpec, run: Training, gpu: GPU | None) -> int:
    """Return the peak bytes of the fullest device in any stage of the pipeline.

    Only the first two stages and the last, which has the head, are computed. The others have fewer micro-batches in
    flight than the second, and no more layers.
    """
    stages = sorted({0, min(1, run.pp - 1), run.pp - 1})
    shares = [share_of(spec, run, gpu, stage=stage) for stage in stages]
    return max(moment.total for share in shares for moment in step_memory(share).moments())


def search(
    model: ModelLike,
    gpu: GPU | str,
    devices: int,
    batch: int,
    cluster: Cluster | None = None,
    overlap: tuple[str, ...] = ("data",),
    **settings: Any,
) -> list[Choice]:
    """Return every mesh of `devices` GPUs that trains on `batch` sequences per step. Meshes that fit come first, and
    the fastest comes first among them.

    The search tries all degrees of tensor, pipeline and data parallelism that divide the model evenly, micro-batches
    that are powers of two, ZeRO 1 (0 with a single replica) and, without a pipeline, also 3, each with and without full
    checkpointing. It uses sequence parallelism together with tensor parallelism. `settings` are the fields of
    `Training` that all meshes have in common, such as seq_len and precision. `cp` and `ep` are 1 unless they are in
    `settings`. Raises SpecError if no mesh is possible.
    """
    spec, gpu = find_model(model), find_gpu(gpu)
    nodes = cluster or cluster_of(gpu)
    choices = []
    for run in _runs(spec, gpu, devices, batch, settings):
        peak = peak_of(spec, run, gpu)
        fits = verdict(peak, gpu, devices, off=plainness(spec, run)).outcome == "fits"
        choices.append(Choice(run, step(spec, run, gpu, nodes, overlap=overlap), peak, fits))
    if not choices:
        raise SpecError(f"no mesh of {devices} devices trains batch={batch} sequences of {spec.name}; try a multiple")
    return sorted(choices, key=lambda choice: (not choice.fits, choice.seconds))


def _runs(spec: ModelSpec, gpu: GPU, devices: int, batch: int, settings: dict[str, Any]) -> Iterator[Training]:
    cp = settings.get("cp", 1)
    for tp in _divisors(devices // cp):
        for pp in _divisors(devices // cp // tp):
            dp = devices // cp // tp // pp
            if batch % dp or any(size % tp for size in (spec.kv_heads, spec.intermediate, spec.vocab)):
                continue
            per_rank = batch // dp
            for micro_batch in (2**n for n in range(per_rank.bit_length()) if per_rank % 2**n == 0):
                for zero in (0,) if dp == 1 else (1,) if pp > 1 else (1, 3):
                    for checkpointing in (None, "full"):
                        degrees = {"tp": tp, "pp": pp, "dp": dp, "zero": zero, "sequence_parallel": tp > 1}
                        degrees |= {"micro_batch": micro_batch, "accumulation": per_rank // micro_batch}
                        try:
                            run = Training(**{**settings, **degrees, "checkpointing": checkpointing})
                            check(spec, run, gpu)
                        except SpecError:  # a stage without a layer, experts that are not divided
                            continue
                        yield run


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
