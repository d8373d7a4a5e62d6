"""The moments of a step of DeepSpeed's engine: flat buffers, buckets that gradients are reduced in, and the update.

Blocks, logits and temporaries are transformers', as in moments.py. Sources are files of deepspeed/runtime (0.19.8).
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from ...specs.model import ModelSpec
from ...specs.run import Training
from ...specs.stacks import DeepSpeed
from .moments import Moment, StepMemory
from .share import Share

HALF, FP32, FP64 = 2, 4, 8  # bytes
ALLREDUCE = 500_000_000  # elements that stage 0 reduces at a time: engine.py, MEMORY_OPT_ALLREDUCE_SIZE


class DeepSpeedMemory(StepMemory):
    """The bytes on one rank that the moments of DeepSpeed's step are sums of."""

    def __init__(self, share: Share) -> None:
        super().__init__(share)
        spec, run = share.spec, share.run
        self.stack, self.stage = _options(run), run.zero
        self.sizes = sizes = tensors(spec)
        self.parameters, self.largest = sum(sizes), max(sizes)
        self.part = -(-self.parameters // run.dp) if self.stage else self.parameters  # elements that this rank updates
        # Rank 0 updates the first ones. Tensors that it has a piece of it keeps whole until then.
        self.owned = next(whole for whole in accumulate(sizes) if whole >= self.part)
        self.widest = min(self.part, max(self._of_part(sizes)))
        self.held = HALF * self.owned
        self.accumulated = self.held if run.accumulation > 1 else 0
        self.resident["other"] = 0
        if self.stage == 3:
            kept = sum(size for size in sizes if size <= self.stack.stage3_param_persistence_threshold)
            self.resident["weights"] = HALF * (sum(-(-size // run.dp) for size in sizes) + kept)
            self.resident["gradients"] = HALF * self.part
            self.held = 0
        buckets = 1 + bool(self.stack.overlap_comm)
        self.bucket = HALF * self.stack.reduce_bucket_size * buckets if self.stage and self.stack.contiguous_gradients else 0
        if self.stage == 3:
            self.resident["other"], self.bucket = HALF * self.stack.reduce_bucket_size, 0

    def _of_part(self, sizes: list[int]) -> list[int]:
        return [size for size, whole in zip(sizes, accumulate(sizes), strict=True) if whole - size < self.part]

    def moments(self) -> list[Moment]:
        """Return the moments of one steady step, in order."""
        loaded = {**self.resident, "optimizer": FP32 * self.part, "workspace": 0}
        return [
            Moment("load", "the engine made", loaded),
            *self._forward(),
            *self._backward(),
            *(self._flat_update() if self.stage == 0 else self._update()),
        ]

    def _backward(self) -> list[Moment]:
        if self.stage >= 2:
            return self._reduced_at_once()
        loss, head, *blocks = super()._backward()
        reduced = self._moment("backward", "gradients reduced", gradients=HALF * self.parameters, logits=self.loss.after,
                               other=self.bucket or HALF * min(self.parameters, ALLREDUCE))  # fmt: skip
        return [loss, head, *(self._with_bucket(each) for each in blocks), reduced]

    def _with_bucket(self, moment: Moment) -> Moment:
        return moment._replace(parts={**moment.parts, "other": moment.parts["other"] + self.bucket})

    def _reduced_at_once(self) -> list[Moment]:
        """Return the moments of backward at stages 2 and 3, whose hooks move each gradient into the bucket."""
        loss, head, first, last, embedding = super()._backward()
        table = HALF * self.sizes[0]
        waiting = self.accumulated + (table if self.share.spec.tied else 0)  # until the embedding's is added to it
        moments = [loss, head]
        if self.share.last:
            moments.append(self._moment("backward", "the head's gradient in the bucket", activations=self.activations,
                                        gradients=self.accumulated + table, logits=self.loss.after, other=self.bucket))
        working = self.between + self.backward.temporaries
        moments += [
            self._moment("backward", first.name, activations=first.parts["activations"], gradients=waiting,
                         logits=self.loss.after, other=self.bucket + working),
            *self._reductions(waiting),
            self._moment("backward", embedding.name, gradients=waiting + (2 if self.share.spec.tied else 1) * table,
                         logits=self.loss.after, other=self.bucket),
        ]
        return moments

    def _reductions(self, waiting: int) -> list[Moment]:
        """Return the moments at which the bucket is full, or backward over: what is in it, copied."""
        found = []
        for each in reductions(self.sizes, self.stack.reduce_bucket_size, self.part):
            left = max(0, len(self.sizes) - each.tensors - 1) * self.layers // len(self.sizes)
            activations = self.block * (left + 1) + self.recomputed if each.next else 0
            owned = self.held if each.owned else 0
            found.append(self._moment("backward", "a bucket reduced", activations=activations, logits=self.loss.after,
                                      gradients=(waiting if each.next else self.accumulated) + owned + HALF * (each.next + each.alone),
                                      other=self.bucket + HALF * each.copied))
        return found

    def _flat_update(self) -> list[Moment]:
        """fp16/fused_optimizer.py: each gradient is cast, and all casts are flattened."""
        return [self._moment("optimizer", "the update", gradients=HALF * self.parameters, logits=self.loss.after,
                             other=2 * FP32 * self.parameters)]  # fmt: skip

    def _update(self) -> list[Moment]:
        """zero/stage_1_and_2.py, step: the norm is of each gradient in double precision; what this rank updates is
        flattened, and cast."""
        return [
            self._moment("optimizer", "the norm", gradients=HALF * self.owned, logits=self.loss.after,
                         other=FP64 * self.widest),
            self._moment("optimizer", "the update", gradients=HALF * self.owned, logits=self.loss.after,
                         other=(HALF + FP32) * self.part),
        ]  # fmt: skip


def tensors(spec: ModelSpec) -> list[int]:
    """Return the elements of each parameter of transformers' model, in the order of its parameters()."""
    by = spec.parameters_by_component
    block = [linear.inputs * linear.outputs for linear in spec.block_linears]
    small = sum(by[part] for part in ("attention", "mlp", "norms")) - spec.layers * sum(block)
    block.append(small // spec.layers)
    around = [by["embedding"], by["positions"]], [by["head"]]
    return [size for size in (*around[0], *(block * spec.layers), *around[1]) if size]


class Reduction(NamedTuple):
    """A reduction of gradients: after how many of them in backward, elements of what is copied for it, of the gradient
    that waits for the bucket, and of one that is too large for it; whether a gradient of this rank's was reduced before
    it."""

    tensors: int
    copied: int
    next: int
    alone: int
    owned: bool


def reductions(sizes: list[int], bucket: int, part: int) -> list[Reduction]:
    """Return the reductions of stage 2, in backward's order, of tensors of these sizes in the model's order
    (zero/stage_1_and_2.py, reduce_independent_p_g_buckets_and_remove_grads). Only what belongs to several ranks is
    copied (average_tensor)."""
    found: list[Reduction] = []
    inside: list[tuple[int, int]] = []  # begin and end in the flat buffer of what is in the bucket
    elements, owned = 0, False
    ends = list(accumulate(sizes))
    backward = list(zip(reversed(sizes), reversed(ends), strict=True))
    for number, (size, end) in enumerate([*backward, (0, 0)]):
        if inside and (elements + size > bucket or not size):
            ranks = {at // part for begin, stop in inside for at in (begin, stop - 1)}
            alone = elements if elements > bucket else 0
            found.append(Reduction(number, elements if len(ranks) > 1 else 0, size, alone, owned))
            owned = owned or 0 in ranks
            inside, elements = [], 0
        inside.append((end - size, end))
        elements += size
    return found


def _options(run: Training) -> DeepSpeed:
    assert isinstance(run.stack, DeepSpeed)
    return run.stack
