"""What `lab.serve` answers: memory, latency, throughput and price of a deployment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from ..base.errors import SpecError
from ..base.notes import Note
from ..base.units import show_bytes, show_digits, show_seconds
from ..formulas.time.step import price
from ..hardware.gpu import GPU
from ..specs.generic import ConfigSizes, auto_class, text_config
from ..specs.model import ModelSpec
from .kernels import engine_kernels
from .layers import Attention, Experts, LatentAttention, draft_of, layers_of
from .llamacpp import Buffers, buffers, slot_tokens
from .load import Latency, goodput, prompt_seconds, simulate, summary
from .memory import Memory, divided_memory, necessary_limit
from .replay import Served
from .service import UTILIZATION, WEIGHTS, Service
from .step import Step, step_seconds

# Of 80 % of the deployments in benchmarks/results/serving.md, the measured value is between these factors of the
# predicted one; the factors were chosen on the same deployments.
TPOT_INTERVAL = (0.8, 1.35)
TTFT_INTERVAL = (0.57, 2.15)
RATE_INTERVAL = (0.78, 1.28)  # of tokens per second
# Of llama.cpp: those of TPOT hold 20 of the 24 speeds of decoding in the archive's figures llama-bench-cuda,
# -llama-3-8b and -apple, those of TTFT 9 of the 11 prompts of llama-bench-cuda-prompt.
LLAMA_CPP_INTERVALS = (0.85, 1.2), (0.88, 1.16)
UNITS = {"fp8": "fp8", "nvfp4": "fp4", "mxfp4": "bf16"}  # the matrix units that kernels for these formats need


@dataclass(frozen=True)
class ServingReport:
    """A deployment's memory on its fullest GPU, latency and throughput. Bytes, seconds, US dollars; None where it does
    not fit.

    `latency` has medians and 99th percentiles under the load; `time` the parts of a step that gives each running
    request a token, and "waiting", what the prompts of others add to it in the mean; `usd_per_million_input` and
    `_output` divide the price of the GPUs by the time that prompts and answers take; `goodput`: requests per second
    within the service level that was asked for.
    """

    model: str
    gpu: str
    service: Service
    memory: Memory | Buffers
    running: int
    latency: Latency | None
    time: dict[str, float]
    usd_per_million_input: float | None
    usd_per_million_output: float | None
    notes: tuple[Note, ...]
    goodput: float | None = None

    @property
    def outcome(self) -> str:
        """"fits", or "out of memory" where weights and one step leave no room for a request."""
        return "fits" if self.latency else "out of memory"

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        """Output tokens per second of the deployment, divided by its GPUs."""
        return self.latency.tokens_per_second / self.service.gpus if self.latency else None

    @property
    def tokens_per_second_per_user(self) -> float | None:
        """Tokens per second that one request gets after its first."""
        return 1 / self.latency.tpot if self.latency and self.latency.tpot else None

    @property
    def intervals(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """The factors of TPOT and of TTFT between which 80 % of measured deployments are."""
        return LLAMA_CPP_INTERVALS if self.service.engine == "llama.cpp" else (TPOT_INTERVAL, TTFT_INTERVAL)

    @property
    def rate_interval(self) -> tuple[float, float]:
        """The factors of tokens per second between which 80 % of measured deployments are."""
        return (1 / 1.2, 1 / 0.85) if self.service.engine == "llama.cpp" else RATE_INTERVAL

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON."""
        data = asdict(self) | {"outcome": self.outcome, "notes": [str(note) for note in self.notes]}
        data["memory"] |= {"tokens": self.memory.tokens, "requests": self.memory.requests}
        if not self.latency:
            data["memory"]["missing"] = self.memory.missing
        if isinstance(self.memory, Memory):
            data["memory"] |= {
                "blocks": self.memory.blocks, "longest": self.memory.longest, "cache": max(0, self.memory.cache),
            }  # fmt: skip
        data["tokens_per_second_per_gpu"] = self.tokens_per_second_per_gpu
        return data

    def __str__(self) -> str:
        memory, service = self.memory, self.service
        lines = [f"{self.model} on {service.gpus} × {self.gpu}, {service.engine}, weights in {service.weights}", ""]
        lines += memory.shown()
        if not self.latency:
            missing = show_bytes(memory.missing)
            return "\n".join([*lines, "", f"Out of memory: {missing} more are needed on each GPU.", *self._noted()])
        requests = "one request" if memory.requests == 1 else f"{memory.requests:,} requests"
        length = f"{service.prompt_len + service.output_len:,} tokens"
        lines.append(f"{'cache holds':20}{memory.tokens:>12,} tokens, {requests} of {length}")
        if isinstance(memory, Memory):
            longest = f"{memory.longest:.2f} requests of {service.max_model_len:,} tokens at the same time"
            lines.append(f"{'':20}{memory.blocks:>12,} blocks, enough for {longest}")
        lines.append("")
        times = self.latency
        tpot, ttft = self.intervals
        for name, value, far, (low, high) in (
            ("TTFT", times.ttft, times.ttft_p99, ttft), ("TPOT", times.tpot, times.tpot_p99, tpot)
        ):  # fmt: skip
            between = f"80 % interval {show_seconds(low * value)} to {show_seconds(high * value)}"
            before = f", of which {show_seconds(times.waiting)} until the prompt is computed"
            waits = before if name == "TTFT" and times.waiting else ""
            lines.append(f"{name:20}{show_seconds(value):>12}{waits} ({between}); p99 {show_seconds(far)}")
        lines.append(f"{'ITL':20}{'':12} p99 {show_seconds(times.itl_p99)}")
        rate, (low, high) = times.tokens_per_second, self.rate_interval
        per_gpu = f"{self.tokens_per_second_per_gpu:,.0f} per GPU"
        lines.append(f"{'output':20}{rate:>12,.0f} tokens/s ({low * rate:,.0f} to {high * rate:,.0f}), {per_gpu}")
        if self.goodput is not None:
            lines.append(f"{'goodput':20}{show_digits(self.goodput):>12} requests/s within the service level")
        if self.usd_per_million_output is not None:
            paid = self.usd_per_million_output
            both = f"${self.usd_per_million_input:.3f} in, ${paid:.2f} (${paid / high:.2f} to ${paid / low:.2f}) out"
            lines.append(f"{'per million tokens':20}{both:>12}")
        shares = ", ".join(f"{part} {show_seconds(value)}" for part, value in self.time.items() if value >= 5e-6)
        given = f" gives each {service.tokens_per_step:.2f} tokens" if service.draft else ""
        requests = "one request" if self.running == 1 else f"{self.running:,} requests"
        return "\n".join([*lines, "", f"A step of {requests}{given}: {shares}.", *self._noted()])

    def _noted(self) -> list[str]:
        return [f"note: {note}" for note in self.notes]


def served(
    spec: ModelSpec, service: Service, gpu: GPU, slo: tuple[float, float] | None = None
) -> ServingReport:
    """Return what `service` costs for the model, and its goodput if `slo` has the most seconds to the first and per
    further token. Raises SpecError for what cannot be served so."""
    service = checked(spec, service, gpu)
    if slo is not None and not min(slo) > 0:
        raise SpecError(f"slo={slo!r}: give two times in seconds above 0, to the first token and per further token")
    memory = divided_memory(spec, service, gpu)
    room = memory.requests * service.dp_attention
    notes = _notes(spec, service, gpu)
    if room and (limit := necessary_limit(spec, service, gpu)):
        words = f"vLLM does not start: its cache is smaller than one request of {service.max_model_len:,} tokens"
        notes.append(Note("max-model-len", f"{words}; give max_model_len={limit}"))
    if room < 1:
        if nearest := _nearest(spec, service, gpu):
            notes.append(Note("fits-with", f"the model fits on {nearest}"))
        return ServingReport(spec.name, gpu.name, service, memory, 0, None, {}, None, None, tuple(notes))
    requests = simulate(spec, service, gpu, memory)
    times, good = summary(requests), goodput(requests, *slo) if slo else None
    busy = round(times.tokens_per_second * times.tpot) if service.rate else service.concurrency or 1
    if service.rate and times.requests_per_second < 0.95 * service.rate and _waits_more(requests):
        both = f"{show_digits(times.requests_per_second)} of {show_digits(service.rate)}"
        answered = f"{both} requests per second are answered"
        notes.append(Note("queue-grows", f"{answered}: the queue grows, and the time to the first token with it"))
    if times.preempted > 0.01:
        words = f"the cache fills up: requests are preempted and computed again {times.preempted:.2f} times in the mean"
        notes.append(Note("preemption", f"{words}; {room} of this length fit, so give max_num_seqs={room}"))
    if busy < service.pp:
        notes.append(Note("bubbles", f"{busy} requests keep {busy} of the {service.pp} pipeline stages busy"))
    running = max(1, min(room, busy, service.limits(gpu)[0] * service.dp_attention))
    context = service.prompt_len + service.output_len // 2
    time = step_seconds(spec, service, gpu, Step(running, context))
    if running > 1:
        time["waiting"] = max(0.0, times.tpot * service.tokens_per_step - sum(time.values()))
    prices = _prices(spec, service, gpu, times)
    about = spec.name, gpu.name, service, memory, running, times, time
    return ServingReport(*about, prices[0], prices[1], tuple(notes), good)


def _waits_more(requests: Sequence[Served]) -> bool:
    """Return whether the last quarter of the requests waits more than twice as long as the first for a token."""
    count = len(requests) // 4
    first, last = (fmean(one.first_token for one in part) for part in (requests[:count], requests[-count:]))
    return last > 2 * first


def checked(spec: ModelSpec, service: Service, gpu: GPU) -> Service:
    """Return the service with the weights' format and the longest request filled in.

    Raises SpecError if it cannot be served.
    """
    service = possible(spec, service, gpu)
    needed = spec.max_positions
    if service.engine == "llama.cpp":
        needed = min(slot_tokens(service), needed)
    longest = service.max_model_len or needed
    if service.prompt_len + service.output_len > longest:
        total = f"prompt_len={service.prompt_len} and output_len={service.output_len} are more"
        raise SpecError(f"{total} than the {longest} tokens that a request may have; give shorter ones")
    return replace(service, max_model_len=longest)


def possible(spec: ModelSpec, service: Service, gpu: GPU) -> Service:
    """Return the service with the weights' format filled in. Raises SpecError if no request can be served so."""
    if auto_class(spec.family) == "AutoModelForMaskedLM":
        raise SpecError(f"{spec.name} fills in masked tokens and writes no text; give a model that does")
    if ConfigSizes(text_config(spec.config), spec.name).stacks()[0]:
        raise SpecError(f"{spec.name} has an encoder and a decoder, which are not predicted; give a decoder alone")
    if (service.max_model_len or 0) > spec.max_positions:
        given = f"max_model_len={service.max_model_len}"
        raise SpecError(f"{given}: {spec.name} has {spec.max_positions} positions; give no more")
    if service.engine == "trtllm" and gpu.vendor != "NVIDIA":
        raise SpecError(f'engine="trtllm" runs on NVIDIA\'s GPUs, and {gpu.name} is none; give "vllm" or "sglang"')
    service = _with_format(spec, service, gpu)
    if service.engine == "llama.cpp":
        return service
    if not _has_units(service.weights, gpu):
        words = f'weights="{service.weights}": {gpu.name} has no {UNITS[service.weights]} units'
        raise SpecError(f'{words}; give "bf16", "awq" or "gptq"')
    if service.pp > spec.layers:
        raise SpecError(f"pp={service.pp}: {spec.name} has {spec.layers} layers; give at most as many stages")
    if service.draft and (vocab := draft_of(spec, service.draft).vocab) != spec.vocab:
        words = f'draft="{service.draft}" has a vocabulary of {vocab}, {spec.name} one of {spec.vocab}'
        raise SpecError(f"{words}; give a draft with the model's tokenizer")
    experts = any(isinstance(layer.mlp, Experts) for layer, _ in layers_of(spec).kinds)
    if not experts and (service.ep > 1 or service.weights == "mxfp4"):
        option = f"ep={service.ep}" if service.ep > 1 else 'weights="mxfp4"'
        raise SpecError(f"{option} is for experts, and {spec.name} has none; leave it out")
    split = service.tp // service.dp_attention
    for layer, _ in layers_of(spec).kinds:
        if isinstance(layer.mixer, (Attention, LatentAttention)) and layer.mixer.heads % split:
            heads = layer.mixer.heads
            degrees = ", ".join(str(degree) for degree in range(1, heads + 1) if heads % degree == 0)
            words = f"tp={split} does not divide the {heads} heads of {spec.name}, and engines give each GPU whole ones"
            raise SpecError(f"{words}; give one of {degrees}")
    return service


def _with_format(spec: ModelSpec, service: Service, gpu: GPU) -> Service:
    """Return the service with the published format in place of "auto", as engines take it from the checkpoint."""
    if service.weights != "auto":
        return service
    if service.engine == "llama.cpp":
        return replace(service, weights="mxfp4" if spec.checkpoint == "mxfp4" else "bf16")
    return replace(service, weights=spec.checkpoint if _has_units(spec.checkpoint, gpu) else "bf16")


def _has_units(weights: str, gpu: GPU) -> bool:
    return weights in WEIGHTS and (weights not in UNITS or gpu.peak(UNITS[weights]) is not None)


def _notes(spec: ModelSpec, service: Service, gpu: GPU) -> list[Note]:
    notes = []
    if service.engine == "llama.cpp":
        words = "no kernels were measured: times are computed from the weights' bytes at 80 % of the memory's bandwidth"
        notes.append(Note("kernels-not-measured", words))
        memory = divided_memory(spec, service, gpu)
        if isinstance(memory, Buffers) and memory.offloaded < memory.layers:
            words = f"layers on the CPU read its memory at {service.cpu_memory_gb_s:g} GB/s (--cpu-memory-gb-s)"
            notes.append(Note("layers-on-the-cpu", words))
        return notes
    if service.weights == "bf16" and spec.checkpoint in WEIGHTS:
        words = f"{spec.name} is published in {spec.checkpoint}, and this is the service with weights in bf16"
        instead = f'give weights="{spec.checkpoint}" to serve it as it is'
        lacks = f"{gpu.name} has no {UNITS.get(spec.checkpoint)} units, and kernels that widen them are not predicted"
        notes.append(Note("checkpoint", f"{words}; {instead if _has_units(spec.checkpoint, gpu) else lacks}"))
    elif spec.checkpoint and spec.checkpoint not in WEIGHTS:
        words = f"{spec.name} is quantized by {spec.checkpoint}, which is not predicted"
        notes.append(Note("checkpoint", f"{words}; this is the service with weights in {service.weights}"))
    if service.weights == "bf16" and gpu.peak("bf16") is None:
        words = f"{gpu.name} has no bf16 units: engines convert the weights to fp16, which has the same size"
        notes.append(Note("fp16", f'{words}; give weights="fp16"'))
    if service.gpus > gpu.node_gpus:
        words = f"{service.gpus} GPUs are on several nodes of {gpu.node_gpus} {gpu.name}"
        notes.append(Note("several-nodes", f"{words}: messages are timed as within one node, so times are too short"))
    if not engine_kernels(gpu).measured:
        words = f"no kernels of {gpu.name} were measured: times are computed from 80 % of the data sheet's bandwidth"
        notes.append(Note("kernels-not-measured", f"{words} and 60 % of its peak FLOP/s"))
    split = service.tp // service.dp_attention
    least = min((layer.mixer.kv_heads for layer, _ in layers_of(spec).kinds if isinstance(layer.mixer, Attention)),
                default=split)  # fmt: skip
    if split > least:
        notes.append(Note("heads-copied", f"each of the {least} key and value heads is on {split // least} GPUs"))
    return notes


def _nearest(spec: ModelSpec, service: Service, gpu: GPU) -> str | None:
    """Return the GPUs and a change with which a request fits: the published weights, the engine's own limits, more
    GPUs, then smaller weights."""
    if service.engine == "llama.cpp":
        most = buffers(spec, replace(service, n_gpu_layers=None), gpu)
        return f"{service.gpus} × {gpu.name} with n_gpu_layers={most.offloaded}" if most.requests else None
    tries: list[dict[str, Any]] = [{"weights": spec.checkpoint}] if spec.checkpoint in WEIGHTS else []
    tries.append({"gpu_memory_utilization": max(UTILIZATION, service.gpu_memory_utilization)})
    requests, tokens = replace(service, max_num_seqs=None, max_num_batched_tokens=None).limits(gpu)
    tries.append({"max_num_seqs": requests, "max_num_batched_tokens": tokens})
    tries += [{"tp": count} for count in (2, 4, 8) if count > service.tp]
    small = [kind for kind, units in (("fp8", "fp8"), ("nvfp4", "fp4"), ("awq", "bf16")) if gpu.peak(units)]
    tries += [{"weights": kind} for kind in small] + [{"weights": kind, "tp": 8} for kind in small]
    for fields in tries:
        try:
            other = checked(spec, replace(service, **fields), gpu)
        except SpecError:
            continue
        if divided_memory(spec, other, gpu).requests:
            change = " and ".join(f'{name}="{value}"' if name == "weights" else f"{name}={value}"
                                  for name, value in fields.items())  # fmt: skip
            return f"{other.gpus} × {gpu.name} with {change}"
    return None


def _prices(
    spec: ModelSpec, service: Service, gpu: GPU, times: Latency
) -> tuple[float, float] | tuple[None, None]:
    """Return US dollars per million input and output tokens: the GPUs' price by the time that each kind takes."""
    paid = price(gpu, service.gpus, None)
    if paid is None:
        return None, None
    second = paid / 3600
    # The share of the time; a step with a prompt is faster than one without where layers are on a slow CPU.
    reading = min(0.95, max(0.0, times.requests_per_second * prompt_seconds(spec, service, gpu)))
    inputs = times.requests_per_second * service.prompt_len
    return second * reading / inputs * 1e6, second * (1 - reading) / times.tokens_per_second * 1e6
