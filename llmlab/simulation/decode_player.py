"""Plays a decode step that does not run: makes its requests to the allocator, and adds up the time of its kernels.

Requests of up to 1 MiB come from a pool of their own, whose blocks are as large as the requests. The bytes that a step
allocates there are therefore known in advance, but not whether the pool needs another segment. All layers make the same
small requests. When one layer leaves the small pool exactly as an earlier layer did, so will all later ones, and their
small requests are skipped. Large requests are always made, and so are those for tensors that outlive the step.

Small requests leave no events, except in the step with the highest peak (`Played.show_all`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch

from ..base.compat import disable_current_modes, tree_unflatten
from ..formulas.time.operators import OFF_CARD, Stretch
from ..recording.events import Event
from ..traces.kernels import Kernel
from .allocator.caching import Allocator
from .allocator.config import SMALL_SIZE, round_size
from .decode_record import Argument, DecodeStep, Living, Request, on_line
from .engine.engine import Engine
from .profile.operator_log import Operators
from .workspaces.registry import FREE, Operator, Outputs


class Change(NamedTuple):
    """Allocates block `slot`, of `size` bytes in the line's first step and `growth` more in each later one, or frees
    it. `lasts`: the block is older than the step, or outlives it."""

    slot: Any
    frees: bool
    size: int
    growth: int
    place: Any
    lasts: bool

    def is_large(self, steps: int) -> bool:
        """Whether the large pool serves it, `steps` after the first one."""
        return self.size + self.growth * steps > SMALL_SIZE


class Plan:
    """The requests of a step. `shown` are the positions of those that have events, in order: large ones, and those of
    lasting tensors. From `start` to `end` the small requests repeat with this `period`."""

    def __init__(self, changes: list[Change], steps: int, block: Callable[[int], int]) -> None:
        self.changes, self._block = changes, block  # the bytes of a small block, by those of its request
        self.made = {change.slot: at for at, change in enumerate(changes) if not change.frees}
        self.freed = {change.slot: at for at, change in enumerate(changes) if change.frees}
        self._large = [each.is_large(steps) and (each.is_large(steps - 1) or not each.lasts) for each in changes]
        self.shown = [at for at, each in enumerate(changes) if each.lasts or self._large[at]]
        self.is_shown = frozenset(self.shown)
        self.growing = [at for at, each in enumerate(changes) if each.growth and at not in self.is_shown]
        self.start, self.end, self.period = self._repeats()
        self.begins = {
            begin: [(at - begin, changes[at].slot) for at in range(begin, self.end) if self._frees_older(at, begin)]
            for begin in range(self.start, self.end, self.period or 1)
        }
        self.skipped = cache(self._skipped)
        self._added = np.array([0 if at in self.is_shown else self._adds(at, 0) for at in range(len(changes))])

    def added(self, steps: int) -> np.ndarray:
        """Return the bytes that each small request adds, `steps` after the first step; 0 for the shown ones."""
        added = self._added.copy()
        added[self.growing] = [self._adds(at, steps) for at in self.growing]
        return added

    def _adds(self, at: int, steps: int) -> int:
        change = self.changes[at]
        return self._block(change.size + change.growth * steps) * (-1 if change.frees else 1)

    def _frees_older(self, at: int, begin: int) -> bool:
        """Whether a small block is freed at `at` that was allocated before `begin`."""
        change = self.changes[at]
        return change.frees and at not in self.is_shown and self.made[change.slot] < begin

    def _repeats(self) -> tuple[int, int, int]:
        """Return where the longest stretch of repeated small requests begins and ends, and its period."""
        codes: dict[Any, int] = {}
        coded = np.array([codes.setdefault(self._code(at), len(codes)) for at in range(len(self.changes))])
        best = 0, 0, 0
        for period in range(1, len(coded) // 3):
            differ = np.flatnonzero(coded[period:] != coded[:-period])
            edges = [-1, *differ.tolist(), len(coded) - period]
            longest = int(np.diff(edges).argmax())
            start, end = edges[longest] + 1, edges[longest + 1] + period
            if end - start - period > best[1] - best[0] - best[2]:
                best = start, end, period
        return best

    def _code(self, at: int) -> Any:
        """Return what is equal for requests that do the same to the small pool."""
        change = self.changes[at]
        if self._large[at]:
            return change.frees
        if change.lasts:
            return "lasts", at  # of which no two do
        return ("frees", at - self.made[change.slot]) if change.frees else ("makes", change.size, change.growth)

    def _skipped(self, begin: int, cycle: int) -> tuple[list[int], list[tuple[Any, Any]], int]:
        """Return the shown requests of all whole cycles from `begin` on, the small blocks that are in use after these,
        each with the block of the cycle before `begin` whose address it has, and where the cycles end."""
        end = begin + (self.end - begin) // cycle * cycle
        shown = self.shown[bisect_left(self.shown, begin) : bisect_left(self.shown, end)]
        left = [at for slot, at in self.made.items() if begin <= at < end <= self.freed.get(slot, -1)]
        moved = [
            (self.changes[at].slot, self.changes[begin - cycle + (at - begin) % cycle].slot)
            for at in left
            if at not in self.is_shown
        ]
        return shown, moved, end


class Played(NamedTuple):
    """A step that was played: its highest allocated bytes, the addresses of the tensors that live on, the time at which
    it began, and the bytes that each request of its plan added."""

    peak: int
    living: list[int]
    began: int
    plan: Plan
    added: np.ndarray

    def show_all(self, engine: Engine) -> None:
        """Add the events that were left out, at addresses that nothing else has."""
        made, shown = self.plan.made, set(self.plan.shown)
        for at, change in enumerate(self.plan.changes):
            if at not in shown:
                time = self.began + 1 + at
                engine.events.append(Event(time, -1 - made[change.slot], int(self.added[at])))
                if not change.frees and change.place is not None:
                    engine.places[time] = change.place


class Player:
    """Plays the steps on a line, whose first two steps are `one` and `other`."""

    def __init__(self, engine: Engine, operators: Operators, one: DecodeStep, other: DecodeStep) -> None:
        self.engine, self.operators, self.one, self.other = engine, operators, one, other
        self._row = Row(operators, one.kernels, other.kernels)
        self._requests = list(zip(one.requests, other.requests, strict=True))
        self._scratch = dict.fromkeys((_call(a), _call(b)) for a, b in self._requests if "scratch" in a.kind and a.func)
        self._growing = [(a.size, b.size - a.size) for a, b in self._requests if a.size != b.size]
        self._living = [living.number for living in one.living]
        self._sizes = cache(self._sizes_of)
        self._plans: dict[Any, Plan] = {}

    def logits(self, steps: int) -> Living:
        """Return the layout of the logits, `steps` after the first one."""
        return on_line(self.one.living[-1], self.other.living[-1], steps)

    def play(self, steps: int, cached: list[int], can_skip: bool) -> Played:
        """Play the step that is `steps` after the first one. `cached`: where the cache's tensors are before it."""
        engine, place, plan = self.engine, self.engine.place, self._plan(steps)
        began = engine.now() - 1  # the time of what came last
        events, allocated = len(engine.events), engine.memory.allocated
        addresses: dict[Any, int] = {-1 - number: address for number, address in enumerate(cached)}
        try:
            self._request(plan, steps, addresses, began, can_skip)
        finally:
            engine.place = place
        engine.pass_to(began + len(plan.changes))
        if engine.watch is self.operators:
            self.operators.append(self._row.at(steps))
        added = plan.added(steps)
        added[plan.shown] = [event.size for event in engine.events[events:]]
        peak = allocated + int(added.cumsum().max(initial=0))
        return Played(peak, [addresses[number] for number in self._living], began, plan, added)

    def _request(self, plan: Plan, steps: int, addresses: dict[Any, int], began: int, can_skip: bool) -> None:
        """Make the requests of `plan`, and write the address of each block into `addresses`."""
        engine, memory, changes = self.engine, self.engine.memory, plan.changes
        here = None
        if engine.place is not None:
            engine.place = lambda: here

        def show(at: int) -> None:
            nonlocal here
            slot, frees, size, growth, here, _ = changes[at]
            engine.pass_to(began + at)
            if frees:
                engine.free(addresses[slot])
            else:
                addresses[slot] = engine.malloc(size + growth * steps)

        if not isinstance(memory, Allocator):  # where a small request changes nothing for others
            for at in plan.shown:
                show(at)
            return
        stream, is_shown, at = engine.stream, plan.is_shown, 0
        begins = plan.begins if can_skip else {}
        seen: dict[Any, int] = {}  # by the state of the small pool: where it was in this state
        while at < len(changes):
            if at in begins:
                state = memory.small_blocks(stream), tuple((far, addresses.get(slot)) for far, slot in begins[at])
                cycle = at - seen.setdefault(state, at)
                if cycle:
                    positions, moved, end = plan.skipped(at, cycle)
                    for each in positions:
                        show(each)
                    for slot, like in moved:
                        addresses[slot] = addresses[like]
                    at, begins = end, {}
                    continue
            slot, frees, size, growth, _, _ = changes[at]
            if at in is_shown:
                show(at)
            elif frees:
                memory.free(addresses[slot])
            else:
                addresses[slot] = memory.malloc(size + growth * steps, stream)
            at += 1

    def _plan(self, steps: int) -> Plan:
        scratch = {a: self._sizes(on_line(a, b, steps)) for a, b in self._scratch}
        large = [(a + b * steps > SMALL_SIZE, a + b * (steps - 1) > SMALL_SIZE) for a, b in self._growing]
        key = tuple(scratch.values()), tuple(large)
        if key not in self._plans:
            memory = self.engine.memory
            config = memory.config if isinstance(memory, Allocator) else None
            block = (lambda size: round_size(size, config)) if config else int
            self._plans[key] = Plan(self._changes(scratch), steps, block)
        return self._plans[key]

    def _changes(self, scratch: dict[Any, tuple[int, ...]]) -> list[Change]:
        """Return the requests of a step in order; `scratch`: the sizes of each operator's, by its call."""
        sizes = {a.number: (a.size, b.size - a.size) for a, b in self._requests if a.kind == "malloc"}
        sizes |= {-1 - number: sizes[each] for number, each in enumerate(self._living)}  # before the step
        living, found = set(self._living), []
        held: dict[int, list[Any]] = {}  # the scratch of each operator

        def change(slot: Any, frees: bool, place: Any) -> None:
            if sizes[slot][0]:
                lasts = slot in living or (frees and not isinstance(slot, tuple) and slot < 0)
                found.append(Change(slot, frees, *sizes[slot], place, lasts))

        for one, _ in self._requests:
            if one.kind in ("malloc", "free"):
                change(one.number, one.kind == "free", one.place)
                continue
            own = held.setdefault(one.number, [])
            for size in scratch[_call(one)] if one.func else [FREE] * len(own):
                if size == FREE:
                    change(own.pop(), True, one.place)
                else:
                    own.append((one.number, len(found)))
                    sizes[own[-1]] = size, 0
                    change(own[-1], False, one.place)
        return found

    def _sizes_of(self, request: Request) -> tuple[int, ...]:
        """Return what the workspace function yields for the shapes of `request`, before its outputs or after them."""
        with disable_current_modes():
            leaves = [
                torch.empty(each.shape, dtype=each.dtype, device="meta") if isinstance(each, Argument) else each
                for each in request.leaves
            ]
            op = Operator(request.func, *tree_unflatten(leaves, request.form))
            steps = iter(self.engine.workspaces[request.func.name()](op, self.engine.gpu))
            before = list(takewhile(lambda step: not isinstance(step, Outputs), steps))
            return tuple(step for step in (before if request.kind == "scratch" else steps) if isinstance(step, int))


class Row:
    """The kernels of the steps on a line: of the first one and, beside these, of the second."""

    def __init__(self, operators: Operators, one: Sequence[Kernel], other: Sequence[Kernel]) -> None:
        self.operators = operators
        self._where: dict[tuple[Kernel, Kernel], list[int]] = {}  # of kernels that change
        for at, pair in enumerate(zip(one, other, strict=True)):
            if pair[0] != pair[1]:
                self._where.setdefault(pair, []).append(at)
        self._flops = sum(kernel.flops for kernel in one)
        costs = [operators.costs(kernel) for kernel in one]
        self._seconds = np.array([card for card, _ in costs])
        self._started = np.cumsum([host for _, host in costs])
        self._on_card = np.array([kernel.kind not in OFF_CARD for kernel in one])

    def at(self, steps: int) -> Stretch:
        """Return the kernels of the step that is `steps` after the first one."""
        flops, seconds = self._flops, self._seconds.copy()
        for (one, other), where in self._where.items():
            kernel = on_line(one, other, steps)
            flops += (kernel.flops - one.flops) * len(where)
            seconds[where], _ = self.operators.costs(kernel)
        seconds, started = seconds[self._on_card], self._started[self._on_card]
        left = np.cumsum(seconds[::-1])[::-1]  # seconds of a kernel and all that follow
        return Stretch(flops, float(self._started[-1]), float(left[0]), float((started + left).max()))


def _call(request: Request) -> Request:
    """Return what the scratch of an operator depends on."""
    return request._replace(number=0, place=None)
