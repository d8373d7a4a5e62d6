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
    rank = _Rank(share, states)
    stored, of_head = rank.stored(), rank.of_head()
    # The head's gradient is added to the accumulated one immediately, unless it still has to be added to the
    # embedding's or reduced.
    reduced_now = rank.sharded and (rank.casts or not rank.late)
    head_stays = share.last and (rank.tied or not rank.accumulates or reduced_now)
    after_head = rank.accumulated + (of_head if head_stays and (rank.tied or not rank.in_backward) else 0)
    reducing, units = stored, states.units
    if rank.late:
        freed = units.block_reduction - units.block_shard  # when a block's gradients become a shard
        before = after_head - share.layers * freed
        reducing = Stored(before + 2 * freed, before + freed, rank.every - share.layers * freed)
    half_head = rank.elements * share.bytes.compute // share.run.tp if share.autocast else 0
    return Gradients(
        accumulated=rank.accumulated,
        head=(3 if in_chunks(share.run) else 1) * rank.table + half_head if rank.head_alone else 0,
        after_head=after_head,
        stored=stored,
        reducing=reducing,
        embedding=rank.embedding(),
        update=0 if rank.in_backward else rank.wide or _update(share, states),
        update_casts=0 if rank.wide else max(rank.uncut, _last_half(share)),
    )


class _Rank:
    """The sizes and conditions that the moments of a step share."""

    def __init__(self, share: Share, states: States) -> None:
        run, b, self.share, self.states = share.run, share.bytes, share, states
        self.sharded, self.in_backward = uses_fsdp(run), stack_of(run).steps_in_backward(run)
        self.tied = share.ties_head and share.first and share.last
        self.head_alone = share.scores_vocabulary and not share.delays_head
        self.late = waits(run) and self.sharded
        self.first_alone = self.late and run.accumulation == 2  # the second backward pass frees the whole gradients
        self.widens = reduced_bytes(run, b) > b.gradients
        # To the dtype of the sum; otherwise autograd adds without a cast.
        self.casts = self.late and self.widens
        # If gradients are reduced only once, in or after the last micro-batch, each rank accumulates whole gradients.
        self.whole = not run.sync_each_batch or (self.sharded and run.pp > 1)
        # Accumulated gradients exist during the whole step. Those of a single micro-batch exist from its backward pass
        # on.
        self.wide = wide_bytes(share, states)
        synced_on_host = run.offload and run.sync_each_batch
        self.accumulates = share.backward_passes_done > 0 and not synced_on_host and not self.wide
        self._add_tables()
        self._add_totals()

    def _add_tables(self) -> None:
        """Set the bytes of the gradients of the embedding and the head."""
        share, run, b = self.share, self.share.run, self.share.bytes
        self.elements = 0 if run.lora else share.spec.vocab * share.spec.hidden
        self.table = self.elements * b.gradients // run.tp  # the head's gradient, the embedding's, or that of both
        # Each rank computes the whole gradient of an embedding that is divided by rows
        # (torch/distributed/tensor/_ops/_embedding_ops.py). FSDP2 divides it before the reduction, and a tied weight's
        # sum is divided before it is stored. Otherwise it stays whole until the update.
        dtensor = run.tp > 1 and stack_of(run).dtensors
        self.whole_table = self.elements * b.gradients if dtensor and share.first else 0
        self.uncut = 0 if self.sharded or self.tied else self.whole_table

    def _add_totals(self) -> None:
        """Set the bytes of all gradients: at the end of a step (`every`), of a single micro-batch (`once`), and of
        earlier micro-batches, in the dtype of gradients (`earlier`) and with fp32 buffers (`accumulated`)."""
        share, states, run, units = self.share, self.states, self.share.run, self.states.units
        every = 4 * states.trained if self.sharded and share.bytes.master else states.gradients
        if self.in_backward:
            every = 0
        if self.whole:
            every = share.layers * units.block_reduction + units.outside_reduction + units.head_reduction
        every += max(0, self.uncut - self.table)
        self.once = _stored(share, states, every)
        if self.whole and share.first and not self.tied:  # the embedding's is divided only by the reduction
            every += self.elements * reduced_bytes(run, share.bytes) * (run.tp - 1) // run.tp
        self.every, self.earlier = every, every if self.accumulates else 0
        if share.chunk is not None and not run.offload and not self.wide:
            self.earlier, self.once = _of_chunks(share, states, every)
        self.accumulated = self.earlier + self.wide

    def of_head(self) -> int:
        """Return the bytes of the head's gradient until the blocks' backward passes."""
        if self.states.units.head:  # a unit of its own, whose gradients are reduced before those of the blocks
            return 0 if self.accumulates else self.every * self.elements // sum(_stage_parameters(self.share).values())
        return self.table if self.head_alone else 0

    def stored(self) -> Stored:
        """Return the gradients during the last micro-batch's backward pass."""
        share, run = self.share, self.share.run
        stored = self.once
        if not self.first_alone and self.accumulates:
            stored = Stored(*[self.earlier] * 3)
        elif not self.first_alone and run.offload:
            stored = Stored(*[self.every] * 3)
        if self.accumulates and share.compiled and run.world_size == 1:
            # A graph returns all of them before the first is added.
            stored = Stored(*(self.earlier + now for now in self.once))
        if self.sharded and self.accumulates and run.dp_replicate > 1 and not self.whole:
            # HSDP adds the sums over the replicas to earlier gradients, and keeps both until the backward pass ends
            # (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _all_reduce_state).
            stored = Stored(*(before + now for before, now in zip(stored, self.once, strict=True)))
        # FSDP2 reduces the head's gradient only with the embedding's.
        waits_for_embedding = self.casts or self.tied or self.first_alone or not self.late
        later = self.of_head() if self.sharded and not self.states.units.head and waits_for_embedding else 0
        last_two, last, end = (size + self.wide for size in stored)
        return Stored(last_two + later, last + later, end)

    def embedding(self) -> int:
        """Return the bytes that the embedding's gradient needs while it is computed."""
        share, stack = self.share, stack_of(self.share.run)
        # Autograd adds the gradients of both uses of a tied weight before it stores the sum. It holds two terms and a
        # sum, or only two terms if the first one was cast (torch/csrc/autograd/input_buffer.cpp,
        # can_accumulate_inplace).
        terms = 2 if (share.autocast and share.run.tp == 1) or in_chunks(share.run) else 3
        whole_table, table = self.whole_table, self.table
        if self.sharded:
            size = self._sharded_embedding(terms)
        elif self.in_backward and not self.tied:
            size = table
        elif share.compiled and not share.run.lora:
            # A compiled graph computes the embedding's gradient in fp32. It is then cast, or added to a tied head's
            # gradient in the dtype of the matmuls (torch/_decomp/decompositions.py, embedding_dense_backward).
            b = share.bytes
            widened = 4 if b.gradients < 4 or self.tied else 0
            element = 4 + b.compute if self.tied and not share.delays_head else widened
            size = self.elements * element // share.run.tp
        elif self.tied:
            size = whole_table + (terms if self.accumulates else terms - 1) * table
        else:
            size = (whole_table or table) if self.accumulates and share.first else 0
        if not (share.first and stack.models_embedding_backward):
            return size
        sums = embedding_sums(share)
        return max(size, (whole_table or table) + self.tied * table + sums) if self.sharded else size + sums

    def _sharded_embedding(self, terms: int) -> int:
        """Return the bytes of the embedding's gradient under FSDP2, with a number of `terms` for a tied weight."""
        share, units, table, whole_table = self.share, self.states.units, self.table, self.whole_table
        cut = table if self.late and whole_table else 0  # not divided yet
        size = whole_table + (terms * table if self.tied else units.outside_gradients - cut)
        if self.first_alone and self.casts:
            size = max(size, units.outside_reduction + table)
        elif share.run.pp > 1 or (self.late and not (self.casts or self.tied or self.first_alone)):
            size = (whole_table or table) if share.first else 0  # added without having been divided
        if self.whole and not self.accumulates and self.widens:  # cast, because later ones are added to it
            summed = self.elements * reduced_bytes(share.run, share.bytes) if share.first and not self.tied else 0
            size = (whole_table or size) + summed
        return size


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
