"""Replay of one decode step: its requests to the allocator, and its kernels.

The allocator serves small requests, of up to 1 MiB, from a separate pool, and all layers send the same ones. If a layer
finds this pool exactly as an earlier layer found it, every later layer will as well. Its small requests are then
skipped, because each would get the address that the earlier layer got, and the pool would not change in the end. Large
requests are always sent, and so are requests for tensors that outlive the step.

Small requests leave no events, except in the step with the highest peak (`Replayed.add_small_events`).
"""

from __future__ import annotations

from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch

from ..base.compat import disable_current_modes, tree_unflatten
from ..recording.parts import Event
from ..traces.kernels import Kernel
from .allocator.caching import Allocator
from .allocator.config import SMALL_SIZE, round_size
from .decode_record import Argument, DecodeStep, Living, Request, on_line
from .engine.engine import Engine
from .workspaces.registry import FREE, Operator, Outputs


class Change(NamedTuple):
    """An allocation of `size` bytes in the first step, and `growth` more in each later step, or the free of one.

    `block` is the position of the allocation among the changes of the step, or -1 - n for tensor n of the cache before
    the step. `outlives`: the block is older than the step or lives on after it.
    """

    block: int
    frees: bool
    size: int
    growth: int
    outlives: bool
    place: Any = None

    def bytes(self, steps: int) -> int:
        """Return the size in bytes, `steps` after the first step."""
        return self.size + self.growth * steps


class Plan:
    """The changes of a step, and of every other step in which the same changes are large.

    `living` are the blocks of the tensors that outlive the step. Changes that have an event in each step are `shown`:
    those of the large pool, and those of blocks that outlive the step. `starts` are the positions from which small
    requests repeat until `end`, each with the older blocks that are freed in between.
    """

    def __init__(self, changes: list[Change], living: list[int], steps: int) -> None:
        self.changes, self.living = changes, living
        self.sizes = np.array([change.size for change in changes])
        self.growths = np.array([change.growth for change in changes])
        self.signs = np.array([-1 if change.frees else 1 for change in changes])
        # A free of a block that is older than the step frees the size that it had in the step before.
        large = [change.bytes(steps) > SMALL_SIZE < change.bytes(steps - change.outlives) for change in changes]
        self.shown = [is_large or change.outlives for is_large, change in zip(large, changes, strict=True)]
        self.large = [change for is_large, change in zip(large, changes, strict=True) if is_large and not change.frees]
        self.small = [at for at, shown in enumerate(self.shown) if not shown]
        start, self.end, period = _repetition([
            _effect(at, change, is_large) for at, (change, is_large) in enumerate(zip(changes, large, strict=True))
        ])
        self.starts = {at: self._freed_from(at) for at in range(start, self.end, period)}

    def _freed_from(self, start: int) -> list[int]:
        """Return the small blocks that are older than `start` and freed between it and the end."""
        changes = [self.changes[at] for at in self.small if start <= at < self.end]
        return [change.block for change in changes if change.frees and change.block < start]


def _effect(at: int, change: Change, is_large: bool) -> Any:
    """Return a value that is equal for changes with the same effect on the small pool."""
    if is_large:
        return "large"
    if change.outlives:
        return "outlives", at
    return at - change.block if change.frees else (change.size, change.growth)


def _repetition(effects: list[Any]) -> tuple[int, int, int]:
    """Return where the longest stretch that repeats itself begins and ends, and its period."""
    numbers: dict[Any, int] = {}
    numbered = np.array([numbers.setdefault(effect, len(numbers)) for effect in effects])
    longest, longest_run = 0, (0, 0, 1)
    for period in range(1, len(numbered) // 3):
        edges = np.flatnonzero(np.r_[True, numbered[period:] != numbered[:-period], True])
        at = int(np.diff(edges).argmax())
        start, stop = int(edges[at]), int(edges[at + 1]) - 1
        if stop - start > longest:
            longest, longest_run = stop - start, (start, stop + period, period)
    return longest_run


class Replayed(NamedTuple):
    """A replayed step: its peak of allocated bytes, the addresses of the tensors that outlive it, the time at which it
    began, its plan, and the bytes that each change of the plan added."""

    peak: int
    living: list[int]
    began: int
    plan: Plan
    added: np.ndarray

    def add_small_events(self, engine: Engine) -> None:
        """Add the events of the small requests, at addresses below 0, which nothing else uses."""
        for at in self.plan.small:
            change, time = self.plan.changes[at], self.began + 1 + at
            engine.events.append(Event(time, -1 - change.block, int(self.added[at])))
            if not change.frees and change.place is not None:
                engine.places[time] = change.place


class Replayer:
    """Replays decode steps, by linear extrapolation from the two consecutive steps `one` and `other`."""

    def __init__(self, engine: Engine, one: DecodeStep, other: DecodeStep) -> None:
        self.engine, self.one, self.other = engine, one, other
        self._requests = list(zip(one.requests, other.requests, strict=True))
        self._scratch = dict.fromkeys((_call(a), _call(b)) for a, b in self._requests if a.func)
        self._growing = {(a.size, b.size - a.size) for a, b in self._requests if a.size != b.size}
        self._kernels: dict[tuple[Kernel, Kernel], list[int]] = {}  # positions of kernels that change
        for at, pair in enumerate(zip(one.kernels, other.kernels, strict=True)):
            if pair[0] != pair[1]:
                self._kernels.setdefault(pair, []).append(at)
        self._sizes = cache(self._sizes_of)
        self._plans: dict[Any, Plan] = {}

    def logits(self, steps: int) -> Living:
        """Return the layout of the logits, `steps` after the first step."""
        return on_line(self.one.living[-1], self.other.living[-1], steps)

    def kernels(self, steps: int) -> list[Kernel]:
        """Return the kernels, `steps` after the first step; equal ones are the same object in all steps."""
        kernels = list(self.one.kernels)
        for (one, other), positions in self._kernels.items():
            kernel = on_line(one, other, steps)
            for at in positions:
                kernels[at] = kernel
        return kernels

    def replay(self, steps: int, cached: list[int]) -> Replayed:
        """Replay the requests of the step `steps` after the first one; `cached` are the cache's addresses before it."""
        engine, place, plan = self.engine, self.engine.place, self._plan(steps)
        began = engine.now() - 1  # the time of the last event
        first, allocated = len(engine.events), engine.memory.allocated
        addresses = {-1 - number: address for number, address in enumerate(cached)}
        try:
            self._request(plan, steps, began, addresses)
        finally:
            engine.place = place
        engine.pass_to(began + len(plan.changes))
        added = self._added(plan, steps)
        added[plan.shown] = [event.size for event in engine.events[first:]]
        peak = allocated + int(added.cumsum().max(initial=0))
        return Replayed(peak, [addresses[block] for block in plan.living], began, plan, added)

    def _request(self, plan: Plan, steps: int, began: int, addresses: dict[int, int]) -> None:
        """Send the requests of `plan`, and write the address of each block into `addresses`."""
        engine, memory, stream, here = self.engine, self.engine.memory, self.engine.stream, None
        if engine.place is not None:
            engine.place = lambda: here
        # If cached segments may be released, the state of the small pool matters at every moment.
        room = isinstance(memory, Allocator) and memory.has_room(change.bytes(steps) for change in plan.large)
        allocator = memory if isinstance(memory, Allocator) and room else None
        seen: dict[Any, int] = {}  # the positions at which the small pool was in a state
        cycle = skipped_until = 0
        for at, (block, frees, size, growth, _, place) in enumerate(plan.changes):
            if allocator and not cycle and at in plan.starts:
                state = allocator.small_pool(stream), *[addresses.get(older) for older in plan.starts[at]]
                cycle = at - seen.setdefault(state, at)
                skipped_until = plan.end - (plan.end - at) % cycle if cycle else 0
            if plan.shown[at]:
                here = place
                engine.pass_to(began + at)
                if frees:
                    engine.free(addresses[block])
                else:
                    addresses[at] = engine.malloc(size + growth * steps)
            elif at < skipped_until:
                if not frees:
                    addresses[at] = addresses[at - cycle]
            elif frees:
                memory.free(addresses[block])
            else:
                addresses[at] = memory.malloc(size + growth * steps, stream)

    def _added(self, plan: Plan, steps: int) -> np.ndarray:
        """Return the bytes that each change adds, if its block is as large as the request rounded up."""
        memory = self.engine.memory
        sizes, positions = np.unique(plan.sizes + plan.growths * steps, return_inverse=True)
        if isinstance(memory, Allocator):
            sizes = np.array([round_size(size, memory.config) for size in sizes.tolist()])
        return plan.signs * sizes[positions]

    def _plan(self, steps: int) -> Plan:
        scratch = tuple(self._sizes(on_line(*calls, steps)) for calls in self._scratch)
        large = [size + growth * at > SMALL_SIZE for size, growth in self._growing for at in (steps - 1, steps)]
        key = scratch, *large
        if key not in self._plans:
            self._plans[key] = self._planned(dict(zip(self._scratch, scratch, strict=True)), steps)
        return self._plans[key]

    def _planned(self, scratch: dict[tuple[Request, Request], tuple[int, ...]], steps: int) -> Plan:
        """Return the plan of a step. `scratch` has the sizes of each operator's buffers, or FREE, by its two calls."""
        living = [tensor.number for tensor in self.one.living]
        changes: list[Change] = []
        blocks: dict[int, int] = {}  # by the number of a malloc
        buffers: dict[int, list[int]] = {}  # each operator's scratch that is in use
        sizes = {a.number: (a.size, b.size - a.size) for a, b in self._requests if a.kind == "malloc"}
        older = {-1 - at: Change(-1 - at, True, *sizes[number], True) for at, number in enumerate(living)}

        def allocate(size: int, growth: int, outlives: bool, place: Any) -> int:
            changes.append(Change(len(changes), False, size, growth, outlives, place))
            return len(changes) - 1

        def free(block: int) -> None:
            changes.append(older[block] if block < 0 else changes[block]._replace(frees=True))

        for request, other in self._requests:
            number, own = request.number, buffers.setdefault(request.number, [])
            if request.kind == "malloc":
                blocks[number] = allocate(*sizes[number], number in living, request.place)
            elif request.kind == "free":
                free(blocks.get(number, number))
            elif request.kind == "free scratch":
                while own:
                    free(own.pop())
            else:
                for size in scratch[_call(request), _call(other)]:
                    if size == FREE:
                        free(own.pop())
                    else:
                        own.append(allocate(size, 0, False, request.place))
        return Plan(changes, [blocks[number] for number in living], steps)

    def _sizes_of(self, request: Request) -> tuple[int, ...]:
        """Return the sizes that the workspace function yields for the shapes of `request`, before or after outputs."""
        with disable_current_modes():
            leaves = [
                torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Argument) else leaf
                for leaf in request.leaves
            ]
            op = Operator(request.func, *tree_unflatten(leaves, request.form))
            steps = iter(self.engine.workspaces[request.func.name()](op, self.engine.gpu))
            before = list(takewhile(lambda step: not isinstance(step, Outputs), steps))
            return tuple(step for step in (before if request.kind == "scratch" else steps) if isinstance(step, int))


def _call(request: Request) -> Request:
    """Return `request` without its number and place, on which the scratch of an operator does not depend."""
    return request._replace(number=0, place=None)
