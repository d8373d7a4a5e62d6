"""Whether a run fits, from the sum of its tensors.

A formula knows the tensors. The allocator needs more: it rounds blocks up, its segments have holes, and it cannot
return all of its cached memory when memory runs short. How much more depends on every request, so a verdict uses what
simulated steps of the same kind needed.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import NamedTuple

from ..base.terms import Outcome
from ..hardware.gpu import GPU, gpus
from ..specs.check import has_formulas
from ..specs.model import ModelSpec
from ..specs.run import Run, Training, stack_of
from ..specs.stages import layers_of
from .memory.moments import Moment
from .memory.share import bytes_of
from .memory.states import states


class Kind(NamedTuple):
    """A kind of steps that need similar room. `holes`: 95 % of simulated steps of this kind run in this many times the
    bytes of the tensors at their peak."""

    what: str
    holes: float


# From 994 draws (benchmarks/memory/room_draws.csv, 2026-11-29), 130 of them on several GPUs. Each was simulated once,
# and its requests were then sent to allocators with less and less room. benchmarks/results/room.md shows the
# percentiles, and how well each half predicts the other.
#
# The allocator returns a segment only if no block in it is in use. The largest blocks of a step are usually the logits.
# When they are freed, their segments serve smaller requests, and one block that stays keeps a segment, so the next
# step's logits need a new one. Two facts show that these holes are the cause. Three draws with checkpointing need 1.23
# to 1.28 times what they allocate, but in their first step only 1.02 times. And 95 % of the draws need at most 1.04
# times what they allocate if segments are expandable.
#
# Holes are small if logits are small, or are freed before the peak, as they are if it is in the optimizer's update. Any
# limit between 1 and 5 % of the peak gives about the same percentiles.
SMALL = 0.02
NO_LOGITS = Kind("small logits or none at the peak", 1.082)
# Without checkpointing, activations stay, and fill the segments of the last step's logits. With it, a block's
# activations are freed at once, except for its checkpoint, which keeps the segment. Selective checkpointing frees less.
KEPT = Kind("no checkpointing", 1.125)
SELECTIVE = Kind("selective checkpointing", 1.186)
RECOMPUTED = Kind("full checkpointing", 1.252)
# Each token of generation concatenates the cache and a new key and value, so two sizes of the cache alternate. Part of
# this factor is the error of the formula, at most 1.09 in 45 of the 46 draws. Generation with quantized weights or
# several GPUs was not drawn, and has the same factor.
GENERATION = Kind("generation", 1.285)
DRAWN = (NO_LOGITS, KEPT, SELECTIVE, RECOMPUTED, GENERATION)
# Runs that were not drawn: other stacks, pipeline, context and expert parallelism, compiled steps, families without
# formulas, and less common options. 98 % of all draws need no more than this.
OTHER = Kind("other runs", 1.25)
# Megatron-LM allocates weights and gradients once, in large buffers, and all its micro-batches request the same blocks.
# In public logs of dense models (megatron-core with Transformer Engine), ranks with enough memory reserved 1.007 to
# 1.130 times their peak, with a median of 1.03 (benchmarks/memory/room.py). The logs do not include its older layers,
# or attention that stores its probabilities.
MEGATRON = Kind("Megatron-LM", 1.15)
# Expandable segments have next to no holes (benchmarks/results/room.md). The formula is within 2.6 % of all 22 peaks
# that Megatron-LM's tests print (megatron_golden.py).
MEGATRON_EXPANDABLE = Kind("Megatron-LM with expandable segments", 1.06)
# DeepSpeed's pipeline and ZeRO around Megatron-LM's model have buffers that are not described. BigScience published the
# memory of 13 such runs (train/tr11-176B-ml and experiments/tr3m-1B3.md; V100s and A100s). Without context and NCCL,
# they used 1.07 to 1.86 times the estimated peak, with a median of 1.47.
MEGATRON_DEEPSPEED = Kind("Megatron-DeepSpeed", 1.9)
# A family without formulas is counted as a plain transformer of the same sizes. We simulated 249 families with 2 × 128
# tokens, and with two layers where their config allows it. The simulated peak is within 2 % of the formula for half of
# them, and within this factor for 9 out of 10 (2026-11-29, transformers 5.23).
PLAIN_MEMORY = 1.3


class Verdict(NamedTuple):
    """Whether a run fits, and the least and the most bytes of the GPU that its process may need."""

    outcome: Outcome
    least: int
    most: int


# The fields of Training that benchmarks/memory/room_draws.py varies, and their values that it leaves out.
VARIED = {"micro_batch", "seq_len", "precision", "optimizer", "checkpointing", "attention", "accumulation", "lora",
          "quantization", "kernels", "dp", "zero", "tp", "sequence_parallel"}  # fmt: skip
LEFT_OUT = {"muon", "gptq", "liger"}


def kind(spec: ModelSpec, run: Run, peak: Moment) -> Kind:
    """Return the kind of a run with its tensors at `peak`."""
    stack = stack_of(run)
    if stack.deepspeed:
        return MEGATRON_DEEPSPEED
    if stack.transformer_engine and run.attention != "eager":
        return MEGATRON_EXPANDABLE if stack.expandable_segments else MEGATRON
    if not isinstance(run, Training):
        return GENERATION
    if stack.copies_gathered:
        return Kind(f"{stack.name}'s runs", OTHER.holes + reserved_beside(spec, run) / peak.total)
    if not has_formulas(spec, run) or not _was_drawn(run):
        return OTHER
    logits = 4 * run.tokens * spec.vocab // run.tp  # bytes in fp32, as the loss computes
    if peak.phase == "optimizer" or logits < SMALL * peak.total:
        return NO_LOGITS
    return {None: KEPT, "selective": SELECTIVE, "full": RECOMPUTED}[run.checkpointing]


def reserved_beside(spec: ModelSpec, run: Training) -> int:
    """Return the bytes that nanotron's allocator keeps in blocks of their own, where no other tensor of a step can be.

    Under tensor parallelism these are two whole inputs per layer, which the stream of communication uses too
    (record_stream), and with ZeRO-1 one flat copy of the weights that are gathered after the update. With both, the
    reserved bytes of 875 jobs are within 8 % at the median, and without 16 % too low (benchmarks/time/ultrascale.py).
    """
    weights = states(spec, run).weights if run.zero == 1 else 0
    inputs = 2 * run.tokens * spec.hidden * bytes_of(run).compute * layers_of(spec, run)[0] if run.tp > 1 else 0
    return inputs + weights


def _was_drawn(run: Training) -> bool:
    """Whether benchmarks/memory/room_draws.py draws runs like this. lab.simulate has no ZeRO of quantized weights."""
    plain = all(getattr(run, field.name) == field.default for field in fields(run) if field.name not in VARIED)
    left_out = LEFT_OUT & {run.optimizer, run.quantization, run.kernels}
    return plain and not left_out and not (run.zero and run.quantization)


def plainness(spec: ModelSpec, run: Run) -> float:
    """Return the factor by which the true peak may be above or below the estimate: 1 for families with formulas."""
    return 1.0 if has_formulas(spec, run) else PLAIN_MEMORY


def verdict(peak: int, gpu: GPU, ranks: int = 1, holes: float = OTHER.holes, off: float = 1.0) -> Verdict:
    """Return whether a step whose tensors need `peak` bytes fits `gpu`, with `ranks` processes in the run.

    The process needs at least `peak / off` and at most `holes * off * peak` bytes for the allocator, and in both cases
    the CUDA context and the buffers of NCCL. If these two are unknown for this GPU, the lower limit counts them as 0,
    and the upper limit as the largest that are known of any GPU. The outcome is "fits" if the upper limit fits, "out of
    memory" if the lower limit does not, and otherwise "unknown".
    """
    least = int(peak / off) + gpu.memory - gpu.room(ranks)
    most = round(holes * off * peak) + gpu.memory - fully_used(gpu).room(ranks)
    outcome: Outcome = "fits" if most <= gpu.memory else "out of memory" if least > gpu.memory else "unknown"
    return Verdict(outcome, least, most)


def fully_used(gpu: GPU) -> GPU:
    """Return `gpu` with the largest CUDA context and NCCL buffers of any GPU where its own are unknown."""
    context = largest_context() if gpu.context is None else gpu.context
    return replace(gpu, context=context, nccl=_largest_nccl() if gpu.nccl is None else gpu.nccl)


@cache
def largest_context() -> int:
    """Return the largest CUDA context that is known of any GPU, in bytes."""
    return max(gpu.context or 0 for gpu in gpus())


@cache
def _largest_nccl() -> int:
    """Return the largest buffers of NCCL that are known of any GPU, in bytes."""
    return max(gpu.nccl or 0 for gpu in gpus())
