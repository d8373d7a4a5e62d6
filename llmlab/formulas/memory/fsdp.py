"""What FSDP2 holds for a while beside its shards: units gathered whole, their gradients, and buffers.

A block is a unit, and what is outside of blocks another, whole from its forward to the end of backward. In forward the
output of a block's all-gather stays until the next block's weights have been copied out of theirs; in backward the
next block is gathered ahead, and the input of a reduce-scatter stays until the next unit has its gradients
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: wait_for_unshard, pre_backward, post_backward).
"""

from __future__ import annotations

from typing import NamedTuple

from ...specs.model import ModelSpec
from ...specs.run import Training
from .precision import Bytes


class Units(NamedTuple):
    """Bytes of a block and of what is outside of blocks: gathered weights, gradients before they are reduced, and the
    input of their reduce-scatter. `whole`: what stays gathered from forward to backward, with zero=2 all blocks too;
    `ahead`: the block that backward gathers before it is needed, with zero=3."""

    block: int = 0
    outside: int = 0
    whole: int = 0
    ahead: int = 0
    block_gradients: int = 0
    outside_gradients: int = 0
    block_reduced: int = 0
    outside_reduced: int = 0


NONE = Units()


def uses_fsdp(run: Training) -> bool:
    """Return whether FSDP2 is what shards: zero=2 or 3 that offloads nothing."""
    return run.zero >= 2 and not run.offload


def sharded_experts(spec: ModelSpec, run: Training) -> float:
    """Return the part of the experts on rank 0. FSDP2 cuts a layer's along their first dimension, the experts: of more
    ranks than experts, some hold one each and the others none, and padding is gathered for those. With expert
    parallelism, engines cut another dimension (torch's shard_placement_fn)."""
    same = run.dp * run.cp // run.ep
    if run.ep > 1 or not spec.experts or not uses_fsdp(run):
        return 1 / same
    return -(-spec.experts // same) / spec.experts


def units(
    spec: ModelSpec, run: Training, b: Bytes, weights: tuple[int, int], counts: dict[str, int], trained: int
) -> Units:
    """Return the units of a device that holds `counts` parameters by component, in `weights` bytes (of experts, of all
    else), of which `trained` are trained. A pipeline's stages cannot be sharded so: all blocks are here."""
    if run.zero < 2 or (run.offload and run.zero < 3):
        return NONE
    experts, dense = weights
    padding = sharded_experts(spec, run) * (run.dp * run.cp // run.ep)
    around = counts["embedding"] + counts["positions"] + counts["head"]
    outside = dense * around // max(1, sum(counts.values()) - counts["experts"])
    block = int((experts * padding + dense - outside) / spec.layers)
    made, reduced = b.gradients, 4 if b.master else b.gradients
    if run.lora:
        around, made, reduced = 0, 4, 4
    if run.offload:  # gradients leave as they are made
        made = reduced = 0
    own = (trained - around) / spec.layers
    padded = own if run.lora else own + counts["experts"] / spec.layers * (padding - 1)
    stay = run.zero == 2
    return Units(
        block=block,
        outside=outside,
        whole=outside + (spec.layers * block if stay else 0),
        ahead=0 if stay else block,
        block_gradients=int(made * own),
        outside_gradients=made * around,
        block_reduced=int(reduced * padded),
        outside_reduced=reduced * around,
    )
