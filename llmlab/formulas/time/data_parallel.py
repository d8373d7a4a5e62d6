"""Seconds of data-parallel communication in a training step: how much there is, and how much computation hides of it.

DDP reduces gradients in buckets while backward runs; ZeRO 1 and 2 scatter them and gather updated parameters; ZeRO 3
gathers each unit's parameters before it is needed, twice, and scatters its gradients (arXiv 1910.02054, section 7).
Nothing hides stage 1's gather, which ends the update (DeepSpeed, runtime/zero/stage_1_and_2.py, step), but with
Megatron-LM's overlap_param_gather, which NeMo's recipes set. FSDP2's stage 2 gathers in the next forward.
PyTorch's stage 1 sums as DDP does, and sends each tensor from the rank that updated it: one broadcast after the other,
each of which goes round all ranks (torch/distributed/optim/zero_redundancy_optimizer.py, _sync_params).
HSDP does so among the ranks that share a copy, and sums each shard's gradients over the copies by an all-reduce, on a
stream of its own (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce).
In a pipeline gradients are scattered once, after the last micro-batch (torch/distributed/pipelining/stage.py), and with
sync_each_batch=False behind its backward; weights are gathered for every micro-batch all the same.
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
    """Seconds of a step's data-parallel communication: what computation does not hide, and all of it; the `bytes` of
    the tensors that are sent (an all-reduce's twice); for each layer the seconds of a gather of its weights, and of
    summing its gradients, once; and the seconds of FSDP2's copies between parameters and its buffers, which run among
    the computation's kernels and are in neither of the first two. `maybe_exposed`: seconds that are exposed too where
    an engine that is not named sends its updated tensors one by one, as PyTorch's and InternEvo do. `contended`:
    seconds of the hidden part in which it takes memory and multiprocessors from computation."""

    exposed: float
    sent: float
    bytes: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    copied: float = 0.0
    maybe_exposed: float = 0.0
    contended: float = 0.0

    def contending(self, group: Group) -> Communicated:
        """Return this with what is `contended`: as long as the bytes take inside a node, however slow the network."""
        if not self.sent:
            return self
        inside = self.bytes * (group.ranks - 1) / group.ranks / group.inside.reached
        return self._replace(contended=(self.sent - self.exposed) * min(1.0, inside / self.sent))


class _Sizes(NamedTuple):
    """The bytes of a stage, on any links: of its weights, which are gathered `narrower` bytes fewer, of gradients, and
    of these in the dtype in which they are `reduced`.

    `in_blocks` is the share of the bytes that is in the `layers` blocks. A block is gathered in so many messages, and
    its gradients scattered; of its weights `again` are gathered a third time, for backward.
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
    """What the ranks of `group` have alike: a stage of the model, its sizes, and the seconds of a micro-batch's passes.

    `copies` are the ranks with the same shard, `everyone` both.
    """

    kernels: Kernels
    group: Group
    copies: Group
    everyone: Group
    forward: float
    backward: float
    sizes: _Sizes

    def seconds(self, collective: str, size: int, less: int = 0, messages: int = 1) -> tuple[float, float]:
        """Return the seconds of `collective` for a block's part of `size` bytes, of which blocks have `less` fewer, in
        so many messages, and for the part outside of blocks."""
        parts = (self.sizes.in_blocks * size - less) / self.sizes.layers / messages, (1 - self.sizes.in_blocks) * size
        block, outside = [self.kernels.collective(collective, part, self.group) for part in parts]
        return messages * block, outside

    def summed(self) -> tuple[float, float]:
        """Return the seconds in which copies sum the gradients of a shard: of a block's, and of the part outside."""
        if self.copies.ranks == 1:
            return 0.0, 0.0
        parts = self.sizes.in_blocks / self.sizes.layers, 1 - self.sizes.in_blocks
        shard = self.sizes.reduced / self.group.ranks
        block, outside = [self.kernels.collective("all-reduce", part * shard, self.copies) for part in parts]
        return block, outside

    def busy(self, inside: float, across: float) -> float:
        """Return the seconds that links are busy with what shards and copies send: at once, where copies alone are on
        other nodes."""
        two_levels = self.copies.across is not None and self.group.across is None
        return max(inside, across) if two_levels else inside + across


def _groups(run: Training, cluster: Cluster) -> tuple[Group, Group, Group]:
    """Return the ranks that share one copy of the parameters, or of the states (without ZeRO those that hold them), the
    ranks that have the same share, and both."""
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
    """Return the seconds of a step's gradients and parameters, over the ranks that have the same part of the model.

    `compute`: s of a micro-batch, of which `forward` is forward's share."""
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
    # PyTorch's optimizer has no master copy, as `states` has it; who keeps one is not named.
    whole_tensors = not PRECISION[run.precision].master and not run.lora
    sent = dealt if whole_tensors else flat._replace(maybe_exposed=max(0.0, dealt.exposed - flat.exposed))
    return sent.contending(group)


@lru_cache(maxsize=256)
def _sizes(spec: ModelSpec, run: Training) -> _Sizes:
    of_stages = layers_of(spec, run)
    stage, counts = _largest_stage(spec, of_stages, run.tp, run.ep)
    # Ranks send one another what each has from its host, and gradients before each sends its own there (ZeRO-Offload,
    # arXiv 2101.06840, section 4.2; FSDP's CPUOffload).
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
    """Return in how many buckets DDP sums the gradients of the largest stage, taken as backward makes them: one is full
    with the matrix that brings it to `full` bytes, however large that is (torch/csrc/distributed/c10d/reducer.cpp,
    compute_bucket_assignment_by_size). Vectors lie in the buckets of matrices."""
    sizes, width = _sizes(spec, run), adapter_bytes(run) if run.lora else PRECISION[run.precision].gradients
    if run.lora:
        matrices = [(run.lora.rank * features, linear.count)
                    for linear in adapted(spec, run) for features in (linear.inputs, linear.outputs)]  # fmt: skip
    else:
        matrices = [(linear.inputs * linear.outputs // run.tp, linear.count) for linear in spec.block_linears]
        experts = spec.parameters_by_component["experts"] // max(1, spec.moe_layers) // (run.tp * run.ep)
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
    return buckets + (bucket_bytes > 0)


@lru_cache(maxsize=256)
def tensors(spec: ModelSpec, run: Training) -> int:
    """Return how many tensors are trained: matrices and biases, norms, embeddings, experts' matrices; or adapters."""
    if run.lora:
        return 2 * sum(linear.count for linear in adapted(spec, run))
    norms = (2 if spec.norm == "layernorm" else 1) * (spec.layers * spec.norms_per_layer + 1)
    norms += 2 * spec.layers if spec.qk_norm else 0
    embeddings = (0 if spec.tied else 1) + (1 if spec.learned_positions else 0)  # tied, it is the head
    experts = 3 * spec.moe_layers if spec.experts else 0  # two of all experts, and the router
    return sum(linear.count * (1 + linear.bias) for linear in spec.linears) + norms + embeddings + experts


@lru_cache(maxsize=1024)
def _largest_stage(spec: ModelSpec, layers: tuple[int, ...], tp: int, ep: int) -> tuple[int, dict[str, int]]:
    """Return the pipeline stage with the most parameters on a rank, and these: the first, the last or, of those
    between, one with most layers."""
    pp = len(layers)
    between = max(range(1, pp - 1), key=lambda stage: layers[stage], default=0)
    counts = {stage: device_parameters(spec, layers, stage, tp, ep) for stage in sorted({0, between, pp - 1})}
    largest = max(counts, key=lambda stage: sum(counts[stage].values()))
    return largest, counts[largest]


def _dealt_out(
    replica: _Replica, run: Training, updated: int, tensors: int, hidden: bool, buckets: int
) -> Communicated:
    """Return the seconds of gradients that all ranks sum, and of `updated` bytes in so many broadcasts, which nothing
    hides: they follow the update."""
    reduced = _reduced(replica, run, hidden, buckets)
    sent = tensors * replica.kernels.collective("broadcast", updated / tensors, replica.group)
    return reduced._replace(exposed=reduced.exposed + sent, sent=reduced.sent + sent, bytes=reduced.bytes + updated)


def _communicated(
    run: Training, replica: _Replica, updated: int, hide_forward: bool, hide_backward: bool, buckets: int
) -> Communicated:
    """Return what the replicas send: gradients, and with ZeRO the parameters."""
    sizes = replica.sizes
    if run.zero == 3:
        return _sharded(replica, run, hide_forward, hide_backward)
    if run.zero == 1 and stack_of(run).sums_in_fp32:
        # nanotron sums its buffer at once, when backward is over (optim/gradient_accumulator.py).
        reduced = _reduced(replica, run, hide_backward, 1)
    else:
        reduced = _reduced(replica, run, hide_backward, None if run.zero else buckets)
    if run.zero == 0:
        return reduced
    block, outside = replica.seconds("all-gather", updated, sizes.narrower)
    sent = outside + sizes.layers * block
    # Forward's first unit waits for its own parameters; the others' come behind the computation before them.
    hidden = outside + max(0.0, sizes.layers * block - replica.forward)
    behind = stack_of(run).overlap_param_gather or uses_fsdp(run)
    exposed = reduced.exposed + (hidden if hide_forward and behind else sent)
    return Communicated(exposed, reduced.sent + sent, reduced.bytes + updated - sizes.narrower, 0.0, reduced.reduce)


def buckets_finished(messages: int, cost: float, backward: float, share: float) -> float:
    """Return when the last of `messages` buckets is through that take `cost` seconds each, on one link.

    One after the other is ready until `share` of all gradients are, those of the blocks, at `backward` seconds; the
    rest are ready then. So the last follows without a gap the first, or one of the two where that changes.
    """
    over = min(messages, ceil(messages * share))
    first = (0, max(0, over - 2), over - 1)
    return max([backward * min(1, (i + 1) / messages / share) + (messages - i) * cost for i in first])


def _reduced(replica: _Replica, run: Training, hidden: bool, buckets: int | None) -> Communicated:
    """Return the seconds in which gradients are summed: in so many buckets, as DDP does, or, scattered (None), what a
    block has at once, as FSDP does; DeepSpeed's buckets are larger still."""
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
    """Return ZeRO-3's seconds: each unit is gathered before forward and again before backward, behind the unit before
    it; its gradient is sent behind the next unit's backward. What is outside of blocks is whole from forward to
    backward.

    FSDP2 copies what was gathered out of its buffer, and gradients into that of the reduce-scatter, on the stream that
    computes (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_all_gather_copy_out, foreach_reduce).

    In a pipeline torch frees nothing after a backward but the last, so that a forward after it finds all blocks whole,
    and frees them: m micro-batches of 1F1B gather a block m + 1 times (tests/formulas/test_fsdp_pipeline.py)."""
    sizes, layers = replica.sizes, replica.sizes.layers
    whole = _reductions(run)  # micro-batches with both gathers and a reduce-scatter
    gathers_only = run.accumulation - whole  # with one of them; without a pipeline with both
    again = 0 if run.pp > 1 else gathers_only
    gather, outside_gather = replica.seconds("all-gather", sizes.weights, sizes.narrower, sizes.gathers)
    scatter, outside_scatter = replica.seconds("reduce-scatter", sizes.reduced, messages=sizes.scatters)
    regather = (1 + sizes.again) * gather
    reduce, outside_reduce = replica.summed()
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
    weights = sizes.weights - sizes.narrower
    gathers = (2 + sizes.again) * whole + gathers_only + again
    size = whole * (1 + 2 * _copied(replica)) * sizes.reduced + gathers * weights
    moved = whole * (sizes.gradients + sizes.reduced) + gathers * 2 * weights
    return Communicated(exposed, sent, size, gather, scatter + reduce, moved / replica.kernels.bandwidth)


def _reductions(run: Training) -> int:
    """Return how often ZeRO 2 and 3 scatter all gradients in a step: they cannot wait for the last micro-batch, unless
    they are whole until then."""
    return run.accumulation if run.pp == 1 and run.sync_each_batch else 1


def _copied(replica: _Replica) -> float:
    """Return the share of the gradients that copies sum: one shard, where there are copies."""
    return 1 / replica.group.ranks if replica.copies.ranks > 1 else 0.0
