"""The description of a run's block, by stack."""

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
    """Return the description of the block of the run's stack. It is None for Hugging Face's classes, which DeepSpeed
    trains, too, because code describes these (activations.py)."""
    described = DESCRIPTIONS.get(stack_of(share.run).name)
    return described(share) if described else None
