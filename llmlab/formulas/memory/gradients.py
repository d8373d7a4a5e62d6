"""The gradients that are there as backward goes on, of one training step on one device."""

from __future__ import annotations

from typing import NamedTuple

from ...specs.model import ModelSpec
from ...specs.run import Training
from ...specs.stages import stage_layers
from .fsdp import uses_fsdp
from .precision import Bytes
from .states import States, block_parameters, device_parameters


class Gradients(NamedTuple):
    """Bytes of gradients when."""

    earlier: int  # of earlier micro-batches: all the time
    head: int  # the head's, as it is made, and the half one it is cast from
    begun: int  # what is there of both from then on
    before: int  # when the backward of the last block but one begins
    made: int  # when the last block's does
    stored: int  # when it is over
    besides: int  # while the embedding's is made, besides `stored`
    stepped: int  # in the update
    last_cast: int  # as the update begins, besides `stepped`


def gradients(spec: ModelSpec, run: Training, b: Bytes, held: States, stage: int) -> Gradients:
    """Return the gradients on a device of pipeline stage `stage` that holds `held`."""
    first, last, sharded = stage == 0, stage == run.pp - 1, uses_fsdp(run)
    table = 0 if run.lora else spec.vocab * spec.hidden
    part = table * b.gradients // run.tp  # the head's, the embedding's, or that of both
    tied, autocast = spec.tied and first and last, b.residual != b.compute
    # torch/distributed/tensor/_ops/_embedding_ops.py: of an embedding cut by rows each rank makes the whole gradient.
    # FSDP2 cuts it before it reduces, the sum of a tied weight before it is stored; else it stays until the update.
    whole = table * b.gradients if run.tp > 1 and first else 0
    uncut = 0 if sharded or tied else whole
    every = 4 * held.trained if sharded and b.master else held.gradients
    every += max(0, uncut - part)
    # Those of earlier micro-batches are alive all the time; those of a single one only from backward on.
    several = run.accumulation > 1 and not run.offload
    before = made = stored = every
    if not several and not run.offload:
        before, made, stored = _made(spec, run, every, stage)
    # Autograd sums the gradients of a tied weight's two uses before it stores them: two terms and a sum, or, where the
    # first was cast from half, two terms (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace).
    terms = 2 if autocast and run.tp == 1 else 3
    if sharded:  # and FSDP2 has no shard of them yet
        before, made = before + part, made + part
        besides = whole + (terms * part if spec.tied else held.units.outside_gradients)
    elif tied:
        besides = whole + (terms if several else terms - 1) * part
    else:
        besides = (whole or part) if several and first else 0
    return Gradients(
        earlier=every if several else 0,
        head=part + (table * b.compute // run.tp if autocast else 0) if last else 0,
        # It is added to an earlier one at once, but where it is to be summed with another before, or reduced.
        begun=(every if several else 0) + (part if last and (sharded or tied or not several) else 0),
        before=before,
        made=made,
        stored=stored,
        besides=besides,
        stepped=_stepped(run, b, held),
        last_cast=max(uncut, _last_half(spec, run, b) if last else 0),
    )


def _made(spec: ModelSpec, run: Training, every: int, stage: int) -> tuple[int, int, int]:
    """Return what there is of `every` gradient when the last two blocks' backwards begin, and when the last is over.

    Still to come are their own, and the embedding's, which a tied head has begun. FSDP2 reduces what is outside of
    blocks when all is over.
    """
    if run.lora:
        block = every // stage_layers(spec.layers, run.pp)[stage]
        return max(0, every - 2 * block), every - block, every
    here = sum(device_parameters(spec, run.pp, stage).values())  # of all tensor- and expert-parallel ranks
    table = spec.vocab * spec.hidden
    outside = (table if spec.tied else 2 * table) if uses_fsdp(run) else 0
    embedding = 0 if outside or spec.tied or stage else table
    stored = every * (here - outside) // here
    block = every * block_parameters(spec) // here
    made = stored - block - every * embedding // here
    return max(0, made - block), made, stored


def _stepped(run: Training, b: Bytes, held: States) -> int:
    """Return the gradients in the update: a master copy is stepped with fp32 ones, cast one by one from the half
    gradients, which are freed as they are cast, except where ZeRO-1 keeps all of them and casts only its share."""
    if run.offload:
        return 0  # they are with the states
    if not b.master:
        return held.gradients
    return 4 * held.trained + (held.gradients if run.zero == 1 else 0)


def _last_half(spec: ModelSpec, run: Training, b: Bytes) -> int:
    """Return the half gradient that is cast last, beside all fp32 ones: the head's, where it has a weight of its own
    (a tied one's is the first)."""
    if run.zero or run.offload or run.lora or spec.tied or not b.master:
        return 0
    return spec.vocab * spec.hidden * b.gradients // run.tp


def buckets(run: Training, b: Bytes, held: States) -> int:
    """Return the buckets that torch's DDP copies gradients into: as many bytes, from its construction on
    (gradient_as_bucket_view=False). With ZeRO 1 and a master copy it is DeepSpeed or Megatron-LM, which have none."""
    ddp = run.zero == 0 or (run.zero == 1 and not b.master)
    return held.gradients if run.dp > 1 and ddp else 0
