"""What a rank's step takes, as its stack runs it."""

from __future__ import annotations

from ...specs.run import Training
from ...specs.stacks import Megatron
from .megatron_step import MegatronMemory
from .moments import StepMemory
from .share import Share


def step_memory(share: Share) -> StepMemory | MegatronMemory:
    """Return the bytes and moments of a rank's step: Megatron-LM has a schedule and buffers of its own."""
    megatron = isinstance(share.run, Training) and isinstance(share.run.stack, Megatron)
    return MegatronMemory(share) if megatron else StepMemory(share)
