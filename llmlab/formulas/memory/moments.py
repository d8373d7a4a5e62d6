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
from functools import partial
from operator import mul
from typing import NamedTuple

from ...hardware.gpu import GPU
from ...specs.model import ModelSpec
from ...specs.run import Training, stack_of
from ...specs.stages import chunks_of
from .activations import (
    block_inputs,
    block_saved,
    casts_without_gradient,
    checkpointed,
    int8_inputs,
    per_device,
    reached,
    without_gradient,
)
from .fsdp import is_flat, own_ranks, reduced_bytes, uses_fsdp, waits
from .gradients import bucket_bytes, gradients, layers_through
from .methods import WORDS, copies, offloaded, value_run
from .mlp import mlp_of
from .scores import causal_mask, forward_scores
from .share import Share, by_bitsandbytes, share_of
from .stacks.blocks import block_of
from .stacks.torchtune import in_chunks
from .states import kept_weights, states, unsplit
from .temporaries import (
    behind_scores,
    between_stages,
    block_backward,
    dequantized,
    described_bytes,
    forward_height,
    forward_mlp,
    loss_bytes,
    norm_backward,
    norm_replaced,
    optimizer_temporaries,
    outer_activations,
    receive_buffers,
    sent_back,
)  # fmt: skip

STASHED = 5  # tensors


class Moment(NamedTuple):
    """One instant of the step: its phase, what is happening, and the live bytes by part (some 0)."""

    phase: str
    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def training_moments(
    spec: ModelSpec, run: Training, gpu: GPU | None, cpu: bool = False, stage: int = 0
) -> list[Moment]:
    """Return the moments of one steady step (the states exist) on a device of pipeline stage `stage`; rank 0's is 0.

    In 1F1B stage s keeps the activations of pp - s micro-batches in flight (arXiv 2104.04473, section 2.2); the last
    has the logits.
    """
    return StepMemory(share_of(spec, run, gpu, cpu, stage)).moments()


class StepMemory:
    """The bytes on one device that a step's moments are sums of. Activations are those of all micro-batches in flight,
    unless it says otherwise."""

    def __init__(self, share: Share) -> None:
        spec, run, gpu, stack = share.spec, share.run, share.gpu, stack_of(share.run)
        self.share, self.layers, self.sharded = share, share.layers, uses_fsdp(run)
        self.states = states(spec, run, share.stage)
        self.gradients = gradients(share, self.states)
        if (through := layers_through(share)) and run.zero == 2:
            units = self.states.units
            left = units.resident - through * units.block
            self.states = self.states._replace(units=units._replace(resident=left, at_loss=left, head=0))
        self.loss = loss_bytes(share)
        # FSDP2's fp32 shards are the master copy; the half weights are what is gathered of them.
        master_shards = self.sharded and share.bytes.master and not run.lora
        self.gathered_part = "weights" if master_shards else "other"
        block = block_of(share)
        # The last micro-batch's logits, where they have a name until this one's.
        self.named_logits = self.loss.after if block and share.over else 0
        self.of_weights, self.apart = (0, 0) if share.cpu else unsplit(spec, run, share.stage)
        self.resident = {  # what stays from step to step, by part
            "weights": kept_weights(run, self.states) + (0 if master_shards else self.of_weights) + copies(spec, run),
            "optimizer": self.states.optimizer + (self.of_weights if master_shards else 0),
            "gradients": 0,  # these three come and go
            "activations": 0,
            "logits": 0,
            # cuBLAS takes one workspace per handle, and the autograd thread has a handle of its own; both stay.
            "workspace": 2 * (gpu.cublas_workspace or 0) if gpu else 0,
            "other": bucket_bytes(share, self.states) + (block.table if block else 0) + receive_buffers(share),
        }
        self.sent = sent_back(share)
        self.resident["other"] += self.sent
        # What is whole still when backward ends: in a pipeline all blocks, but for one that the moments add.
        units = self.states.units
        self.left = units.outside + (units.head + units.block * (self.layers - through - 1) if run.pp > 1 else 0)
        # Then only the first micro-batch, when there is little else, has outputs of all-gathers.
        self.stay_gathered = self.sharded and run.pp > 1 and run.zero == 2 and share.over > 0
        whole = per_device(block_saved(share), run)
        kept = checkpointed(share) if run.checkpointing else whole
        # What torchtune offloads is on the card while the block computes that made or takes it.
        host = stack.enable_activation_offloading
        held = 1 if host else share.layers
        blocks = layers_in_flight(run, share.stage, held, share.over)  # of all micro-batches
        of_chunk = held // run.virtual_stages
        if share.chunk is not None:
            chunks = chunks_of(spec, run, share.stage)
            flying = chunks_in_flight(run, share.stage, chunks, share.chunk, share.begun)
            blocks, of_chunk = sum(map(mul, flying, chunks)), chunks[share.chunk]
        self.activations_by_kind = {kind: each * blocks for kind, each in kept.items() if each}
        # Where one of `every` blocks is recomputed, counted through a rank's virtual stages, these keep others.
        every, inputs = stack.recomputes_one_in, block_inputs(share)
        if every and share.chunk is not None:
            ends = [sum(chunks[:number]) // every for number in range(len(chunks) + 1)]
            again = sum(number * (end - start) for number, start, end in zip(flying, ends, ends[1:], strict=False))
            self.activations_by_kind = {kind: whole.get(kind, 0) * (blocks - again) + inputs.get(kind, 0) * again
                                        for kind in self.activations_by_kind}  # fmt: skip
        self.block = sum(kept.values())  # what one block keeps of one micro-batch
        self.outside = _outside_in_flight(share, self.loss.waiting)  # of blocks
        self.activations = sum(self.activations_by_kind.values()) + self.outside
        # What the last one keeps less than the average, and the last two; what the first keeps more.
        self.uneven, self.first_more = (0, 0), 0
        if every:
            self.first_more = (every > 1) * (sum(whole.values()) - self.block)
            number = share.layers if share.chunk is None else sum(chunks[: share.chunk + 1])
            last = [sum((whole if (number - back) % every else inputs).values()) for back in (0, 1)]
            self.uneven = self.block - last[0], 2 * self.block - sum(last)
        # What torchtune sends to the host is there until five more have been kept (training/_activation_offloading.py,
        # max_fwd_stash_size), of blocks the inputs; the final norm's replace them.
        self.stashed = self.block * min(STASHED, share.layers - 1) if host else 0
        # Left when the last block's backward begins.
        self.last_block = self.block * (blocks - of_chunk + 1)
        # Of the micro-batches that wait while one's backward ends.
        passes = passes_in_flight(run, share.stage, share.over)
        self.others = self.last_block - self.block + (self.outside - self.outside // passes if passes else 0)
        self.backward = block_backward(share, kept, whole)
        other = share.remade_masks > 1  # else the first and the last block's are the same
        self.last_backward = block_backward(share, kept, whole, first=False) if other else self.backward
        self.recomputed = self.backward.recomputed
        # What the first block keeps less, of all micro-batches.
        first = micro_batches_in_flight(run, share.stage, over=share.over)
        for kind, less in per_device(without_gradient(share), run).items():
            if less:
                self.activations_by_kind[kind] -= less * first
                self.activations -= less * first
                self.last_block -= less * first
        # The half copies that autocast makes of weights; those of blocks are alive until forward is over, and backward
        # still has them, unless it makes them again. Only weights that are trained have one copy for all micro-batches
        # (aten/src/ATen/autocast_mode.cpp, cached_cast): a frozen one lives as long as autograd keeps it, which is not
        # at all in a block that is recomputed. bitsandbytes dequantizes instead; what GPTQ's layers unpacked autograd
        # keeps like a frozen weight's copy, without autocast too.
        element = share.bytes.compute if share.autocast else 0
        of_linear = 0 if by_bitsandbytes(run) else share.bytes.compute if run.quantization else element
        self.block_cast = of_linear * spec.block_linear_elements // spec.layers // run.tp
        # w2's is gone as soon as its input has a gradient.
        read = stack.own_model and not run.compile
        down = sum(linear.elements for linear in spec.block_linears if linear.name == "down_proj") // spec.layers
        self.read_cast = element * down // run.tp if read else 0
        adapters = element * self.states.trained if run.lora else 0
        freed = run.checkpointing and (run.lora or share.blocks_compiled)
        uncast = of_linear * casts_without_gradient(share) // run.tp if of_linear else 0
        self.casts = adapters + (0 if freed else self.block_cast * share.layers - uncast)
        self.kept_casts = 0 if run.checkpointing else self.casts
        self.head_cast = element * spec.vocab * spec.hidden // run.tp if share.last else 0
        if run.objective.loss == "chunked":  # of the words of a tile
            self.head_cast = min(self.head_cast, element * WORDS * spec.hidden)
        # Temporaries in a block's forward: attention's or the MLP's, or what its description says.
        self.in_forward = max(forward_scores(share) - behind_scores(share), forward_mlp(share)) + forward_height(share)
        # Temporaries anywhere between first and last block; descriptions say when a weight is dequantized, and so does
        # mlp.py.
        self.around_loss = causal_mask(share)
        self.between = self.around_loss + (0 if block or mlp_of(share) else dequantized(share))
        self.working = self.backward.temporaries + self.between
        self.last_working = self.working - self.backward.temporaries + self.last_backward.temporaries
        # Of what is outside of blocks nothing is left when their backward begins; a gradient goes through them. In a
        # pipeline both lie in buffers: what a stage received, for as long as it runs, and the gradient of what it sent.
        self.replaced = outer_activations(share) if block else norm_replaced(share)
        self.ends = 0  # what the stage received and sent, and others' outside, when its first block's backward begins
        if stack.torch_stages and run.pp > 1:
            self.replaced += (not share.first) * between_stages(share)
            self.ends = self.outside - (self.replaced if share.last else 0)
        # What torchtune brought back stays until the node of backward is over that brings back the next
        # (training/_activation_offloading.py, bwd_tensor_stash): the final norm's input, cast, and a block's. In an
        # eager block without an adapter beside w2 that node is w2's product.
        if host and (run.compile or (run.lora and "down_proj" in run.lora.targets)):
            self.replaced -= 4 * share.tokens * spec.hidden
            self.last_block += self.block if share.layers > 1 else 0
        # With adapters and checkpointing peft makes the embedding's output a leaf, so that checkpointing has something
        # to differentiate; it and its gradient outlive backward.
        through_peft = run.lora and run.checkpointing and not stack.own_model
        leaf = 2 * run.tokens * spec.hidden * share.bytes.residual if through_peft else 0
        # A loop's variable has the last loss, and its graph int8 linears' contexts, until the next micro-batch's is
        # there, or the step is over; with it the leaf.
        before = reached(share)
        later = int8_inputs(share) * (share.layers - 1)
        self.contexts = later + int8_inputs(share, 0 if before is None else before + 1)
        self.named_graph = leaf + self.contexts if share.over and run.pp == 1 else 0
        self.last_block += later
        self.others += self.contexts
        self.update = max(self.gradients.update_casts, leaf + optimizer_temporaries(share, self.states))

    def moments(self) -> list[Moment]:
        """Return the moments of the step, in order."""
        loaded = {**self.resident, "optimizer": 0, "workspace": 0}
        if self.gathered_part == "weights":
            loaded["weights"] = 4 * self.states.trained + self.of_weights
        share = self.share
        # What variables of torch's schedule held is gone as it returns.
        returned = share.run.pp > 1 and stack_of(share.run).torch_stages
        update = {"logits": 0 if returned else self.loss.after, "gradients": self.gradients.update}
        chunks, number = chunks_of(share.spec, share.run, share.stage), share.run.virtual_stages
        if share.chunk is None and (len(set(chunks)) > 1 or (number > 1 and self.sharded)):
            return [
                moment
                for chunk, layers in enumerate(chunks)
                for begun in {0, chunk, chunk + 1}
                if any(chunks_in_flight(share.run, share.stage, chunks, chunk, begun))
                for moment in type(self)(_of_chunk(share, chunk, begun)).moments()
                if layers or "block" not in moment.name
            ]
        every = share.run.accumulation * number  # where all are in flight, nothing is before them
        alone = share.over and share.run.pp > 1 and share.chunk is None
        alone = alone and passes_in_flight(share.run, share.stage) == every
        before = type(self)(replace(share, over=0)) if alone else None
        found = [
            Moment("load", "weights loaded", loaded),
            *(self._gathering() if self.sharded else ()),
            *(before._forward() + before._backward() if before else ()),
            *self._forward(),
            *self._backward(),
            *(self._reducing() if self.sharded else ()),
            self._moment("optimizer", "the update", other=self.update - self.sent, activations=self.contexts, **update),
        ]
        if share.run.objective.critic:
            found = _with_value_model(found, type(self)(share_of(share.spec, value_run(share.run), share.gpu)))
        if not (apart := self._apart(found)):
            return found
        return [moment._replace(parts={**moment.parts, "optimizer": moment.parts["optimizer"] + apart * (number > 0)})
                for number, moment in enumerate(found)]  # fmt: skip

    def _apart(self, found: list[Moment]) -> int:
        """Return what the allocator gives beyond the states' sizes. The first update makes them in what the step before
        it left free, as many as there is room for; where they are made in backward, there is little."""
        run, states = self.share.run, 2 * self.share.bytes.states * self.states.trained
        if not self.apart or stack_of(run).steps_in_backward(run):
            return self.apart
        *step, update = (moment.total for moment in found)
        free = max(step) - (update - self.update)
        return int(self.apart * max(0, 1 - free / states))

    def _moment(self, phase: str, name: str, gathered: int = 0, other: int = 0, **parts: int) -> Moment:
        """Return the moment of what is resident, `gathered` weights, `other` temporaries, and the `parts` named."""
        found = {**self.resident, **parts}
        found["other"] += other
        found[self.gathered_part] += gathered
        return Moment(phase, name, found)

    def _forward(self) -> list[Moment]:
        units, moment = self.states.units, partial(self._moment, "forward", gradients=self.gradients.accumulated,
                                                   logits=self.named_logits)  # fmt: skip
        gathered, casts = units.resident + units.block, self.casts + self.head_cast
        if self.stay_gathered:
            gathered -= units.block
        around_loss = gathered if units.at_loss is None else units.at_loss
        ahead = units.prefetched  # the output of the all-gather, or what is gathered next
        stashed = min(self.stashed, self.block * (STASHED - 1))
        activations, before = self.activations - self.outside + casts + stashed + self.named_graph, []
        if units.experts:  # the output of their all-gather stays until the next block's are copied out
            held = units.experts if own_ranks(self.share.run) > 1 else 0
            before.append(moment("the second-to-last block of forward", gathered + ahead + held,
                                 self.between + self.in_forward, activations=activations - self.block))  # fmt: skip
            ahead = units.head + held
        if comes := offloaded(self.share.spec, self.share.run):
            working = self.between + self.in_forward + self.loss.forward
            before.append(moment("the reference model's pass", gathered, comes + working))
        return [
            *before,
            moment("the last block of forward", gathered + ahead, self.between + self.in_forward,
                   activations=activations),
            moment("the loss", around_loss, self.around_loss, activations=self.activations + casts + self.named_graph,
                   logits=self.loss.forward),
        ]  # fmt: skip

    def _gathering(self) -> list[Moment]:
        """Return the moments in which FSDP2's forward copies a unit's weights out of what was gathered: the output of
        the all-gather before it is there too."""
        if self.stay_gathered:
            return []
        units, moment = self.states.units, partial(self._moment, "forward", gradients=self.gradients.accumulated,
                                                   logits=self.named_logits)  # fmt: skip
        activations = self.activations - self.outside - self.block + self.casts - self.block_cast + self.stashed
        activations += self.named_graph
        last = units.resident + units.prefetched + 2 * units.block
        found = [
            moment("the first block gathered", (1 if units.head else 2) * units.outside + 2 * units.block),
            moment("the last block gathered", last, self.between, activations=activations),
        ]
        if units.head:
            gathered = units.resident + units.prefetched + 2 * units.head
            found.append(moment("the head gathered", gathered, activations=self.activations))
        return found

    def _backward(self) -> list[Moment]:
        units, grads, moment = self.states.units, self.gradients, partial(self._moment, "backward")
        # What the head's gradient is made of stays, where that comes last.
        in_blocks = partial(moment, logits=self.loss.head if self.share.delays_head else self.loss.after)
        gathered, activations = units.resident + min(units.block, units.prefetched), self.activations + self.kept_casts
        around_loss = gathered if units.at_loss is None else units.at_loss
        # FSDP2 gathers ahead what ran before: in chunks, the head itself.
        at_head = gathered - (units.prefetched if units.head and in_chunks(self.share.run) else 0)
        working, own_gradients = self.working, self.backward.gradients
        # In a pipeline blocks are neither freed nor reduced before all micro-batches are through.
        freed, reduction, of_head, in_pipeline = units.block, units.block_reduction, units.head_reduction, 0
        if self.share.run.pp > 1:
            freed, reduction, of_head, in_pipeline = 0, 0, 0, units.head
        reduction = 0 if waits(self.share.run) else reduction  # that of the last micro-batch: see `_reducing`
        in_norm = []
        if (block := block_of(self.share)) and block.norm_backward and self.share.last:
            other = of_head + described_bytes(block.norm_backward, self.share)
            in_norm.append(in_blocks("the final norm's backward", gathered, other, gradients=grads.after_head,
                                     activations=activations))  # fmt: skip
        elif in_norm_written_out := norm_backward(self.share):
            in_norm.append(in_blocks("the final norm's backward", around_loss, in_norm_written_out + self.around_loss,
                                     gradients=grads.after_head, activations=activations))  # fmt: skip
        in_second = []
        if self.share.run.pp > 1 and any(self.uneven) and self.layers > 2:
            share = self.share
            new = not grads.accumulated if share.chunk is None else share.begun > share.chunk
            first = units.block_reduction if new else 0
            in_second.append(in_blocks("the second block of backward", gathered + in_pipeline, working,
                                       gradients=grads.after_head + first + own_gradients,
                                       activations=self.activations - self.replaced - self.block + self.recomputed
                                       + self.uneven[1]))  # fmt: skip
        return [
            moment("the gradient of the logits", around_loss, self.around_loss, gradients=grads.accumulated,
                   activations=activations + self.head_cast, logits=self.loss.gradient),
            moment("the head's gradient", at_head + units.head, self.around_loss,
                   gradients=grads.accumulated + grads.head, activations=activations, logits=self.loss.head),
            *in_norm,
            # A block's own experts are among its temporaries, where their description has them.
            in_blocks("the first block of backward", gathered + (units.prefetched or in_pipeline - units.experts),
                      of_head + working,
                      gradients=grads.after_head + own_gradients,
                      activations=self.activations - self.replaced + self.recomputed + self.uneven[0]
                      + (self.kept_casts or self.block_cast) - self.read_cast),
            *in_second,
            in_blocks("the last block of backward", self.left + units.block, reduction + self.last_working,
                      gradients=grads.stored.before_last + self.last_backward.gradients,
                      activations=self.last_block + self.ends + self.recomputed + self.block_cast
                      - self.read_cast),
            in_blocks("the embedding's gradient", self.left + units.block - freed, reduction + grads.embedding,
                      gradients=grads.stored.after_blocks, activations=self.others),
        ]  # fmt: skip

    def _reducing(self) -> list[Moment]:
        """Return the moments in which FSDP2 reduces gradients: a unit's, and the copies of all ranks, side by side."""
        units, grads = self.states.units, self.gradients
        moment = partial(self._moment, "backward", logits=self.loss.after)
        # The first block's activations are gone, and its weights.
        activations = self.activations - self.block - self.replaced + max(0, self.kept_casts - self.block_cast)
        if self.share.run.pp > 1:
            activations = 0
        gathered = units.resident + (units.prefetched or -units.block - units.experts)
        # Where they waited, as in a pipeline, a block's gradients are among earlier ones, which go as it is reduced.
        late = waits(self.share.run)
        reducing = units.block_reduction + (0 if late or self.share.run.pp > 1 else units.block_gradients)
        ranks = self.share.run.dp_shard * self.share.run.cp
        last_but_one = units.block + (units.prefetched or units.block + units.experts) + self.left
        last_but_one -= units.outside if units.head else 0
        # Of a unit with one large tensor, its gradient is still there as the reduced one is made.
        head_shard, outside_shard = units.head_reduction // ranks, 0
        shard = units.block_shard + units.experts_shard
        after_first = grads.after_head + (shard - units.block_reduction if late else 0 if grads.accumulated else shard)
        if units.head:
            outside_shard = units.outside_shard
        found = []
        if units.head:
            if self.share.run.pp > 1:  # when all is through, after those of blocks
                reduced = units.head_reduction + self.layers * units.block_shard
                now = moment("the head's gradients reduced", 0, units.head_reduction, gradients=reduced + head_shard)
            else:
                whole = units.head_gradients + units.head_reduction
                now = moment("the head's gradients reduced", units.resident + units.prefetched, self.between + whole,
                             gradients=grads.accumulated + head_shard, activations=self.activations)  # fmt: skip
            found.append(now)
        elif self.share.run.zero == 3 and stack_of(self.share.run).reshards_model:
            logits = self.loss.head if units.at_loss == 0 else self.loss.waiting
            found.append(moment("embedding and head gathered again", 2 * units.outside, logits=logits,
                                gradients=grads.accumulated,
                                activations=self.activations + self.kept_casts))  # fmt: skip
        # FSDP1's autograd joins a unit's gradients before its weights go, and nothing of its reduction stays.
        flat = is_flat(self.share.run)
        joined, behind = (units.block, 0) if flat else (0, units.block_reduction)
        # Of two micro-batches the first has no earlier ones, and as the second's are reduced those of blocks are gone.
        earlier = units.outside_gradients if flat and self.share.run.accumulation == 2 else 0
        # Beside it are the reduced ones, in half and cast to the shard's fp32, and the unit's last gradient, which a
        # loop's variable keeps (_fsdp_collectives.py, foreach_reduce): an untied head's.
        made, share = units.outside_shard, self.share
        made += units.outside_reduction // ranks if made * ranks > units.outside_reduction else 0
        if share.last and not (flat or units.head or share.spec.tied or share.run.lora):
            width = reduced_bytes(share.run, share.bytes) if late else share.bytes.gradients
            made += width * share.spec.vocab * share.spec.hidden // share.run.tp
        found += [
            moment("the first block's gradients reduced", gathered + joined, self.between + reducing,
                   gradients=grads.after_head, activations=activations),
            moment("the last block's gradients reduced", self.left + joined, reducing,
                   gradients=grads.reducing.before_last),
            moment("the other gradients reduced", units.outside if flat else 0,
                   units.outside_reduction + max(0 if late else units.outside_gradients, made),
                   gradients=grads.reducing.after_blocks + outside_shard - earlier),
        ]  # fmt: skip
        if late:
            found.append(moment("the embedding's gradient, the last time", self.left, units.block_reduction +
                                grads.embedding, gradients=grads.reducing.after_blocks))  # fmt: skip
        # One with a reduction behind it and a block gathered, or still whole, before it; a pipeline reduces when all is
        # through.
        if self.layers > 2 and self.share.run.pp == 1:
            stays = units.resident - units.block - 2 * units.experts
            gathered = units.resident + units.block + units.prefetched if units.prefetched else stays
            found += [
                moment("the second block of backward", gathered,
                       behind + self.working,
                       gradients=after_first + self.backward.gradients,
                       activations=activations + self.recomputed + self.uneven[1]
                       + (0 if self.kept_casts else self.block_cast)),
                moment("the second block's gradients", gathered, self.between + reducing, gradients=after_first,
                       activations=activations - self.block),
                moment("the second-to-last block of backward", last_but_one, behind + self.working,
                       gradients=grads.reducing.before_last_two + self.backward.gradients,
                       activations=self.last_block + self.first_more + self.block + self.recomputed + self.block_cast),
                moment("the second-to-last block's gradients", last_but_one, self.between + reducing,
                       gradients=grads.reducing.before_last_two, activations=self.last_block + self.first_more),
            ]  # fmt: skip
        return found


def _with_value_model(found: list[Moment], value: StepMemory) -> list[Moment]:
    """Return the moments of a policy's step with its value model's, which one backward pass trains: the value model's
    forward comes last, so its backward comes first, and its gradients stay until the update."""
    stays = {**value.resident, "workspace": 0}
    beside = {
        "load": {**stays, "optimizer": 0},
        "forward": {**stays, "activations": value.activations},  # the policy's tile of logits is gone by then
        "backward": {**stays, "gradients": value.gradients.update},
        "optimizer": {**stays, "gradients": value.gradients.update, "other": stays["other"] + value.update},
    }
    waiting = {**next(moment for moment in reversed(found) if moment.phase == "forward").parts, "logits": 0}
    own = [_sum(moment._replace(parts={**moment.parts, "workspace": 0}), waiting)
           for moment in value.moments() if moment.phase == "backward"]  # fmt: skip
    both = [_sum(moment._replace(parts={**moment.parts, "logits": 0}) if moment.phase == "forward" else moment,
                 beside[moment.phase]) for moment in found]  # fmt: skip
    place = next(number for number, moment in enumerate(both) if moment.phase == "backward")
    return [*both[:place], *own, *both[place:]]


def _sum(moment: Moment, parts: dict[str, int]) -> Moment:
    return moment._replace(parts={part: size + parts[part] for part, size in moment.parts.items()})


def passes_in_flight(run: Training, stage: int, over: int = 0) -> int:
    """Return how many forward passes through its stages a rank is ahead of its backward passes at most, once `over` of
    these are over.

    1F1B: pp - stage, if there are as many micro-batches. GPipe: all of them. Interleaved: warm-up runs
    2 (pp - stage - 1) + (virtual_stages - 1) pp passes ahead (Megatron-LM, core/pipeline_parallel/schedules.py,
    get_pp_rank_microbatches; torch, distributed/pipelining/schedules.py, ScheduleInterleaved1F1B), and one more before
    the first backward.

    >>> [passes_in_flight(Training(pp=4, accumulation=8), stage) for stage in range(4)]
    [4, 3, 2, 1]
    >>> passes_in_flight(Training(pp=4, accumulation=8, schedule="gpipe"), 3)
    8
    """
    if run.pp == 1:
        return 1
    if run.schedule == "gpipe":
        return run.accumulation - over
    later = run.pp - stage - 1
    ahead = later + 1 if run.virtual_stages == 1 else 2 * later + (run.virtual_stages - 1) * run.pp + 1
    return min(ahead, run.accumulation * run.virtual_stages - over)


def chunks_in_flight(run: Training, stage: int, chunks: tuple[int, ...], chunk: int, begun: int) -> list[int]:
    """Return of how many micro-batches a rank keeps what each of its virtual stages does, when it keeps most layers, of
    which these have so many as `chunks` says, and `chunk` runs backward, while passes through those from `begun` on are
    over, and through none before it. Nothing is kept where that never is.

    Backward takes pp micro-batches through the rank's last virtual stage, then as many through the one before.

    >>> run = Training(pp=2, accumulation=4, virtual_stages=2)
    >>> [chunks_in_flight(run, 1, (3, 1), chunk=0, begun=begun) for begun in (0, 1, 2)]
    [[3, 0], [3, 0], [0, 0]]
    """
    number = run.virtual_stages
    every = run.accumulation * number
    ahead = 2 * (run.pp - stage - 1) + (number - 1) * run.pp + 1
    best: list[int] = [0] * number
    for back in range(every):
        over = max(0, number - 1 - (back - 1) // run.pp) if back else number
        if number - 1 - back // run.pp % number != chunk or over != begun:
            continue
        held = [0] * number
        for each in range(min(back + ahead, every)):
            held[each // run.pp % number] += 1
        for each in range(back):
            held[number - 1 - each // run.pp % number] -= 1
        best = max(best, held, key=lambda found: sum(map(mul, found, chunks)))
    return best


def layers_in_flight(run: Training, stage: int, layers: int, over: int = 0) -> int:
    """Return of how many layers a rank with so many keeps activations at most, of all its micro-batches; `over` as in
    `passes_in_flight`.

    >>> layers_in_flight(Training(pp=4, accumulation=4, virtual_stages=8), 3, 8)
    29
    """
    return -(-passes_in_flight(run, stage, over) * layers // run.virtual_stages)


def micro_batches_in_flight(run: Training, stage: int = 0, last: bool = False, over: int = 0) -> int:
    """Return of how many micro-batches a rank keeps what its first stage does at most; with `last`, its last stage;
    `over` as in `passes_in_flight`.

    Warm-up takes pp micro-batches through a rank's first stage, then as many through its second, and so on.

    >>> micro_batches_in_flight(Training(pp=4, accumulation=8, virtual_stages=2))
    7
    """
    passes, of_group = passes_in_flight(run, stage, over), run.pp * run.virtual_stages
    if run.virtual_stages == 1:
        return passes
    groups, more = divmod(passes, of_group)
    begun = max(0, more - (of_group - run.pp)) if last else min(more, run.pp)
    return min(groups * run.pp + begun, run.accumulation)


def _of_chunk(share: Share, chunk: int, begun: int) -> Share:
    """Return the share of a rank whose virtual stage `chunk` runs: only its last one has the head, its first the
    embedding. Passes backward through those from `begun` on are over."""
    first, last = share.first and chunk == 0, share.last and chunk == share.run.virtual_stages - 1
    return replace(share, first=first, last=last, chunk=chunk, begun=begun, over=int(begun <= chunk))


def _outside_in_flight(share: Share, waiting: int) -> int:
    """Return the bytes kept outside blocks by all passes in flight, of which a rank's first stage has the embedding and
    the last one the head; `waiting` is what the loss of one keeps until its backward begins."""
    run, stage, over = share.run, share.stage, share.over
    if share.chunk is not None:
        flying = chunks_in_flight(run, stage, chunks_of(share.spec, run, stage), share.chunk, share.begun)
        between = outer_activations(replace(share, first=False, last=False))
        first = outer_activations(replace(share, first=stage == 0, last=False))
        last = outer_activations(replace(share, first=False, last=stage == run.pp - 1))
        waits = waiting * max(0, flying[-1] - 1)
        return first * flying[0] + between * sum(flying[1:-1]) + last * flying[-1] + waits
    ending = micro_batches_in_flight(run, stage, True, over)
    waits = waiting * (ending - 1) if share.last else 0
    if run.virtual_stages == 1:
        return outer_activations(share) * ending + waits
    middle, passes = replace(share, first=False, last=False), passes_in_flight(run, stage, over)
    ends = micro_batches_in_flight(run, stage, over=over) if share.first else ending if share.last else 0
    return outer_activations(share) * ends + outer_activations(middle) * (passes - ends) + waits
