"""What FSDP2 allocates for a while in addition to its shards: gathered units, their gradients, and buffers.

Each block is a unit. The parameters outside the blocks are another unit, which stays gathered from its forward pass to
the end of the backward pass. In the forward pass, the output of a block's all-gather stays until the next block's
weights have been copied out of theirs. In the backward pass, the next block is prefetched, and the input of a
reduce-scatter stays until the next unit has its gradients (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py:
wait_for_unshard, pre_backward, post_backward).

In a pipeline, torch reduces a stage's gradients once, after its last micro-batch, and frees no parameters in the
backward passes before (torch/distributed/pipelining/stage.py, backward_maybe_with_nosync). Until then, gradients are
whole and in the dtype of the reduction. TorchTitan then does not free parameters after the forward pass either
(reshard_after_forward_policy), which is zero=2.

With sync_each_batch=False (set_requires_gradient_sync), a unit is freed after each backward pass. Its gradients stay
whole, in the dtype of the reduction, until the last micro-batch's backward pass reaches it (_fsdp_param.py,
to_accumulated_grad_if_needed). This holds with offloading too: only reduced gradients are copied to the host.
"""

from __future__ import annotations

from typing import NamedTuple

from ...specs.model import ModelSpec
from ...specs.run import Training, stack_of
from ...specs.stages import layers_of
from .float8 import gathered_less
from .precision import Bytes
from .share import adapter_bytes


class Parts(NamedTuple):
    """An amount for the routed experts and one for everything else, because ZeRO shards the two differently."""

    experts: int
    dense: int

    @property
    def total(self) -> int:
        return self.experts + self.dense


class Units(NamedTuple):
    """Bytes of FSDP2's units: of one block, and of the parameters outside the blocks."""

    block: int = 0  # gathered weights of a block, without experts that are their own unit
    experts: int = 0  # gathered weights of these experts
    outside: int = 0  # gathered weights outside the blocks, without a head that is its own unit
    head: int = 0  # gathered weights of the final norm and the head, if they are their own unit
    at_loss: int | None = None  # weights that are gathered between forward and backward pass, if fewer than before
    resident: int = 0  # weights that stay gathered from forward to backward pass; with zero=2 those of blocks too
    prefetched: int = 0  # the block that the backward pass gathers early, with zero=3
    block_gradients: int = 0  # before the reduction
    outside_gradients: int = 0
    block_reduction: int = 0  # the input of the reduce-scatter, in its dtype
    block_shard: int = 0  # the part of it that stays on a rank
    experts_shard: int = 0  # the same of experts that are their own unit
    outside_reduction: int = 0
    outside_shard: int = 0
    head_gradients: int = 0
    head_reduction: int = 0


NONE = Units()


def uses_fsdp(run: Training) -> bool:
    """Return whether FSDP2 shards the run: zero=2 or 3 without offloading, except under DeepSpeed."""
    return run.zero >= 2 and not run.offload and not stack_of(run).own_zero


def is_flat(run: Training) -> bool:
    """Whether FSDP1 shards `run`. It has one flat parameter per unit, and autograd concatenates the unit's
    gradients."""
    return stack_of(run).flat_parameters and uses_fsdp(run) and run.lora is None


def waits(run: Training) -> bool:
    """Whether FSDP2 reduces gradients only in the last micro-batch's backward pass."""
    return not run.sync_each_batch and not is_flat(run)


def reduced_bytes(run: Training, b: Bytes) -> int:
    """Return the bytes per element of gradients in the reduction, which in mixed precision runs in fp32 by default."""
    return 4 if b.master and run.reduce_dtype == "fp32" else b.gradients


def own_unit(run: Training) -> bool:
    """Return whether a block's experts are their own unit within the block's (torchtitan/models/llama4/infra/
    parallelize.py, apply_fsdp), as with expert parallelism, which also prefetches a block in the forward pass."""
    return stack_of(run).own_experts and run.ep > 1


def own_ranks(run: Training) -> int:
    """Return the number of ranks that share the same experts. Each keeps a shard of them."""
    return run.dp_shard * run.cp * run.tp // (run.expert_tp * run.ep)


def sharded_experts(spec: ModelSpec, run: Training) -> float:
    """Return rank 0's fraction of the experts. FSDP2 divides a layer's tensor along its first dimension, the experts.
    If there are more ranks than experts, some ranks have one expert and the others none, and padding is gathered from
    these. With expert parallelism, engines divide another dimension (torch's shard_placement_fn)."""
    same = own_ranks(run)
    if run.ep > 1 or not spec.experts or not uses_fsdp(run):
        return 1 / same
    return -(-spec.experts // same) / spec.experts


def units(
    spec: ModelSpec, run: Training, b: Bytes, weights: Parts, counts: dict[str, int], trained: int, stage: int = 0
) -> Units:
    """Return the units of a device of pipeline stage `stage`, which has `counts` parameters by component in `weights`
    bytes, and trains `trained` parameters."""
    if run.offload and run.zero < 3:
        return NONE
    layers = layers_of(spec, run)[stage]
    same = own_ranks(run)
    padding = sharded_experts(spec, run) * same
    around = counts["embedding"] + counts["positions"] + counts["head"]
    outside = weights.dense * around // max(1, sum(counts.values()) - counts["experts"])
    dense = weights.dense - outside - gathered_less(spec, run, b.weights, layers)
    own_experts = int(weights.experts / layers) if own_unit(run) else 0
    block = int((weights.experts * padding + dense) / layers) - own_experts
    gradient, reduced, sum_bytes = b.gradients, reduced_bytes(run, b), 4 if b.master else b.gradients
    if run.lora:
        around, gradient, sum_bytes = 0, adapter_bytes(run), adapter_bytes(run)
        reduced = min(sum_bytes, reduced) if run.reduce_dtype != "fp32" else sum_bytes
    if run.offload and run.sync_each_batch:  # each gradient is copied to the host when it exists
        gradient = reduced = sum_bytes = 0
    own = padded = (trained - around) / layers  # trained parameters of one block
    if not run.lora:
        padded += counts["experts"] / layers * (padding - 1)
    if own_experts:
        own = padded = own - counts["experts"] / layers
    stays = run.zero == 2
    stack = stack_of(run)
    own_head = stack.own_head(run) and not spec.tied
    head = outside * counts["head"] // max(1, counts["embedding"] + counts["head"]) if own_head else 0
    of_head = counts["head"] if own_head else 0
    outside, around = outside - head, around - of_head
    resident = (0 if own_head and not stays else outside) + (layers * (block + own_experts) if stays else 0)
    at_loss = None
    if head:
        at_loss = resident + (head if stack.keeps_head else 0)
    elif stack.loss_after_model:  # when the model returns, the output of the last all-gather is freed
        at_loss = resident * (stays or not stack.reshards_model)
    return Units(
        block=block,
        experts=own_experts,
        experts_shard=int(reduced * counts["experts"] / layers / same) if own_experts else 0,
        outside=outside,
        head=head,
        at_loss=at_loss,
        head_gradients=gradient * of_head,
        head_reduction=reduced * of_head,
        resident=resident,
        # With one rank, FSDP2 gathers nothing and casts when the experts run (_fsdp_param_group.py, wait_for_unshard).
        prefetched=0 if stays else block + (own_experts if same > 1 else 0),
        block_gradients=int(gradient * own),
        outside_gradients=gradient * around,
        block_reduction=int(reduced * padded),
        block_shard=int(sum_bytes * padded) // (run.dp_shard * run.cp),
        outside_reduction=reduced * around,
        outside_shard=sum_bytes * around // (run.dp_shard * run.cp),
    )
