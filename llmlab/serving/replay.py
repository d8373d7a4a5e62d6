"""A service under real traffic: requests as they came, batched by one rule or another, on a clock that a formula sets.

The rules are those of `llmlab.course.inference.Scheduler` (a test compares the two, pass by pass), without the
model: a pass takes the seconds that any function of yours says; `llmlab.serving.load` asks `step_seconds`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from ..base.errors import SpecError

TRACE = "azure-conversations-2023.json"
BATCHING = ("static", "continuous")


class Arrival(NamedTuple):
    """A request: when it comes, in seconds; tokens of its prompt; tokens of its answer."""

    at: float
    prompt: int
    new: int


@dataclass
class Served:
    """One request's times, in seconds of the replay's clock: of its arrival and of each token it was given."""

    arrival: Arrival
    tokens: list[float] = field(default_factory=list)
    cached: int = 0  # tokens in the cache so far
    entered: float = 0.0  # when it came, for a user who waits for an earlier answer first

    @property
    def first_token(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.tokens[0] - self.entered

    @property
    def each_token(self) -> float:
        """Mean seconds from one token to the next; 0 for an answer of one."""
        return (self.tokens[-1] - self.tokens[0]) / max(len(self.tokens) - 1, 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between each two tokens: what a reader sees stutter."""
        return [later - earlier for earlier, later in zip(self.tokens, self.tokens[1:], strict=False)]


class Pass(NamedTuple):
    """One pass: new `tokens` of `sequences` requests, which attend to `pairs` tokens; `cached` lie in the cache.

    `decoding` of the requests get a new token, and have `decoding_cached` tokens in the cache, theirs among them.
    """

    tokens: int
    sequences: int
    pairs: int
    cached: int
    decoding: int
    decoding_cached: int


def arrivals(count: int | None = None, speed: float = 1.0) -> list[Arrival]:
    """Return the first `count` requests of a real service, coming `speed` times as fast as they did.

    Azure's conversation trace of November 2023 (`source()`): when each came, and its two lengths; nothing of its text.
    """
    rows = _trace()["rows"]
    if count is not None and not 1 <= count <= len(rows):
        raise SpecError(f"count={count}: the trace kept here has {len(rows)} requests; give 1 to {len(rows)}")
    if not speed > 0:
        raise SpecError(f"speed={speed}: give a factor above 0")
    return [Arrival(at / speed, prompt, new) for at, prompt, new in rows[:count]]


def source() -> str:
    """Return where the trace comes from, and under which licence."""
    return f"{_trace()['source']} ({_trace()['licence']})"


@cache
def _trace() -> dict[str, Any]:
    return json.loads(files(__package__).joinpath(TRACE).read_text(encoding="utf-8"))


def replay(
    requests: Sequence[Arrival],
    seconds: Callable[[Pass], float],
    batching: str = "continuous",
    max_batch: int = 64,
    chunk: int | None = None,
    capacity: int | None = None,
    users: int | None = None,
    prefix_hit: float = 0.0,
) -> list[Served]:
    """Return how each request is served, in the order of arrival.

    "continuous" fills a place as soon as it is free; "static" forms a batch and takes no other until all of it is
    done. Each pass reads a token of every request that has its prompt behind it, and prompts, at most `chunk`
    tokens of them (None: whole ones). `capacity`: tokens of the cache; a request enters where all of its tokens
    fit. With `users`, a request comes when one of so many users has the answer to an earlier one; its `at` is
    ignored. `prefix_hit`: share of each prompt that the prefix cache has. Passes in which nobody comes, goes or
    reads a prompt are asked for together, at the first and the last of them.
    """
    if batching not in BATCHING:
        raise SpecError(f"batching={batching!r}: give one of {', '.join(map(repr, BATCHING))}")
    if max_batch < 1 or (chunk is not None and chunk < 1) or (users is not None and users < 1):
        given = f"max_batch={max_batch}, chunk={chunk}, users={users}"
        raise SpecError(f"{given}: give 1 or more (chunk, users: or None)")
    if capacity is not None and (most := max(r.prompt + r.new for r in requests)) > capacity:
        raise SpecError(f"a request of {most} tokens: the cache has {capacity}; give a larger capacity")
    order = list(requests) if users else sorted(requests, key=lambda one: one.at)
    served = [Served(one, cached=int(prefix_hit * one.prompt), entered=0.0 if users else one.at) for one in order]
    coming = deque(served[users:] if users else ())
    waiting, running, clock = deque(served[:users] if users else served), list[Served](), 0.0
    while waiting or running:
        if not running:
            clock = max(clock, waiting[0].entered)
        if not (running and batching == "static"):
            _admit(waiting, running, clock, max_batch, capacity)
        writing, reading = _next_reads(running, chunk)
        if reading:
            clock += seconds(_pass(writing, reading))
            times = [clock]
        else:
            alone = waiting[0].entered if waiting and len(running) < max_batch else None
            times = _decode(writing, seconds, clock, alone)
            clock = times[-1]
        for one, tokens in [*((one, len(times)) for one in writing), *reading]:
            one.cached += tokens
            if one.cached >= one.arrival.prompt:
                one.tokens += times
        still = [one for one in running if len(one.tokens) < one.arrival.new]
        for _ in range(min(len(running) - len(still), len(coming))):
            coming[0].entered = clock
            waiting.append(coming.popleft())
        running = still
    return served


def _decode(
    writing: list[Served], seconds: Callable[[Pass], float], clock: float, arrival: float | None
) -> list[float]:
    """Return the ends of the passes until the first of `writing` is done, or until after the next `arrival`."""
    first = _pass(writing, [])
    count = min([one.arrival.new - len(one.tokens) for one in writing])
    begin = seconds(first)
    if count == 1:
        return [clock + begin]
    grown = (count - 1) * len(writing)
    last = first._replace(
        pairs=first.pairs + grown, cached=first.cached + grown, decoding_cached=first.decoding_cached + grown
    )
    slope = (seconds(last) - begin) / (count - 1)
    times: list[float] = []
    for number in range(count):
        clock += begin + slope * number
        times.append(clock)
        if arrival is not None and clock >= arrival:
            break
    return times


def _admit(
    waiting: deque[Served], running: list[Served], clock: float, max_batch: int, capacity: int | None
) -> None:
    while waiting and len(running) < max_batch and waiting[0].entered <= clock:
        if capacity is not None:
            entering = [waiting[0].arrival, *(one.arrival for one in running)]
            if sum(one.prompt + one.new for one in entering) > capacity:
                return
        running.append(waiting.popleft())


def _next_reads(running: list[Served], chunk: int | None) -> tuple[list[Served], list[tuple[Served, int]]]:
    """Return who writes a token, and of whose prompt how much is read."""
    writing, reading, budget = [], [], chunk
    for one in running:
        left = one.arrival.prompt - one.cached
        if left <= 1:  # a prompt's last token is read with the others' one
            writing.append(one)
        elif budget != 0:
            tokens = left if budget is None else min(left, budget)
            budget = None if budget is None else budget - tokens
            reading.append((one, tokens))
    return writing, reading


def _pass(writing: list[Served], reading: list[tuple[Served, int]]) -> Pass:
    cached = sum(one.cached + 1 for one in writing)
    pairs = cached + sum(n * one.cached + n * (n + 1) // 2 for one, n in reading)
    return Pass(
        tokens=len(writing) + sum(n for _, n in reading),
        sequences=len(writing) + len(reading),
        pairs=pairs,
        cached=cached + sum(one.cached for one, _ in reading),
        decoding=len(writing),
        decoding_cached=cached,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of `values` do not exceed (nearest rank).

    >>> percentile([4.0, 1.0, 3.0, 2.0], 0.5)
    2.0
    """
    ranked = sorted(values)
    return ranked[max(-(-int(share * 1000) * len(ranked) // 1000), 1) - 1]


def throughput(served: Sequence[Served]) -> float:
    """Return tokens given per second, from the first arrival to the last token."""
    begin, end = min(one.entered for one in served), max(one.tokens[-1] for one in served)
    return sum(len(one.tokens) for one in served) / (end - begin)
