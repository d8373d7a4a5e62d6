"""Latency and throughput of a service under its load: the scheduler's replay, with the seconds of each step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import log

from ..hardware.gpu import GPU
from ..specs.model import ModelSpec
from .llamacpp import Buffers
from .memory import Memory
from .replay import Arrival, Pass, Served, percentile
from .replay import replay as replayed
from .service import Service
from .step import Step, step_seconds, token_seconds

SEED = 0
ROUNDS = 10  # answers that each user waits for, as in InferenceX's runs
REQUESTS = 400  # of a load given by a rate
# Seconds until the scheduler has a request: HTTP and the processes before the engine, and per token of its prompt.
# Fitted by benchmarks/serving/fit.py; benchmarks/results/serving.md says how far off other deployments are.
ARRIVING, TOKENIZING = {"vllm": 0.02, "sglang": 0.12, "trtllm": 0.014, "llama.cpp": 0.0}, 6e-6
LLAMA_STEPS = 1  # llama.cpp samples the first token in the prompt's last step; the step before may be under way
DIGITS = 1.05  # sizes of steps are rounded to powers of it, so that few steps are computed


@dataclass(frozen=True)
class Latency:
    """Seconds: to the first token, those of them that a prompt waits until it is read, per further token (mean of a
    request), from one token to the next; and output tokens per second of the whole deployment; `preempted`: how often a
    request's cache was freed, in the mean. Without `_p99`, seconds are medians."""

    ttft: float
    waiting: float
    ttft_p99: float
    tpot: float
    tpot_p99: float
    itl_p99: float
    tokens_per_second: float
    requests_per_second: float
    preempted: float


def latency(spec: ModelSpec, service: Service, gpu: GPU, memory: Memory | Buffers) -> Latency:
    """Return the latencies under the service's load. Raises SpecError where a request does not fit the cache."""
    return summary(simulate(spec, service, gpu, memory))


def first_token(spec: ModelSpec, service: Service, gpu: GPU) -> float:
    """Return about the median seconds to the first token of users who each wait for their answer, and whose requests
    spread evenly over the time: `latency` without a replay. Prompts wait for each other (the M/D/1 queue's mean)."""
    users, context = service.concurrency or 1, service.prompt_len + service.output_len // 2
    if users == 1:  # nobody decodes meanwhile
        return ARRIVING[service.engine] + TOKENIZING * service.prompt_len + prefill_seconds(spec, service, gpu)
    prompt = prompt_seconds(spec, service, gpu)
    step = token_seconds(spec, service, gpu, Step(users, context))
    busy = users * prompt / (users * prompt + step * service.output_len)
    return answer_delay(spec, service, gpu) + prompt * (1 + busy / (2 * (1 - busy)))


def answer_delay(spec: ModelSpec, service: Service, gpu: GPU) -> float:
    """Return by how much a first token comes later than its prompt is read: HTTP, two steps that are decided before
    the scheduler has the request, those until it looks for new ones, and the decoding of others in its own."""
    step = Step(service.concurrency or 1, service.prompt_len)
    seconds = sum(step_seconds(spec, service, gpu, step).values())
    if service.engine == "llama.cpp":
        return LLAMA_STEPS * seconds if (service.concurrency or 1) > 1 or service.rate else 0.0
    steps = (2 if service.prompts_first else 3) + (service.prefill_interval - 1) * (1 if service.patient else 0.5)
    return ARRIVING[service.engine] + TOKENIZING * service.prompt_len + steps * seconds


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


def simulate(
    spec: ModelSpec, service: Service, gpu: GPU, memory: Memory | Buffers, requests: Sequence[Arrival] | None = None
) -> list[Served]:
    """Return the `requests`, or those of the service's load, as they are served."""
    users = None if requests else service.concurrency
    requests = requests or arrivals_of(service)
    limit, tokens = service.limits(gpu)
    capacity = memory.requests * service.dp_attention * (service.prompt_len + service.output_len)
    return replayed(
        requests,
        pass_time(spec, service, gpu),
        users=users,
        prefix_hit=service.prefix_hit,
        delay=ARRIVING[service.engine],
        tokenizing=0.0 if service.engine == "llama.cpp" else TOKENIZING,
        max_batch=limit * service.dp_attention,
        chunk=tokens * service.dp_attention * service.pp,
        capacity=max(capacity, 1),
        preempts=service.preempts,
        prompts_first=service.prompts_first,
        ahead=service.engine != "llama.cpp",
        interval=service.prefill_interval,
        patient=service.patient,
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
    def seconds(sequences: int, context: int, *prompts: int) -> float:
        """Return the seconds of a pass that gives a token to each: with a draft, the part of a step per token."""
        each = token_seconds(spec, service, gpu, Step(sequences, context)) if sequences else 0.0
        if not prompts[0]:
            return each
        alone = each * service.tokens_per_step
        return sum(step_seconds(spec, service, gpu, Step(sequences, context, *prompts)).values()) - alone + each

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
        waiting=percentile([one.waited for one in served], 0.5),
        ttft_p99=percentile(first, 0.99),
        tpot=percentile(each, 0.5),
        tpot_p99=percentile(each, 0.99),
        itl_p99=percentile(gaps, 0.99),
        tokens_per_second=sum(len(one.tokens) for one in served) / (end - begin),
        requests_per_second=len(served) / (end - begin),
        preempted=sum(one.preempted for one in served) / len(served),
    )
