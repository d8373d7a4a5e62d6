"""The gradients that exist as backward goes on, of one training step on one device."""

from __future__ import annotations

from typing import NamedTuple

from ...base.terms import ROWS_PER_PARTIAL, SORTS_ABOVE
from ...specs.run import stack_of
from ...specs.stages import chunks_of, layers_of
from .fsdp import reduced_bytes, uses_fsdp, waits
from .share import Share
from .stacks.torchtune import in_chunks
from .states import States, block_parameters, device_parameters


class Stored(NamedTuple):
    """Bytes of gradients that are stored when the backward of the last two blocks begins, and when blocks are over."""

    before_last_two: int
    before_last: int
    after_blocks: int


class Gradients(NamedTuple):
    """Bytes of gradients at the moments of a step."""

    accumulated: int  # of earlier micro-batches, from the step's start on
    head: int  # of the head's weight as it is made, and the half one it is cast from; in chunks two, and their sum
    after_head: int  # all that exist once the head's is made
    stored: Stored
    reducing: Stored  # the same of a backward pass in which FSDP2 reduces
    embedding: int  # while the embedding's is made, besides `stored.after_blocks`
    update: int  # in the update
    update_casts: int  # as the update begins, besides `update`


def gradients(share: Share, states: States) -> Gradients:
    """Return the gradients of a rank with these states."""
    spec, run, b, sharded, stack = share.spec, share.run, share.bytes, uses_fsdp(share.run), stack_of(share.run)
    elements = 0 if run.lora else spec.vocab * spec.hidden
    table = elements * b.gradients // run.tp  # the head's gradient, the embedding's, or that of both
    tied = spec.tied and share.first and share.last
    # torch/distributed/tensor/_ops/_embedding_ops.py: of an embedding cut by rows each rank makes the whole gradient.
    # FSDP2 cuts it before it reduces, the sum of a tied weight before it is stored; else it stays until the update.
    dtensor = run.tp > 1 and stack.dtensors
    whole_table = elements * b.gradients if dtensor and share.first else 0
    uncut = 0 if sharded or tied else whole_table
    every = 4 * states.trained if sharded and b.master else states.gradients
    if in_backward := stack.steps_in_backward(run):
        every = 0
    units, late = states.units, waits(run) and sharded
    reduced = reduced_bytes(run, b)
    casts = late and reduced > b.gradients  # to the dtype of the sum; else autograd adds them to it
    # Reduced once, in or after the last micro-batch: until then each rank sums whole ones.
    whole = not run.sync_each_batch or (sharded and run.pp > 1)
    if whole:
        every = share.layers * units.block_reduction + units.outside_reduction + units.head_reduction
    every += max(0, uncut - table)
    # Those of earlier micro-batches exist all the time; those of a single one only from backward on.
    wide = wide_bytes(share, states)
    accumulates = share.backward_passes_done > 0 and not (run.offload and run.sync_each_batch) and not wide
    once = _stored(share, states, every)
    if whole and share.first and not tied:  # an embedding's is cut only then
        every += elements * reduced * (run.tp - 1) // run.tp
    there = every if accumulates else 0
    if share.chunk is not None and not run.offload and not wide:
        there, once = _of_chunks(share, states, every)
    accumulated = there + wide
    stored = Stored(there, there, there) if accumulates else Stored(every, every, every) if run.offload else once
    if first_alone := late and run.accumulation == 2:  # whole ones come in the first backward, and go in the second
        stored = once
    if accumulates and share.compiled and run.world_size == 1:  # a graph's are there before the first is added
        stored = Stored(*(there + now for now in once))
    if sharded and accumulates and run.dp_replicate > 1 and not whole:
        # What copies have summed is added to earlier gradients, and kept beside them until backward is over
        # (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _all_reduce_state).
        stored = Stored(*(before + now for before, now in zip(stored, once, strict=True)))
    stored = Stored(*(size + wide for size in stored))
    # Autograd sums the gradients of a tied weight's two uses before it stores them: two terms and a sum, or, where the
    # first was cast from half, two terms (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace).
    terms = 2 if (share.autocast and run.tp == 1) or in_chunks(run) else 3
    of_head = table if share.last and not share.delays_head else 0
    if units.head:  # a unit of its own, whose gradients are reduced before those of blocks
        of_head = 0 if accumulates else every * elements // sum(_stage_parameters(share).values())
    elif sharded and (casts or tied or first_alone or not late):  # and FSDP2 has no shard of them yet
        stored = Stored(stored.before_last_two + of_head, stored.before_last + of_head, stored.after_blocks)
    if sharded:
        cut = table if late and whole_table else 0  # that is to come
        embedding = whole_table + (terms * table if tied else units.outside_gradients - cut)
        if first_alone and casts:
            embedding = max(embedding, units.outside_reduction + table)
        elif run.pp > 1 or (late and not (casts or tied or first_alone)):  # nothing is cut before it is added
            embedding = (whole_table or table) if share.first else 0
        if whole and not accumulates and reduced > b.gradients:  # cast to be summed with later ones
            embedding = (whole_table or embedding) + (elements * reduced if share.first and not tied else 0)
    elif in_backward and not tied:
        embedding = table
    elif share.compiled and not run.lora:
        # The graph makes the embedding's in fp32, which is cast, or summed with a tied head's, in the products' dtype
        # (torch/_decomp/decompositions.py, embedding_dense_backward).
        beside = 4 + b.compute if tied and not share.delays_head else 4 if b.gradients < 4 or tied else 0
        embedding = elements * beside // run.tp
    elif tied:
        embedding = whole_table + (terms if accumulates else terms - 1) * table
    else:
        embedding = (whole_table or table) if accumulates and share.first else 0
    if share.first and stack.counts_rows:
        sums = embedding_sums(share)
        embedding = max(embedding, (whole_table or table) + tied * table + sums) if sharded else embedding + sums
    # The head's is added to an earlier one at once, but where it is to be summed with another before, or reduced.
    head_stays = share.last and (tied or not accumulates or (sharded and (casts or not late)))
    after_head = accumulated + (of_head if head_stays and (tied or not in_backward) else 0)
    reducing = stored
    if late:
        left = units.block_reduction - units.block_shard  # by which a block's shard is less
        before = after_head - share.layers * left
        reducing = Stored(before + 2 * left, before + left, every - share.layers * left)
    half_head = elements * b.compute // run.tp if share.autocast else 0
    return Gradients(
        accumulated=accumulated,
        head=0 if share.delays_head else (3 if in_chunks(run) else 1) * table + half_head if share.last else 0,
        after_head=after_head,
        stored=stored,
        reducing=reducing,
        embedding=embedding,
        update=0 if in_backward else wide or _update(share, states),
        update_casts=0 if wide else max(uncut, _last_half(share)),
    )


def embedding_sums(share: Share) -> int:
    """Return what the embedding's backward takes beside the gradient that it makes: that of its output, whole, and in
    fp32 sums of rows of equal tokens, as many as can be (aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu)."""
    tokens, spec = share.tokens, share.spec
    sums = tokens // ROWS_PER_PARTIAL + min(tokens, spec.vocab) if tokens > SORTS_ABOVE else 0
    return spec.hidden * (share.bytes.residual * tokens + 4 * sums)


def wide_bytes(share: Share, states: States) -> int:
    """Return the bytes of fp32 gradients that half ones are added to as soon as a micro-batch's backward is over, from
    the first step on; 0 where they are summed in half."""
    return 4 * states.gradients // share.bytes.gradients if stack_of(share.run).sums_in_fp32 else 0


def _stored(share: Share, states: States, every: int) -> Stored:
    """Return what is stored of a single micro-batch's gradients, which take `every` bytes in the end.

    Still to come are the last blocks' own, and the embedding's, which a tied head has begun. FSDP2 reduces what is
    outside of blocks when all is over.
    """
    spec, run = share.spec, share.run
    if run.lora:
        block = every // share.layers
        return Stored(max(0, every - 2 * block), every - block, every)
    counts = _stage_parameters(share)
    stage = sum(counts.values()) or 1  # nanotron's stage for the loss alone has none
    sharded = uses_fsdp(run)
    outside = counts["embedding"] + (0 if states.units.head else counts["head"]) if sharded else 0
    embedding_exists = spec.tied and not share.delays_head
    embedding = 0 if sharded or embedding_exists or not share.first else counts["embedding"]
    after_blocks = every * (stage - outside) // stage
    block = every * block_parameters(spec) // stage
    before_last = after_blocks - block - every * embedding // stage
    return Stored(max(0, before_last - block), before_last, after_blocks)


def _of_chunks(share: Share, states: States, every: int) -> tuple[int, Stored]:
    """Return the gradients of virtual stages of which a backward pass is over, and what is stored beside them in the
    first one of the virtual stage that runs, of a rank's `every` bytes of gradients in the end."""
    run, layers = share.run, chunks_of(share.spec, share.run, share.stage)
    block = every * block_parameters(share.spec) // (stage := sum((counts := _stage_parameters(share)).values()))
    through, less, head = layers_through(share), 0, every * counts["head"] // stage
    if uses_fsdp(run):
        block = states.units.block_reduction
        ranks = run.dp_shard * run.cp
        less = through * (block - states.units.block_shard) + (head - head // ranks if through else 0)
    head = head if share.first_chunk_in_backward < run.virtual_stages else 0
    first = share.first_chunk_in_backward
    there = (every if first == 0 else block * sum(layers[first:]) + head) - less
    own = layers[share.chunk or 0]
    return there, Stored(*(there + block * max(0, own - left) for left in (2, 1, 0)))


def layers_through(share: Share) -> int:
    """Return how many layers are in virtual stages that all micro-batches are through, while `share.chunk` runs
    backward: their gradients are reduced then, and their weights are gone."""
    run = share.run
    if share.chunk is None or run.accumulation > run.pp:
        return 0
    return sum(chunks_of(share.spec, run, share.stage)[share.chunk + 1 :])


def _stage_parameters(share: Share) -> dict[str, int]:
    """Return the parameters of the stage by component, of all tensor- and expert-parallel ranks."""
    return device_parameters(share.spec, layers_of(share.spec, share.run), share.stage)


def _update(share: Share, states: States) -> int:
    """Return the gradients in the update: a master copy is stepped with fp32 ones, cast one by one from the half
    gradients, which are freed as they are cast, except where ZeRO-1 keeps all of them and casts only its share."""
    if share.run.offload:
        return 0  # they are with the states
    if not share.bytes.master:
        return states.gradients
    return 4 * states.trained + (states.gradients if share.run.zero == 1 else 0)


def _last_half(share: Share) -> int:
    """Return the half gradient that is cast last, beside all fp32 ones: the head's, where it has a weight of its own
    (a tied one's is the first)."""
    spec, run, b = share.spec, share.run, share.bytes
    if not share.last or run.zero or run.offload or run.lora or spec.tied or not b.master:
        return 0
    return spec.vocab * spec.hidden * b.gradients // run.tp


def bucket_bytes(share: Share, states: States) -> int:
    """Return the buckets that torch's DDP copies gradients into: as many bytes, from its construction on
    (gradient_as_bucket_view=False). With ZeRO 1 and a master copy it is DeepSpeed, Megatron-LM or nanotron, which have
    none; nanotron's are DDP's where it sums in half (src/nanotron/trainer.py, make_ddp)."""
    run = share.run
    ddp = run.zero == 0 or (run.zero == 1 and (not share.bytes.master or stack_of(run).keeps_ddp))
    return states.gradients if run.dp > 1 and ddp else 0
