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
from heapq import heapify, heappop, heappush
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


@dataclass(eq=False)
class Served:
    """One request's times, in seconds of the replay's clock: of its arrival and of each token it was given."""

    arrival: Arrival
    tokens: list[float] = field(default_factory=list)
    cached: int = 0  # tokens in the cache when it last read some of its prompt
    entered: float = 0.0  # when it came, for a user who waits for an earlier answer first
    ready: float = 0.0  # when the scheduler has it
    started: float | None = None  # when the first pass that reads its prompt began
    noticed: int | None = None  # number of the pass before which the scheduler first saw it
    begun: int | None = None  # number of decoding passes before its first one; None while its prompt is read
    preempted: int = 0  # how often its cache was freed

    @property
    def unread(self) -> int:
        """Tokens of its prompt, and of its answer if it was preempted, that are not in the cache."""
        return self.arrival.prompt + len(self.tokens) - self.cached

    @property
    def first_token(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.tokens[0] - self.entered

    @property
    def waited(self) -> float:
        """Seconds from its arrival until its prompt began to be read."""
        return (self.tokens[0] if self.started is None else self.started) - self.entered

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


@dataclass(frozen=True)
class Rules:
    """How an engine schedules. The defaults are those of the chapters' scheduler.

    `batching`: "continuous" fills a place as soon as it is free; "static" forms a batch and admits no other request
    until all of it is done. `max_batch`: requests in a pass. `chunk`: tokens of prompts in a pass (None: whole
    prompts). `capacity`: tokens of the cache (None: no limit). With `preempts`, a request enters as soon as the cache
    has room for its prompt; if the cache is full later, the request that entered last leaves, and its prompt and the
    answer so far are computed again. Otherwise a request enters when all of its tokens fit. `prompts_first`: a pass
    either reads prompts or decodes, prompts first. `ahead`: a pass is put together while the one before it runs.
    `interval`: decoding passes between two looks for new requests; with `patient`, passes that a new request waits.
    """

    batching: str = "continuous"
    max_batch: int = 64
    chunk: int | None = None
    capacity: int | None = None
    preempts: bool = False
    prompts_first: bool = False
    ahead: bool = False
    interval: int = 1
    patient: bool = False

    def __post_init__(self) -> None:
        if self.batching not in BATCHING:
            raise SpecError(f"batching={self.batching!r}: give one of {', '.join(map(repr, BATCHING))}")
        if self.max_batch < 1 or self.interval < 1 or (self.chunk is not None and self.chunk < 1):
            given = f"max_batch={self.max_batch}, chunk={self.chunk}, interval={self.interval}"
            raise SpecError(f"{given}: give 1 or more (chunk: or None)")


def replay(
    requests: Sequence[Arrival],
    seconds: Callable[[Pass], float],
    batching: str = "continuous",
    *,
    users: int | None = None,
    prefix_hit: float = 0.0,
    delay: float = 0.0,
    tokenizing: float = 0.0,
    **rules: Any,
) -> list[Served]:
    """Return how each request is served under `rules` (see `Rules`), in the order of arrival.

    Each pass computes a token of every request whose prompt is in the cache, and tokens of prompts. With `users`, a
    request comes when one of so many users has the answer to an earlier one; its `at` is ignored. `prefix_hit`: share
    of each prompt that the prefix cache has. `delay`: seconds from a request's arrival until the scheduler has it, and
    `tokenizing` more per token of its prompt, one request after another.
    Passes in which nobody comes, goes or reads a prompt are computed together, from the first and the last of them.
    """
    how = Rules(batching, **rules)
    if users is not None and users < 1:
        raise SpecError(f"users={users}: give 1 or more, or None")
    if how.capacity is not None and (most := max(r.prompt + r.new for r in requests)) > how.capacity:
        raise SpecError(f"a request of {most} tokens: the cache has {how.capacity}; give a larger capacity")
    order = list(requests) if users else sorted(requests, key=lambda one: one.at)
    served = [Served(one, cached=int(prefix_hit * one.prompt)) for one in order]
    free = 0.0  # when the process that tokenizes is

    def send(one: Served, at: float) -> None:
        nonlocal free
        free = max(free, at) + tokenizing * one.arrival.prompt
        one.entered, one.ready = at, free + delay

    for one in served[:users]:
        send(one, 0.0 if users else one.arrival.at)
    coming = deque(served[users:] if users else ())
    state = _State(deque(served[:users] if users else served), how, prefix_hit)
    while state.waiting or state.entered:
        for _ in range(min(state.step(seconds), len(coming))):
            one = coming.popleft()
            send(one, state.clock)
            state.waiting.append(one)
    return served


class _State:
    """The scheduler between two passes.

    Requests that decode advance together, so that none of them is touched in a pass: `ends` has the end of each
    decoding pass, and `decoding` is a heap of requests by the number of passes after which they are done.
    """

    def __init__(self, waiting: deque[Served], rules: Rules, prefix_hit: float) -> None:
        self.waiting, self.rules, self.prefix_hit = waiting, rules, prefix_hit
        self.reading: list[Served] = []
        self.decoding: list[tuple[int, int, Served]] = []
        self.entered: list[Served] = []  # those running, in order
        self.ends: list[float] = []
        self.cached = self.reserved = 0  # tokens in the cache of those decoding; all tokens of those running
        self.clock = self.decided = 0.0  # now, and when the next pass was put together
        self.passes = self.looked = 0  # passes so far, and the one before which new requests were looked for

    def step(self, seconds: Callable[[Pass], float]) -> int:
        """Run passes until a request is done or may enter; return how many are done."""
        if not self.entered:
            self.clock = self.decided = max(self.clock, self.waiting[0].ready)
            self.looked = self.passes
        if not (self.entered and self.rules.batching == "static"):
            self._admit()
        self._make_room()
        begin, chunks = self.clock, self._chunks()
        if chunks:
            together = not self.rules.prompts_first
            self.clock += seconds(self._pass(len(self.decoding) if together else 0, chunks))
            self.passes += 1
            self.looked = self.passes
            self._advance([self.clock] if together else [])
            for one, tokens in chunks:
                one.cached += tokens
                one.started = begin if one.started is None else one.started
        else:
            times = self._decode(seconds)
            begin, self.clock = times[-2] if len(times) > 1 else begin, times[-1]
            self._advance(times)
        self.decided = begin if self.rules.ahead else self.clock
        return self._settle()

    def _chunks(self) -> list[tuple[Served, int]]:
        """Return whose prompt is read in the next pass, and how many tokens of it."""
        chunks, budget = list[tuple[Served, int]](), self.rules.chunk
        for one in self.reading:
            if budget == 0:
                break
            tokens = one.unread if budget is None else min(one.unread, budget)
            budget = None if budget is None else budget - tokens
            chunks.append((one, tokens))
        return chunks

    def _advance(self, times: list[float]) -> None:
        self.ends += times
        self.cached += len(times) * len(self.decoding)

    def _settle(self) -> int:
        """Move requests whose prompt is read on to decoding; return how many have their whole answer."""
        done = 0
        for one in [one for one in self.reading if one.unread <= 1]:
            self.reading.remove(one)
            if one.unread == 0:
                one.tokens.append(self.clock)
            done += self._decodes(one)
        while self.decoding and self.decoding[0][0] == len(self.ends):
            _, _, one = heappop(self.decoding)
            self._stop(one)
            done += 1
        return done

    def _decodes(self, one: Served) -> int:
        """Let a request whose prompt is read decode; return 1 if it has its whole answer, else 0."""
        one.begun = len(self.ends)
        left = one.arrival.new - len(one.tokens)
        self.cached += one.cached
        if left == 0:
            self._stop(one)
            return 1
        heappush(self.decoding, (one.begun + left, id(one), one))
        return 0

    def _stop(self, one: Served) -> None:
        """Take a request that decodes out: it has the tokens of the passes since it began."""
        times = self.ends[one.begun :]
        one.tokens += times
        self.cached -= one.cached + len(times)
        self._leave(one)

    def _leave(self, one: Served) -> None:
        one.begun = None
        self.entered.remove(one)
        self.reserved -= one.arrival.prompt + one.arrival.new

    def _decode(self, seconds: Callable[[Pass], float]) -> list[float]:
        """Return the ends of the passes until a request is done, the cache is full, or a request may enter."""
        users, count = len(self.decoding), self.decoding[0][0] - len(self.ends)
        if self.rules.preempts and self.rules.capacity is not None:
            count = max(1, min(count, (self.rules.capacity - self.cached) // users))
        first = self._pass(users, [])
        begin, slope = seconds(first), 0.0
        if count > 1:
            grown = (count - 1) * users
            last = first._replace(
                pairs=first.pairs + grown, cached=first.cached + grown, decoding_cached=first.decoding_cached + grown
            )
            slope = (seconds(last) - begin) / (count - 1)
        times, clock, room = list[float](), self.clock, self._fits()
        for number in range(count):
            before = clock
            clock += begin + slope * number
            times.append(clock)
            self.passes += 1
            if room and self._may_enter(before if self.rules.ahead else clock):
                break
        return times

    def _may_enter(self, decided: float) -> bool:
        """Return whether the scheduler has seen the first of those that wait when the next pass is put together."""
        if not self.waiting or self.waiting[0].ready > decided:
            return False
        one = self.waiting[0]
        if one.noticed is None:
            one.noticed = self.passes
        if self.rules.patient:
            return self.passes - one.noticed >= self.rules.interval - 1 or not self.entered
        return (self.passes - self.looked) % self.rules.interval == 0

    def _fits(self) -> bool:
        """Return whether there is a place, and room in the cache, for the first of those that wait."""
        if not self.waiting or len(self.entered) >= self.rules.max_batch:
            return False
        capacity = self.rules.capacity
        one = self.waiting[0]
        tokens = one.arrival.prompt + (len(one.tokens) if self.rules.preempts else one.arrival.new)
        return capacity is None or self._used() + tokens <= capacity

    def _admit(self) -> None:
        entering = self._may_enter(self.decided)
        while entering and self._fits() and self.waiting[0].ready <= self.decided:
            one = self.waiting.popleft()
            self.entered.append(one)
            self.reserved += one.arrival.prompt + one.arrival.new
            if one.unread <= 1:
                one.started = self.clock if one.started is None else one.started
                self._decodes(one)
            else:
                self.reading.append(one)

    def _used(self) -> int:
        """Return the tokens of the cache that cannot be given to others, after everybody's next token."""
        if not self.rules.preempts:
            return self.reserved
        return self.cached + len(self.decoding) + sum(one.arrival.prompt + len(one.tokens) for one in self.reading)

    def _make_room(self) -> None:
        """Preempt the requests that entered last while the cache has no room for each one's next token."""
        while self.rules.preempts and self.rules.capacity is not None and self._used() > self.rules.capacity:
            one = self.entered[-1]
            if one.begun is None:
                self.reading.remove(one)
                self._leave(one)
            else:
                self.decoding = [entry for entry in self.decoding if entry[2] is not one]
                heapify(self.decoding)
                self._stop(one)
            one.cached, one.noticed = int(self.prefix_hit * one.arrival.prompt), None
            one.preempted += 1
            self.waiting.appendleft(one)

    def _pass(self, decoding: int, chunks: list[tuple[Served, int]]) -> Pass:
        cached = self.cached + decoding if decoding else 0
        return Pass(
            tokens=decoding + sum(n for _, n in chunks),
            sequences=decoding + len(chunks),
            pairs=cached + sum(n * one.cached + n * (n + 1) // 2 for one, n in chunks),
            cached=cached + sum(one.cached for one, _ in chunks),
            decoding=decoding,
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
