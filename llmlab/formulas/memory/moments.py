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
    missing_in_first,
    per_device,
    reached,
)
from .fsdp import is_flat, own_ranks, reduced_bytes, uses_fsdp, waits
from .gradients import bucket_bytes, gradients, layers_through
from .methods import WORDS, copies, offloaded, value_run
from .mlp import mlp_of
from .scores import causal_mask, forward_scores
from .share import Share, by_bitsandbytes, frozen_in_half, share_of
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
    norm_temporaries,
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
    """The sizes on one device from which the moments of a step are summed. Activations are those of all micro-batches
    in flight, except where a comment says otherwise."""

    def __init__(self, share: Share) -> None:
        run = share.run
        self.share, self.layers, self.sharded = share, share.layers, uses_fsdp(run)
        self.states = states(share.spec, run, share.stage)
        self.gradients = gradients(share, self.states)
        if (through := layers_through(share)) and run.zero == 2:
            units = self.states.units
            left = units.resident - through * units.block
            self.states = self.states._replace(units=units._replace(resident=left, at_loss=left, head=0))
        self.loss = loss_bytes(share)
        self._add_resident()
        units = self.states.units
        # Weights that are still gathered when the backward pass ends. In a pipeline these are all blocks but one, which
        # the moments add.
        self.still_gathered = units.outside
        if run.pp > 1:
            self.still_gathered += units.head + units.block * (self.layers - through - 1)
        # In a pipeline, only the first micro-batch has outputs of all-gathers, and then little else is allocated.
        self.stay_gathered = self.sharded and run.pp > 1 and run.zero == 2 and share.backward_passes_done > 0
        self._add_activations()
        self._add_casts()
        self._add_temporaries()
        self._add_leftovers()

    def _add_resident(self) -> None:
        """Set the bytes that stay from step to step."""
        share, block = self.share, block_of(self.share)
        spec, run, gpu = share.spec, share.run, share.gpu
        # With FSDP2 in mixed precision, the fp32 shards are the master weights, and gathered weights are in 16 bits.
        master_shards = self.sharded and share.bytes.master and not run.lora
        self.gathered_part = "weights" if master_shards else "other"
        # The logits of the micro-batch before, if a variable refers to them until the next logits are computed.
        self.named_logits = self.loss.after if block and share.backward_passes_done else 0
        self.of_weights, self.unsplit_states = (0, 0) if share.cpu else unsplit(spec, run, share.stage)
        self.resident = {
            "weights": kept_weights(run, self.states) + (0 if master_shards else self.of_weights) + copies(spec, run),
            "optimizer": self.states.optimizer + (self.of_weights if master_shards else 0),
            "gradients": 0,  # these three are allocated and freed within a step
            "activations": 0,
            "logits": 0,
            # cuBLAS has one workspace per handle, and the autograd thread has its own handle.
            "workspace": 2 * (gpu.cublas_workspace or 0) if gpu else 0,
            "other": bucket_bytes(share, self.states) + (block.table if block else 0) + receive_buffers(share),
        }
        self.sent = sent_back(share)
        self.resident["other"] += self.sent

    def _add_activations(self) -> None:
        """Set the bytes that forward passes save, by kind, and what the first and the last blocks save of them."""
        share, stack = self.share, stack_of(self.share.run)
        spec, run = share.spec, share.run
        whole = per_device(block_saved(share), run)
        saved_by_kind = checkpointed(share) if run.checkpointing else whole
        # With torchtune's offloading, only the activations of the block that runs are on the GPU.
        host = stack.enable_activation_offloading
        live_layers = 1 if host else share.layers
        blocks = layers_in_flight(run, share.stage, live_layers, share.backward_passes_done)
        of_chunk = live_layers // run.virtual_stages
        if share.chunk is not None:
            chunks = chunks_of(spec, run, share.stage)
            flying = chunks_in_flight(run, share.stage, chunks, share.chunk, share.first_chunk_in_backward)
            blocks, of_chunk = sum(map(mul, flying, chunks)), chunks[share.chunk]
        self.activations_by_kind = {kind: size * blocks for kind, size in saved_by_kind.items() if size}
        # If one of `every` blocks is recomputed, counted through all virtual stages of a rank, the others save more.
        every, inputs = stack.recomputes_one_in, block_inputs(share)
        if every and share.chunk is not None:
            ends = [sum(chunks[:number]) // every for number in range(len(chunks) + 1)]
            again = sum(number * (end - start) for number, start, end in zip(flying, ends, ends[1:], strict=False))
            self.activations_by_kind = {kind: whole.get(kind, 0) * (blocks - again) + inputs.get(kind, 0) * again
                                        for kind in self.activations_by_kind}  # fmt: skip
        self.block = sum(saved_by_kind.values())  # of one block and one micro-batch
        self.outside = _outside_in_flight(share, self.loss.waiting)  # outside the blocks
        self.activations = sum(self.activations_by_kind.values()) + self.outside
        # How much less than the average the last block saves, and the last two; how much more the first block saves.
        self.lighter_last_blocks, self.first_more = (0, 0), 0
        if every:
            self.first_more = (every > 1) * (sum(whole.values()) - self.block)
            number = share.layers if share.chunk is None else sum(chunks[: share.chunk + 1])
            last = [sum((whole if (number - back) % every else inputs).values()) for back in (0, 1)]
            self.lighter_last_blocks = self.block - last[0], 2 * self.block - sum(last)
        # A tensor that torchtune copies to the host is freed after five more have been saved
        # (training/_activation_offloading.py, max_fwd_stash_size). The final norm's inputs replace those of blocks.
        self.stashed = self.block * min(STASHED, share.layers - 1) if host else 0
        # What is left when the last block's backward pass begins.
        self.last_block = self.block * (blocks - of_chunk + 1)
        # Of the micro-batches that wait when one micro-batch's backward pass ends.
        passes = passes_in_flight(run, share.stage, share.backward_passes_done)
        self.others = self.last_block - self.block + (self.outside - self.outside // passes if passes else 0)
        self.backward = block_backward(share, saved_by_kind, whole)
        other = share.remade_masks > 1  # else the backward passes of the first and the last block are the same
        self.last_backward = block_backward(share, saved_by_kind, whole, first=False) if other else self.backward
        self.recomputed = self.backward.recomputed
        first = micro_batches_in_flight(run, share.stage, done=share.backward_passes_done)
        for kind, less in per_device(missing_in_first(share), run).items():
            if less:
                self.activations_by_kind[kind] -= less * first
                self.activations -= less * first
                self.last_block -= less * first

    def _add_casts(self) -> None:
        """Set the bytes of 16-bit copies of weights that autocast makes.

        The copies of a block's weights are alive until the forward pass ends, and in the backward pass too, unless
        the block is recomputed. Only trained weights have one copy for all micro-batches
        (aten/src/ATen/autocast_mode.cpp, cached_cast). The copy of a frozen weight lives as long as autograd saves it,
        and in a recomputed block autograd does not save it. bitsandbytes dequantizes instead. Autograd saves the
        weights that GPTQ's layers unpack, too, with or without autocast.
        """
        share, stack = self.share, stack_of(self.share.run)
        spec, run = share.spec, share.run
        element = share.bytes.compute if share.autocast else 0
        of_linear = 0 if by_bitsandbytes(run) else share.bytes.compute if run.quantization else element
        self.block_cast = of_linear * spec.block_linear_elements // spec.layers // run.tp
        # The copy of w2 is freed as soon as the gradient of its input is computed.
        read = stack.own_model and not run.compile
        down = sum(linear.elements for linear in spec.block_linears if linear.name == "down_proj") // spec.layers
        self.read_cast = element * down // run.tp if read else 0
        adapters = share.bytes.compute * self.states.trained if run.lora and (element or frozen_in_half(run)) else 0
        freed = run.checkpointing and (run.lora or share.blocks_compiled)
        uncast = of_linear * casts_without_gradient(share) // run.tp if of_linear else 0
        self.casts = adapters + (0 if freed else self.block_cast * share.layers - uncast)
        self.kept_casts = 0 if run.checkpointing else self.casts
        cast_head = share.scores_vocabulary and run.half_layers is None
        self.head_cast = element * spec.vocab * spec.hidden // run.tp if cast_head else 0
        if run.objective.loss == "chunked":  # of the words of a tile
            self.head_cast = min(self.head_cast, element * WORDS * spec.hidden)

    def _add_temporaries(self) -> None:
        """Set the bytes of tensors that live only while a block's forward or backward pass runs."""
        share, block = self.share, block_of(self.share)
        # In a block's forward pass: those of attention or of the MLP, or what the block's description says.
        self.in_forward = max(forward_scores(share) - behind_scores(share), forward_mlp(share)) + forward_height(share)
        # Anywhere between the first and the last block. Descriptions and mlp.py count dequantized weights themselves.
        self.around_loss = causal_mask(share)
        self.between = self.around_loss + (0 if block or mlp_of(share) else dequantized(share))
        self.working = self.backward.temporaries + self.between
        self.last_working = self.working - self.backward.temporaries + self.last_backward.temporaries

    def _add_leftovers(self) -> None:
        """Set the bytes that a stack's own code or a variable keeps alive for longer than autograd does."""
        share, stack, block = self.share, stack_of(self.share.run), block_of(self.share)
        spec, run = share.spec, share.run
        # Tensors outside the blocks are freed before the blocks' backward pass begins, and a gradient flows through
        # them. In a pipeline both are in buffers: a stage's input while the stage runs, and its output's gradient.
        self.replaced = outer_activations(share) if block else norm_replaced(share)
        # The stage's input and output, and what other micro-batches save outside the blocks, when the backward pass of
        # the stage's first block begins.
        self.at_stage_ends = 0
        if stack.torch_stages and run.pp > 1:
            self.replaced += (not share.first) * between_stages(share)
            self.at_stage_ends = self.outside - (self.replaced if share.last else 0)
        # What torchtune copies back to the GPU stays until the backward node that copies the next tensor back has run
        # (training/_activation_offloading.py, bwd_tensor_stash): the final norm's input in fp32, and a block's. In an
        # eager block whose w2 has no adapter, this node is the matmul of w2.
        if stack.enable_activation_offloading and (run.compile or (run.lora and "down_proj" in run.lora.targets)):
            self.replaced -= 4 * share.tokens * spec.hidden
            self.last_block += self.block if share.layers > 1 else 0
        # With adapters and checkpointing, peft makes the embedding's output a leaf, so that checkpointing has an input
        # that needs a gradient. The leaf and its gradient live until after the backward pass.
        through_peft = run.lora and run.checkpointing and not stack.own_model
        leaf = 2 * run.tokens * spec.hidden * share.bytes.residual if through_peft else 0
        # A variable of the training loop refers to the last loss, and so to its graph, until the next loss is computed
        # or the step ends. The graph keeps the contexts of int8 linear layers, and the leaf.
        before = reached(share)
        later = int8_inputs(share) * (share.layers - 1)
        self.contexts = later + int8_inputs(share, 0 if before is None else before + 1)
        self.named_graph = leaf + self.contexts if share.backward_passes_done and run.pp == 1 else 0
        self.last_block += later
        self.others += self.contexts
        self.update = max(self.gradients.update_casts, leaf + optimizer_temporaries(share, self.states))

    def moments(self) -> list[Moment]:
        """Return the moments of the step, in order."""
        loaded = {**self.resident, "optimizer": 0, "workspace": 0}
        if self.gathered_part == "weights":
            loaded["weights"] = 4 * self.states.trained + self.of_weights
        share = self.share
        # When torch's pipeline schedule returns, its variables are gone, and the logits with them.
        returned = share.run.pp > 1 and stack_of(share.run).torch_stages
        update = {"logits": 0 if returned else self.loss.after, "gradients": self.gradients.update}
        chunks, number = chunks_of(share.spec, share.run, share.stage), share.run.virtual_stages
        if share.chunk is None and (len(set(chunks)) > 1 or (number > 1 and self.sharded)):
            return [
                moment
                for chunk, layers in enumerate(chunks)
                for first_chunk in {0, chunk, chunk + 1}
                if any(chunks_in_flight(share.run, share.stage, chunks, chunk, first_chunk))
                for moment in type(self)(_of_chunk(share, chunk, first_chunk)).moments()
                if layers or "block" not in moment.name
            ]
        every = share.run.accumulation * number  # if all passes are in flight, none has been done before
        alone = share.backward_passes_done and share.run.pp > 1 and share.chunk is None
        alone = alone and passes_in_flight(share.run, share.stage) == every
        before = type(self)(replace(share, backward_passes_done=0)) if alone else None
        moments = [
            Moment("load", "weights loaded", loaded),
            *(self._gathering() if self.sharded else ()),
            *(before._forward() + before._backward() if before else ()),
            *self._forward(),
            *self._backward(),
            *(self._reducing() if self.sharded else ()),
            self._moment("optimizer", "the update", other=self.update - self.sent, activations=self.contexts, **update),
        ]
        if share.run.objective.critic:
            moments = _with_value_model(moments, type(self)(share_of(share.spec, value_run(share.run), share.gpu)))
        if not (extra := self._beyond_states(moments)):
            return moments
        return [moment._replace(parts={**moment.parts, "optimizer": moment.parts["optimizer"] + extra * (number > 0)})
                for number, moment in enumerate(moments)]  # fmt: skip

    def _beyond_states(self, moments: list[Moment]) -> int:
        """Return the bytes that the allocator adds to the sizes of the optimizer's states. The first update allocates
        as many of them as fit in the memory that the backward pass has freed. In the backward pass little is free."""
        run, states = self.share.run, 2 * self.share.bytes.states * self.states.trained
        if not self.unsplit_states or stack_of(run).steps_in_backward(run):
            return self.unsplit_states
        *step, update = (moment.total for moment in moments)
        free = max(step) - (update - self.update)
        return int(self.unsplit_states * max(0, 1 - free / states))

    def _moment(self, phase: str, name: str, gathered: int = 0, other: int = 0, **parts: int) -> Moment:
        """Return the moment with the resident bytes, `gathered` weights, `other` temporaries, and `parts`."""
        sizes = {**self.resident, **parts}
        sizes["other"] += other
        sizes[self.gathered_part] += gathered
        return Moment(phase, name, sizes)

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
        if units.experts:  # the output of the experts' all-gather stays until the next block's is copied out
            expert_weights = units.experts if own_ranks(self.share.run) > 1 else 0
            before.append(moment("the second-to-last block of forward", gathered + ahead + expert_weights,
                                 self.between + self.in_forward, activations=activations - self.block))  # fmt: skip
            ahead = units.head + expert_weights
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
        """Return the moments at which FSDP2 copies the weights of a unit out of the output of their all-gather, while
        the output of the previous all-gather is still allocated."""
        if self.stay_gathered:
            return []
        units, moment = self.states.units, partial(self._moment, "forward", gradients=self.gradients.accumulated,
                                                   logits=self.named_logits)  # fmt: skip
        activations = self.activations - self.outside - self.block + self.casts - self.block_cast + self.stashed
        activations += self.named_graph
        last = units.resident + units.prefetched + 2 * units.block
        moments = [
            moment("the first block gathered", (1 if units.head else 2) * units.outside + 2 * units.block),
            moment("the last block gathered", last, self.between, activations=activations),
        ]
        if units.head:
            gathered = units.resident + units.prefetched + 2 * units.head
            moments.append(moment("the head gathered", gathered, activations=self.activations))
        return moments

    def _backward(self) -> list[Moment]:
        units, grads, moment = self.states.units, self.gradients, partial(self._moment, "backward")
        # If the head's gradient is computed last, its inputs stay until then.
        in_blocks = partial(moment, logits=self.loss.head if self.share.delays_head else self.loss.after)
        gathered, activations = units.resident + min(units.block, units.prefetched), self.activations + self.kept_casts
        around_loss = gathered if units.at_loss is None else units.at_loss
        # FSDP2 prefetches the unit that ran before this one in the forward pass, with a chunked loss the head.
        at_head = gathered - (units.prefetched if units.head and in_chunks(self.share.run) else 0)
        working, own_gradients = self.working, self.backward.gradients
        # In a pipeline, weights are freed and gradients reduced only after the last micro-batch.
        freed, reduction, of_head, in_pipeline = units.block, units.block_reduction, units.head_reduction, 0
        if self.share.run.pp > 1:
            freed, reduction, of_head, in_pipeline = 0, 0, 0, units.head
        reduction = 0 if waits(self.share.run) else reduction  # only the last micro-batch has one: see `_reducing`
        in_norm = []
        if (block := block_of(self.share)) and block.norm_backward and self.share.last:
            other = of_head + described_bytes(block.norm_backward, self.share)
            in_norm.append(in_blocks("the final norm's backward", gathered, other, gradients=grads.after_head,
                                     activations=activations))  # fmt: skip
        elif in_norm_written_out := norm_backward(self.share):
            in_norm.append(in_blocks("the final norm's backward", around_loss, in_norm_written_out + self.around_loss,
                                     gradients=grads.after_head, activations=activations))  # fmt: skip
        in_second = []
        if self.share.run.pp > 1 and any(self.lighter_last_blocks) and self.layers > 2:
            share = self.share
            new = not grads.accumulated if share.chunk is None else share.first_chunk_in_backward > share.chunk
            first = units.block_reduction if new else 0
            in_second.append(in_blocks("the second block of backward", gathered + in_pipeline, working,
                                       gradients=grads.after_head + first + own_gradients,
                                       activations=self.activations - self.replaced - self.block + self.recomputed
                                       + self.lighter_last_blocks[1]))  # fmt: skip
        return [
            moment("the gradient of the logits", around_loss, self.around_loss, gradients=grads.accumulated,
                   activations=activations + self.head_cast, logits=self.loss.gradient),
            moment("the head's gradient", at_head + units.head, self.around_loss,
                   gradients=grads.accumulated + grads.head, activations=activations, logits=self.loss.head),
            *in_norm,
            # Where a description contains a block's own experts, they are among its temporaries.
            in_blocks("the first block of backward", gathered + (units.prefetched or in_pipeline - units.experts),
                      of_head + working,
                      gradients=grads.after_head + own_gradients,
                      activations=self.activations - self.replaced + self.recomputed + self.lighter_last_blocks[0]
                      + (self.kept_casts or self.block_cast) - self.read_cast),
            *in_second,
            in_blocks("the last block of backward", self.still_gathered + units.block, reduction + self.last_working,
                      gradients=grads.stored.before_last + self.last_backward.gradients,
                      activations=self.last_block + self.at_stage_ends + self.last_backward.recomputed + self.block_cast
                      - self.read_cast),
            in_blocks("the embedding's gradient", self.still_gathered + units.block - freed,
                      reduction + grads.embedding, gradients=grads.stored.after_blocks, activations=self.others),
        ]  # fmt: skip

    def _reducing(self) -> list[Moment]:
        """Return the moments at which FSDP2 reduces gradients: a unit's gradients are beside their flat copy."""
        units, grads, share, run = self.states.units, self.gradients, self.share, self.share.run
        moment, late = partial(self._moment, "backward", logits=self.loss.after), waits(run)
        # If gradients are reduced after the last micro-batch, a block's gradients are among the accumulated ones.
        reducing = units.block_reduction + (0 if late or run.pp > 1 else units.block_gradients)
        gathered = units.resident + (units.prefetched or -units.block - units.experts)
        # FSDP1's autograd concatenates a unit's gradients before it frees the weights, and frees the reduction's copy.
        flat = is_flat(run)
        joined = units.block if flat else 0
        # With two micro-batches, the first one adds to no earlier gradients, and when the second one's are reduced, the
        # gradients of the blocks are freed.
        earlier = units.outside_gradients if flat and run.accumulation == 2 else 0
        # The reduced gradients are allocated beside it, in 16 bits and in the shard's fp32. So is the unit's last
        # gradient, an untied head's, because a loop variable refers to it (_fsdp_collectives.py, foreach_reduce).
        shard, ranks = units.outside_shard, run.dp_shard * run.cp
        reduced = shard + (units.outside_reduction // ranks if shard * ranks > units.outside_reduction else 0)
        if share.last and not (flat or units.head or share.spec.tied or run.lora):
            width = reduced_bytes(run, share.bytes) if late else share.bytes.gradients
            reduced += width * share.spec.vocab * share.spec.hidden // run.tp
        ending = grads.reducing.after_blocks
        moments = [
            *self._head_reduced(),
            moment("the first block's gradients reduced", gathered + joined, self.between + reducing,
                   gradients=grads.after_head, activations=self._without_first_block()),
            moment("the last block's gradients reduced", self.still_gathered + joined, reducing,
                   gradients=grads.reducing.before_last),
            moment("the other gradients reduced", units.outside if flat else 0,
                   units.outside_reduction + max(0 if late else units.outside_gradients, reduced),
                   gradients=ending + (shard if units.head else 0) - earlier),
        ]  # fmt: skip
        if late:
            moments.append(moment("the embedding's gradient, the last time", self.still_gathered,
                                  units.block_reduction + grads.embedding, gradients=ending))  # fmt: skip
        # A pipeline reduces only after the last micro-batch.
        return moments + (self._between_reductions(reducing) if self.layers > 2 and run.pp == 1 else [])

    def _without_first_block(self) -> int:
        """Return the bytes of activations when the first block's activations and weights have been freed."""
        if self.share.run.pp > 1:
            return 0
        return self.activations - self.block - self.replaced + max(0, self.kept_casts - self.block_cast)

    def _head_reduced(self) -> list[Moment]:
        """Return the moment at which the gradients of the head are reduced, if it is a unit of its own, or at which a
        head that was freed is gathered again. The gradient of a unit with one large tensor is still allocated when the
        reduced gradient is."""
        units, grads, run = self.states.units, self.gradients, self.share.run
        moment = partial(self._moment, "backward", logits=self.loss.after)
        shard = units.head_reduction // (run.dp_shard * run.cp)
        if units.head and run.pp > 1:  # after the last micro-batch, and after the blocks' gradients
            reduced = units.head_reduction + self.layers * units.block_shard
            return [moment("the head's gradients reduced", 0, units.head_reduction, gradients=reduced + shard)]
        if units.head:
            whole = units.head_gradients + units.head_reduction
            return [moment("the head's gradients reduced", units.resident + units.prefetched, self.between + whole,
                           gradients=grads.accumulated + shard, activations=self.activations)]  # fmt: skip
        if not (run.zero == 3 and stack_of(run).reshards_model):
            return []
        logits = self.loss.head if units.at_loss == 0 else self.loss.waiting
        return [moment("embedding and head gathered again", 2 * units.outside, logits=logits,
                       gradients=grads.accumulated, activations=self.activations + self.kept_casts)]  # fmt: skip

    def _between_reductions(self, reducing: int) -> list[Moment]:
        """Return the moments of blocks that have a reduction of `reducing` bytes behind them, and a block before them
        that is gathered or not yet freed."""
        units, grads, late = self.states.units, self.gradients, waits(self.share.run)
        moment = partial(self._moment, "backward", logits=self.loss.after)
        activations, behind = self._without_first_block(), 0 if is_flat(self.share.run) else units.block_reduction
        shard = units.block_shard + units.experts_shard
        after_first = grads.after_head + (shard - units.block_reduction if late else 0 if grads.accumulated else shard)
        stays = units.resident - units.block - 2 * units.experts
        gathered = units.resident + units.block + units.prefetched if units.prefetched else stays
        last_but_one = units.block + (units.prefetched or units.block + units.experts) + self.still_gathered
        last_but_one -= units.outside if units.head else 0
        # Before a block's gradients are copied for their reduction, the backward pass of its first norm ends.
        reducing += 0 if is_flat(self.share.run) else norm_temporaries(self.share)
        return [
            moment("the second block of backward", gathered,
                   behind + self.working,
                   gradients=after_first + self.backward.gradients,
                   activations=activations + self.recomputed + self.lighter_last_blocks[1]
                   + (0 if self.kept_casts else self.block_cast)),
            moment("the second block's gradients", gathered, self.between + reducing, gradients=after_first,
                   activations=activations - self.block),
            moment("the second-to-last block of backward", last_but_one, behind + self.working,
                   gradients=grads.reducing.before_last_two + self.backward.gradients,
                   activations=self.last_block + self.first_more + self.block + self.recomputed + self.block_cast),
            moment("the second-to-last block's gradients", last_but_one, self.between + reducing,
                   gradients=grads.reducing.before_last_two, activations=self.last_block + self.first_more),
        ]  # fmt: skip


def _with_value_model(policy: list[Moment], value: StepMemory) -> list[Moment]:
    """Return the moments of a policy's step with its value model's, which one backward pass trains: the value model's
    forward comes last, so its backward comes first, and its gradients stay until the update."""
    stays = {**value.resident, "workspace": 0}
    beside = {
        "load": {**stays, "optimizer": 0},
        "forward": {**stays, "activations": value.activations},  # the policy's tile of logits is gone by then
        "backward": {**stays, "gradients": value.gradients.update},
        "optimizer": {**stays, "gradients": value.gradients.update, "other": stays["other"] + value.update},
    }
    waiting = {**next(moment for moment in reversed(policy) if moment.phase == "forward").parts, "logits": 0}
    own = [_sum(moment._replace(parts={**moment.parts, "workspace": 0}), waiting)
           for moment in value.moments() if moment.phase == "backward"]  # fmt: skip
    both = [_sum(moment._replace(parts={**moment.parts, "logits": 0}) if moment.phase == "forward" else moment,
                 beside[moment.phase]) for moment in policy]  # fmt: skip
    place = next(number for number, moment in enumerate(both) if moment.phase == "backward")
    return [*both[:place], *own, *both[place:]]


def _sum(moment: Moment, parts: dict[str, int]) -> Moment:
    return moment._replace(parts={part: size + parts[part] for part, size in moment.parts.items()})


def passes_in_flight(run: Training, stage: int, done: int = 0) -> int:
    """Return by how many forward passes a rank is ahead of its backward passes at most, after `done` backward passes.

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
        return run.accumulation - done
    later_stages = run.pp - stage - 1
    ahead = later_stages + 1 if run.virtual_stages == 1 else 2 * later_stages + (run.virtual_stages - 1) * run.pp + 1
    return min(ahead, run.accumulation * run.virtual_stages - done)


def chunks_in_flight(run: Training, stage: int, chunks: tuple[int, ...], chunk: int, first_chunk: int) -> list[int]:
    """Return, for each virtual stage of a rank, from how many micro-batches it keeps activations at the moment when the
    rank keeps the most layers.

    `chunks` are the layers of each virtual stage. Only moments count at which virtual stage `chunk` runs backward, the
    virtual stages from `first_chunk` on have done a backward pass, and those before it have not. All counts are 0 if
    there is no such moment. Backward takes pp micro-batches through the rank's last virtual stage, then pp through the
    one before it.

    >>> run = Training(pp=2, accumulation=4, virtual_stages=2)
    >>> [chunks_in_flight(run, 1, (3, 1), chunk=0, first_chunk=first) for first in (0, 1, 2)]
    [[3, 0], [3, 0], [0, 0]]
    """
    number = run.virtual_stages
    every = run.accumulation * number
    ahead = 2 * (run.pp - stage - 1) + (number - 1) * run.pp + 1
    best: list[int] = [0] * number
    for back in range(every):
        first = max(0, number - 1 - (back - 1) // run.pp) if back else number
        if number - 1 - back // run.pp % number != chunk or first != first_chunk:
            continue
        passes = [0] * number
        for index in range(min(back + ahead, every)):
            passes[index // run.pp % number] += 1
        for index in range(back):
            passes[number - 1 - index // run.pp % number] -= 1
        best = max(best, passes, key=lambda counts: sum(map(mul, counts, chunks)))
    return best


def layers_in_flight(run: Training, stage: int, layers: int, done: int = 0) -> int:
    """Return from how many layers, summed over micro-batches, a rank with `layers` layers keeps activations at most.
    `done` is that of `passes_in_flight`.

    >>> layers_in_flight(Training(pp=4, accumulation=4, virtual_stages=8), 3, 8)
    29
    """
    return -(-passes_in_flight(run, stage, done) * layers // run.virtual_stages)


def micro_batches_in_flight(run: Training, stage: int = 0, last: bool = False, done: int = 0) -> int:
    """Return from how many micro-batches a rank's first virtual stage keeps activations at most; with `last`, its last
    virtual stage. `done` is that of `passes_in_flight`.

    Warm-up takes pp micro-batches through a rank's first stage, then as many through its second, and so on.

    >>> micro_batches_in_flight(Training(pp=4, accumulation=8, virtual_stages=2))
    7
    """
    passes, of_group = passes_in_flight(run, stage, done), run.pp * run.virtual_stages
    if run.virtual_stages == 1:
        return passes
    groups, more = divmod(passes, of_group)
    in_group = max(0, more - (of_group - run.pp)) if last else min(more, run.pp)
    return min(groups * run.pp + in_group, run.accumulation)


def _of_chunk(share: Share, chunk: int, first_chunk: int) -> Share:
    """Return the share of a rank whose virtual stage `chunk` runs. Only the last virtual stage has the head, and only
    the first has the embedding. Those from `first_chunk` on have done a backward pass."""
    first, last = share.first and chunk == 0, share.last and chunk == share.run.virtual_stages - 1
    return replace(share, first=first, last=last, chunk=chunk, first_chunk_in_backward=first_chunk,
                   backward_passes_done=int(first_chunk <= chunk))  # fmt: skip


def _outside_in_flight(share: Share, waiting: int) -> int:
    """Return the bytes that all passes in flight save outside the blocks. A rank's first virtual stage may have the
    embedding and its last one the head. `waiting` is what one loss keeps until its backward pass begins."""
    run, stage, done = share.run, share.stage, share.backward_passes_done
    if share.chunk is not None:
        flying = chunks_in_flight(run, stage, chunks_of(share.spec, run, stage), share.chunk,
                                  share.first_chunk_in_backward)  # fmt: skip
        between = outer_activations(replace(share, first=False, last=False))
        first = outer_activations(replace(share, first=stage == 0, last=False))
        last = outer_activations(replace(share, first=False, last=stage == run.pp - 1))
        waits = waiting * max(0, flying[-1] - 1)
        return first * flying[0] + between * sum(flying[1:-1]) + last * flying[-1] + waits
    ending = micro_batches_in_flight(run, stage, True, done)
    waits = waiting * (ending - 1) if share.last else 0
    if run.virtual_stages == 1:
        return outer_activations(share) * ending + waits
    middle, passes = replace(share, first=False, last=False), passes_in_flight(run, stage, done)
    ends = micro_batches_in_flight(run, stage, done=done) if share.first else ending if share.last else 0
    return outer_activations(share) * ends + outer_activations(middle) * (passes - ends) + waits
