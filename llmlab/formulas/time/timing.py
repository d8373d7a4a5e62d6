"""The time of a run: its parts, the source of each rate, and an 80 % interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from math import exp, hypot, log

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
from .distributed import Step, computation, step
from .efficiency import Efficiency, efficiencies
from .flops import Flops, head_sizes
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
    spec: ModelSpec, run: Run, card: GPU | None, cluster: Cluster | None = None, traced: Traced | None = None
) -> Timing:
    """Return the time of a step of `run` on `card`, or of a generation, which has `seconds` only. The passes and the
    update of a `traced` step replace those of the formulas, which still count its communication."""
    result = _timing(spec, run, card, cluster, traced)
    return result if traced else replace(result, notes=(*result.notes, *uncounted(spec, run)))


def _timing(spec: ModelSpec, run: Run, card: GPU | None, cluster: Cluster | None, traced: Traced | None) -> Timing:
    if card is None:
        return Timing()
    if card.by_memory:
        return Timing(notes=(Note("time-unknown", f"The step time is unknown: {card.name} names no GPU model."),))
    if not isinstance(run, Training):
        return Timing(step_seconds(spec, run, card))
    gpu_kernels, nodes, rates, node_spread, held_up, why = kernels(card), cluster, None, (1.0, 1.0), 1.0, ""
    on_host, notes = Waiting(0.0, 0.0, 0.0), list[Note]()
    # A trace has the operators of hooks, compiled graphs and Megatron-LM's layers, but not the time of their Python.
    if traced:
        # Rates fitted to whole steps, which were checkpointed, include this time in that of operators.
        host = traced.passes.host + (0.0 if gpu_kernels.kind == "fitted" else python_seconds(spec, run))
        if hook_seconds(spec, run, gpu_kernels.host) or stack_of(run).own_kernels:
            host = max(host, host_seconds(spec, run, gpu_kernels.host) + host_waits(run, traced.passes))
        host = max(host, traced.passes.card + traced.waited)  # the GPU may wait in a part of the passes only
        traced = traced._replace(passes=traced.passes._replace(host=host))
    shapes = outside(spec, run, gpu_kernels)
    if traced and shapes.maybe_less_s:  # a trace times matmuls as if their rows were aligned
        products = dict(traced.passes.products)
        products["head"] = products.get("head", 0.0) + shapes.maybe_less_s
        traced = traced._replace(passes=traced.passes._replace(products=products))
    try:
        known = computation(spec, run, card, traced)
        if known.passes is None:
            reason = f"the {card.name} has no {peak_dtype(run)} units"
            return Timing(notes=(Note("time-unknown", f"The step time is unknown: {reason}."),))
        if run.offload:
            on_host = waiting(spec, run, card, known.passes.seconds)
        if run.world_size == 1:
            parts, hidden, unnamed = _alone(run, known.passes, known.update), 0.0, 0.0
            layer = _layer(spec, run, known.counted, parts)
        else:
            nodes = nodes or _usual_nodes(card)
            rates = pcie_rates(nodes.inside, min(run.world_size, nodes.gpus), card.peer_access)
            terms = step(spec, run, card, nodes, traced=traced, known=known)
    except NotAvailable as error:
        return Timing(notes=(Note("time-unknown", f"The step time is unknown: {error}."),))
    if nodes and run.world_size > 1:
        several = run.world_size > nodes.gpus
        parts, notes = _of(run, terms), list(_interconnect(several, nodes, rates))
        hidden, unnamed = terms.data_sent - terms.data_exposed, terms.data_maybe_exposed
        if rates:
            slow, fast = (step(spec, run, card, nodes.reaching(rate), traced=traced, known=known)
                          for rate in (rates.slow, rates.fast))  # fmt: skip
            node_spread = _nodes_apart(terms, slow, fast)
        busy, overlap, why = _held_up(run, nodes)
        if why:
            busy_step = step(spec, run, card, busy, overlap, traced=traced, known=known)
            held_up = (busy_step.seconds + busy_step.data_maybe_exposed) / (terms.seconds + terms.data_maybe_exposed)
        layer = {name: value for name, value in terms.layer.items() if value}
    seconds = sum(parts.values())
    spread = _spread(run, gpu_kernels, shapes.extrapolated_s / seconds)
    # One GPU waits for the training loop: the next batch, logging, reading the loss.
    waited = 1 + (float(training_rates()["loop"]["seconds"]) / seconds if run.world_size == 1 else 0.0)
    # The spreads of nodes, networks and loops are independent of that of kernels.
    quicker = exp(hypot(spread, log(node_spread[0])))
    factor = exp(hypot(spread, log(node_spread[1]), log(held_up), log(waited)))
    rest = seconds - on_host.seconds
    longest = factor * (rest + unnamed) + on_host.most
    if run.world_size > 1:  # an engine for several GPUs adds time of its own to each step
        longest += float(training_rates()["engine"]["seconds"])
    if nodes and cluster is None and nodes.across and run.world_size > nodes.gpus:
        few = replace(nodes, adapters=max(1, nodes.adapters // FEWER_ADAPTERS))
        slower = step(spec, run, card, few, traced=traced, known=known).seconds
        longest = max(longest, slower)
        if slower > factor * seconds:
            times = f"{slower / seconds:.1f} times as long"
            fewer = f"With {few.adapters} network adapters per node, as some clouds have, a step takes {times}"
            notes.append(Note("fewer-adapters", f"{fewer}; give yours as --adapters (in Python cluster=)."))
    if held_up > exp(spread):
        notes.append(Note("slower-communication", f"A step can take {held_up:.1f} times as long: {why}."))
    kernel = traced.attention if traced else fastest_kernel(run, attention_kernel(spec, run, card), card)
    slower = gpu_kernels.slower(kernel, run.seq_len, sum(head_sizes(spec)) // 2)
    sources = _sources(run, gpu_kernels, parts, kernel, slower, shapes)
    other, older = _older_attention(spec, run, gpu_kernels, kernel, parts.get("attention", 0.0))
    if older:
        sources["attention"] += f"; with {FUSED[other]}, which torch uses with cuDNN up to 9.15, {older:.2g} s more"
    if nodes and not rates and (nodes.inside.kind == "pcie" or nodes.inside.source == GIVEN):
        sources.update({name: "the links that were given" for name in SENT if name in sources})
    host_less_s, host_more_s = _other_hosts(spec, run, gpu_kernels.host, parts, host_waits(run, known.passes))
    low = min(rest / quicker, rest - host_less_s) - shapes.maybe_less_s + on_host.least
    high = max(longest, seconds + host_more_s) + shapes.maybe_more_s + older
    if not (has_formulas(spec, run) or traced):
        low, high = low / PLAIN, high * PLAIN
    if on_host.host:
        sources["offload"] = on_host.host.source or "the median of nodes.toml"
        waits = f"In each step the GPUs wait {on_host.seconds:.2g} s for host memory, assuming {on_host.host.name}"
        host_range = f"{on_host.least:.2g} to {on_host.most:.2g} s"
        notes.append(Note("host-memory", f"{waits}; other hosts take {host_range}."))
    return Timing(seconds, low, high, parts, sources, {"data": hidden} if hidden else {}, layer, tuple(notes))


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


def _nodes_apart(terms: Step, slow: Step, fast: Step) -> tuple[float, float]:
    """Return by what factor a step is faster on the node at the 90th percentile of published ones than on the median
    node, and by what factor slower at the 10th."""
    longest = (slow.seconds + slow.data_maybe_exposed) / (terms.seconds + terms.data_maybe_exposed)
    return terms.seconds / fast.seconds, longest


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
    """Return the attention kernel that runs if torch does not use cuDNN's, and how many seconds it adds to a step with
    `attention` seconds of attention.

    It runs with CUDA 12's wheels up to torch 2.10, whose cuDNN is older than `fastest_kernel` assumes. Megatron-LM and
    torchtitan select cuDNN's kernel themselves.
    """
    stack = stack_of(run)
    if kernel != "cudnn" or run.attention != "sdpa" or stack.own_kernels or stack.lists_kernels:
        return kernel, 0.0
    other = "efficient" if masked_layers(spec, run) else "flash"
    sizes = run.sequences, max(1, spec.heads // run.tp), run.seq_len, sum(head_sizes(spec)) // 2
    dtype = peak_dtype(run)
    times = gpu_kernels.attention(*sizes, other, dtype) / gpu_kernels.attention(*sizes, kernel, dtype)
    return other, attention * max(0.0, times - 1)


@cache
def _hosts_apart() -> float:
    """Return how many times as long the slowest measured host needs to launch an operator as the fastest."""
    times = [rates.dispatch for rates in efficiencies().values() if rates.dispatch]
    return max(times) / min(times)


def _alone(run: Training, passed: Passes, update: float) -> dict[str, float]:
    """Return the seconds of the parts of a step on one device; parts that take no time are left out."""
    parts = {
        "products": sum(passed.products.values()),
        "attention": passed.attention,
        "elementwise": passed.elementwise + passed.loss,
        "launches": passed.seconds - passed.card,
        "offload" if run.offload else "optimizer": update,
    }
    return {name: value for name, value in parts.items() if value}


def _layer(spec: ModelSpec, run: Training, counted: Flops, parts: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a layer's forward and backward computation in a micro-batch on one device: an equal share
    of the passes, including the head and the loss."""
    computed = sum([parts.get(name, 0.0) for name in COMPUTED]) / run.accumulation / spec.layers
    forward = counted.forward / counted.total
    return {"forward": forward * computed, "backward": (1 - forward) * computed}


def _of(run: Training, terms: Step) -> dict[str, float]:
    values = {"offload" if run.offload else "optimizer": terms.update, **terms._asdict()}
    return {name: values[name] for name in PARTS if values.get(name)}


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
            timed, times = misaligned_factor(gpu_kernels.card)
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
