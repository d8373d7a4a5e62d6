"""Whether a run fits, from the sum of its tensors.

A formula knows the tensors. The allocator needs more: it rounds blocks up, its segments have holes, and it cannot
return all of its cached memory when memory runs short. How much more depends on every request, so a verdict uses what
simulated steps of the same kind needed.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ..base.terms import Outcome
from ..hardware.gpu import GPU, gpus
from ..specs.model import ModelSpec
from ..specs.run import Run, Training, stack_of
from ..specs.stacks import Megatron
from .memory.moments import Moment


class Kind(NamedTuple):
    """Steps that need about equally much room. `holes`: the least room in which a step runs, over the sum of its
    tensors at the peak, is at most this in 95 % of `runs` simulated steps."""

    what: str
    holes: float
    runs: int


# From 864 draws (benchmarks/room_draws.csv, 2026-11-29): presets on one GPU, each step simulated once, and its requests
# then sent to allocators with less and less room. Half of the draws need no more than 1.043 times their estimate.
# Percentiles of one half of a kind's draws cover 93 to 97 % of the other half (benchmarks/results/room.md).
UPDATE = Kind("the peak is in the update", 1.073, 120)
SMALL_LOGITS = Kind("small logits", 1.083, 243)
KEPT = Kind("no checkpointing", 1.131, 102)
KEPT_ADAPTERS = Kind("no checkpointing, LoRA", 1.099, 61)
SELECTIVE = Kind("selective checkpointing", 1.161, 86)
RECOMPUTED = Kind("full checkpointing", 1.265, 102)
RECOMPUTED_ADAPTERS = Kind("full checkpointing, LoRA", 1.244, 104)
KINDS = (UPDATE, SMALL_LOGITS, KEPT, KEPT_ADAPTERS, SELECTIVE, RECOMPUTED, RECOMPUTED_ADAPTERS)
# Logits are small if their fp32 copy is less than this share of the peak. Limit and kinds were chosen with the draws
# and the published steps in view.
SMALL = 0.02
# For everything else: several GPUs, other stacks, compiled steps and families without formulas were not drawn. Of 46
# generations 95 % need at most 1.285, but part of that is the error of their formula. The bound is from 26 steps that
# were chosen by hand and need 1.006 to 1.224.
HOLES = 1.25
# Of Megatron-LM's steps, whose weights and gradients lie in buffers that are made once, and whose micro-batches all ask
# for the same blocks: in public logs of dense models, megatron-core with Transformer Engine, 1.007 to 1.130 times the
# peak was reserved, the median 1.03, where nothing was short (benchmarks/room.py). Its older layers, and attention with
# scores in memory, are not among them.
MEGATRON_HOLES = 1.15
# Where segments expand there are next to none: the training steps of benchmarks/room.py need 1.000 to 1.032 times what
# they allocate. Of 22 peaks that Megatron-LM's tests print the formula misses at most 2.6 % (megatron_golden.py).
MEGATRON_EXPANDABLE_HOLES = 1.06
# Of a family that is counted as a plain transformer of the same sizes: the peak of 249 families, simulated with a batch
# of 2 × 128 tokens and two layers where their config allows it, is within 2 % of the formula's for half of them and
# within this factor for 9 in 10 (2026-11-29, transformers 5.23).
PLAIN_MEMORY = 1.3


class Verdict(NamedTuple):
    """Whether a peak fits, and between what the process then takes, in bytes of the card."""

    outcome: Outcome
    least: int
    most: int


def holes(spec: ModelSpec, run: Run, peak: Moment) -> float:
    """Return how much room a run needs over its tensors at `peak`: that of its kind, Megatron-LM's, or `HOLES`."""
    stack = stack_of(run)
    if isinstance(stack, Megatron) and stack.transformer_engine and run.attention != "eager":
        return MEGATRON_EXPANDABLE_HOLES if stack.expandable_segments else MEGATRON_HOLES
    found = kind(spec, run, peak)
    return found.holes if found else HOLES


def kind(spec: ModelSpec, run: Run, peak: Moment) -> Kind | None:
    """Return the kind of a step with its tensors at `peak`; None for runs that no kind describes."""
    if not isinstance(run, Training) or not _was_drawn(spec, run):
        return None
    if peak.phase == "optimizer":
        return UPDATE
    logits = 4 * run.micro_batch * run.seq_len * spec.vocab  # bytes in fp32, as the loss computes
    if logits < SMALL * peak.total:
        return SMALL_LOGITS
    if run.checkpointing == "selective":
        return SELECTIVE
    if run.checkpointing == "full":
        return RECOMPUTED_ADAPTERS if run.lora else RECOMPUTED
    return KEPT_ADAPTERS if run.lora else KEPT


def _was_drawn(spec: ModelSpec, run: Training) -> bool:
    """Whether benchmarks/room_draws.py draws runs like this one."""
    elsewhere = stack_of(run) or run.world_size > 1 or run.compile or run.offload
    other = run.optimizer == "muon" or run.quantization == "gptq" or run.kernels == "liger"
    return spec.has_formulas and not elsewhere and not other


def plainness(spec: ModelSpec) -> float:
    """Return the factor by which the peak of `spec` may be off in either direction: 1 for families with formulas."""
    return 1.0 if spec.has_formulas else PLAIN_MEMORY


def verdict(peak: int, card: GPU, ranks: int = 1, holes: float = HOLES, off: float = 1.0) -> Verdict:
    """Return whether tensors of `peak` bytes fit `card` in a process of `ranks`: between both limits it is unknown. The
    peak may be `off` by that factor.

    Where this card's memory outside of the allocator is not known, it counts from nothing up to the most that is
    known of any card.
    """
    context = largest_context() if card.context is None else card.context
    nccl = 0 if ranks == 1 else _largest_nccl() if card.nccl is None else card.nccl
    least = int(peak / off) + card.memory - card.room(ranks)
    most = round(holes * off * peak) + context + nccl
    outcome: Outcome = "fits" if most <= card.memory else "out of memory" if least > card.memory else "unknown"
    return Verdict(outcome, least, most)


@cache
def largest_context() -> int:
    """Return the largest CUDA context that is known of any GPU, in bytes."""
    return max(card.context or 0 for card in gpus())


@cache
def _largest_nccl() -> int:
    """Return the largest buffers of NCCL that are known of any GPU, in bytes."""
    return max(card.nccl or 0 for card in gpus())
