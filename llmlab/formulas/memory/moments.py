"""Where the bytes of a training step go, and when they peak: closed formulas, a term at a time.

The peak of a step is the largest of a few moments: the loss (all activations and the logits alive), the head's
gradient and the first block of the backward pass (all activations, no other gradients yet), the last block (all
gradients, one block's activations), and the optimizer; with FSDP2 also what it gathers and reduces (fsdp.py).
`training_moments` computes each as its parts; `estimate` reports the largest.

Not in a formula: how tensors fall into segments (so `peak_reserved` is None), and the small change of indices, masks
and buffers.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from ...hardware.gpu import GPU
from ...specs.model import ModelSpec
from ...specs.run import Training
from .activations import block_saved, checkpointed, per_device
from .fsdp import uses_fsdp
from .gradients import Gradients, bucket_bytes, gradients
from .scores import causal_mask, forward_scores
from .share import Share, share_of
from .states import States, states
from .temporaries import (
    BlockBackward,
    LossBytes,
    block_backward,
    cast_weights,
    dequantized,
    loss_bytes,
    optimizer_temporaries,
    outer_activations,
)


class Moment(NamedTuple):
    """One instant of the step: its phase, what is happening, and the live bytes by part (some 0)."""

    phase: str
    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class Kept(NamedTuple):
    """Bytes of activations that are kept for backward, of all micro-batches in flight unless it says otherwise."""

    total: int  # all of them, at the end of forward
    outside: int  # those outside of the blocks
    block: int  # those of one block and one micro-batch
    last_block: int  # what is left of them when the last block's backward begins
    kinds: dict[str, int]  # those of the blocks, by kind
    recomputed: int  # what a checkpointed block makes again for its backward


class Casts(NamedTuple):
    """Bytes of the half copies that autocast makes of weights."""

    block: int  # of one block
    blocks: int  # of all blocks: alive until forward is over
    kept: int  # what of them backward still has: all of them, or none where it makes them again
    head: int


class Amounts(NamedTuple):
    """What the moments of a step are sums of: bytes on one device."""

    share: Share
    resident_bytes: dict[str, int]  # what stays from step to step, by part
    gathered_part: str  # the part that FSDP2's gathered weights belong to
    states: States
    gradients: Gradients
    kept: Kept
    casts: Casts
    loss: LossBytes
    backward: BlockBackward
    forward_scores: int  # attention's temporaries in forward
    between: int  # temporaries anywhere between first and last block: the causal mask, a dequantized weight
    update: int  # temporaries of the update


def training_moments(
    spec: ModelSpec, run: Training, gpu: GPU | None, cpu: bool = False, stage: int = 0
) -> list[Moment]:
    """Return the moments of one steady step (the states exist) on a device of pipeline stage `stage`; rank 0's is 0.

    In 1F1B stage s keeps the activations of pp - s micro-batches in flight (arXiv 2104.04473, section 2.2); the last
    has the logits.
    """
    return moments(amounts(share_of(spec, run, gpu, cpu, stage)))


def moments(of: Amounts) -> list[Moment]:
    """Return the moments that these amounts make."""
    sharded = uses_fsdp(of.share.run)
    loaded = {**of.resident_bytes, "optimizer": 0, "workspace": 0}
    if of.gathered_part == "weights":
        loaded["weights"] = 4 * of.states.trained
    return [
        Moment("load", "weights loaded", loaded),
        *(_gathering(of) if sharded else ()),
        *_forward(of),
        *_backward(of),
        *(_reducing(of) if sharded else ()),
        _moment(of, "optimizer", "the update", other=of.update, logits=of.loss.after, gradients=of.gradients.update),
    ]


def _moment(of: Amounts, phase: str, name: str, gathered: int = 0, other: int = 0, **parts: int) -> Moment:
    """Return the moment of what is resident, `gathered` weights, `other` temporaries, and the `parts` named."""
    found = {**of.resident_bytes, **parts}
    found["other"] += other
    found[of.gathered_part] += gathered
    return Moment(phase, name, found)


def _forward(of: Amounts) -> list[Moment]:
    units, kept, moment = of.states.units, of.kept, partial(_moment, of, "forward", gradients=of.gradients.accumulated)
    gathered, casts = units.resident + units.block, of.casts.blocks + of.casts.head
    return [
        moment("attention in the last block", gathered + units.prefetched, of.between + of.forward_scores,
               activations=kept.total - kept.outside + casts),
        moment("the loss", gathered, of.between, activations=kept.total + casts, logits=of.loss.forward),
    ]  # fmt: skip


def _gathering(of: Amounts) -> list[Moment]:
    """Return the moments in which FSDP2's forward copies a unit's weights out of what was gathered: the output of the
    all-gather before it is there too."""
    units, kept, moment = of.states.units, of.kept, partial(_moment, of, "forward", gradients=of.gradients.accumulated)
    activations = kept.total - kept.outside - kept.block + of.casts.blocks - of.casts.block
    last = units.resident + units.prefetched + 2 * units.block
    return [
        moment("the first block gathered", 2 * (units.outside + units.block)),
        moment("the last block gathered", last, of.between, activations=activations),
    ]


def _backward(of: Amounts) -> list[Moment]:
    units, grads, kept, casts = of.states.units, of.gradients, of.kept, of.casts
    moment = partial(_moment, of, "backward")
    in_blocks = partial(moment, logits=of.loss.after)
    gathered, activations = units.resident + units.prefetched, kept.total + casts.kept
    working, own_gradients = of.between + of.backward.temporaries, of.backward.gradients
    return [
        moment("the loss's gradient", gathered, of.between, gradients=grads.accumulated,
               activations=activations + casts.head, logits=of.loss.gradient),
        moment("the head's gradient", gathered, of.between, gradients=grads.accumulated + grads.head,
               activations=activations, logits=of.loss.head),
        in_blocks("the first block of backward", gathered + units.prefetched, working,
                  gradients=grads.after_head + own_gradients,
                  activations=kept.total + kept.recomputed + (casts.kept or casts.block)),
        in_blocks("the last block of backward", units.outside + units.block, units.block_reduction + working,
                  gradients=grads.stored.before_last + own_gradients,
                  activations=kept.last_block + kept.recomputed + casts.block),
        in_blocks("the embedding's gradient", units.outside, units.block_reduction + grads.embedding,
                  gradients=grads.stored.after_blocks),
    ]  # fmt: skip


def _reducing(of: Amounts) -> list[Moment]:
    """Return the moments in which FSDP2 reduces gradients: a unit's, and their copies, of all ranks, side by side."""
    units, grads, kept, casts = of.states.units, of.gradients, of.kept, of.casts
    moment = partial(_moment, of, "backward", logits=of.loss.after)
    # The first block's activations are gone, and its weights.
    activations = kept.total - kept.block + max(0, casts.kept - casts.block)
    gathered = units.resident + (units.prefetched or -units.block)
    reducing = units.block_gradients + units.block_reduction
    found = [
        moment("the first block's gradients reduced", gathered, of.between + reducing, gradients=grads.after_head,
               activations=activations),
        moment("the last block's gradients reduced", units.outside, reducing, gradients=grads.stored.before_last),
        moment("the other gradients reduced", 0, units.outside_gradients + units.outside_reduction,
               gradients=grads.stored.after_blocks),
    ]  # fmt: skip
    if of.share.layers > 2:  # one with a reduction behind it and a block gathered, or still whole, before it
        gathered += units.prefetched
        found += [
            moment("the second block of backward", gathered,
                   units.block_reduction + of.between + of.backward.temporaries,
                   gradients=grads.after_head + of.backward.gradients,
                   activations=activations + kept.recomputed + (0 if casts.kept else casts.block)),
            moment("the second block's gradients", gathered, of.between + reducing, gradients=grads.after_head,
                   activations=activations - kept.block),
            moment("the last but one block's gradients", units.outside + 2 * units.block, of.between + reducing,
                   gradients=grads.stored.before_last_two, activations=kept.last_block),
        ]  # fmt: skip
    return found


def amounts(share: Share) -> Amounts:
    """Return the bytes that the moments of a step are made of."""
    run, gpu, sharded = share.run, share.gpu, uses_fsdp(share.run)
    resident = states(share.spec, run, share.stage)
    block = per_device(block_saved(share), run)
    # FSDP2's fp32 shards are the master copy; the half weights are what is gathered of them.
    master_shards = sharded and share.bytes.master and not run.lora
    grads = gradients(share, resident)
    return Amounts(
        share=share,
        resident_bytes={
            "weights": 0 if master_shards else resident.shard if sharded else resident.weights,
            "optimizer": resident.optimizer,
            "gradients": 0,  # these three come and go
            "activations": 0,
            "logits": 0,
            # cuBLAS takes one workspace per handle, and the autograd thread has a handle of its own; both stay.
            "workspace": 2 * (gpu.cublas_workspace or 0) if gpu else 0,
            "other": bucket_bytes(share, resident),
        },
        gathered_part="weights" if master_shards else "other",
        states=resident,
        gradients=grads,
        kept=_kept(share, block),
        casts=_casts(share),
        loss=loss_bytes(share),
        backward=block_backward(share, block.get("mlp", 0)),
        forward_scores=forward_scores(share),
        between=dequantized(share) + causal_mask(share),
        update=max(grads.update_casts, _checkpointed_leaf(share) + optimizer_temporaries(share, resident)),
    )


def _kept(share: Share, block: dict[str, int]) -> Kept:
    """Return what is kept for backward, where a block without checkpointing keeps `block`."""
    run, in_flight = share.run, micro_batches_in_flight(share.run, share.stage)
    kept = checkpointed(share) if run.checkpointing else block
    size, outside = sum(kept.values()), outer_activations(share) * in_flight
    return Kept(
        total=size * share.layers * in_flight + outside,
        outside=outside,
        block=size,
        last_block=size * (share.layers * (in_flight - 1) + 1),
        kinds={kind: each * share.layers * in_flight for kind, each in kept.items() if each},
        # The block at work is whole again; what selective checkpointing kept of it is not made twice.
        recomputed=sum(block.values()) - kept.get("matmul outputs", 0) if run.checkpointing else 0,
    )


def _casts(share: Share) -> Casts:
    spec, run, block = share.spec, share.run, cast_weights(share)
    head = spec.vocab * spec.hidden * share.bytes.compute // run.tp if share.last and share.autocast else 0
    return Casts(block, block * share.layers, 0 if run.checkpointing else block * share.layers, head)


def _checkpointed_leaf(share: Share) -> int:
    """Return the bytes that outlive backward with adapters and checkpointing: peft makes the embedding's output a leaf,
    so that checkpointing has something to differentiate; it and its gradient stay."""
    run = share.run
    return 2 * run.tokens * share.spec.hidden * share.bytes.residual if run.lora and run.checkpointing else 0


def micro_batches_in_flight(run: Training, stage: int = 0) -> int:
    """Return how many micro-batches' activations a stage keeps at most, in 1F1B: pp - stage, if there are as many.

    >>> [micro_batches_in_flight(Training(pp=4, accumulation=8), stage) for stage in range(4)]
    [4, 3, 2, 1]
    """
    return min(run.pp - stage, run.accumulation) if run.pp > 1 else 1
