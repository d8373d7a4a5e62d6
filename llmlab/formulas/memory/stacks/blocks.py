"""Which description is that of a run's block."""

from __future__ import annotations

from ....specs.run import stack_of
from ..share import Share
from . import litgpt, megatron, nanotron, torchtitan, torchtune
from .described import Block

DESCRIPTIONS = {
    "litgpt": litgpt.block, "megatron": megatron.block, "nanotron": nanotron.block, "torchtitan": torchtitan.block,
    "torchtune": torchtune.block,
}  # fmt: skip


def block_of(share: Share) -> Block | None:
    """Return the description of the run's stack; None for Hugging Face's classes, which DeepSpeed trains too, and whose
    description is code."""
    described = DESCRIPTIONS.get(stack_of(share.run).name)
    return described(share) if described else None
