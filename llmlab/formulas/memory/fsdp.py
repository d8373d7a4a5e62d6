"""What FSDP2 keeps for a while beside its shards: units gathered whole, their gradients, and buffers.

Each block is a unit, and what is outside of blocks another, whole from its forward to the end of backward. In forward
the output of a block's all-gather stays until the next block's weights have been copied out of theirs; in backward the
next block is gathered ahead, and the input of a reduce-scatter stays until the next unit has its gradients
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: wait_for_unshard, pre_backward, post_backward).

In a pipeline torch reduces a stage's gradients once, after its last micro-batch, and frees no parameters in backward
before that (torch/distributed/pipelining/stage.py, backward_maybe_with_nosync): gradients are whole until then, in the
dtype in which they are reduced. TorchTitan then frees none after forward either (reshard_after_forward_policy), which
is zero=2.

With sync_each_batch=False (set_requires_gradient_sync) a unit is freed after each backward, and its gradients stay
whole, in the dtype in which they are reduced, until the last micro-batch's backward has come to it (_fsdp_param.py,
to_accumulated_grad_if_needed). Offloading is no exception: only what is reduced leaves the GPU.
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
    """An amount of the routed experts, and of all else: ZeRO shards the two differently."""

    experts: int
    dense: int

    @property
    def total(self) -> int:
        return self.experts + self.dense


class Units(NamedTuple):
    """Bytes of FSDP2's units: of one block, and of what is outside of blocks."""

    block: int = 0  # a block's gathered weights, but for experts that are a unit of their own
    experts: int = 0  # those experts' of a block
    outside: int = 0  # those of what is outside of blocks; where the head is a unit of its own, the embedding's
    head: int = 0  # the final norm's and the head's, where they are a unit of their own
    at_loss: int | None = None  # what is gathered between forward and backward, where that is less than before
    resident: int = 0  # what stays gathered from forward to backward: what is outside, with zero=2 all blocks too
    prefetched: int = 0  # the block that backward gathers before it is needed, with zero=3
    block_gradients: int = 0  # before they are reduced
    outside_gradients: int = 0
    block_reduction: int = 0  # the input of the reduce-scatter, in its dtype
    block_shard: int = 0  # what of it stays on a rank
    experts_shard: int = 0  # and of the block's own experts
    outside_reduction: int = 0
    outside_shard: int = 0
    head_gradients: int = 0
    head_reduction: int = 0


NONE = Units()


def uses_fsdp(run: Training) -> bool:
    """Return whether FSDP2 is what shards: zero=2 or 3 that offloads nothing, unless DeepSpeed trains."""
    return run.zero >= 2 and not run.offload and not stack_of(run).own_zero


def is_flat(run: Training) -> bool:
    """Whether it is FSDP1 that shards `run`: of each unit one flat parameter, whose gradients autograd joins."""
    return stack_of(run).flat_parameters and uses_fsdp(run) and run.lora is None


def waits(run: Training) -> bool:
    """Whether FSDP2 reduces gradients in the last micro-batch's backward alone."""
    return not run.sync_each_batch and not is_flat(run)


def reduced_bytes(run: Training, b: Bytes) -> int:
    """Return the bytes of an element of gradients as they are reduced: in mixed precision fp32 ones by default."""
    return 4 if b.master and run.reduce_dtype == "fp32" else b.gradients


def own_unit(run: Training) -> bool:
    """Return whether a block's experts are a unit within the block's (torchtitan/models/llama4/infra/parallelize.py,
    apply_fsdp): those of expert parallelism, which is told to gather one block and its experts ahead in forward too."""
    return stack_of(run).own_experts and run.ep > 1


def own_ranks(run: Training) -> int:
    """Return how many ranks have the same experts, of which each keeps a shard."""
    return run.dp_shard * run.cp // run.ep


def sharded_experts(spec: ModelSpec, run: Training) -> float:
    """Return the part of the experts on rank 0. FSDP2 cuts a layer's along their first dimension, the experts: where
    there are more ranks than experts, some have one each and the others none, and padding is gathered for those. With
    expert parallelism, engines cut another dimension (torch's shard_placement_fn)."""
    same = own_ranks(run)
    if run.ep > 1 or not spec.experts or not uses_fsdp(run):
        return 1 / same
    return -(-spec.experts // same) / spec.experts


def units(
    spec: ModelSpec, run: Training, b: Bytes, weights: Parts, counts: dict[str, int], trained: int, stage: int = 0
) -> Units:
    """Return the units of a device of pipeline stage `stage` with `counts` parameters by component, in `weights` bytes,
    of which `trained` are trained."""
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
    if run.offload and run.sync_each_batch:  # gradients leave as they are made
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
    elif stack.loss_after_model:  # as the model returns the last all-gather's output is gone
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
        # FSDP2 gathers nothing from one rank: it casts as the experts run (_fsdp_param_group.py, wait_for_unshard).
        prefetched=0 if stays else block + (own_experts if same > 1 else 0),
        block_gradients=int(gradient * own),
        outside_gradients=gradient * around,
        block_reduction=int(reduced * padded),
        block_shard=int(sum_bytes * padded) // (run.dp_shard * run.cp),
        outside_reduction=reduced * around,
        outside_shard=sum_bytes * around // (run.dp_shard * run.cp),
    )
