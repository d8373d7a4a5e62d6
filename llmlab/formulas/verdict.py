"""Whether a run fits, from the sum of its tensors.

A formula knows the tensors. The allocator takes more: blocks are rounded, segments have holes, and part of its memory
cannot be given back when memory runs short. How much more depends on every request; `HOLES` bounds it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ..base.terms import Outcome
from ..hardware.gpu import GPU, gpus
from ..specs.model import ModelSpec
from ..specs.run import Run, stack_of

# The least room in which a step runs, over the peak that the formula says. In 26 steps and generations of 5 to 76 GiB
# (124M to 8B parameters, every precision, adapters, NF4 loaded in order and by threads, both attentions, with and
# without checkpointing) whose requests were asked again of the simulated allocator in less and less room:
# 1.006 to 1.224, the median 1.05. So what is larger than the card by the formula is larger than it, and what is less by
# a fifth fits. Half as much again may be reserved where there is room for it (1.49, eager attention); that goes back.
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


def holes(run: Run) -> float:
    """Return the bound of what a step reserves, over its tensors: `HOLES`, or Megatron-LM's own."""
    stack = stack_of(run)
    if not stack.transformer_engine or run.attention == "eager":
        return HOLES
    return MEGATRON_EXPANDABLE_HOLES if stack.expandable_segments else MEGATRON_HOLES


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
