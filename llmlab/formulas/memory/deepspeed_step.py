"""The moments of a step of DeepSpeed's engine: flat buffers, buckets in which gradients are reduced, and the update.

Blocks, logits and temporaries are those of transformers, as in moments.py. Sources are files of deepspeed/runtime
(0.19.8).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

from ...specs.model import ModelSpec
from ...specs.stacks import DeepSpeed
from .moments import Moment, StepMemory
from .share import Share
from .states import block_parameters

HALF, FP32, FP64 = 2, 4, 8  # bytes
ALLREDUCE = 500_000_000  # elements that stage 0 reduces at a time: engine.py, MEMORY_OPT_ALLREDUCE_SIZE
NORMED = 250_000_000  # elements that stage 3 casts at a time for a norm: zero/stage3.py, _constant_buffered_norm2


class DeepSpeedMemory(StepMemory):
    """The sizes on one rank from which the moments of DeepSpeed's step are summed."""

    def __init__(self, share: Share) -> None:
        super().__init__(_as_if_kept(share))
        spec, run = share.spec, share.run
        self.stack, self.stage = DeepSpeed.of(run), run.zero
        self.sizes = sizes = tensors(spec)
        self.parameters, self.largest = sum(sizes), max(sizes)
        self.part = -(-self.parameters // run.dp) if self.stage else self.parameters  # elements that this rank updates
        # Rank 0 updates the first elements. Until the update it stores whole gradients, even if it updates only a piece
        # of the last one.
        self.owned = next(whole for whole in accumulate(sizes) if whole >= self.part)
        self.widest = min(self.part, max(self._of_part(sizes)))
        # The fp64 copy of a gradient on its way to the host, for its norm (set_norm_for_param_grad_in_gpu).
        self.normed = FP64 * self.widest if run.offload and self.stage < 3 else 0
        self.slice = self.part if self.stage < 3 else 0
        self.width = FP32 if self.stack.grad_accum_dtype == "fp32" else HALF  # per element of sums of gradients
        # With bf16, runtime/bf16_optimizer.py sums all gradients in a flat buffer.
        self.flat_sums = self.stage == 1 and self.width == FP32 and run.compute_dtype == "bf16"
        self.reduced_bytes = FP32 * self.part if self.width == FP32 else HALF * self.owned  # in stages 1 and 2
        self.accumulated = self.reduced_bytes if run.accumulation > 1 and self.stage == 2 else 0
        self.live = 0  # gathered weights between forward and backward
        bucket = self.stack.reduce_bucket_size if self.stage and self.stack.contiguous_gradients else 0
        bucket *= self.width if self.stage == 1 else HALF
        self.bucket = 0 if self.flat_sums else bucket * (1 + bool(self.stack.overlap_comm))
        self.resident["other"] = 0
        if self.flat_sums:
            self.resident["gradients"], self.reduced_bytes = FP32 * self.parameters, 0
        if self.stage == 3:
            persistent = sum(size for size in sizes if size <= self.stack.stage3_param_persistence_threshold)
            self.part = sum(-(-size // run.dp) for size in sizes)  # each tensor is sharded
            self.widest = -(-self.largest // run.dp)
            self.reduced_bytes, self.bucket = 0, 0
            weights = HALF * (self.part + persistent)
            self.resident.update(weights=weights, gradients=self.width * self.part, other=bucket)
            # Gathered weights stay until they are used if prefetching has reached them, or if they are used again soon.
            # Therefore weights accumulate at the end of the forward pass (zero/partitioned_param_coordinator.py,
            # __params_to_release). Between a block's forward and backward pass lies twice its distance to the head. The
            # head's own weight is gathered whatever the limit is (fetch_sub_module limits only prefetching).
            most = max(self.stack.stage3_max_live_parameters, self.stack.stage3_max_reuse_distance // 2, sizes[0])
            # On one GPU, a weight is its own shard unless it is copied from the host (partition_parameters.py,
            # NoGatherHandle).
            gathers = run.dp > 1 or run.offload == "optimizer+parameters"
            self.live = HALF * min(self.parameters, most) if gathers else 0
        self.sent = bool(run.offload) and self.stage == 3  # whether reduced gradients go to the host immediately
        if run.offload:
            self.reduced_bytes = self.accumulated = self.part = self.widest = 0  # the host updates
            self.resident.update(optimizer=0, gradients=0)
            if self.stage < 3:
                self.resident["other"] = HALF * self.largest  # the buffer for sending gradients
            elif run.offload == "optimizer+parameters":
                self.resident["weights"] = 0

    def _of_part(self, sizes: list[int]) -> list[int]:
        return [size for size, whole in zip(sizes, accumulate(sizes), strict=True) if whole - size < self.part]

    def moments(self) -> list[Moment]:
        """Return the moments of one steady step, in order."""
        loaded = {**self.resident, "optimizer": FP32 * self.part, "workspace": 0}
        summed = self._summed() - self.gradients.accumulated
        # At stage 1 the bucket stays until gradients are reduced.
        waiting = self.bucket if self.stage == 1 and self.share.run.accumulation > 1 else 0
        return [
            Moment("load", "weights flattened", {"weights": self._flattened()}),
            Moment("load", "the engine made", loaded),
            *(
                self._adding(moment, weights=self.live, gradients=summed, other=waiting)
                for moment in self._forward()
            ),
            *self._gathering(),
            *self._backward(),
            *(self._flat_update() if self.stage == 0 else self._update()),
        ]

    def _flattened(self) -> int:
        """Return the bytes of weights while they are copied into one flat tensor: on the GPU if it has room for both,
        otherwise on the host (zero/stage_1_and_2.py, flatten_on_accelerator)."""
        if self.stage == 3:
            return 0
        gpu, copy = self.share.gpu, HALF * self.parameters
        return copy if gpu and 2 * copy > gpu.room(self.share.run.dp) else 2 * copy

    def _summed(self) -> int:
        """Return the bytes of gradients that exist when a micro-batch begins."""
        if self.stage >= 2 or self.flat_sums:
            return self.resident["gradients"] + self.accumulated
        return self.gradients.accumulated

    def _gathering(self) -> list[Moment]:
        """Return the moment at which weights that were gathered in one buffer are copied out of it into tensors
        (zero/partition_parameters.py, AllGatherCoalescedHandle.wait)."""
        if not self.live:
            return []
        copied = HALF * min(self.parameters, self.stack.stage3_prefetch_bucket_size)
        return [self._moment("forward", "weights gathered", activations=self.activations - self.outside,
                             gradients=self._summed(),
                             weights=self.resident["weights"] + self.live + copied)]  # fmt: skip

    def _backward(self) -> list[Moment]:
        if self.stage >= 2 or self.stack.immediate_grad_update:
            return self._reduced_at_once()
        loss, head, *blocks = super()._backward()
        piled = HALF * self.parameters
        copied = HALF * min(self.parameters, ALLREDUCE)
        if self.stage:  # gradients go into the bucket, which is copied when it is full
            copied = self.bucket + max(0, self.normed - HALF * min(self.parameters, self.stack.reduce_bucket_size))
            # The embedding's gradient is reduced first. If it is too large for the bucket and belongs to several ranks,
            # it is copied while all others are still allocated (average_tensor).
            alone = self.sizes[0] > max(self.stack.reduce_bucket_size, self.part)
            copied += HALF * self.sizes[0] * (alone and not self.flat_sums)
        if self.flat_sums:
            loss, head = (
                self._adding(moment, gradients=self._summed() - self.gradients.accumulated) for moment in (loss, head)
            )
            blocks = [self._adding(moment, gradients=self.resident["gradients"]) for moment in blocks]
            piled, copied = piled + self.resident["gradients"], HALF * self.parameters
        reduced = self._moment("backward", "gradients reduced", gradients=piled, logits=self.loss.after, other=copied)
        if self.share.run.accumulation > 1:
            loss, head = (self._adding(moment, other=self.bucket) for moment in (loss, head))
        return [loss, head, *(self._adding(moment, other=self.bucket) for moment in blocks), reduced]

    @staticmethod
    def _adding(moment: Moment, **parts: int) -> Moment:
        return moment._replace(parts={name: size + parts.get(name, 0) for name, size in moment.parts.items()})

    def _reduced_at_once(self) -> list[Moment]:
        """Return the moments of the backward pass at stages 2 and 3, and with immediate_grad_update, where hooks move
        each gradient into the bucket."""
        loss, head, first, _, embedding = super()._backward()
        spec, after = self.share.spec, self.loss.after
        table = HALF * self.sizes[0]
        gradients = self._summed()
        waiting = gradients + (table if spec.tied else 0)  # a tied head's gradient, until the embedding's is added
        # After the head, a tied weight stays for the embedding's backward pass if that is within the reuse distance.
        near = spec.tied and self.parameters - self.sizes[0] < self.stack.stage3_max_reuse_distance
        # Then each module's hook prefetches whole tensors until as many are gathered as the limit allows: the model and
        # its norm do so twice, and a block more often than it has weights (_fetch_sub_module_impl). No weight of a
        # recomputed block is freed before its backward pass, because prefetching has already reached it
        # (__params_to_release).
        block = HALF * block_parameters(spec) if self.live and self.share.run.checkpointing else 0
        gathered = min(max(self.live, block), HALF * self.parameters - (0 if spec.tied else table))
        left = max(0, self.live - (0 if near else table))
        left = min(gathered, left + 2 * HALF * max(self.stack.stage3_prefetch_bucket_size, *self.sizes[1:-1]))
        added = 0 if spec.tied or not self.flat_sums else FP32 * self.sizes[0]  # the table's gradient, cast
        moments = [
            self._adding(loss, weights=self.live, gradients=gradients - loss.parts["gradients"]),
            self._adding(head, weights=self.live, gradients=gradients - loss.parts["gradients"]),
            self._moment("backward", "the head's gradient in the bucket", gradients=gradients + table, logits=after,
                         activations=self.activations, weights=self.resident["weights"] + self.live,
                         other=self.bucket + added),
            self._moment("backward", first.name, gradients=waiting, logits=after,
                         activations=first.parts["activations"], weights=self.resident["weights"] + gathered,
                         other=self.bucket + self.between + self.backward.temporaries),
        ]  # fmt: skip
        if self.flat_sums:
            reduced = [self._moment("backward", "gradients reduced", gradients=gradients, logits=after,
                                    other=HALF * self.parameters)]  # fmt: skip
        else:
            reduced = self._reductions(waiting, left, gathered)
        # Stage 3 gathers the embedding's weight together with the last block's in one buffer, and copies it out of
        # that.
        there = table if self.live else 0
        weights = self.resident["weights"] + there
        if there and not near:
            moments.append(self._moment("backward", "the embedding's weight gathered", gradients=waiting, logits=after,
                                      activations=self.block + self.recomputed, weights=weights + there,
                                      other=self.bucket))  # fmt: skip
        # At stage 2, the sum of a tied weight's two gradients is a third tensor. Stage 3 adds in place.
        made = table * (2 if spec.tied and self.stage < 3 else 1)
        last = self._moment("backward", embedding.name, gradients=waiting + made, logits=after, weights=weights,
                            other=self.bucket + added)  # fmt: skip
        return [*moments, *reduced, last]

    def _reductions(self, waiting: int, left: int, gathered: int) -> list[Moment]:
        """Return the moments at which the gradients in the bucket are reduced, and copied if necessary, because it is
        full or the backward pass is over. `waiting`: bytes of gradients outside the bucket. `left`, `gathered`: bytes
        of gathered weights directly after the head, and later."""
        moments, sizes = [], self.sizes
        tied = HALF * sizes[0] if self.share.spec.tied else 0
        for reduction in reductions(sizes, self.stack.reduce_bucket_size, self.slice):
            to_come = len(sizes) - reduction.tensors
            blocks = 1 + max(0, to_come - 1) * self.layers // len(sizes)
            # If sums are in fp32, this rank's part exists before the reduction, and gradients are cast to be added.
            wide = self.width == FP32 and reduction.own and self.stage == 2
            owned, cast = reduction.owned or wide, FP32 * self.widest if wide else 0
            if self.width == FP32 and self.stage == 3:
                cast = FP32 * reduction.elements // self.share.run.dp
            weights = left if reduction.tensors < 2 else min(gathered, HALF * sum(sizes[:to_come]))
            if self.live and to_come < 2:  # the embedding's weight, which stays
                weights = HALF * sizes[0]
            moments.append(
                self._moment(
                    "backward", "a bucket reduced",
                    weights=self.resident["weights"] + weights,
                    activations=self.block * blocks + self.recomputed if to_come > 1 else 0,
                    # The last gradient is the sum of a tied weight's two, so the head's does not wait any more.
                    gradients=waiting - (tied if to_come < 2 else 0) + (self.reduced_bytes if owned else 0)
                    + HALF * (reduction.next + reduction.alone),
                    logits=self.loss.after,
                    other=self.bucket
                    + max(HALF * reduction.copied + cast + self._to_host(reduction.largest), self.normed),
                )
            )  # fmt: skip
        return moments

    def _to_host(self, elements: int) -> int:
        """Return the bytes that stage 3 allocates to send a gradient to the host: this rank's part on the GPU, and a
        copy of it, in fp64 for its norm or in fp32 (zero/stage3.py, partition_grads,
        _offload_grad_partition_at_boundary)."""
        if not self.sent:
            return 0
        part = -(-elements // self.share.run.dp)
        return self.width * part + max(FP64 * min(part, NORMED), FP32 * part * (self.width == HALF))

    def _flat_update(self) -> list[Moment]:
        """Return the update of fp16/fused_optimizer.py, which casts each gradient to fp32 and flattens all casts."""
        return [self._moment("optimizer", "the update", gradients=HALF * self.parameters, logits=self.loss.after,
                             other=2 * FP32 * self.parameters)]  # fmt: skip

    def _update(self) -> list[Moment]:
        """Return the update of zero/stage_1_and_2.py and zero/stage3.py (step). The norm of each gradient is computed
        in fp64. Then the gradients that this rank updates are flattened and cast."""
        moment = partial(self._moment, "optimizer", gradients=self.resident["gradients"] + self.reduced_bytes,
                         logits=self.loss.after)  # fmt: skip
        if self.flat_sums:
            half_gradients = 0 if self.stack.immediate_grad_update else HALF * self.parameters
            return [moment("the update", other=half_gradients)]
        part = min(self.part, self.stack.sub_group_size) if self.stage == 3 else self.part
        copied = HALF + FP32 if self.width == HALF else FP32 if self.stage == 3 else 0
        return [moment("the norm", other=FP64 * self.widest), moment("the update", other=copied * part)]


@lru_cache(maxsize=1024)
def tensors(spec: ModelSpec) -> list[int]:
    """Return the number of elements of each parameter of transformers' model, in the order of its parameters(). The
    list is cached, so callers must not change it."""
    by = spec.parameters_by_component
    block = [linear.inputs * linear.outputs for linear in spec.block_linears]
    small = sum(by[part] for part in ("attention", "mlp", "norms")) - spec.layers * sum(block)
    block.append(small // spec.layers)
    around = [by["embedding"], by["positions"]], [by["head"]]
    return [size for size in (*around[0], *(block * spec.layers), *around[1]) if size]


def _as_if_kept(share: Share) -> Share:
    """Return the share without offloading, for everything that offloading does not change: gradients accumulate as
    without it."""
    run = share.run
    if not run.offload:
        return share
    return replace(share, run=replace(run, offload=None, zero=run.zero if run.dp > 1 else 0))


class Reduction(NamedTuple):
    """A reduction of the gradients in a bucket.

    `tensors`: how many gradients the backward pass has computed before it. `elements`: how many are reduced. `largest`:
    those of the largest gradient. `copied`: how many are copied for the reduction. `next`: elements of the gradient
    that waits for the bucket. `alone`: elements of a gradient that is larger than the bucket. `owned`: whether a
    gradient of rank 0 has been reduced before. `own`: whether this reduction contains one.
    """

    tensors: int
    elements: int
    largest: int
    copied: int
    next: int
    alone: int
    owned: bool
    own: bool


def reductions(sizes: list[int], bucket: int, part: int) -> list[Reduction]:
    """Return the reductions of gradients in the order of the backward pass, for tensors of `sizes` elements in the
    order of the model (reduce_independent_p_g_buckets_and_remove_grads of zero/stage_1_and_2.py and zero/stage3.py).

    At stage 2, where a rank updates `part` elements, only a bucket that belongs to several ranks is copied
    (average_tensor). At stage 3, where `part` is 0, only a bucket with several tensors is copied
    (reduce_scatter_coalesced).
    """
    result: list[Reduction] = []
    inside: list[tuple[int, int]] = []  # of tensors in the bucket: begin and end in the flat buffer
    elements, owned = 0, False
    bounds = list(accumulate(sizes))
    backward = list(zip(reversed(sizes), reversed(bounds), strict=True))
    for number, (size, end) in enumerate([*backward, (0, 0)]):
        if inside and (elements + size > bucket or not size):
            ranks = {at // part for begin, stop in inside for at in (begin, stop - 1)} if part else set()
            alone = elements if elements > bucket else 0
            copied = len(ranks) > 1 if part else len(inside) > 1
            largest = max(stop - begin for begin, stop in inside)
            copies = elements if copied else 0
            result.append(Reduction(number, elements, largest, copies, size, alone, owned, 0 in ranks))
            owned = owned or 0 in ranks
            inside, elements = [], 0
        inside.append((end - size, end))
        elements += size
    return result
