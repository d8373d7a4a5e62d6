"""Facts about the functions of yours/pipeline.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, count, pairwise
from random import Random
from typing import Any

from ...course.techniques.pipeline_schedules import Op, Schedule, needs, schedule, times

PLANS = {
    "gpipe": schedule("gpipe", 4, 8), "1f1b": schedule("1f1b", 4, 8),
    "interleaved": schedule("interleaved", 4, 8, 2), "zero-bubble": schedule("zero-bubble", 4, 8),
}  # fmt: skip


def _inputs_of(plan: Schedule, most: int = 100_000) -> Callable[[Op], list[Op]]:
    """Return `needs` for a plan. It raises if a function asks endlessly."""
    stages, questions = 1 + max(op.stage for ops in plan for op in ops), count()

    def inputs(op: Op) -> list[Op]:
        if next(questions) == most:
            raise RuntimeError(f"asked {most:,} times which inputs an operation needs: it never ends")
        return needs(op, stages)

    return inputs


def _agrees(function: Callable[..., Any], name: str, slower: int = 1) -> bool:
    """Return whether `function` finds when a schedule ends if stage 1 takes `slower` times as long.

    The end is that of the longest chain of operations.
    """
    plan = PLANS[name]
    inputs = _inputs_of(plan)
    seconds = {s.op: (s.end - s.start) * (slower if s.op.stage == 1 else 1) for s in times(plan)}
    before = {op: ops[:n][-1:] for ops in plan for n, op in enumerate(ops)}

    @cache
    def end(op: Op) -> float:
        return seconds[op] + max(map(end, [*before[op], *inputs(op)]), default=0)

    result = function([list(ops) for ops in plan], inputs, seconds.__getitem__)
    return result is not None and abs(result - max(map(end, seconds))) < 1e-9


_FIRST, _SECOND = ([Op(kind, stage, n) for kind in "FB" for n in (0, 1)] for stage in (0, 1))
# Stage 0 sends one micro-batch and waits for its gradient, and stage 1 waits for two.
_STUCK = [[_FIRST[i] for i in (0, 2, 1, 3)], _SECOND]

done_at = {
    "GPipe ends when it does above": lambda f: _agrees(f, "gpipe"),
    "so does 1F1B": lambda f: _agrees(f, "1f1b"),
    "so does the interleaved schedule": lambda f: _agrees(f, "interleaved"),
    "so does the zero-bubble schedule": lambda f: _agrees(f, "zero-bubble"),
    "a slower stage delays the end": lambda f: _agrees(f, "1f1b", slower=3),
    "a deadlock gives None": lambda f: f([list(ops) for ops in _STUCK], _inputs_of(_STUCK), lambda op: 1) is None,
}


def _slowest(seconds: Sequence[float], sizes: Sequence[int]) -> float:
    bounds = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    return max(sum(seconds[a:b]) for a, b in pairwise(bounds))


def _best(function: Callable[..., Any], draw: Random) -> bool:
    seconds, stages = [draw.randint(1, 9) for _ in range(draw.randint(4, 9))], draw.randint(1, 4)
    ways = [(0, *bounds, len(seconds)) for bounds in combinations(range(1, len(seconds)), stages - 1)]
    least = min(_slowest(seconds, [b - a for a, b in pairwise(way)]) for way in ways)
    sizes = list(function(list(seconds), stages))
    whole = len(sizes) == stages and min(sizes) > 0 and sum(sizes) == len(seconds)
    return whole and _slowest(seconds, sizes) == least


cut = {
    "equal layers, equal stages": lambda f: list(f([1] * 12, 4)) == [3, 3, 3, 3],
    "a head as long as three layers": lambda f: list(f([1] * 13 + [3], 4)) == [4, 4, 4, 2],
    "no stage is empty": lambda f: list(f([9, 1, 1], 3)) == [1, 1, 1],
    "no other cut is faster, for 100 drawn models": lambda f: all(_best(f, Random(n)) for n in range(100)),
}
