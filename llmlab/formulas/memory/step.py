"""What a rank's step takes, as its stack runs it."""

from __future__ import annotations

from ...specs.run import stack_of
from .deepspeed_step import DeepSpeedMemory
from .megatron_step import MegatronMemory
from .moments import StepMemory
from .share import Share

OWN: dict[str, type[StepMemory] | type[MegatronMemory]] = {"deepspeed": DeepSpeedMemory, "megatron": MegatronMemory}


def step_memory(share: Share) -> StepMemory | MegatronMemory:
    """Return the bytes and moments of a rank's step: DeepSpeed has buffers of its own, Megatron-LM a schedule too."""
    return OWN.get(stack_of(share.run).name, StepMemory)(share)
