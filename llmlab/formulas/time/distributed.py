"""Seconds of a training step on many GPUs: computation, and the communication that it does not hide.

    step = micro-batches × the slowest stage  +  the other stages once (filling, emptying)  +  gradients  +  update

Communication of each kind of parallelism in a step, on one GPU (b micro_batch, s seq_len, h hidden, P its parameters):

    tensor      per layer: 2 all-reduces of bsh forward, 2 backward, 2 in recomputation (arXiv 1909.08053, section 3);
                with sequence parallelism an all-gather and a reduce-scatter instead of each, and 2 more all-gathers
                backward if a pair's gathered input was not saved (selective checkpointing; Megatron-LM: arXiv
                2205.05198, 4.2.2)
    pipeline    per micro-batch and virtual stage: bsh forward, bsh backward, divided among the tensor-parallel ranks
    context     per layer: keys and values once round the ring forward, they and their gradients backward, while a rank
                computes attention with those that came before; then it merges the partial results
    experts     per layer: 2 all-to-alls of the tokens' copies forward, 2 backward
    data        ZeRO 0 to 2: gradients and parameters, 2P; ZeRO 3, and PyTorch's ZeRO 1: 3P (arXiv 1910.02054, section
                7; data_parallel.py); with copies of the shards, 2P / shards more
    logits      per micro-batch, on the last stage: all of them, if the loss is not vocabulary-parallel

The vocabulary-parallel loss and embedding also communicate a little, which is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from types import MappingProxyType
from typing import NamedTuple

from ...base.errors import NotAvailable, SpecError
from ...hardware.gpu import GPU
from ...hardware.gpu import gpu as find_gpu
from ...hardware.links import Cluster, pcie_rates
from ...specs.check import check
from ...specs.model import ModelLike, ModelSpec
from ...specs.model import model as find_model
from ...specs.run import Training, stack_of
from ...specs.stages import layers_of
from ..again import attentions_again, module_again, whole_again
from ..memory.fsdp import uses_fsdp
from ..memory.share import bytes_of
from . import step as time
from .data_parallel import data_parallel
from .flops import Flops, flops
from .host import forward_share
from .kernels import Kernels, kernels, training_rates
from .stacks.megatron import token_copies

BUCKET_BYTES = 25 * 2**20  # torch DDP's bucket_cap_mb, for all-reduces of gradients
# Communication that computation can hide. "data": gradients during the backward pass, and ZeRO-3's parameters during
# the previous unit, as in DDP and FSDP. "gradients": the same, but only in the backward pass, so the forward pass waits
# for each unit's parameters. "tensor": tensor-parallel communication of the backward pass during its matmuls, as in
# Megatron-LM.
OVERLAPS = ("data", "gradients", "tensor")
# Bytes that a rank moves to merge the partial results of ring attention, forward and backward, per element of its
# queries and of its keys: for the first step after that with its own keys, and for each further step. Torch merges in
# fp32 (distributed/tensor/experimental/_context_parallel/_attention.py), and compiled blocks fuse some of it. The
# numbers come from the simulator's log of torchtitan's first rank, which has the least to merge
# (tests/simulation/test_ring_attention.py). Transformer Engine adds in bf16 (pytorch/attention.py of 1.6,
# AttnFuncWithCP: flash_attn_fwd_out_correction, dq.add_, dkv.add_).
RING = {
    "eager": (((44, 16), (27, 8)), ((46, 136), (13, 44))),
    "compiled": (((11, 12), (9, 0)), ((15, 20), (8, 28))),
    "megatron": (((12, 0), (6, 0)), ((12, 24), (6, 12))),
}


class Step(NamedTuple):
    """Seconds of a step by the activity of the slowest GPU. Communication counts only if computation does not hide it.

    `launches`: the GPU waits for its host to launch kernels. `data_sent`: all data-parallel communication, hidden or
    not. `data_exposed`: the part that computation does not hide. `data`: `data_exposed`, the cost of the hidden part,
    and FSDP2's copies. `scale`: the time that many nodes lose to the slowest of them. `layer`: the seconds of one layer
    in a micro-batch: its forward and backward computation, gathering its parameters, reducing its gradients, and the
    communication within it. `data_maybe_exposed`: additional seconds that an unnamed engine may expose.
    """

    products: float
    attention: float
    elementwise: float
    launches: float
    tensor: float
    context: float
    experts: float
    pipeline: float
    bubble: float
    data: float
    update: float
    data_sent: float
    data_exposed: float = 0.0
    layer: Mapping[str, float] = MappingProxyType({})
    scale: float = 0.0
    data_maybe_exposed: float = 0.0
    mfu: float | None = None

    @property
    def compute(self) -> float:
        return self.products + self.attention + self.elementwise + self.launches

    @property
    def seconds(self) -> float:
        sent = self.tensor + self.context + self.experts + self.pipeline + self.data
        return self.compute + sent + self.bubble + self.update + self.scale


class _Layer(NamedTuple):
    """Seconds of the passes of some layers on the GPU, by kind, and on the host that launches their kernels."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    host: float = 0.0

    @property
    def gpu(self) -> float:
        return self.products + self.attention + self.elementwise

    @property
    def seconds(self) -> float:
        return max(self.gpu, self.host)

    def parts(self, micro_batches: int) -> dict[str, float]:
        """Return the seconds of several micro-batches by part, with those in which the GPU waits for its host."""
        parts = {"products": self.products, "attention": self.attention, "elementwise": self.elementwise,
                 "launches": self.seconds - self.gpu}  # fmt: skip
        return {name: micro_batches * seconds for name, seconds in parts.items()}


NOTHING = _Layer()


class Computation(NamedTuple):
    """The computation of a step on many GPUs, which does not depend on the links between them: the passes, a layer of
    the average stage and the head with the loss (for all micro-batches), FLOP, and the seconds of the update.

    `traced`: the passes and the update are those of a simulated rank, and include the copies of FSDP2 and of DDP's
    buckets.
    """

    passes: time.Passes
    block: _Layer
    head: _Layer
    counted: Flops
    update: float
    traced: bool


def computation(spec: ModelSpec, run: Training, gpu: GPU, traced: time.Traced | None = None) -> Computation:
    """Return the computation of a rank in a step. Raises NotAvailable if `gpu` has no units for the dtype."""
    counted = flops(spec, run, gpu)
    passes = traced.passes if traced else time.passes(spec, run, gpu)
    if passes is None:
        raise NotAvailable(f"the {gpu.name} has no {time.peak_dtype(run)} units")
    update = time.update_after(spec, run, kernels(gpu), passes, traced.update if traced else None)
    head = passes.products.get("head", 0.0)
    # The last stage has all of the head and the loss, and joins streams for multi-token prediction.
    products, loss = (head + passes.products.get("mtp", 0.0)) * run.pp, passes.loss
    if traced:  # traced passes include the host's time for everything, also for the head and the loss
        started = own = products + loss
    else:
        started, own = [time.loss_waits(run, own_products, loss) for own_products in (head, products)]
    blocks = sum([seconds for part, seconds in passes.products.items() if part not in ("head", "mtp")])
    share = run.pp / spec.layers
    # Matmuls, traffic and the host's time are counted for a layer of the average stage.
    times = blocks, passes.attention, passes.elementwise, passes.host - started
    block = _Layer(*[share * seconds for seconds in times])
    return Computation(passes, block, _Layer(products, 0.0, loss, own), counted, update, traced is not None)


def step(
    model: ModelLike,
    run: Training,
    gpu: GPU | str,
    cluster: Cluster,
    overlap: tuple[str, ...] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    known: Computation | None = None,
) -> Step:
    """Return the time of one optimizer step of `run` on `cluster`, and of each part of it.

    Ranks are laid out tensor, context, data, pipeline parallel, neighbours first (see mesh.py); expert-parallel ranks
    are data-parallel ones.

    `overlap` names the communication that computation hides (`OVERLAPS`). None: whatever the run's stack hides, which
    is "data", for Megatron-LM also "tensor", and for both Megatron-LM and DeepSpeed depends on their options. `known`:
    the result of `computation` for the same run, for steps on several clusters. Raises SpecError for settings that
    contradict each other, and NotAvailable if the GPU has no units for the dtype, or if no link is known.
    """
    spec, gpu = find_model(model), find_gpu(gpu)
    if known is None:  # otherwise the run has been checked before
        check(spec, run, gpu)
    overlap = stack_of(run).overlap(run) if overlap is None else overlap
    if unknown := [name for name in overlap if name not in OVERLAPS]:
        raise SpecError(f"overlap={unknown[0]!r} is not one of {', '.join(OVERLAPS)}")
    if bucket_bytes < 1:
        raise SpecError(f"bucket_bytes={bucket_bytes} is not a size >= 1")
    if rates := pcie_rates(cluster.inside, min(run.world_size, cluster.gpus), gpu.peer_access):
        cluster = cluster.reaching(rates.median)  # all GPUs of a node share its host, whatever groups they are in
    gpu_kernels, known = kernels(gpu), known or computation(spec, run, gpu)
    block, counted = known.block, known.counted
    m, sent = run.accumulation, _sent(spec, run, cluster, gpu_kernels, known, overlap)
    forward = counted.forward / counted.total
    if spec.experts and stack_of(run).counts_tokens_on_host:
        # The host waits for the GPU in each forward pass, so it launches neither pass while the GPU runs the other.
        launched, on_gpu = forward_share(spec, run, gpu_kernels.host), block.gpu + m * sent.within
        parts = (forward, launched), (1 - forward, 1 - launched)
        block = block._replace(host=sum(max(mine * on_gpu, theirs * block.host) for mine, theirs in parts))
    if sent.within and not stack_of(run).cuda_launch_blocking:
        block = block._replace(host=block.host - m * sent.within)  # the host continues while ranks send
    stages = _stages(layers_of(spec, run), block, known.head, m, sent)
    n, busy = stages.layers, stages.compute.seconds
    data = data_parallel(spec, run, cluster, gpu_kernels, busy, forward, overlap, bucket_bytes)
    copied = 0.0 if known.traced else data.copied
    exposed = data.exposed + copied + training_rates()["scale"]["contention"] * data.contended
    passed = 0.0 if stack_of(run).hides_sends else m * sent.pipeline
    bubble = (sum(stages.seconds) - stages.longest + (run.pp - 1) * sent.pipeline) / run.virtual_stages
    seconds = m * stages.longest + passed + bubble + exposed + known.update
    lost, one = _lost(run, cluster, seconds), block.seconds / m
    return Step(
        **stages.compute.parts(m),
        tensor=m * (n * sent.tensor + (sent.logits if stages.slowest == run.pp - 1 else 0.0)),
        context=m * n * sent.context,
        experts=m * n * sent.experts,
        pipeline=passed,
        bubble=bubble,
        data=exposed,
        update=known.update,
        data_sent=data.sent,
        data_exposed=data.exposed,
        data_maybe_exposed=data.maybe_exposed,
        layer={"forward": forward * one, "backward": (1 - forward) * one, "gather": data.gather, "reduce": data.reduce,
               "tensor": sent.tensor, "context": sent.context, "experts": sent.experts},
        scale=lost,
        mfu=time.utilisation(counted.model, run, gpu, seconds + lost),
    )  # fmt: skip


def _lost(run: Training, cluster: Cluster, seconds: float) -> float:
    """Return the seconds that all ranks of a step of `seconds` wait for the slowest one: on several nodes once per
    step, and with sharded parameters also in each layer."""
    nodes, scale = -(-run.world_size // cluster.gpus), training_rates()["scale"]
    if nodes == 1:
        return 0.0
    per_doubling = scale["seconds_per_doubling"]
    per_doubling += scale["share_per_doubling"] * seconds if uses_fsdp(run) else 0.0
    return float(per_doubling * log2(nodes))


class _Sent(NamedTuple):
    """Seconds of a micro-batch's communication that computation does not hide: in each layer, to gather the logits,
    and between two stages of the pipeline."""

    tensor: float
    context: float
    experts: float
    logits: float
    pipeline: float

    @property
    def within(self) -> float:
        return self.tensor + self.context + self.experts


def _sent(
    spec: ModelSpec, run: Training, cluster: Cluster, gpu_kernels: Kernels, known: Computation, overlap: tuple[str, ...]
) -> _Sent:  # fmt: skip
    """Return the seconds of a rank's communication."""
    tensor = _tensor(spec, run, cluster, gpu_kernels, "tensor" in overlap)
    if stack_of(run).tp_comm_overlap:
        tensor /= run.tp  # sent in tp pieces, each during the matmul of another: only the first is exposed
    context = _context(spec, run, cluster, gpu_kernels, known.block.attention / run.accumulation)
    if not known.traced:  # traced passes include this
        context += _merged(spec, run, gpu_kernels)
    experts = spec.moe_layers / spec.layers * _experts(spec, run, cluster, gpu_kernels) if run.ep > 1 else 0.0
    if stack_of(run).overlap_moe_expert_parallel_comm:
        experts = _left(experts, known.block.gpu / run.accumulation)
    return _Sent(tensor, context, experts, _logits(spec, run, cluster, gpu_kernels),
                 _sends(spec, run, cluster, gpu_kernels))  # fmt: skip


class _Stages(NamedTuple):
    """The seconds of a micro-batch in each pipeline stage; which one is slowest, its layers and its computation."""

    seconds: list[float]
    slowest: int
    layers: int
    compute: _Layer

    @property
    def longest(self) -> float:
        return self.seconds[self.slowest]


def _stages(layers: Sequence[int], block: _Layer, head: _Layer, micro_batches: int, sent: _Sent) -> _Stages:
    """Return the stages with so many `layers`. Those with equally many need the same time, except the last one, which
    also has the head."""
    alike = {n: _stage(n, block, NOTHING, micro_batches) for n in set(layers[:-1])}
    last = _stage(layers[-1], block, head, micro_batches)
    times = {n: stage.seconds + n * sent.within for n, stage in alike.items()}
    seconds = [*[times[n] for n in layers[:-1]], last.seconds + layers[-1] * sent.within + sent.logits]
    slowest = seconds.index(max(seconds))
    n = layers[slowest]
    return _Stages(seconds, slowest, n, last if slowest == len(layers) - 1 else alike[n])


def _stage(layers: int, block: _Layer, head: _Layer, micro_batches: int) -> _Layer:
    """Return the seconds of a micro-batch in a pipeline stage with `layers` layers and, on the last stage, with
    `head`."""
    share = 1 / micro_batches
    return _Layer(
        share * (layers * block.products + head.products),
        share * (layers * block.attention + head.attention),
        share * (layers * block.elementwise + head.elementwise),
        share * (layers * block.host + head.host),
    )


def _stream_bytes(spec: ModelSpec, run: Training) -> float:
    """Return the bytes of a micro-batch's activations between two layers: bsh."""
    return run.tokens / run.cp * spec.hidden * bytes_of(run).compute


def _tensor(spec: ModelSpec, run: Training, cluster: Cluster, gpu_kernels: Kernels, hidden: bool) -> float:
    """Return the exposed seconds of tensor-parallel communication per layer and micro-batch.

    With `hidden`, the backward pass hides communication of column-parallel layers, as in Megatron-LM: the all-reduce of
    the input's gradient runs during the matmul for the weight's gradient. With sequence parallelism, the all-gather of
    the input runs during the matmul for the input's gradient, and the reduce-scatter of that gradient during the matmul
    for the weight's. Torch saves the gathered input, as the memory formulas do (`per_device`), unless checkpointing
    recomputes it.
    """
    if run.tp == 1:
        return 0.0
    group, size = cluster.group(run.tp), _stream_bytes(spec, run)
    again = 2 * whole_again(spec, run) + module_again(run, "mlp")
    behind = time.columns_backward(spec, run, gpu_kernels) if hidden else ()
    if not run.sequence_parallel:
        once = gpu_kernels.collective("all-reduce", size, group)
        return (2 + (0 if hidden else 2) + again) * once + sum(_left(once, backward.weight) for backward in behind)
    regathers = 2 if run.checkpointing == "selective" and not again and not hidden else 0
    gathers, scatters = 4 + regathers + again, 2 + (0 if hidden else 2) + again
    if spec.experts and run.expert_tp == 1:  # whole experts read and write a rank's own tokens
        behind, half = behind[:1], 1 - spec.moe_layers / spec.layers / 2
        gathers, scatters = half * gathers, half * scatters
    # torchao gathers fp8 with one scale per tensor (float8_tensor_parallel.py), Transformer Engine with all recipes.
    cast = stack_of(run).fp8_recipe or run.fp8 == "tensorwise"
    gathered = size / 2 if cast else size
    waited = group.nodes * group.across.waited if group.across else 0.0
    gather = gpu_kernels.collective("all-gather", gathered, group) + waited
    scatter = gpu_kernels.collective("reduce-scatter", size, group) + waited
    if run.zero == 3:
        # FSDP2 with DTensor: a gather or a reduce-scatter along dimension 1 is copied to or from dimension 0
        # (torch/distributed/_functional_collectives.py, all_gather_tensor, reduce_scatter_tensor).
        gather, scatter = gather + 2 * gathered / gpu_kernels.bandwidth, scatter + 2 * size / gpu_kernels.bandwidth
    left = sum(_left(gather, backward.input) + _left(scatter, backward.weight) for backward in behind)
    return gathers * gather + scatters * scatter + left


def _left(sent: float, matmul: float, inside: float | None = None) -> float:
    """Return the seconds that `sent` seconds of communication add to a step if a matmul of `matmul` seconds runs
    concurrently. They are the rest after the matmul, and the usual cost of hidden communication. This cost counts for
    at most `inside` seconds, the time in which the bytes cross the links of a node."""
    behind = min(sent, matmul)
    contended = behind if inside is None else min(behind, inside)
    return sent - behind + float(training_rates()["scale"]["contention"]) * contended


def _logits(spec: ModelSpec, run: Training, cluster: Cluster, gpu_kernels: Kernels) -> float:
    """Return the seconds in which ranks gather a micro-batch's logits and reorder them by token of the vocabulary. The
    backward pass takes a slice of their gradient and sends nothing."""
    if run.loss_parallel:
        return 0.0
    size = run.tokens / run.cp * spec.vocab * bytes_of(run).compute
    return gpu_kernels.collective("all-gather", size, cluster.group(run.tp)) + 2 * size / gpu_kernels.bandwidth


def _context(spec: ModelSpec, run: Training, cluster: Cluster, gpu_kernels: Kernels, attention: float) -> float:
    """Return the seconds per layer and micro-batch in which keys and values travel round the ring and which `attention`
    does not hide. While a rank computes attention with some, the next ones are on their way (Transformer Engine,
    attention.py, AttnFuncWithCP; torch, distributed/tensor/experimental/_context_parallel, which gathers all of them
    together)."""
    if run.cp == 1:
        return 0.0
    width = 2 * spec.key_width / run.tp * bytes_of(run).compute  # keys and values of a token
    group = cluster.group(run.cp, run.tp)
    # Forward 1; backward 2, with the gradients.
    passes = 3 + attentions_again(spec, run, fused=True) / spec.layers
    size = run.tokens / run.cp * width
    sent = passes * (run.cp - 1) * gpu_kernels.collective("send", size, group)
    return _left(sent, (run.cp - 1) / run.cp * attention, passes * (run.cp - 1) * size / group.inside.reached)


def _merged(spec: ModelSpec, run: Training, gpu_kernels: Kernels) -> float:
    """Return the seconds per layer and micro-batch in which ranks merge the partial results of ring attention."""
    if run.cp == 1:
        return 0.0
    own = stack_of(run).name
    kind = own if own in RING else "compiled" if run.compile else "eager"
    times = 1 + attentions_again(spec, run, fused=True) / spec.layers, 1
    bytes_per_token = sum(
        many * (first + (run.cp - 2) * more) * width
        for many, passed in zip(times, RING[kind], strict=True)
        for first, more, width in zip(*passed, (spec.query_width, spec.key_width), strict=True)
    )
    return run.tokens / run.cp * bytes_per_token / run.tp / gpu_kernels.bandwidth


def _experts(spec: ModelSpec, run: Training, cluster: Cluster, gpu_kernels: Kernels) -> float:
    """Return the seconds per micro-batch and layer with experts in which tokens are sent to their experts and back, on
    the rank that receives the most. Between nodes, a flexible dispatcher sends a token once to each node, and forwards
    it there (DeepEP, HybridEP)."""
    group = cluster.group(run.ep, run.expert_stride)
    passes = 4 + 2 * whole_again(spec, run)
    copies = token_copies(spec, run, group.nodes if group.across else group.ranks)
    sent = run.expert_imbalance * copies * _stream_bytes(spec, run) / run.tp
    return passes * gpu_kernels.collective("all-to-all", sent, group)


def _sends(spec: ModelSpec, run: Training, cluster: Cluster, gpu_kernels: Kernels) -> float:
    """Return the seconds per micro-batch in which a stage sends: each tensor-parallel rank sends its part, and the
    receiving ranks gather the parts (arXiv 2104.04473, section 4.1), unless sequence parallelism needs only parts."""
    if run.pp == 1:
        return 0.0
    group = cluster.group(run.pp, run.tp * run.cp * run.dp)
    once = gpu_kernels.collective("send", _stream_bytes(spec, run) / run.tp, group)
    if run.tp > 1 and not run.sequence_parallel:
        once += gpu_kernels.collective("all-gather", _stream_bytes(spec, run), cluster.group(run.tp))
    return 2 * run.virtual_stages * once
