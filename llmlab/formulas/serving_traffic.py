"""A service under real traffic: requests as they came, batched by one rule or another, on a clock that a formula sets.

The rules are those of `llmlab.course.inference.Scheduler` (a test compares the two, pass by pass), without the
model: a pass takes the seconds that `llmlab.formulas.serving.pass_seconds` says, or any function of yours.
"""

from __future__ import annotations

import json
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

    @property
    def first_token(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.tokens[0] - self.arrival.at

    @property
    def each_token(self) -> float:
        """Mean seconds from one token to the next; 0 for an answer of one."""
        return (self.tokens[-1] - self.tokens[0]) / max(len(self.tokens) - 1, 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between each two tokens: what a reader sees stutter."""
        return [later - earlier for earlier, later in zip(self.tokens, self.tokens[1:], strict=False)]


class Pass(NamedTuple):
    """One pass: new `tokens` of `sequences` requests, which attend to `pairs` tokens; `cached` lie in the cache."""

    tokens: int
    sequences: int
    pairs: int
    cached: int


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
) -> list[Served]:
    """Return how each request is served, in the order of arrival.

    "continuous" fills a place as soon as it is free; "static" forms a batch and takes no other until all of it is done.
    Each pass reads a token of every request that has its prompt behind it, and prompts, at most `chunk` tokens of them
    (None: whole ones). `capacity`: tokens of the cache; a request enters where all of its tokens fit.
    """
    if batching not in BATCHING:
        raise SpecError(f"batching={batching!r}: give one of {', '.join(map(repr, BATCHING))}")
    if max_batch < 1 or (chunk is not None and chunk < 1):
        raise SpecError(f"max_batch={max_batch}, chunk={chunk}: give 1 or more (chunk: or None for whole prompts)")
    if capacity is not None and (most := max(r.prompt + r.new for r in requests)) > capacity:
        raise SpecError(f"a request of {most} tokens: the cache has {capacity}; give a larger capacity")
    served = [Served(one) for one in sorted(requests, key=lambda one: one.at)]
    waiting, running, clock = list(served), list[Served](), 0.0
    while waiting or running:
        if not running:
            clock = max(clock, waiting[0].arrival.at)
        if not (running and batching == "static"):
            _admit(waiting, running, clock, max_batch, capacity)
        writing, reading = _next_reads(running, chunk)
        clock += seconds(_pass(writing, reading))
        for one, tokens in [*((one, 1) for one in writing), *reading]:
            one.cached += tokens
            if one.cached >= one.arrival.prompt:
                one.tokens.append(clock)
        running = [one for one in running if len(one.tokens) < one.arrival.new]
    return served


def _admit(waiting: list[Served], running: list[Served], clock: float, max_batch: int, capacity: int | None) -> None:
    while waiting and len(running) < max_batch and waiting[0].arrival.at <= clock:
        if capacity is not None:
            entering = [waiting[0].arrival, *(one.arrival for one in running)]
            if sum(one.prompt + one.new for one in entering) > capacity:
                return
        running.append(waiting.pop(0))


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
    begin, end = min(one.arrival.at for one in served), max(one.tokens[-1] for one in served)
    return sum(len(one.tokens) for one in served) / (end - begin)
