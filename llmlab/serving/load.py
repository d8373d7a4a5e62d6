"""Latency and throughput of a service under its load: the scheduler's replay, with the seconds of each step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import log

from ..hardware.gpu import GPU
from ..specs.model import ModelSpec
from .llamacpp import Buffers
from .memory import Memory
from .replay import Arrival, Pass, Served, percentile
from .replay import replay as replayed
from .service import Service
from .step import Step, step_seconds

SEED = 0
ROUNDS = 10  # answers that each user waits for, as in InferenceX's runs
REQUESTS = 400  # of a load given by a rate
# A first token comes later than its prompt is read: by steps that are under way or queued, and by the engine's HTTP
# server; and among users who each wait for an answer, a tenth of the others' prompts come before one's own, since
# their answers end together. Fitted on every eighth deployment of benchmarks/serving/serving.py, whose results say how
# far off the others are.
FIRST_STEPS, TOGETHER = 5.4, 0.1
FIRST_TOKEN = {"vllm": 0.0, "sglang": 0.31, "trtllm": 0.08}
LLAMA_STEPS = 1  # llama.cpp samples the first token in the prompt's last step; the step before may be under way
DIGITS = 1.05  # sizes of steps are rounded to powers of it, so that few steps are computed


@dataclass(frozen=True)
class Latency:
    """Seconds: to the first token, per further token (mean of a request), from one token to the next; and output
    tokens per second of the whole deployment."""

    ttft: float
    ttft_p99: float
    tpot: float
    tpot_p99: float
    itl_p99: float
    tokens_per_second: float
    requests_per_second: float


def latency(spec: ModelSpec, service: Service, gpu: GPU, memory: Memory | Buffers) -> Latency:
    """Return the latencies under the service's load. Raises SpecError where a request does not fit the cache."""
    served = simulate(spec, service, gpu, memory)
    times = summary(served)
    if service.rate is not None:
        late = answer_delay(spec, service, gpu)
        return replace(times, ttft=times.ttft + late, ttft_p99=times.ttft_p99 + late)
    first = first_token(spec, service, gpu)
    return replace(times, ttft=first, ttft_p99=max(first, times.ttft_p99 + answer_delay(spec, service, gpu)))


def first_token(spec: ModelSpec, service: Service, gpu: GPU) -> float:
    """Return the median seconds to the first token of users who each wait for their answer."""
    together = 1 + TOGETHER * (service.concurrency or 1)
    return prompt_seconds(spec, service, gpu) * together + answer_delay(spec, service, gpu)


def answer_delay(spec: ModelSpec, service: Service, gpu: GPU) -> float:
    """Return by how much a first token comes later than its prompt is read: steps that are queued, the HTTP server."""
    step = Step(service.concurrency or 1, service.prompt_len)
    seconds = sum(step_seconds(spec, service, gpu, step).values())
    if service.engine == "llama.cpp":
        return LLAMA_STEPS * seconds if (service.concurrency or 1) > 1 or service.rate else 0.0
    return FIRST_STEPS * seconds + FIRST_TOKEN[service.engine]


def prompt_seconds(spec: ModelSpec, service: Service, gpu: GPU) -> float:
    """Return by how much reading one prompt makes steps longer that give a token to everybody else."""
    users, context = service.concurrency or 1, service.prompt_len + service.output_len // 2
    new, chunk, before = _pieces(service, gpu)
    steps = (Step(users, context, chunk, before), Step(users, context))
    reading, alone = (sum(step_seconds(spec, service, gpu, step).values()) for step in steps)
    return (reading - alone) * new / chunk


def prefill_seconds(spec: ModelSpec, service: Service, gpu: GPU) -> float:
    """Return how long one prompt takes in steps that give no token to anybody else: longer than `prompt_seconds`,
    since these steps read the weights for the prompt alone."""
    new, chunk, before = _pieces(service, gpu)
    return sum(step_seconds(spec, service, gpu, Step(0, 1, chunk, before)).values()) * new / chunk


def _pieces(service: Service, gpu: GPU) -> tuple[int, int, int]:
    """Return the tokens of a prompt that are not cached, those read in a step, and those before them in the mean."""
    new = service.prompt_len - int(service.prefix_hit * service.prompt_len)
    chunk = min(new, service.limits(gpu)[1])
    return new, chunk, service.prompt_len - new + (new - chunk) // 2


def simulate(spec: ModelSpec, service: Service, gpu: GPU, memory: Memory | Buffers) -> list[Served]:
    """Return the requests of the service's load as they are served."""
    requests = arrivals_of(service)
    limit, tokens = service.limits(gpu)
    capacity = memory.requests * service.dp_attention * (service.prompt_len + service.output_len)
    return replayed(
        requests,
        pass_time(spec, service, gpu),
        max_batch=limit * service.dp_attention,
        chunk=tokens * service.dp_attention,
        capacity=max(capacity, 1),
        users=service.concurrency,
        prefix_hit=service.prefix_hit,
    )


def arrivals_of(service: Service) -> list[Arrival]:
    """Return the requests of the service's load: of users who wait, of a rate at random (exponential gaps), or one."""
    source = random.Random(SEED)
    count = service.concurrency * ROUNDS if service.concurrency else REQUESTS if service.rate else 1
    at, requests = 0.0, []
    for _ in range(count):
        at += source.expovariate(service.rate) if service.rate else 0.0
        lengths = (service.prompt_len, service.output_len)
        drawn = (source.randint(max(1, round(service.range_ratio * most)), most) for most in lengths)
        requests.append(Arrival(at, *drawn))
    return requests


def pass_time(spec: ModelSpec, service: Service, gpu: GPU) -> Callable[[Pass], float]:
    """Return the seconds of a pass of the scheduler, as a function."""

    @cache
    def seconds(*sizes: int) -> float:
        return sum(step_seconds(spec, service, gpu, Step(*sizes)).values())

    def of_pass(one: Pass) -> float:
        tokens, prompts = one.tokens - one.decoding, max(1, one.sequences - one.decoding)
        before = (one.cached - one.decoding_cached) // prompts
        context = one.decoding_cached // max(1, one.decoding)
        return seconds(rounded(one.decoding), rounded(context), rounded(tokens), rounded(before), rounded(prompts))

    return of_pass


def goodput(served: Sequence[Served], ttft: float, tpot: float) -> float:
    """Return the requests per second that have their first token within `ttft` and each other within `tpot` seconds
    (the mean of a request)."""
    begin, end = min(one.entered for one in served), max(one.tokens[-1] for one in served)
    return sum(one.first_token <= ttft and one.each_token <= tpot for one in served) / (end - begin)


def rounded(size: int) -> int:
    """Return the power of DIGITS next to `size`; small sizes as they are."""
    if size <= 32:
        return size
    return round(DIGITS ** round(log(size) / log(DIGITS)))


def summary(served: Sequence[Served]) -> Latency:
    """Return the latencies of requests and the rates while they were served."""
    first = [one.first_token for one in served]
    each = [one.each_token for one in served if len(one.tokens) > 1] or [0.0]
    gaps = [gap for one in served for gap in one.gaps] or [0.0]
    begin, end = min(one.entered for one in served), max(one.tokens[-1] for one in served)
    return Latency(
        ttft=percentile(first, 0.5),
        ttft_p99=percentile(first, 0.99),
        tpot=percentile(each, 0.5),
        tpot_p99=percentile(each, 0.99),
        itl_p99=percentile(gaps, 0.99),
        tokens_per_second=sum(len(one.tokens) for one in served) / (end - begin),
        requests_per_second=len(served) / (end - begin),
    )
