"""Seconds of a step whose optimizer states, or all of its parameters, are in the host's memory.

    step = micro-batches × (forward | weights up  +  backward | weights up | gradients down)  +  update | weights up

Work between bars runs concurrently, and the slowest part counts. PCIe carries both directions at the same time. The
CPUs of the host run Adam, which is limited by the host's memory bandwidth.

    optimizer               gradients are copied during the backward pass, updated weights during the update
    optimizer+parameters    weights are copied for the forward pass and again for the backward pass

Sums of the gradients of several micro-batches on the host are not counted. The passes count those on a single GPU.

ZeRO-Offload (arXiv 2101.06840, sections 4 and 5), ZeRO-Infinity (arXiv 2104.07857, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ...hardware.gpu import GPU
from ...hardware.nodes import Host, adam_share, host_of, hosts, to_host, usual_host
from ...specs.model import ModelSpec
from ...specs.run import Training
from ..memory.precision import PRECISION, state_bytes
from ..memory.states import states
from .flops import flops


@dataclass(frozen=True)
class Crossing:
    """Bytes that one GPU and its host exchange in a step, and bytes that the update moves in the host's memory."""

    down: int  # gradients
    up: int  # weights
    stepped: int  # parameters of this GPU's share
    stepped_bytes: int  # read and written by the update
    state: int  # bytes of master copy and states


@dataclass(frozen=True)
class OffloadedStep:
    """Seconds of a step: of the GPU's passes, and of the whole step. `down`, `up`, `adam`: all of it, whether hidden or
    not."""

    forward: float
    backward: float
    down: float
    up: float
    adam: float
    seconds: float

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    @property
    def waiting(self) -> float:
        """Seconds in which the GPU runs neither a forward nor a backward pass."""
        return self.seconds - self.compute


def crossing(spec: ModelSpec, run: Training) -> Crossing:
    """Return the bytes that one GPU of `run` and its host exchange in one optimizer step, and the size of the host's
    update.

    A rank moves the gradients and weights that it updates (ZeRO-Offload, section 4.2): 1/N with ZeRO, all of them
    without. Offloaded parameters are copied to the GPU in the host's format, quantized ones packed. Each GPU receives
    its own shard, and ranks then gather the shards from one another (data_parallel.py).
    """
    b, sizes = PRECISION[run.precision], states(spec, run)
    stepped = sizes.trained
    gradient, weight = (4, 4) if run.lora else (b.gradients, b.weights)
    state = state_bytes(run.optimizer, 4, stepped, 0) + 4 * stepped
    received = weight * stepped
    if run.offload == "optimizer+parameters":
        received = 2 * run.accumulation * sizes.shard
    return Crossing(
        down=run.accumulation * gradient * stepped,
        up=received,
        stepped=stepped,
        stepped_bytes=_update_bytes(weight, stepped, state),
        state=state,
    )


def _update_bytes(weight: int, stepped: int, state: int) -> int:
    """Return the bytes that the update reads (gradients, master copy, states) and writes (master copy, states, and the
    weights for the GPU if they have fewer bytes than fp32)."""
    return (4 + (weight if weight < 4 else 0)) * stepped + 2 * state


def adam_seconds(moved: float, host: Host, gpus: int | None = None) -> float:
    """Return the seconds in which the host's CPUs move `moved` bytes for Adam, for one of the `gpus` GPUs that share
    the host.

    `gpus` None: all GPUs of the host.
    """
    return moved / (host.bandwidth * adam_share() / (gpus or host.gpus))


def offloaded_step(
    spec: ModelSpec,
    run: Training,
    gpu: GPU,
    computed: float,
    host: Host | None = None,
    gpus: int | None = None,
    pinned: bool = True,
) -> OffloadedStep:
    """Return the step of a run with offload, if its passes alone take `computed` seconds (`step.passes`).

    `host` None is the host that the GPU is sold with; `gpus` GPUs share it (None: all of them). If memory is not
    `pinned`, copies are slower and hide behind nothing, because the CPU that copies also launches the kernels. Raises
    NotAvailable if the tables contain no host or no PCIe for the GPU.
    """
    host = host or host_of(gpu)
    counted = flops(spec, run, gpu)
    forward = computed * counted.forward / counted.total
    backward = computed - forward
    sent, rate = crossing(spec, run), to_host(gpu, pinned)
    down, up, adam = sent.down / rate, sent.up / rate, adam_seconds(sent.stepped_bytes, host, gpus)
    if not pinned:
        seconds = computed + down + up + adam
    elif run.offload == "optimizer+parameters":
        seconds = max(forward, up / 2) + max(backward, up / 2, down) + adam
    else:
        seconds = forward + max(backward, down) + max(adam, up)
    return OffloadedStep(forward, backward, down, up, adam, seconds)


class Waiting(NamedTuple):
    """Seconds in which a GPU runs neither a forward nor a backward pass: `seconds` if its usual `host` is full of such
    GPUs; `least` if it is alone in it, or in the host with the most memory bandwidth per GPU of the table, and `most`
    in the host with the least."""

    seconds: float
    least: float
    most: float
    host: Host | None = None


def waiting(spec: ModelSpec, run: Training, gpu: GPU, computed: float) -> Waiting:
    """Return the seconds that the GPU waits in a step with offload, if its passes alone take `computed` seconds. Raises
    NotAvailable for a GPU whose link to its host is not in the table."""
    host, used = usual_host(gpu), min(run.world_size, gpu.node_gpus)
    gpus = max(host.gpus, used)
    own, shares = host.bandwidth / gpus, [host_.share for host_ in hosts().values()]

    def seconds(share: float) -> float:
        return offloaded_step(spec, run, gpu, computed, replace(host, bandwidth=share * gpus), gpus).waiting

    return Waiting(seconds(own), seconds(max(host.bandwidth / used, *shares)), seconds(min(own, *shares)), host)


Work = tuple[str, float, float, str]  # the lane, the start and the end in seconds, and the kind of work


def schedule(step: OffloadedStep, buckets: int = 8, steps: int = 1, delayed: bool = False) -> list[Work]:
    """Return when and on which lane all work of `steps` steps with offload="optimizer" runs, with gradients in
    `buckets` buckets.

    The update starts when the last gradient has arrived, because clipping needs the norm of all of them. The weights of
    a bucket are copied while the CPU updates the next one. With `delayed`, the update runs during the passes of the
    next step, and its weights are copied between two steps: each gradient is applied one step late.
    """
    works: list[Work] = []
    gpu = updated = 0.0  # when the GPU may start its next pass, and when the latest update ends
    for number in range(steps):
        turn = gpu + step.forward
        passed = turn + step.backward
        works += [("GPU", gpu, turn, "forward"), ("GPU", turn, passed, "backward")]
        arrived = 0.0
        for i in range(buckets):
            start = max(arrived, turn + step.backward * (i + 1) / buckets)
            arrived = start + step.down / buckets
            works.append(("PCIe down", start, arrived, "gradients"))
        gpu = passed
        if delayed and number:  # the update that ran during this step's passes
            start = max(passed, updated)
            gpu = start + step.up
            works.append(("PCIe up", start, gpu, "weights"))
        updated, up = max(arrived, updated, gpu), 0.0
        for _ in range(buckets):
            start, updated = updated, updated + step.adam / buckets
            works.append(("CPU", start, updated, "Adam"))
            if not delayed:
                start = max(up, updated)
                up = start + step.up / buckets
                works.append(("PCIe up", start, up, "weights"))
        if not delayed:
            gpu = up
    if delayed:  # nothing hides the last update and its weights
        works.append(("PCIe up", updated, updated + step.up, "weights"))
    return works
