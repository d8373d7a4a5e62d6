"""The time of a run: its parts, the source of each rate, and an 80 % interval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from math import exp, hypot, log
from typing import NamedTuple

from ...base.errors import NotAvailable
from ...base.notes import Note
from ...hardware.gpu import GPU
from ...hardware.links import GIVEN, Cluster, Rates, pcie_rates
from ...hardware.links import cluster as cluster_of
from ...specs.check import has_formulas
from ...specs.model import ModelSpec
from ...specs.run import Run, Training, stack_of
from ..memory.share import attention_kernel, masked_layers
from ..uncounted import uncounted
from .distributed import Computation, computation, step
from .efficiency import Efficiency, efficiencies
from .flops import head_sizes
from .host import STAGES, hook_seconds, hook_spread, host_seconds, python_seconds
from .kernels import Kernels, kernels, training_rates
from .offload import Waiting, waiting
from .step import (
    ALIGNED,
    Outside,
    Passes,
    Traced,
    fastest_kernel,
    host_waits,
    misaligned_factor,
    outside,
    peak_dtype,
    step_seconds,
)

# The parts of a step's seconds, in the order in which they are shown.
PARTS = ("products", "attention", "elementwise", "launches", "tensor", "context", "experts", "pipeline", "bubble",
         "data", "optimizer", "offload", "scale")  # fmt: skip
COMPUTED, WITHIN = PARTS[:4], PARTS[4:7]  # WITHIN: communication between the operators of a layer
SENT = (*WITHIN, "pipeline", "data")
FUSED = {"flash": "FlashAttention 2", "efficient": "the memory-efficient kernel", "cudnn": "cuDNN's"}
LITTLE = 0.005  # a share that prints as 0 %
# If no cluster is given, nodes may have this many times fewer network adapters than the vendor's own. With 8 A100s, AWS
# p4d nodes have 400 Gbit/s and a DGX 1,600 (their data sheets); with 8 H100s, Google's a3-highgpu have 800 and a DGX
# 3,200.
FEWER_ADAPTERS = 4
# On n nodes, a network shared with other jobs may reach only n ** -SHARED of its rate. Up to half is lost on 256 nodes
# of Leonardo (arXiv 2408.14090), 20 and 49 % on 540 of Polaris (an all-reduce of 1 GiB with two versions of NCCL:
# links.toml, [slingshot]), and 28 % from 4 to 128 nodes of H100s (a reduce-scatter: NVIDIA/nccl, issue 1229).
SHARED = 1 / 8
PLAIN = 1.55  # 80 % of 189 families counted as plain transformers are within this factor (verdict.PLAIN_MEMORY)


@dataclass(frozen=True)
class Timing:
    """Seconds of a step, or None if they are unknown, and their 80 % interval, from `low` to `high`.

    `parts` has seconds by name (`PARTS`) and adds up to `seconds`; `sources` has the source of each part. `hidden` has
    the seconds of communication that computation hides, which are in no part. `layer` has the seconds of one layer in a
    micro-batch (`distributed.Step`). `notes` say how ranks are connected, or why the time is unknown.
    """

    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    hidden: Mapping[str, float] = field(default_factory=dict)
    layer: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


def timing(
    spec: ModelSpec, run: Run, gpu: GPU | None, cluster: Cluster | None = None, traced: Traced | None = None
) -> Timing:
    """Return the time of a step of `run` on `gpu`, or of a generation, which has `seconds` only. The passes and the
    update of a `traced` step replace those of the formulas, which still count its communication."""
    result = _timing(spec, run, gpu, cluster, traced)
    return result if traced else replace(result, notes=(*result.notes, *uncounted(spec, run)))


class _Parts(NamedTuple):
    """The seconds of a step by part, and the factors between which other networks and nodes change them.

    `unnamed`: additional seconds that an unnamed engine may expose. `faster` and `slower`: the factors between nodes
    whose links reach the 90th and the 10th percentile, and the median node. `held_up`: the factor with a slower
    network or without overlap, because of `why`. `few_adapters`: the cluster with fewer network adapters, and the
    seconds of its step.
    """

    seconds: Mapping[str, float]
    layer: Mapping[str, float]
    nodes: Cluster | None = None
    rates: Rates | None = None
    hidden: float = 0.0
    unnamed: float = 0.0
    faster: float = 1.0
    slower: float = 1.0
    held_up: float = 1.0
    why: str = ""
    few_adapters: tuple[Cluster, float] | None = None

    @property
    def given_links(self) -> bool:
        nodes = self.nodes
        return nodes is not None and not self.rates and (nodes.inside.kind == "pcie" or nodes.inside.source == GIVEN)

    def notes(self, run: Training, factor: float, spread: float) -> Iterator[Note]:
        """Yield the notes on how ranks are connected, and on conditions that make a step longer than `factor` and
        `spread` of its kernels say."""
        if self.nodes:
            yield from _interconnect(run.world_size > self.nodes.gpus, self.nodes, self.rates)
        seconds = sum(self.seconds.values())
        if self.few_adapters and self.few_adapters[1] > factor * seconds:
            few, slower = self.few_adapters
            times = f"{slower / seconds:.1f} times as long"
            fewer = f"With {few.adapters} network adapters per node, as some clouds have, a step takes {times}"
            yield Note("fewer-adapters", f"{fewer}; give yours as --adapters (in Python cluster=).")
        if self.held_up > exp(spread):
            yield Note("slower-communication", f"A step can take {self.held_up:.1f} times as long: {self.why}.")


def _timing(spec: ModelSpec, run: Run, gpu: GPU | None, cluster: Cluster | None, traced: Traced | None) -> Timing:
    if gpu is None:
        return Timing()
    if gpu.by_memory:
        return Timing(notes=(Note("time-unknown", f"The step time is unknown: {gpu.name} names no GPU model."),))
    if not isinstance(run, Training):
        return Timing(step_seconds(spec, run, gpu))
    gpu_kernels = kernels(gpu)
    shapes = outside(spec, run, gpu_kernels)
    if traced:
        traced = traced._replace(passes=_with_python(spec, run, gpu_kernels, shapes, traced))
    try:
        known = computation(spec, run, gpu, traced)
        on_host = waiting(spec, run, gpu, known.passes.seconds) if run.offload else Waiting(0.0, 0.0, 0.0)
        parts = _on_one(spec, run, known) if run.world_size == 1 else _on_several(spec, run, gpu, cluster, known)
    except NotAvailable as error:
        return Timing(notes=(Note("time-unknown", f"The step time is unknown: {error}."),))
    seconds = sum(parts.seconds.values())
    spread = _spread(run, gpu_kernels, shapes.extrapolated_s / seconds)
    # One GPU waits for the training loop: the next batch, logging, reading the loss. An engine for several GPUs adds
    # time of its own to each step.
    waited, engine = 1 + float(training_rates()["loop"]["seconds"]) / seconds, 0.0
    if run.world_size > 1:
        waited, engine = 1.0, float(training_rates()["engine"]["seconds"])
    # The spreads of nodes, networks and loops are independent of that of kernels.
    quicker = exp(hypot(spread, log(parts.faster)))
    factor = exp(hypot(spread, log(parts.slower), log(parts.held_up), log(waited)))
    rest = seconds - on_host.seconds
    longest = factor * (rest + parts.unnamed) + on_host.most + engine
    if parts.few_adapters:
        longest = max(longest, parts.few_adapters[1])
    kernel = traced.attention if traced else fastest_kernel(spec, run, attention_kernel(spec, run, gpu), gpu)
    slower = gpu_kernels.slower(kernel, run.seq_len, sum(head_sizes(spec)) // 2)
    sources, notes = _sources(run, gpu_kernels, parts.seconds, kernel, slower, shapes), parts.notes(run, factor, spread)
    other, older = _older_attention(spec, run, gpu_kernels, kernel, parts.seconds.get("attention", 0.0))
    if older:
        difference = f"{abs(older):.2g} s {'more' if older > 0 else 'less'}"
        use = "torch uses with cuDNN up to 9.15" if older > 0 else "older releases of torch may use"
        sources["attention"] += f"; with {FUSED[other]}, which {use}, {difference}"
    if spec.experts:
        sources["products"] += "; the experts' grouped matmuls as one matmul of all their rows"
    if parts.given_links:
        sources.update({name: "the links that were given" for name in SENT if name in sources})
    waits = host_waits(run, known.passes)
    host_less_s, host_more_s = _other_hosts(spec, run, gpu_kernels.host, parts.seconds, waits)
    low = min(rest / quicker, rest - host_less_s) - shapes.maybe_less_s + on_host.least + min(0.0, older)
    high = max(longest, seconds + host_more_s) + shapes.maybe_more_s + max(0.0, older)
    if not (has_formulas(spec, run) or traced):
        low, high = low / PLAIN, high * PLAIN
    hidden = {"data": parts.hidden} if parts.hidden else {}
    if on_host.host:
        sources["offload"] = on_host.host.source or "the median of nodes.toml"
    return Timing(seconds, low, high, parts.seconds, sources, hidden, parts.layer, (*notes, *_host_memory(on_host)))


def _with_python(spec: ModelSpec, run: Training, gpu_kernels: Kernels, shapes: Outside, traced: Traced) -> Passes:
    """Return the passes of a trace, which has the operators of hooks, compiled graphs and Megatron-LM's layers, with
    the time of their Python, and with the time of matmuls whose rows are not aligned."""
    # Rates fitted to whole steps, which were checkpointed, include this time in that of operators.
    host = traced.passes.host + (0.0 if gpu_kernels.kind == "fitted" else python_seconds(spec, run))
    if hook_seconds(spec, run, gpu_kernels.host) or stack_of(run).own_kernels:
        host = max(host, host_seconds(spec, run, gpu_kernels.host) + host_waits(run, traced.passes))
    host = max(host, traced.passes.gpu + traced.waited)  # the GPU may wait in a part of the passes only
    products = dict(traced.passes.products)
    if shapes.maybe_less_s:
        products["head"] = products.get("head", 0.0) + shapes.maybe_less_s
    return traced.passes._replace(host=host, products=products)


def _host_memory(on_host: Waiting) -> Iterator[Note]:
    if on_host.host:
        waits = f"In each step the GPUs wait {on_host.seconds:.2g} s for host memory, assuming {on_host.host.name}"
        host_range = f"{on_host.least:.2g} to {on_host.most:.2g} s"
        yield Note("host-memory", f"{waits}; other hosts take {host_range}.")


def _held_up(run: Training, nodes: Cluster) -> tuple[Cluster, tuple[str, ...] | None, str]:
    """Return the conditions that may slow a run's communication down: `nodes` with a slower network, the `overlap` of
    `step` (None: the stack's own), and both in words, or "" if neither applies.

    DeepSpeed's ZeRO-3 gathers the weights of one module after another, one module ahead
    (runtime/zero/partitioned_param_coordinator.py, fetch_sub_module). Yet steps on 128 A100s took as long as without
    overlap, with 1 sequence and with 16 (benchmarks/time/throughputs.toml, deepspeed-azure). The cause is unknown
    (deepspeedai/DeepSpeed, issue 5047).
    """
    many, why, overlap = -(-run.world_size // nodes.gpus), [], None
    if many > 1 and (across := nodes.across):
        share = many**-SHARED
        nodes = replace(nodes, across=replace(across, reached=share * across.reached))
        why.append(f"where other jobs share the network, {across.name} can drop to {share:.0%} over {many} nodes")
    if stack_of(run).own_zero and run.zero == 3:
        overlap = ()
        why.append("DeepSpeed's ZeRO-3 may overlap no communication with computation")
    return nodes, overlap, ", and ".join(why)


def _spread(run: Training, gpu_kernels: Kernels, extrapolated_share: float) -> float:
    """Return the logarithm of the factor by which 80 % of the predictions for such a run are off at most.

    `extrapolated_share` is the share of its time in matmuls outside the measured sizes. Their error is added as an
    independent one.
    """
    spread = training_rates()["spread"]
    widest = [gpu_kernels.spread]
    if gpu_kernels.table and not gpu_kernels.measured(peak_dtype(run)):
        widest.append(spread["data sheet"])
    if gpu_kernels.longest and run.seq_len > gpu_kernels.longest:
        widest.append(spread["transferred"])
    if run.tp * run.pp > 1:
        widest.append(spread["cut"])
    if run.pp > 1 and not stack_of(run).timed_pipelines:
        widest.append(spread["pipeline"])  # of an unnamed engine; DeepSpeed's is slower than Megatron-LM's
    return hypot(max(widest), min(1.0, extrapolated_share) * spread["beyond"])


def _other_hosts(
    spec: ModelSpec, run: Training, host: Efficiency, parts: Mapping[str, float], waits: float
) -> tuple[float, float]:  # fmt: skip
    """Return how many seconds less a step takes with a faster host than `host`, and how many more with a slower one.
    Each host waits `waits` seconds for the GPU.

    Hosts differ as much as the slowest and the fastest whose operators were measured, and for hooks by `hook_spread`.
    This covers published hosts: eager loops that wait for them took 0.65 to 1.44 times as long as for `host`
    (benchmarks/time/throughputs.toml, and OPT on an L40S and BERT on an A100 in transformers 4.46's pages).
    DeepSpeed's stages 1 and 2 run Python after each gradient, which no count of operators includes, so a slow host may
    need twice the time of the operators.
    """
    waited = parts.get("launches", 0.0)
    busy = sum([parts.get(name, 0.0) for name in (*COMPUTED, *WITHIN)]) - waited
    fast, slow = [waits + seconds for seconds in _on_other_hosts(spec, run, host)]
    return waited - max(0.0, fast - busy), max(0.0, slow - busy) - waited


@lru_cache(maxsize=256)
def _on_other_hosts(spec: ModelSpec, run: Training, host: Efficiency) -> tuple[float, float]:
    """Return `host_seconds` on a faster and on a slower host than `host`."""
    hooks, host_spread = hook_seconds(spec, run, host), _hosts_apart()
    operators = host_seconds(spec, run, host) - hooks
    slower = 2.0 if (stack_of(run).name, run.zero) in STAGES else host_spread
    spread = hook_spread(host) if hooks else 1.0
    return operators / host_spread + hooks / spread, operators * slower + hooks * spread


def _older_attention(
    spec: ModelSpec, run: Training, gpu_kernels: Kernels, kernel: str, attention: float
) -> tuple[str, float]:  # fmt: skip
    """Return the attention kernel of an older torch or cuDNN, and how many seconds it adds to a step with `attention`
    seconds of attention; negative if it is faster.

    CUDA 12's wheels up to torch 2.10 come with a cuDNN that is older than `fastest_kernel` assumes, and run
    FlashAttention. With dropout, older releases may run cuDNN's kernel: a compiled GPT-2 that was measured on an H200
    with torch 2.11 (archive/h200) takes the time of this kernel. Which release first refuses it is not known.
    Megatron-LM and torchtitan select the kernel themselves.
    """
    stack = stack_of(run)
    if run.attention != "sdpa" or stack.own_kernels or stack.lists_kernels:
        return kernel, 0.0
    flash = "efficient" if masked_layers(spec, run) else "flash"
    if kernel == "cudnn":
        this, other = kernel, flash
    elif kernel == "flash" and gpu_kernels.gpu.prefers_cudnn_attention(*head_sizes(spec)):
        this, other = flash, "cudnn"
    else:
        return kernel, 0.0
    sizes = run.sequences, max(1, spec.heads // run.tp), run.seq_len, sum(head_sizes(spec)) // 2
    dtype = peak_dtype(run)
    times = gpu_kernels.attention(*sizes, other, dtype) / gpu_kernels.attention(*sizes, this, dtype)
    return other, attention * (times - 1) if (times > 1) == (kernel == "cudnn") else 0.0


@cache
def _hosts_apart() -> float:
    """Return how many times as long the slowest measured host needs to launch an operator as the fastest."""
    times = [rates.dispatch for rates in efficiencies().values() if rates.dispatch]
    return max(times) / min(times)


def _on_one(spec: ModelSpec, run: Training, known: Computation) -> _Parts:
    """Return the parts of a step on one device; those that take no time are left out. A layer's forward and backward
    computation is an equal share of the passes, including the head and the loss."""
    passed = known.passes
    times = {
        "products": sum(passed.products.values()),
        "attention": passed.attention,
        "elementwise": passed.elementwise + passed.loss,
        "launches": passed.seconds - passed.gpu,
        "offload" if run.offload else "optimizer": known.update,
    }
    parts = {name: value for name, value in times.items() if value}
    computed = sum([parts.get(name, 0.0) for name in COMPUTED]) / run.accumulation / spec.layers
    forward = known.counted.forward / known.counted.total
    return _Parts(parts, {"forward": forward * computed, "backward": (1 - forward) * computed})


def _on_several(
    spec: ModelSpec, run: Training, gpu: GPU, cluster: Cluster | None, known: Computation
) -> _Parts:  # fmt: skip
    """Return the parts of a step on several GPUs, and what other nodes and networks change."""
    nodes = cluster or _usual_nodes(gpu)
    rates = pcie_rates(nodes.inside, min(run.world_size, nodes.gpus), gpu.peer_access)
    on = partial(step, spec, run, gpu, known=known)
    terms = on(nodes)
    longest = terms.seconds + terms.data_maybe_exposed
    faster, slower, held_up, few_adapters = 1.0, 1.0, 1.0, None
    if rates:
        slow, fast = on(nodes.reaching(rates.slow)), on(nodes.reaching(rates.fast))
        faster, slower = terms.seconds / fast.seconds, (slow.seconds + slow.data_maybe_exposed) / longest
    busy, overlap, why = _held_up(run, nodes)
    if why:
        busy_step = on(busy, overlap)
        held_up = (busy_step.seconds + busy_step.data_maybe_exposed) / longest
    if cluster is None and nodes.across and run.world_size > nodes.gpus:
        few = replace(nodes, adapters=max(1, nodes.adapters // FEWER_ADAPTERS))
        few_adapters = (few, on(few).seconds)
    values = {"offload" if run.offload else "optimizer": terms.update, **terms._asdict()}
    return _Parts(
        seconds={name: values[name] for name in PARTS if values.get(name)},
        layer={name: value for name, value in terms.layer.items() if value},
        nodes=nodes,
        rates=rates,
        hidden=terms.data_sent - terms.data_exposed,
        unnamed=terms.data_maybe_exposed,
        faster=faster,
        slower=slower,
        held_up=held_up,
        why=why,
        few_adapters=few_adapters,
    )


_usual_nodes = cache(cluster_of)


@lru_cache(maxsize=256)
def _interconnect(several: bool, nodes: Cluster, rates: Rates | None) -> tuple[Note, ...]:
    """Return notes on how ranks are connected, in one node or `several`, and for `rates` of published nodes also on
    what to measure."""
    between = ""
    if nodes.across and several:
        between = f", {nodes.adapters} × {nodes.across.name} per node"
    joined = Note("interconnect", f"The step time assumes {nodes.gpus} GPUs per node on {nodes.inside.name}{between}.")
    if not rates:
        return (joined,)
    slow, middle, fast = (f"{rate / 1e9:.2g}" for rate in rates[:3])
    spread = f"the median of {rates.nodes} published PCIe nodes; 80 % of them reach {slow} to {fast} GB/s"
    advice = "Measure yours with nccl-tests and give its busbw as --link-gb-s (in Python cluster=)"
    return joined, Note("pcie-rate", f"The assumed bus bandwidth is {middle} GB/s, {spread}. {advice}.")


def _sources(
    run: Training, gpu_kernels: Kernels, parts: Mapping[str, float], kernel: str, slower: float, shapes: Outside
) -> dict[str, str]:
    """Return the source of each part's rates, in words.

    Attention runs in `kernel`, which takes `slower` times as long as the measured kernel. `shapes` has the seconds of
    matmuls whose shapes were not measured.
    """
    texts = {name: gpu_kernels.sources[name] for name in parts}
    dtype = peak_dtype(run)
    if gpu_kernels.table and not gpu_kernels.measured(dtype):
        texts["products"] = f"{gpu_kernels.shares['products']:.0%} of the data sheet, because {dtype} was not measured"
    else:
        if (share := shapes.extrapolated_s / parts["products"]) > LITTLE:
            texts["products"] += f"; {min(1.0, share):.0%} of it extrapolated beyond the measured sizes"
        if (share := shapes.misaligned_s / parts["products"]) > LITTLE:
            rows = f"on rows that are no multiple of {ALIGNED}"
            timed, times = misaligned_factor(gpu_kernels.gpu)
            take = "which take" if timed else "which may take"
            texts["products"] += f"; {min(1.0, share):.0%} of it {rows}, {take} {times:.0f} times as long"
    if "attention" not in texts or not gpu_kernels.table:
        return texts
    if kernel not in FUSED:
        texts["attention"] = f"its matmuls: {texts['products']}"
    elif dtype == "fp32":
        texts["attention"] = f"{gpu_kernels.shares['attention']:.0%} of the data sheet, because fp32 was not measured"
    else:
        if slower != 1:
            texts["attention"] += f", × {slower:.2f} for {FUSED[kernel]}"
        if gpu_kernels.longest and run.seq_len > gpu_kernels.longest:
            texts["attention"] += f"; extrapolated beyond {gpu_kernels.longest:,} tokens"
    return texts
