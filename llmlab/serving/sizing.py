"""Which deployment: the frontier of latency and throughput of one, and the cheapest that meets a service level."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from ..base.errors import SpecError
from ..base.tables import Table
from ..base.units import show_seconds
from ..hardware.gpu import GPU
from ..specs.model import ModelSpec
from . import llamacpp
from .llamacpp import Buffers
from .load import Latency, answer_delay, first_token, latency, prefill_seconds, prompt_seconds
from .memory import Memory, cache_bytes, divided_memory
from .report import checked, possible
from .service import Service
from .step import Step, token_seconds

USERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Point:
    """A deployment with so many `users`: seconds to the first and per further token, output tokens and requests per
    second, and US dollars per hour of all its GPUs (None: no price is known)."""

    gpu: str
    service: Service
    users: int
    ttft: float
    tpot: float
    tokens_per_second: float
    requests_per_second: float
    usd_per_hour: float | None

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Output tokens per second, divided by the GPUs."""
        return self.tokens_per_second / self.service.gpus


@dataclass(frozen=True)
class Deployment:
    """So many `copies` of a deployment to serve `rate` requests per second, with the `latency` of a copy under its
    share of them. `point` is a copy's most within the service level."""

    point: Point
    copies: int
    rate: float
    latency: Latency

    @property
    def gpus(self) -> int:
        """GPUs of all copies."""
        return self.copies * self.point.service.gpus

    @property
    def usd_per_hour(self) -> float | None:
        """US dollars per hour of all copies."""
        return None if self.point.usd_per_hour is None else self.copies * self.point.usd_per_hour


def frontier(spec: ModelSpec, service: Service, gpu: GPU, users: Sequence[int] = USERS) -> list[Point]:
    """Return the latency and throughput of `service` with more and more users who wait for each answer before they ask
    again, as far as the cache has room for them. Raises SpecError for a service that cannot be."""
    points = []
    for one, memory in _with_users(spec, service, gpu, users):
        times = latency(spec, one, gpu, memory)
        rates = times.tokens_per_second, times.requests_per_second
        points.append(_point(one, gpu, times.ttft, times.tpot, *rates))
    return points


def _with_users(
    spec: ModelSpec, service: Service, gpu: GPU, users: Sequence[int]
) -> Iterator[tuple[Service, Memory | Buffers]]:
    """Yield the service with each number of users that its cache has room for, and its memory."""
    service = checked(spec, service, gpu)
    for count in users:
        one = replace(service, concurrency=count, rate=None)
        memory = divided_memory(spec, one, gpu)
        if count > min(memory.requests, one.limits(gpu)[0]) * service.dp_attention:
            break
        yield one, memory


def _point(service: Service, gpu: GPU, ttft: float, tpot: float, tokens: float, requests: float) -> Point:
    hour = None if gpu.usd_per_hour is None else service.gpus * gpu.usd_per_hour
    return Point(gpu.name, service, service.concurrency or 1, ttft, tpot, tokens, requests, hour)


def _spread(spec: ModelSpec, service: Service, gpu: GPU) -> Point:
    """Return the point of users whose requests spread evenly over the time, without a replay: while one answer is
    written, each of the others has its prompt read once."""
    users = service.concurrency or 1
    alone = _step_of(spec, service, gpu, users, service.prompt_len + service.output_len // 2)
    tpot = alone + (users - 1) * prompt_seconds(spec, service, gpu) / service.output_len
    ttft = first_token(spec, service, gpu)
    rate = users / (ttft + tpot * (service.output_len - 1))
    return _point(service, gpu, ttft, tpot, rate * service.output_len, rate)


def deployments(
    spec: ModelSpec, service: Service, rate: float, ttft: float, tpot: float, gpus: Iterable[GPU]
) -> list[Deployment]:
    """Return the deployments that serve `rate` requests per second, which come at random, within `ttft` and `tpot`
    seconds (at the median), the cheapest of each GPU, the cheapest first; where no price is known, that with the fewest
    GPUs.

    Each GPU is tried with tensor parallelism over 1, 2, 4 and 8 of them, with as many users as the service level
    allows, in as many copies as the rate needs; then the load of a copy is replayed. Raises SpecError where none of
    these can be.
    """
    if not (rate > 0 and ttft > 0 and tpot > 0):
        raise SpecError(f"rate={rate}, ttft={ttft}, tpot={tpot}: give numbers above 0")
    cheapest, tried, refused = [], 0, list[SpecError]()
    for gpu in gpus:
        met = []
        for degree in DEGREES:
            try:
                cut = replace(service, tp=degree, ep=1, dp_attention=1)
                points = [_spread(spec, one, gpu) for one, _ in _with_users(spec, cut, gpu, USERS)]
            except SpecError as error:  # heads that so many GPUs do not divide, or units that this GPU lacks
                refused.append(error)
                continue
            tried += 1
            good = [point for point in points if point.ttft <= ttft and point.tpot <= tpot]
            if good:
                most = max(good, key=lambda point: point.requests_per_second)
                met.append((most, ceil(rate / most.requests_per_second)))
        replays = (_replayed(spec, gpu, *one, rate, ttft, tpot) for one in sorted(met, key=lambda one: _cost(*one)))
        cheapest += [one for one in replays if one][:1]
    if refused and not tried:
        raise refused[0]
    return sorted(cheapest, key=lambda one: _cost(one.point, one.copies))


def _replayed(
    spec: ModelSpec, gpu: GPU, point: Point, least: int, rate: float, ttft: float, tpot: float
) -> Deployment | None:
    """Return `least` copies, or as many more as the replay of a copy's share of the rate needs to stay within the
    level; None where twice as many do not."""
    most = point.users if point.service.engine == "llama.cpp" else point.service.max_num_seqs  # its slots
    copies = least
    while copies <= 2 * least:
        one = replace(point.service, concurrency=None, rate=rate / copies, max_num_seqs=most)
        times = latency(spec, one, gpu, divided_memory(spec, one, gpu))
        if times.ttft <= ttft and times.tpot <= tpot:
            return Deployment(point, copies, rate, times)
        copies += ceil(least / 10)
    return None


def _cost(point: Point, copies: int) -> tuple[bool, float, int]:
    return point.usd_per_hour is None, copies * (point.usd_per_hour or 0.0), copies * point.service.gpus


@dataclass(frozen=True)
class Separated:
    """Prompts read on `prefill` GPUs, answers written on `decode` others, each copy on `tp` of them; the cache of a
    prompt is sent from one to the other in `transfer` seconds, which are in `ttft`."""

    gpu: str
    tp: int
    prefill: int
    decode: int
    ttft: float
    tpot: float
    transfer: float
    usd_per_hour: float | None


def separated(
    spec: ModelSpec, service: Service, rate: float, ttft: float, tpot: float, gpu: GPU
) -> Separated | None:
    """Return the fewest GPUs that meet the service level with prefill and decode apart (DistServe, arXiv 2401.09670);
    None where no degree of tensor parallelism does.

    Prompts come at random and wait for each other (the M/D/1 queue's mean, ρ/(2(1 − ρ)) prompts); steps of decoding
    are never made longer by a prompt. A cache is sent at the rate of NVLink, or 25 GB/s.
    """
    best = None
    for degree in DEGREES:
        try:
            parts = checked(spec, replace(service, tp=degree, ep=1, dp_attention=1, rate=None), gpu)
            counts = [one.concurrency or 1 for one, _ in _with_users(spec, parts, gpu, USERS)]
        except SpecError:
            continue
        context = service.prompt_len + service.output_len // 2
        alone = [(users, _step_of(spec, parts, gpu, users, context)) for users in counts]
        fast = [(users, seconds) for users, seconds in alone if seconds <= tpot]
        if not fast:
            continue
        users, each = fast[-1]
        prompt, late = prefill_seconds(spec, parts, gpu), answer_delay(spec, replace(parts, concurrency=1), gpu)
        transfer = cache_bytes(spec, parts, service.prompt_len) / (gpu.nvlink or 25e9)
        copies = ceil(rate * prompt)
        while True:  # enough copies that the queue is short
            busy = rate * prompt / copies
            first = prompt * (1 + busy / (2 * (1 - busy))) + transfer + late if busy < 1 else float("inf")
            if first <= ttft or copies > 10_000:
                break
            copies += 1
        if first > ttft:
            continue
        prefill, decode = copies * degree, ceil(rate * service.output_len * each / users) * degree
        hour = None if gpu.usd_per_hour is None else (prefill + decode) * gpu.usd_per_hour
        option = Separated(gpu.name, degree, prefill, decode, first, each, transfer, hour)
        if best is None or prefill + decode < best.prefill + best.decode:
            best = option
    return best


def _step_of(spec: ModelSpec, service: Service, gpu: GPU, users: int, context: int) -> float:
    return token_seconds(spec, service, gpu, Step(users, context))


def longest_context(spec: ModelSpec, service: Service, gpu: GPU, users: int) -> int:
    """Return the tokens that each of `users` requests can have in the cache together, at most the model's; 0: none.
    Raises SpecError for a service that cannot be."""
    service = possible(spec, service, gpu)
    if service.engine == "llama.cpp":
        return llamacpp.longest_context(spec, service, gpu, users)
    room = max(0, divided_memory(spec, service, gpu).cache) * service.dp_attention // users
    # The bytes of a request grow with its tokens, but not in proportion where windows bound them.
    return bisect_right(range(1, spec.max_positions + 1), room, key=lambda tokens: cache_bytes(spec, service, tokens))


def least_utilization(spec: ModelSpec, service: Service, gpu: GPU, users: int) -> float | None:
    """Return the smallest gpu_memory_utilization with which `users` requests of the service's length fit; None where
    they do not even fit the whole GPU. Raises SpecError for a service that cannot be, and for llama.cpp, which has no
    such share."""
    service = possible(spec, service, gpu)
    if service.engine == "llama.cpp":
        raise SpecError("llama.cpp has no share of the GPU's memory: it takes what it needs; ask for longest_context")
    memory = divided_memory(spec, replace(service, gpu_memory_utilization=1.0), gpu)
    assert isinstance(memory, Memory)
    needed = memory.budget - memory.cache + memory.per_request * ceil(users / service.dp_attention)
    return needed / memory.budget if needed <= memory.budget else None


def frontier_table(points: Sequence[Point]) -> Table:
    """Return the table of a frontier: a row for each number of users."""
    rows: list[tuple[Any, ...]] = [
        (
            f"{point.users:,}", show_seconds(point.ttft), show_seconds(point.tpot), f"{1 / point.tpot:,.0f}",
            f"{point.tokens_per_second:,.0f}", f"{point.tokens_per_second_per_gpu:,.0f}",
        )
        for point in points
    ]  # fmt: skip
    return Table(("users", "TTFT", "TPOT", "tokens/s per user", "tokens/s", "per GPU"), rows)


def deployment_table(options: Sequence[Deployment]) -> Table:
    """Return the table of deployments: a row for each."""
    rows: list[tuple[Any, ...]] = [
        (
            f"{one.gpus} × {one.point.gpu}", str(one.copies), str(one.point.service.gpus), f"{one.point.users:,}",
            show_seconds(one.latency.ttft), show_seconds(one.latency.tpot),
            "–" if one.usd_per_hour is None else f"${one.usd_per_hour:,.2f}",
        )
        for one in options
    ]  # fmt: skip
    return Table(("GPUs", "copies", "GPUs per copy", "max. users per copy", "TTFT", "TPOT", "price per hour"), rows)
