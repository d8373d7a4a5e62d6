"""The gradients of one training step on one device, at each moment of the backward pass."""

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
    """Bytes of stored gradients before the backward passes of the last two blocks, and after those of all blocks."""

    before_last_two: int
    before_last: int
    after_blocks: int


class Gradients(NamedTuple):
    """Bytes of gradients at the moments of a step."""

    accumulated: int  # of earlier micro-batches, from the beginning of the step
    head: int  # while the head's is computed: with the 16-bit one that is cast, or with a chunk's and the sum of chunks
    after_head: int  # all, after the head's
    stored: Stored
    reducing: Stored  # the same, in a backward pass in which FSDP2 reduces
    embedding: int  # while the embedding's is computed, in addition to `stored.after_blocks`
    update: int  # during the update
    update_casts: int  # when the update begins, in addition to `update`


def gradients(share: Share, states: States) -> Gradients:
    """Return the gradients of a rank with these states."""
    spec, run, b, sharded, stack = share.spec, share.run, share.bytes, uses_fsdp(share.run), stack_of(share.run)
    elements = 0 if run.lora else spec.vocab * spec.hidden
    table = elements * b.gradients // run.tp  # the head's gradient, the embedding's, or that of both
    tied = share.ties_head and share.first and share.last
    # Each rank computes the whole gradient of an embedding that is divided by rows
    # (torch/distributed/tensor/_ops/_embedding_ops.py). FSDP2 divides it before the reduction, and a tied weight's sum
    # is divided before it is stored. Otherwise it stays whole until the update.
    dtensor = run.tp > 1 and stack.dtensors
    whole_table = elements * b.gradients if dtensor and share.first else 0
    uncut = 0 if sharded or tied else whole_table
    every = 4 * states.trained if sharded and b.master else states.gradients
    if in_backward := stack.steps_in_backward(run):
        every = 0
    units, late = states.units, waits(run) and sharded
    reduced = reduced_bytes(run, b)
    casts = late and reduced > b.gradients  # to the dtype of the sum; otherwise autograd adds without a cast
    # If gradients are reduced only once, in or after the last micro-batch, each rank accumulates whole gradients.
    whole = not run.sync_each_batch or (sharded and run.pp > 1)
    if whole:
        every = share.layers * units.block_reduction + units.outside_reduction + units.head_reduction
    every += max(0, uncut - table)
    # Accumulated gradients exist during the whole step. Those of a single micro-batch exist from its backward pass on.
    wide = wide_bytes(share, states)
    accumulates = share.backward_passes_done > 0 and not (run.offload and run.sync_each_batch) and not wide
    once = _stored(share, states, every)
    if whole and share.first and not tied:  # the embedding's is divided only by the reduction
        every += elements * reduced * (run.tp - 1) // run.tp
    there = every if accumulates else 0
    if share.chunk is not None and not run.offload and not wide:
        there, once = _of_chunks(share, states, every)
    accumulated = there + wide
    stored = Stored(there, there, there) if accumulates else Stored(every, every, every) if run.offload else once
    if first_alone := late and run.accumulation == 2:  # the second backward pass frees the whole ones
        stored = once
    if accumulates and share.compiled and run.world_size == 1:  # a graph returns all of them before the first is added
        stored = Stored(*(there + now for now in once))
    if sharded and accumulates and run.dp_replicate > 1 and not whole:
        # HSDP adds the sums over the replicas to earlier gradients, and keeps both until the backward pass ends
        # (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _all_reduce_state).
        stored = Stored(*(before + now for before, now in zip(stored, once, strict=True)))
    stored = Stored(*(size + wide for size in stored))
    # Autograd adds the gradients of both uses of a tied weight before it stores the sum. It holds two terms and a sum,
    # or only two terms if the first one was cast (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace).
    terms = 2 if (share.autocast and run.tp == 1) or in_chunks(run) else 3
    head_alone = share.scores_vocabulary and not share.delays_head
    of_head = table if head_alone else 0
    if units.head:  # the head is a unit of its own, and its gradients are reduced before those of blocks
        of_head = 0 if accumulates else every * elements // sum(_stage_parameters(share).values())
    elif sharded and (casts or tied or first_alone or not late):  # FSDP2 has not reduced the head's gradient yet
        stored = Stored(stored.before_last_two + of_head, stored.before_last + of_head, stored.after_blocks)
    if sharded:
        cut = table if late and whole_table else 0  # not divided yet
        embedding = whole_table + (terms * table if tied else units.outside_gradients - cut)
        if first_alone and casts:
            embedding = max(embedding, units.outside_reduction + table)
        elif run.pp > 1 or (late and not (casts or tied or first_alone)):  # added without having been divided
            embedding = (whole_table or table) if share.first else 0
        if whole and not accumulates and reduced > b.gradients:  # cast, because later ones are added to it
            embedding = (whole_table or embedding) + (elements * reduced if share.first and not tied else 0)
    elif in_backward and not tied:
        embedding = table
    elif share.compiled and not run.lora:
        # A compiled graph computes the embedding's gradient in fp32. It is then cast, or added to a tied head's
        # gradient in the dtype of the matmuls (torch/_decomp/decompositions.py, embedding_dense_backward).
        beside = 4 + b.compute if tied and not share.delays_head else 4 if b.gradients < 4 or tied else 0
        embedding = elements * beside // run.tp
    elif tied:
        embedding = whole_table + (terms if accumulates else terms - 1) * table
    else:
        embedding = (whole_table or table) if accumulates and share.first else 0
    if share.first and stack.models_embedding_backward:
        sums = embedding_sums(share)
        embedding = max(embedding, (whole_table or table) + tied * table + sums) if sharded else embedding + sums
    # The head's gradient is added to the accumulated one immediately, unless it still has to be added to the
    # embedding's or reduced.
    head_stays = share.last and (tied or not accumulates or (sharded and (casts or not late)))
    after_head = accumulated + (of_head if head_stays and (tied or not in_backward) else 0)
    reducing = stored
    if late:
        freed = units.block_reduction - units.block_shard  # when a block's gradients become a shard
        before = after_head - share.layers * freed
        reducing = Stored(before + 2 * freed, before + freed, every - share.layers * freed)
    half_head = elements * b.compute // run.tp if share.autocast else 0
    return Gradients(
        accumulated=accumulated,
        head=(3 if in_chunks(run) else 1) * table + half_head if head_alone else 0,
        after_head=after_head,
        stored=stored,
        reducing=reducing,
        embedding=embedding,
        update=0 if in_backward else wide or _update(share, states),
        update_casts=0 if wide else max(uncut, _last_half(share)),
    )


def embedding_sums(share: Share) -> int:
    """Return the bytes that the embedding's backward pass needs in addition to the gradient that it computes: the
    gradient of its output, and fp32 partial sums over equal tokens, at most one per token of the vocabulary
    (aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu)."""
    tokens, spec = share.tokens, share.spec
    sums = tokens // ROWS_PER_PARTIAL + min(tokens, spec.vocab) if tokens > SORTS_ABOVE else 0
    return spec.hidden * (share.bytes.residual * tokens + 4 * sums)


def wide_bytes(share: Share, states: States) -> int:
    """Return the bytes of fp32 buffers to which 16-bit gradients are added after each micro-batch's backward pass; 0
    if the sums are in 16 bits."""
    return 4 * states.gradients // share.bytes.gradients if stack_of(share.run).sums_in_fp32 else 0


def _stored(share: Share, states: States, every: int) -> Stored:
    """Return the stored gradients of a single micro-batch, which are `every` bytes at the end of its backward pass.

    Until then, those of the last blocks are missing, and the embedding's, unless the weight is tied and the head's
    backward pass has stored it. FSDP2 reduces the gradients outside the blocks at the end.
    """
    spec, run = share.spec, share.run
    if run.lora:
        block = every // share.layers
        return Stored(max(0, every - 2 * block), every - block, every)
    counts = _stage_parameters(share)
    stage = sum(counts.values()) or 1  # a stage of nanotron that only computes the loss has no parameters
    sharded = uses_fsdp(run)
    outside = counts["embedding"] + (0 if states.units.head else counts["head"]) if sharded else 0
    embedding_exists = share.ties_head and not share.delays_head
    embedding = 0 if sharded or embedding_exists or not share.first else counts["embedding"]
    after_blocks = every * (stage - outside) // stage
    block = every * block_parameters(spec) // stage
    before_last = after_blocks - block - every * embedding // stage
    return Stored(max(0, before_last - block), before_last, after_blocks)


def _of_chunks(share: Share, states: States, every: int) -> tuple[int, Stored]:
    """Return the gradients of the virtual stages that have done a backward pass, and the stored gradients during the
    first backward pass of the virtual stage that runs. In the end a rank has `every` bytes of gradients."""
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
    """Return the number of layers in virtual stages that have run backward for all micro-batches, while `share.chunk`
    runs backward. Their gradients have been reduced, and their weights freed."""
    run = share.run
    if share.chunk is None or run.accumulation > run.pp:
        return 0
    return sum(chunks_of(share.spec, run, share.stage)[share.chunk + 1 :])


def _stage_parameters(share: Share) -> dict[str, int]:
    """Return the parameters of the stage by component, of all tensor- and expert-parallel ranks."""
    return device_parameters(share.spec, layers_of(share.spec, share.run), share.stage)


def _update(share: Share, states: States) -> int:
    """Return the bytes of gradients during the update. Master weights are updated with fp32 gradients, which are cast
    one by one from the 16-bit ones. Each of these is freed after its cast, but ZeRO-1 keeps all and casts its shard."""
    if share.run.offload:
        return 0  # they are with the states
    if not share.bytes.master:
        return states.gradients
    return 4 * states.trained + (states.gradients if share.run.zero == 1 else 0)


def _last_half(share: Share) -> int:
    """Return the bytes of the 16-bit gradient that is cast last, when all others are in fp32: the head's, unless its
    weight is tied, because a tied weight's is cast first."""
    spec, run, b = share.spec, share.run, share.bytes
    if not share.last or run.zero or run.offload or run.lora or spec.tied or not b.master:
        return 0
    return spec.vocab * spec.hidden * b.gradients // run.tp


def bucket_bytes(share: Share, states: States) -> int:
    """Return the bytes of the buckets into which torch's DDP copies gradients, as many as the gradients have. They
    exist from the construction of DDP on (gradient_as_bucket_view=False). ZeRO-1 with master weights means DeepSpeed,
    Megatron-LM or nanotron, which have no such buckets, except nanotron if it accumulates in 16 bits
    (src/nanotron/trainer.py, make_ddp)."""
    run = share.run
    ddp = run.zero == 0 or (run.zero == 1 and (not share.bytes.master or stack_of(run).keeps_ddp))
    return states.gradients if run.dp > 1 and ddp else 0
