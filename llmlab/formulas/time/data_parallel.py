"""Seconds of data-parallel communication in a training step: the total, and the part that computation does not hide.

DDP all-reduces gradients in buckets while the backward pass runs. ZeRO 1 and 2 reduce-scatter gradients and all-gather
updated parameters. ZeRO 3 gathers each unit's parameters before they are needed, twice, and reduce-scatters its
gradients (arXiv 1910.02054, section 7).

Stage 1 gathers at the end of the update, so nothing hides this communication (DeepSpeed, runtime/zero/stage_1_and_2.py,
step), except with Megatron-LM's overlap_param_gather, which NeMo's recipes set. FSDP2's stage 2 gathers in the next
forward pass. PyTorch's stage 1 all-reduces gradients as DDP does. Then it broadcasts each tensor from the rank that
updated it, one tensor after the other, and each broadcast passes through all ranks
(torch/distributed/optim/zero_redundancy_optimizer.py, _sync_params).

HSDP runs ZeRO among the ranks that share a copy, and sums the gradients of each shard over the copies by an all-reduce
on its own stream (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce).

In a pipeline, gradients are reduced once, after the last micro-batch (torch/distributed/pipelining/stage.py); without
one and with sync_each_batch=False, also once, but during the last backward pass. ZeRO 3 nevertheless gathers weights
for every micro-batch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from ...hardware.links import Cluster, Group
from ...specs.model import ModelSpec
from ...specs.run import Training, stack_of
from ...specs.stages import layers_of
from ..memory.float8 import gathered_less
from ..memory.fsdp import uses_fsdp
from ..memory.precision import PRECISION
from ..memory.share import adapted, adapter_bytes
from ..memory.states import device_parameters, states
from .host import hook_modules
from .kernels import Kernels
from .stacks import deepspeed

MESSAGES = {"deepspeed": deepspeed.messages}


class Communicated(NamedTuple):
    """Seconds of a step's data-parallel communication.

    `exposed`: not hidden by computation. `sent`: all of it. `bytes`: of the tensors that are sent, twice for an
    all-reduce. `gather`, `reduce`: for one layer, once, gathering its weights and summing its gradients. `copied`:
    FSDP2's copies between parameters and its buffers, which run among the kernels of the computation and are part of
    neither `exposed` nor `sent`. `maybe_exposed`: exposed too if an unnamed engine sends its updated tensors one by
    one, as PyTorch and InternEvo do. `contended`: the part of the hidden communication that takes GPU memory bandwidth
    and multiprocessors from the computation.
    """

    exposed: float
    sent: float
    bytes: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    copied: float = 0.0
    maybe_exposed: float = 0.0
    contended: float = 0.0

    def contending(self, group: Group) -> Communicated:
        """Return this with `contended`: the hidden seconds, but at most as many as the bytes would need inside a node,
        however slow the network is."""
        if not self.sent:
            return self
        inside = self.bytes * (group.ranks - 1) / group.ranks / group.inside.reached
        return self._replace(contended=(self.sent - self.exposed) * min(1.0, inside / self.sent))


class _Sizes(NamedTuple):
    """The bytes of a stage, independent of links: of its weights, of which `narrower` bytes less are gathered; of its
    gradients; and of these in the dtype in which they are `reduced`.

    `in_blocks` is the fraction of the bytes in the `layers` blocks. A block is gathered in `gathers` messages, and its
    gradients are reduce-scattered in `scatters` messages. The fraction `again` of its weights is gathered a third time,
    for the backward pass.
    """

    weights: int
    narrower: int
    gradients: int
    reduced: int
    layers: int
    in_blocks: float
    gathers: int
    scatters: int
    again: float


class _Replica(NamedTuple):
    """The common part of the ranks of `group`: a stage of the model, its sizes, and the seconds of a micro-batch's
    passes.

    `copies` are the ranks with the same shard, and `everyone` the ranks of both groups.
    """

    kernels: Kernels
    group: Group
    copies: Group
    everyone: Group
    forward: float
    backward: float
    sizes: _Sizes

    def seconds(self, collective: str, size: int, less: int = 0, messages: int = 1) -> tuple[float, float]:
        """Return the seconds of `collective` for a block and for the part outside the blocks, if both together have
        `size` bytes, and all blocks together `less` bytes less. A block is sent in `messages` messages."""
        parts = (self.sizes.in_blocks * size - less) / self.sizes.layers / messages, (1 - self.sizes.in_blocks) * size
        block, outside = [self.kernels.collective(collective, part, self.group) for part in parts]
        return messages * block, outside

    def summed(self) -> tuple[float, float]:
        """Return the seconds in which copies sum the gradients of a shard: those of a block, and of the part outside
        the blocks."""
        if self.copies.ranks == 1:
            return 0.0, 0.0
        parts = self.sizes.in_blocks / self.sizes.layers, 1 - self.sizes.in_blocks
        shard = self.sizes.reduced / self.group.ranks
        block, outside = [self.kernels.collective("all-reduce", part * shard, self.copies) for part in parts]
        return block, outside

    def busy(self, inside: float, across: float) -> float:
        """Return the seconds that links are busy with the messages of shards (`inside`) and of copies (`across`). The
        two run concurrently if only copies are on different nodes."""
        two_levels = self.copies.across is not None and self.group.across is None
        return max(inside, across) if two_levels else inside + across


def _groups(run: Training, cluster: Cluster) -> tuple[Group, Group, Group]:
    """Return three groups: the ranks that share one copy of the parameters or of the states (without ZeRO, the ranks
    that have such a copy), the ranks with the same share of it, and all of these ranks."""
    group = cluster.group(run.dp_shard * run.cp, run.tp)
    copies = cluster.group(run.dp_replicate, run.tp * group.ranks)
    return group, copies, cluster.group(run.dp * run.cp, run.tp) if copies.ranks > 1 else group


def data_parallel(
    spec: ModelSpec,
    run: Training,
    cluster: Cluster,
    gpu_kernels: Kernels,
    compute: float,
    forward: float,
    overlap: tuple[str, ...],
    bucket: int,
) -> Communicated:
    """Return the seconds of communicating a step's gradients and parameters among ranks with the same part of the
    model.

    `compute`: seconds of a micro-batch. `forward`: the fraction of these in the forward pass.
    """
    group, copies, everyone = _groups(run, cluster)
    if group.ranks == 1:
        return Communicated(0.0, 0.0)
    times, sizes = (forward * compute, (1 - forward) * compute), _sizes(spec, run)
    replica = _Replica(gpu_kernels, group, copies, everyone, *times, sizes)
    hide_forward, hide_backward = "data" in overlap, "data" in overlap or "gradients" in overlap
    updated = sizes.gradients if run.lora else sizes.weights  # adapters are as wide as their gradients
    buckets = ddp_buckets(spec, run, bucket) if run.zero < 2 else 0
    flat = _communicated(run, replica, updated, hide_forward, hide_backward, buckets)
    if run.zero != 1 or stack_of(run).own_program or run.pp > 1:
        return flat.contending(group)
    dealt = _dealt_out(replica, run, updated, tensors(spec, run), hide_backward, buckets)
    # PyTorch's optimizer has no master copy, as in `states`. A run with a master copy uses an unnamed engine.
    whole_tensors = not PRECISION[run.precision].master and not run.lora
    sent = dealt if whole_tensors else flat._replace(maybe_exposed=max(0.0, dealt.exposed - flat.exposed))
    return sent.contending(group)


@lru_cache(maxsize=256)
def _sizes(spec: ModelSpec, run: Training) -> _Sizes:
    of_stages = layers_of(spec, run)
    stage, counts = _largest_stage(spec, of_stages, run.tp, run.expert_tp * run.ep)
    # With offloading, ranks exchange weights after copying them from their hosts, and gradients before copying them to
    # their hosts (ZeRO-Offload, arXiv 2101.06840, section 4.2; FSDP's CPUOffload).
    whole = states(spec, replace(run, offload=None) if run.offload else run, stage, sharded=False)
    layers = of_stages[stage]
    in_blocks = 1 - sum(counts[part] for part in ("embedding", "positions", "head")) / sum(counts.values())
    b = PRECISION[run.precision]
    less = gathered_less(spec, run, b.weights, layers)
    wider = 4 // b.gradients if stack_of(run).accumulates_in_fp32(run.compute_dtype) else 1
    messages = 1, 1, 0.0  # FSDP's units are blocks
    if run.zero == 3 and (own := MESSAGES.get(stack_of(run).name)):
        messages = own(run, in_blocks * sum(counts.values()) / layers, round(hook_modules(spec).gathered))
    return _Sizes(whole.weights, less, whole.gradients, wider * whole.gradients, layers, in_blocks, *messages)


@lru_cache(maxsize=256)
def ddp_buckets(spec: ModelSpec, run: Training, full: int) -> int:
    """Return the number of buckets in which DDP sums the gradients of the largest stage, in the order in which the
    backward pass computes them. A bucket is complete with the matrix that brings it to `full` bytes, however large this
    matrix is (torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size). Vectors are in the buckets
    of matrices."""
    sizes, width = _sizes(spec, run), adapter_bytes(run) if run.lora else PRECISION[run.precision].gradients
    if run.lora:
        matrices = [(run.lora.rank * features, linear.count)
                    for linear in adapted(spec, run) for features in (linear.inputs, linear.outputs)]  # fmt: skip
    else:
        matrices = [(linear.inputs * linear.outputs // run.tp, linear.count) for linear in spec.block_linears]
        experts = spec.parameters_by_component["experts"] // max(1, spec.moe_layers) // (run.expert_tp * run.ep)
        matrices += [(share * experts // 3, spec.moe_layers) for share in (2, 1)]
    tables = 0 if run.lora else 1 if spec.tied or run.pp > 1 else 2
    outside = [(1 - sizes.in_blocks) * sizes.gradients / tables] * tables if tables else []
    blocks = [
        width * elements for layer in range(sizes.layers) for elements, count in reversed(matrices)
        if (layer + 1) * count // spec.layers > layer * count // spec.layers  # not every layer has experts
    ]  # fmt: skip
    buckets, bucket_bytes = 0, 0.0
    for size in (*outside[:-1], *blocks, *outside[-1:]):
        bucket_bytes += size
        if bucket_bytes >= full:
            buckets, bucket_bytes = buckets + 1, 0.0
    return max(1, buckets + (bucket_bytes > 0))  # adapters of layers whose names only the class knows are not counted


@lru_cache(maxsize=256)
def tensors(spec: ModelSpec, run: Training) -> int:
    """Return the number of trained tensors: matrices and biases, norms, embeddings, experts' matrices; or adapters."""
    if run.lora:
        return 2 * sum(linear.count for linear in adapted(spec, run))
    norms = (2 if spec.norm == "layernorm" else 1) * (spec.layers * spec.norms_per_layer + 1)
    norms += 2 * spec.layers if spec.qk_norm else 0
    embeddings = (0 if spec.tied else 1) + (1 if spec.learned_positions else 0)  # a tied one is the head
    experts = 3 * spec.moe_layers if spec.experts else 0  # two tensors for all experts, and the router
    return sum(linear.count * (1 + linear.bias) for linear in spec.linears) + norms + embeddings + experts


@lru_cache(maxsize=1024)
def _largest_stage(spec: ModelSpec, layers: tuple[int, ...], tp: int, expert_ranks: int) -> tuple[int, dict[str, int]]:
    """Return the pipeline stage with the most parameters on a rank, and its parameters by component. Candidates are the
    first stage, the last one, and one in between with the most layers."""
    pp = len(layers)
    between = max(range(1, pp - 1), key=lambda stage: layers[stage], default=0)
    counts = {stage: device_parameters(spec, layers, stage, tp, expert_ranks) for stage in sorted({0, between, pp - 1})}
    largest = max(counts, key=lambda stage: sum(counts[stage].values()))
    return largest, counts[largest]


def _dealt_out(
    replica: _Replica, run: Training, updated: int, tensors: int, hidden: bool, buckets: int
) -> Communicated:
    """Return the communication if all ranks sum the gradients and then send `updated` bytes in `tensors` broadcasts.
    These follow the update, so nothing hides them."""
    reduced = _reduced(replica, run, hidden, buckets)
    sent = tensors * replica.kernels.collective("broadcast", updated / tensors, replica.group)
    return reduced._replace(exposed=reduced.exposed + sent, sent=reduced.sent + sent, bytes=reduced.bytes + updated)


def _communicated(
    run: Training, replica: _Replica, updated: int, hide_forward: bool, hide_backward: bool, buckets: int
) -> Communicated:
    """Return the communication of the replicas: gradients, and with ZeRO also parameters."""
    sizes = replica.sizes
    if run.zero == 3:
        return _sharded(replica, run, hide_forward, hide_backward)
    if run.zero == 1 and stack_of(run).sums_in_fp32:
        # nanotron sums its whole buffer in one call after the backward pass (optim/gradient_accumulator.py).
        reduced = _reduced(replica, run, hide_backward, 1)
    else:
        reduced = _reduced(replica, run, hide_backward, None if run.zero else buckets)
    if run.zero == 0:
        return reduced
    block, outside = replica.seconds("all-gather", updated, sizes.narrower)
    sent = outside + sizes.layers * block
    # The forward pass's first unit waits for its own parameters. Those of the others arrive during earlier computation.
    hidden = outside + max(0.0, sizes.layers * block - replica.forward)
    behind = stack_of(run).overlap_param_gather or uses_fsdp(run)
    exposed = reduced.exposed + (hidden if hide_forward and behind else sent)
    gathered = updated - sizes.narrower
    copied = _copies(run, replica, gathered, _reductions(run)) if uses_fsdp(run) else 0.0
    return Communicated(exposed, reduced.sent + sent, reduced.bytes + gathered, 0.0, reduced.reduce, copied)


def buckets_finished(messages: int, cost: float, backward: float, share: float) -> float:
    """Return the time at which the last of `messages` buckets has been sent over one link, if each takes `cost`
    seconds.

    The buckets of the blocks' gradients, `share` of all, become ready one after the other until `backward` seconds. The
    rest are ready at that time. From some bucket on, the link is busy without a gap: from the first bucket, or from one
    of the two around the end of the blocks.
    """
    of_blocks = min(messages, ceil(messages * share))
    first = (0, max(0, of_blocks - 2), of_blocks - 1)
    return max([backward * min(1, (i + 1) / messages / share) + (messages - i) * cost for i in first])


def _reduced(replica: _Replica, run: Training, hidden: bool, buckets: int | None) -> Communicated:
    """Return the communication that sums gradients: in `buckets` all-reduces, as in DDP, or (None) with one
    reduce-scatter per block, as in FSDP. DeepSpeed's buckets are larger than a block."""
    sizes, layers, backward = replica.sizes, replica.sizes.layers, replica.backward
    if buckets is None:
        scattered, summed = replica.seconds("reduce-scatter", sizes.reduced), replica.summed()
        block, outside = scattered[0] + summed[0], scattered[1] + summed[1]
        total, last = layers * block + outside, buckets_finished(layers, block, backward, 1.0) + outside
    else:
        cost = replica.kernels.collective("all-reduce", sizes.reduced / buckets, replica.everyone)
        total, last = buckets * cost, buckets_finished(buckets, cost, backward, sizes.in_blocks)
    times = _reductions(run) if run.zero == 2 else 1
    sent = times * total
    size = times * (2 * sizes.reduced if buckets else sizes.reduced * (1 + 2 * _copied(replica)))
    exposed = times * (last - backward) if hidden else sent
    return Communicated(exposed, sent, size, 0.0, total * sizes.in_blocks / layers)


def _sharded(replica: _Replica, run: Training, hide_forward: bool, hide_backward: bool) -> Communicated:
    """Return the communication of ZeRO 3: each unit is gathered before its forward pass and again before its backward
    pass, while the previous unit computes. Its gradient is sent during the next unit's backward pass. Parameters
    outside the blocks stay gathered from the forward to the backward pass, unless the stack frees them (FSDP2 with
    reshard_after_forward=True for the whole model).

    In a pipeline, torch frees weights only after the last backward pass. A forward pass that follows a backward pass
    finds all blocks gathered, and frees them. So m micro-batches of 1F1B gather a block m + 1 times
    (tests/formulas/test_fsdp_pipeline.py).
    """
    sizes, layers = replica.sizes, replica.sizes.layers
    whole = _reductions(run)  # micro-batches with both gathers and a reduce-scatter
    gathers_only = run.accumulation - whole  # in a pipeline with one gather, else with both
    again = 0 if run.pp > 1 else gathers_only
    gather, outside_gather = replica.seconds("all-gather", sizes.weights, sizes.narrower, sizes.gathers)
    scatter, outside_scatter = replica.seconds("reduce-scatter", sizes.reduced, messages=sizes.scatters)
    regather = (1 + sizes.again) * gather
    reduce, outside_reduce = replica.summed()
    outside_gathers = 2 if stack_of(run).reshards_model else 1
    outside_gather *= outside_gathers
    outside = outside_gather + outside_scatter + outside_reduce
    forward = layers * gather
    sent = whole * (forward + layers * (regather + scatter + reduce) + outside) + gathers_only * forward
    sent += again * (forward + outside_gather)
    if hide_forward:
        forward = gather + (layers - 1) * max(0.0, gather - replica.forward / layers)

    def backward(scatter: float, reduce: float) -> float:
        if not hide_backward:
            return layers * (regather + scatter + reduce)
        busy = replica.busy(regather + scatter, reduce)
        return scatter + reduce + (layers - 1) * max(0.0, busy - replica.backward / layers)

    exposed = whole * (forward + backward(scatter, reduce) + outside) + gathers_only * backward(0.0, 0.0)
    exposed += again * (forward + outside_gather)
    gathers = (2 + sizes.again) * whole + gathers_only + again
    gathered = gathers * (sizes.in_blocks * sizes.weights - sizes.narrower)
    gathered += outside_gathers * (whole + again) * (1 - sizes.in_blocks) * sizes.weights
    size = whole * (1 + 2 * _copied(replica)) * sizes.reduced + gathered
    return Communicated(exposed, sent, size, gather, scatter + reduce, _copies(run, replica, gathered, whole))


def _copies(run: Training, replica: _Replica, gathered: float, reductions: int) -> float:
    """Return the seconds of FSDP2's copies in a step that gathers `gathered` bytes: of shards into the buffer of the
    all-gather, for which fp32 masters are cast; of whole weights out of it; and in `reductions` micro-batches of the
    gradients into the buffer of the reduce-scatter. They run on the stream that computes
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: all_gather_copy_in, foreach_all_gather_copy_out,
    foreach_reduce)."""
    shards = gathered / replica.group.ranks
    casts = 3 * shards if uses_fsdp(run) and PRECISION[run.precision].master else 0.0
    moved = 2 * gathered + 2 * shards + casts + reductions * (replica.sizes.gradients + replica.sizes.reduced)
    return moved / replica.kernels.bandwidth


def _reductions(run: Training) -> int:
    """Return how often ZeRO 2 and 3 reduce-scatter all gradients in a step: once per micro-batch, unless ranks keep
    whole gradients until the last one."""
    return run.accumulation if run.pp == 1 and run.sync_each_batch else 1


def _copied(replica: _Replica) -> float:
    """Return the fraction of the gradients that copies sum: one shard, if there are copies."""
    return 1 / replica.group.ranks if replica.copies.ranks > 1 else 0.0
