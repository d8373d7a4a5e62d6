"""Where the bytes of a training step go, and when they peak: closed formulas, a term at a time.

The peak of a step is the largest of a few moments: the loss (all activations and the logits alive), the head's
gradient and the first block of the backward pass (all activations, no other gradients yet), the last block (all
gradients, one block's activations), and the optimizer; with FSDP2 also what it gathers and reduces (fsdp.py).
`training_moments` computes each as its parts; `estimate` reports the largest.

Not in a formula: how tensors fall into segments (so `peak_reserved` is None), and the small change of indices, masks
and buffers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...hardware.gpu import GPU
from ...specs.model import ModelSpec
from ...specs.run import Training
from ...specs.stages import stage_layers
from .activations import attention_kernel, block_saved, checkpointed, keeps_scores, per_device
from .fsdp import uses_fsdp
from .gradients import Gradients, buckets, gradients
from .precision import PRECISION
from .states import States, states
from .temporaries import (
    block_backward,
    cast_weights,
    causal_mask,
    dequantized,
    logits_bytes,
    optimizer_temporaries,
    outer_activations,
    scores_forward,
)


class Moment(NamedTuple):
    """One instant of the step: its phase, what is happening, and the live bytes by part (some 0)."""

    phase: str
    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class Amounts(NamedTuple):
    """What the moments of a step are sums of: bytes on one device."""

    held: States
    always: dict[str, int]  # what lasts, by part
    layers: int
    sharded: bool  # by FSDP2
    gathers: str  # the part that FSDP2's gathered weights are
    kinds: dict[str, int]  # what blocks keep for backward, of all micro-batches in flight, by kind
    activations: int  # all that is kept for backward
    outer: int  # what of it is kept outside of blocks
    kept: int  # what one block keeps of one micro-batch
    last: int  # what is left when the last block's backward begins
    recomputed: int  # what a checkpointed block makes again
    working: int  # other temporaries of the block whose backward runs, and gradients that it has made
    worked: int
    scores: int  # attention's temporaries in forward
    passing: int  # the causal mask, a dequantized weight
    block_casts: int  # half copies of weights: of all blocks in forward, of those that wait for backward, of one
    waiting_casts: int
    casts: int
    head_casts: int
    logits: tuple[int, int, int, int]
    gradients: Gradients
    updating: int  # temporaries of the update


def training_moments(
    spec: ModelSpec, run: Training, gpu: GPU | None, cpu: bool = False, stage: int = 0
) -> list[Moment]:
    """Return the moments of one steady step (the states exist) on a device of pipeline stage `stage`; rank 0's is 0.

    In 1F1B stage s keeps the activations of pp - s micro-batches in flight (arXiv 2104.04473, section 2.2); the last
    has the logits.
    """
    return moments(amounts(spec, run, gpu, cpu, stage))


def moments(of: Amounts) -> list[Moment]:
    """Return the moments that these amounts make."""
    loaded = {**of.always, "optimizer": 0, "workspace": 0}
    if of.gathers == "weights":
        loaded["weights"] = 4 * of.held.trained
    return [
        Moment("load", "weights loaded", loaded),
        *(_gathering(of) if of.sharded else ()),
        *_forward(of),
        *_backward(of),
        *(_reducing(of) if of.sharded else ()),
        _moment(of, "optimizer", "the update", other=of.updating, logits=of.logits[3],
                gradients=of.gradients.stepped),
    ]  # fmt: skip


def _moment(of: Amounts, phase: str, name: str, gathered: int = 0, other: int = 0, **parts: int) -> Moment:
    found = {**of.always, **parts}
    found["other"] += other
    found[of.gathers] += gathered
    return Moment(phase, name, found)


def _forward(of: Amounts) -> list[Moment]:
    units, earlier = of.held.units, of.gradients.earlier
    gathered, casts = units.whole + units.block, of.block_casts + of.head_casts
    return [
        _moment(of, "forward", "attention in the last block", gathered + units.ahead, other=of.passing + of.scores,
                gradients=earlier, activations=of.activations - of.outer + casts),
        _moment(of, "forward", "the loss", gathered, other=of.passing,
                gradients=earlier, activations=of.activations + casts, logits=of.logits[0]),
    ]  # fmt: skip


def _gathering(of: Amounts) -> list[Moment]:
    """Return the moments in which FSDP2's forward copies a unit's weights out of what was gathered: the output of the
    all-gather before it is there too."""
    units, earlier = of.held.units, of.gradients.earlier
    return [
        _moment(of, "forward", "the first block gathered", 2 * (units.outside + units.block), gradients=earlier),
        _moment(of, "forward", "the last block gathered", units.whole + units.ahead + 2 * units.block,
                other=of.passing, gradients=earlier,
                activations=of.activations - of.outer - of.kept + of.block_casts - of.casts),
    ]  # fmt: skip


def _backward(of: Amounts) -> list[Moment]:
    units, grads, logits = of.held.units, of.gradients, of.logits[3]
    gathered = units.whole + units.ahead
    begun = of.activations + of.waiting_casts
    casts = of.waiting_casts or of.casts
    return [
        _moment(of, "backward", "the loss's gradient", gathered, other=of.passing,
                gradients=grads.earlier, activations=begun + of.head_casts, logits=of.logits[1]),
        _moment(of, "backward", "the head's gradient", gathered, other=of.passing,
                gradients=grads.earlier + grads.head, activations=begun, logits=of.logits[2]),
        _moment(of, "backward", "the first block of backward", gathered + units.ahead, other=of.passing + of.working,
                gradients=grads.begun + of.worked, activations=of.activations + of.recomputed + casts, logits=logits),
        _moment(of, "backward", "the last block of backward", units.outside + units.block,
                other=units.block_reduced + of.passing + of.working,
                gradients=grads.made + of.worked, activations=of.last + of.recomputed + of.casts, logits=logits),
        _moment(of, "backward", "the embedding's gradient", units.outside, other=units.block_reduced + grads.besides,
                gradients=grads.stored, logits=logits),
    ]  # fmt: skip


def _reducing(of: Amounts) -> list[Moment]:
    """Return the moments in which FSDP2 reduces gradients: a unit's, and their copies, of all ranks, side by side."""
    units, grads, logits = of.held.units, of.gradients, of.logits[3]
    # The first block's activations are gone, and its weights.
    later = of.activations - of.kept + (of.waiting_casts and of.waiting_casts - of.casts)
    gathered = units.whole + (units.ahead or -units.block)
    both = units.block_gradients + units.block_reduced
    found = [
        _moment(of, "backward", "the first block's gradients reduced", gathered, other=of.passing + both,
                gradients=grads.begun, activations=later, logits=logits),
        _moment(of, "backward", "the last block's gradients reduced", units.outside, other=both,
                gradients=grads.made, logits=logits),
        _moment(of, "backward", "the other gradients reduced",
                other=units.outside_gradients + units.outside_reduced, gradients=grads.stored, logits=logits),
    ]  # fmt: skip
    if of.layers > 2:  # one with a reduction behind it and a block gathered, or still whole, before it
        work = of.recomputed + (0 if of.waiting_casts else of.casts)
        reduced = units.block_reduced + of.passing
        found += [
            _moment(of, "backward", "the second block of backward", gathered + units.ahead, other=reduced + of.working,
                    gradients=grads.begun + of.worked, activations=later + work, logits=logits),
            _moment(of, "backward", "the second block's gradients", gathered + units.ahead,
                    other=reduced + units.block_gradients,
                    gradients=grads.begun, activations=later - of.kept, logits=logits),
            _moment(of, "backward", "the last but one block's gradients", units.outside + 2 * units.block,
                    other=reduced + units.block_gradients, gradients=grads.before, activations=of.last, logits=logits),
        ]  # fmt: skip
    return found


def amounts(spec: ModelSpec, run: Training, gpu: GPU | None, cpu: bool = False, stage: int = 0) -> Amounts:
    """Return the amounts of a step as `training_moments` takes them."""
    b = PRECISION[run.precision]
    if run.quantization and not run.precision.startswith("autocast"):
        b = replace(b, residual=4, compute=4)  # the rest is fp32, and each quantized linear returns fp32
    held, sharded = states(spec, run, stage), uses_fsdp(run)
    first, last = stage == 0, stage == run.pp - 1
    layers = stage_layers(spec.layers, run.pp)[stage]
    in_flight = micro_batches_in_flight(run, stage)
    block = per_device(block_saved(spec, run, b, gpu, cpu), run)
    kernel = attention_kernel(spec, run, gpu, cpu)
    checkpoints = checkpointed(spec, run, b, kernel) if run.checkpointing else block
    kept, blocks = sum(checkpoints.values()), layers * in_flight
    outer = outer_activations(spec, run, b, first, last, cpu) * in_flight
    casts = cast_weights(spec, run, b)
    written = kernel if keeps_scores(spec, run, gpu, cpu) else ""
    working, worked = block_backward(spec, run, b, block, written)
    # FSDP2's fp32 shards are the master copy; the half weights are what is gathered of them.
    gathers = "weights" if sharded and b.master and not run.lora else "other"
    # peft makes the embedding's output a leaf, so that checkpointing has something to differentiate: it and its
    # gradient outlive backward.
    leaf = 2 * run.tokens * spec.hidden * b.residual if run.lora and run.checkpointing else 0
    grads = gradients(spec, run, b, held, stage)
    return Amounts(
        held=held,
        always={
            "weights": 0 if gathers == "weights" else held.shard if sharded else held.weights,
            "optimizer": held.optimizer,
            "gradients": 0,  # these three come and go
            "activations": 0,
            "logits": 0,
            # cuBLAS takes a workspace a handle, and the autograd thread has its own handle; both stay.
            "workspace": 2 * (gpu.cublas_workspace or 0) if gpu else 0,
            "other": buckets(run, b, held),
        },
        layers=layers,
        sharded=sharded,
        gathers=gathers,
        kinds={kind: size * blocks for kind, size in checkpoints.items() if size},
        activations=kept * blocks + outer,
        outer=outer,
        kept=kept,
        last=kept * (layers * (in_flight - 1) + 1),
        # The block at work is whole again; what selective checkpointing kept of it is not made twice.
        recomputed=sum(block.values()) - checkpoints.get("matmul outputs", 0) if run.checkpointing else 0,
        working=working,
        worked=worked,
        scores=scores_forward(spec, run, b, written),
        passing=dequantized(spec, run) + causal_mask(spec, run, b),
        block_casts=casts * layers,
        waiting_casts=0 if run.checkpointing else casts * layers,
        casts=casts,
        head_casts=spec.vocab * spec.hidden * b.compute // run.tp if last and b.residual != b.compute else 0,
        logits=logits_bytes(spec, run, b) if last else (0, 0, 0, 0),
        gradients=grads,
        updating=max(grads.last_cast, leaf + optimizer_temporaries(spec, run, b, held, cpu)),
    )


def micro_batches_in_flight(run: Training, stage: int = 0) -> int:
    """Return how many micro-batches' activations a stage holds at most, in 1F1B: pp - stage, if there are as many.

    >>> [micro_batches_in_flight(Training(pp=4, accumulation=8), stage) for stage in range(4)]
    [4, 3, 2, 1]
    """
    return min(run.pp - stage, run.accumulation) if run.pp > 1 else 1
