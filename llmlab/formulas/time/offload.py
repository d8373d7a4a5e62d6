"""Seconds of a step whose states, or all of its parameters, are in the host's memory or on its drives.

    step = micro-batches × (forward | weights up  +  backward | weights up | gradients down)  +  update | weights up

What stands between bars runs side by side, and the slowest counts: PCIe carries both directions at once. The update is
Adam on the host's CPUs, bound by its memory. On a drive, states are read before it and written after it.

    optimizer               gradients go down as backward makes them; updated weights come up behind the update
    optimizer+parameters    weights come up for forward and again for backward; updated ones are where they belong

ZeRO-Offload (arXiv 2101.06840, sections 4 and 5), ZeRO-Infinity (arXiv 2104.07857, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ...hardware.gpu import GPU
from ...hardware.nodes import Drive, Host, adam_share, host_of, hosts, to_host, usual_host
from ...specs.model import ModelSpec
from ...specs.run import Training
from ..memory.precision import PRECISION, state_bytes
from ..memory.states import states
from .flops import flops


@dataclass(frozen=True)
class Crossing:
    """Bytes that one GPU and its host exchange in a step, and that the update moves in the host's memory."""

    down: int  # gradients
    up: int  # weights
    stepped: int  # parameters of this GPU's share
    stepped_bytes: int  # read and written by the update
    state: int  # bytes of master copy and states, which a drive reads and writes


@dataclass(frozen=True)
class OffloadedStep:
    """Seconds of a step: what the GPU does, and what it waits for. `down`, `up`, `adam`, `drive`: all of it, whether
    hidden or not."""

    forward: float
    backward: float
    down: float
    up: float
    adam: float
    drive: float
    seconds: float

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    @property
    def waiting(self) -> float:
        """Seconds that the GPU neither runs forward nor backward."""
        return self.seconds - self.compute


def crossing(spec: ModelSpec, run: Training) -> Crossing:
    """Return what one GPU of `run` sends to its host and receives in one optimizer step, and what the host updates.

    A rank moves the gradients and weights that it steps (ZeRO-Offload, section 4.2): 1/N with ZeRO, all without.
    Offloaded parameters come up as the host keeps them, quantized ones packed: its own shard, which ranks then gather
    from one another (data_parallel.py).
    """
    b, held = PRECISION[run.precision], states(spec, run)
    stepped = held.trained
    gradient, weight = (4, 4) if run.lora else (b.gradients, b.weights)
    state = state_bytes(run.optimizer, 4, stepped, 0) + 4 * stepped
    received = weight * stepped
    if run.offload == "optimizer+parameters":
        received = 2 * run.accumulation * held.shard
    return Crossing(
        down=run.accumulation * gradient * stepped,
        up=received,
        stepped=stepped,
        stepped_bytes=_update_bytes(weight, stepped, state),
        state=state,
    )


def _update_bytes(weight: int, stepped: int, state: int) -> int:
    """Return what the update reads (gradients, master copy, states) and writes (the last two, and the weights that go
    up, where their `weight` bytes are less than fp32's)."""
    return (4 + (weight if weight < 4 else 0)) * stepped + 2 * state


def adam_seconds(moved: float, host: Host, gpus: int | None = None) -> float:
    """Return the seconds in which the host's CPUs move `moved` bytes for Adam, for one of `gpus` GPUs that share it.

    `gpus` None: all that are in it.
    """
    return moved / (host.bandwidth * adam_share() / (gpus or host.gpus))


def offloaded_step(
    spec: ModelSpec,
    run: Training,
    card: GPU,
    computed: float,
    host: Host | None = None,
    gpus: int | None = None,
    drive: Drive | None = None,
    pinned: bool = True,
) -> OffloadedStep:
    """Return the step of a run with offload, whose passes alone take `computed` s (`step.passes`).

    `host` None is the one the card is sold with; `gpus` GPUs share it (None: all it has). With a `drive` the states are
    there, read and written one after the other, as DeepSpeed does by default (pipeline_read and pipeline_write off).
    Not `pinned`, copies are slower and hide behind nothing: the CPU that makes them also starts the kernels. Raises
    NotAvailable where the tables have no host or no PCIe of the card.
    """
    host = host or host_of(card)
    counted = flops(spec, run, card)
    forward = computed * counted.forward / counted.total
    backward = computed - forward
    sent, rate = crossing(spec, run), to_host(card, pinned)
    down, up, adam = sent.down / rate, sent.up / rate, adam_seconds(sent.stepped_bytes, host, gpus)
    share = (gpus or host.gpus) * sent.state
    disk = share / drive.read + share / drive.write if drive else 0.0
    if not pinned:
        seconds = computed + down + up + adam + disk
    elif run.offload == "optimizer+parameters":
        seconds = max(forward, up / 2) + max(backward, up / 2, down) + adam + disk
    else:
        seconds = forward + max(backward, down) + max(adam + disk, up)
    return OffloadedStep(forward, backward, down, up, adam, disk, seconds)


class Waiting(NamedTuple):
    """Seconds that a GPU neither runs forward nor backward: `seconds` where its usual `host` is full of such GPUs;
    `least` where there are no others in it, or in the table's host with most memory bandwidth for a GPU, and `most` in
    that with least."""

    seconds: float
    least: float
    most: float
    host: Host | None = None


def waiting(spec: ModelSpec, run: Training, card: GPU, computed: float) -> Waiting:
    """Return what a step with offload waits, whose passes alone take `computed` s. Raises NotAvailable for a card whose
    link to its host is not in the table."""
    host, used = usual_host(card), min(run.world_size, card.node_gpus)
    gpus = max(host.gpus, used)
    own, others = host.bandwidth / gpus, [each.share for each in hosts().values()]

    def seconds(share: float) -> float:
        return offloaded_step(spec, run, card, computed, replace(host, bandwidth=share * gpus), gpus).waiting

    return Waiting(seconds(own), seconds(max(host.bandwidth / used, *others)), seconds(min(own, *others)), host)


def schedule(step: OffloadedStep, buckets: int = 8) -> list[tuple[str, float, float, str]]:
    """Return what runs where, from when to when, with offload="optimizer": lane, start and end in s, kind of work.

    The gradients leave in as many buckets; the update starts when the last is there, as it must to clip by their norm.
    """
    passed = step.forward + step.backward
    works = [("GPU", 0.0, step.forward, "forward"), ("GPU", step.forward, passed, "backward")]
    down = adam = up = 0.0
    for i in range(buckets):
        start = max(down, step.forward + step.backward * (i + 1) / buckets)
        down = start + step.down / buckets
        works.append(("PCIe down", start, down, "gradients"))
    adam = down
    for _ in range(buckets):
        start, adam = adam, adam + step.adam / buckets
        works.append(("CPU", start, adam, "Adam"))
        start = max(up, adam)
        up = start + step.up / buckets
        works.append(("PCIe up", start, up, "weights"))
    return works


def tokens_to_hide(card: GPU, rate: float, precision: str = "mixed-bf16", recompute: bool = False) -> float:
    """Return the tokens a GPU needs in a micro-batch for its gradients to cross PCIe behind backward.

    Backward takes 4 FLOP per parameter and token (6 with recomputation) at `rate` FLOP/s, its gradient 2 bytes at
    PCIe's rate: the number of parameters cancels. Attention and the loss, which need more FLOP, make it less.
    """
    return PRECISION[precision].gradients / to_host(card) * rate / (6 if recompute else 4)


def tokens_to_hide_update(card: GPU, rate: float, share: float = 0.1, gpus: int | None = None) -> float:
    """Return the tokens a GPU needs in a *step* for the update on the host to take at most `share` of its passes.

    The passes take 6 FLOP per parameter and token, Adam in mixed precision 30 bytes per parameter: it cancels, again.
    """
    moved = _update_bytes(PRECISION["mixed-bf16"].weights, stepped=1, state=4 + state_bytes("adamw", 4, 1, 0))
    return adam_seconds(moved, host_of(card), gpus) * rate / 6 / share
