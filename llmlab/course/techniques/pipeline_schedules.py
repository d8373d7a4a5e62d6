"""Pipeline schedules as lists of ops per rank, and their cost: the time of each op, the bubble and the memory.

gpipe         all forwards, then all backwards                    Huang et al., arXiv 1811.06965
1f1b          a backward as soon as one can run                   Narayanan et al., arXiv 2104.04473, section 2.2.1
interleaved   1f1b with several distant stages per rank           the same, section 2.2.2
zero-bubble   1f1b with weight gradients deferred into the gaps   Qi et al., arXiv 2401.10241, ZB-H1

p  ranks    m  micro-batches of a step    v  virtual stages per rank; the c-th, counted from 0, is stage c · p + rank
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ...base.errors import SpecError, check_counts

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


class Op(NamedTuple):
    """One operation of a rank: F forward, B backward (of inputs alone if W follows), W backward of weights."""

    kind: str
    stage: int
    micro_batch: int


Schedule = list[list[Op]]  # by rank


def schedule(name: str, ranks: int, micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Return the schedule `name`. Raises SpecError for an unknown name, and for counts that it does not allow.

    `virtual_stages` is for "interleaved", which needs 2 or more, and a multiple of `ranks` micro-batches.
    """
    if name not in SCHEDULES:
        raise SpecError(f"schedule={name!r} is not one of {', '.join(SCHEDULES)}")
    check_counts(ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual_stages)
    if (name == "interleaved") != (virtual_stages > 1):
        given = f"virtual_stages={virtual_stages} with {name}"
        raise SpecError(f"{given}: interleaved takes 2 or more stages per rank, the others one")
    if name == "interleaved" and micro_batches % ranks:
        raise SpecError(f"{micro_batches} micro-batches are not a multiple of {ranks} ranks; interleaved needs that")
    return [_ops(name, rank, ranks, micro_batches, virtual_stages) for rank in range(ranks)]


def _ops(name: str, rank: int, ranks: int, micro_batches: int, virtual_stages: int) -> list[Op]:
    """Return a rank's ops: some forwards ahead, then forward and backward in turn. Schedules differ in how many.

    With virtual stages, p micro-batches pass through one of the rank's stages, then the same through the next.
    """
    forwards, backwards = [], []
    for n in range(micro_batches * virtual_stages):
        group, place = divmod(n, ranks * virtual_stages)
        nth_stage, micro_batch = divmod(place, ranks)
        forwards.append(Op("F", nth_stage * ranks + rank, group * ranks + micro_batch))
        backwards.append(Op("B", (virtual_stages - 1 - nth_stage) * ranks + rank, group * ranks + micro_batch))
    later = ranks - rank - 1  # ranks that each micro-batch passes after this one
    ahead = {"gpipe": micro_batches, "interleaved": 2 * later + (virtual_stages - 1) * ranks}.get(name, later)
    ops = forwards[:ahead]
    for n, backward in enumerate(backwards):
        ops += [*forwards[ahead + n :][:1], backward]
        if name == "zero-bubble" and n >= rank:  # rank r defers its weight gradients by r backwards
            ops.append(Op("W", rank, n - rank))
    if name == "zero-bubble":  # the last ones fill the gap at the end
        ops += [Op("W", rank, n) for n in range(max(0, micro_batches - rank), micro_batches)]
    return ops


# ---- what a schedule costs


class Span(NamedTuple):
    """Start and end of an op on its rank."""

    op: Op
    rank: int
    start: float
    end: float


def times(
    plan: Schedule, forward: float = 1.0, inputs: float = 1.0, weights: float = 1.0, send: float = 0.0
) -> list[Span]:
    """Return when each op runs, if each rank runs its ops in order and each op waits for those that it needs.

    `forward`, and the backward of `inputs` and `weights`, are durations for all layers of a *rank* and one micro-batch:
    each of several stages takes its share. `send` is the time to send an activation. Raises SpecError for a schedule
    that deadlocks.
    """
    ranks = len(plan)
    stages = 1 + max(op.stage for ops in plan for op in ops)
    split = any(op.kind == "W" for ops in plan for op in ops)
    share = ranks / stages
    duration = {"F": forward * share, "B": (inputs if split else inputs + weights) * share, "W": weights * share}
    ends: dict[Op, float] = {}
    spans: list[Span] = []
    clocks, queues = [0.0] * ranks, [deque(ops) for ops in plan]
    while any(queues):
        done = len(spans)
        for rank, queue in enumerate(queues):
            while queue and all(other in ends for other in needs(queue[0], stages)):
                op = queue.popleft()
                ready = (ends[other] + (send if other.stage != op.stage else 0.0) for other in needs(op, stages))
                start = max([clocks[rank], *ready])
                ends[op] = clocks[rank] = start + duration[op.kind]
                spans.append(Span(op, rank, start, clocks[rank]))
        if len(spans) == done:
            waiting = {rank: queue[0] for rank, queue in enumerate(queues) if queue}
            raise SpecError(f"this schedule deadlocks: each rank waits for another, {waiting}")
    return spans


def needs(op: Op, stages: int) -> list[Op]:
    """Return the ops that must end before `op` can run."""
    if op.kind == "F":
        return [op._replace(stage=op.stage - 1)] if op.stage else []
    if op.kind == "W":
        return [op._replace(kind="B")]
    own = [op._replace(kind="F")]
    return own if op.stage == stages - 1 else [*own, op._replace(stage=op.stage + 1)]


def bubble(spans: list[Span]) -> float:
    """Return the fraction of all ranks' time that they spend waiting."""
    busy = sum(span.end - span.start for span in spans)
    return 1 - busy / (max(span.end for span in spans) * (1 + max(span.rank for span in spans)))


def bubble_formula(name: str, ranks: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Return `bubble` by formula, if forward, backward of inputs and backward of weights take one unit of time each.

    A rank waits p − 1 times for forward and backward of a stage, 3 units (arXiv 2104.04473, section 2.2), v times less
    if its stages are v times shorter; in ZB-H1 for one unit (arXiv 2401.10241, section 2.2). Holds for m >= p.
    """
    waits = {"zero-bubble": 1 / 3, "interleaved": 1 / virtual_stages}.get(name, 1.0) * (ranks - 1)
    return waits / (micro_batches + waits)


def held(plan: Schedule) -> list[float]:
    """Return, for each rank, the most micro-batches whose activations it holds at once; one of v stages is 1 / v."""
    stages = 1 + max(op.stage for ops in plan for op in ops)
    frees = "W" if any(op.kind == "W" for ops in plan for op in ops) else "B"
    most = []
    for ops in plan:
        now, peak = 0, 0
        for op in ops:
            now += (op.kind == "F") - (op.kind == frees)
            peak = max(peak, now)
        most.append(peak * len(plan) / stages)
    return most
