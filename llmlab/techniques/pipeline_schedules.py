"""Pipeline schedules as data: what each rank does, in order, and what that costs.

gpipe         all forwards, then all backwards                    Huang et al., arXiv 1811.06965
1f1b          a backward as soon as one can run                   Narayanan et al., arXiv 2104.04473, section 2.2.1
interleaved   1f1b with several stages a rank, far apart          the same, section 2.2.2
zero-bubble   1f1b with weight gradients put off into the gaps    Qi et al., arXiv 2401.10241, ZB-H1

p  ranks    m  micro-batches of a step    v  virtual stages a rank; its c-th, counted from 0, is stage c · p + rank
"""

from __future__ import annotations

from typing import NamedTuple

from ..base.errors import SpecError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


class Op(NamedTuple):
    """One thing a rank does: F forward, B backward (of inputs alone where W follows), W backward of weights."""

    kind: str
    stage: int
    micro_batch: int


Schedule = list[list[Op]]  # by rank


def schedule(name: str, ranks: int, micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """Return the schedule of that name. Raises SpecError for what it cannot do.

    `virtual_stages` is for "interleaved", which needs 2 or more, and a multiple of `ranks` micro-batches.
    """
    if name not in SCHEDULES:
        raise SpecError(f"schedule={name!r} is not one of {', '.join(SCHEDULES)}")
    for what, value in (("ranks", ranks), ("micro-batches", micro_batches), ("virtual_stages", virtual_stages)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"{value!r} {what}: give a whole number >= 1")
    if (name == "interleaved") != (virtual_stages > 1):
        given = f"virtual_stages={virtual_stages} with {name}"
        raise SpecError(f"{given}: interleaved takes 2 or more stages a rank, the others one")
    if name == "interleaved" and micro_batches % ranks:
        raise SpecError(f"{micro_batches} micro-batches are no multiple of {ranks} ranks, which interleaved needs")
    if name == "gpipe":
        return [
            [Op("F", rank, i) for i in range(micro_batches)] + [Op("B", rank, i) for i in range(micro_batches)]
            for rank in range(ranks)
        ]
    if name == "interleaved":
        return [_interleaved(rank, ranks, micro_batches, virtual_stages) for rank in range(ranks)]
    return [_one_forward_one_backward(rank, ranks, micro_batches, name == "zero-bubble") for rank in range(ranks)]


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int, split: bool) -> list[Op]:
    """As many forwards as there are ranks behind this one, then one forward and one backward in turn."""
    ahead = min(ranks - rank - 1, micro_batches)
    ops = [Op("F", rank, i) for i in range(ahead)]
    for i in range(micro_batches):
        if ahead + i < micro_batches:
            ops.append(Op("F", rank, ahead + i))
        ops.append(Op("B", rank, i))
        # Rank r puts its weight gradients off by r backwards: what is put off fills the gaps at the end.
        if split and i >= rank:
            ops.append(Op("W", rank, i - rank))
    if split:
        ops += [Op("W", rank, i) for i in range(max(0, micro_batches - rank), micro_batches)]
    return ops


def _interleaved(rank: int, ranks: int, micro_batches: int, virtual_stages: int) -> list[Op]:
    """1F1B over the stages of this rank: p micro-batches through one virtual stage, then through the next."""

    def nth(kind: str, n: int) -> Op:
        group, place = divmod(n, ranks * virtual_stages)
        nth_stage, micro_batch = divmod(place, ranks)
        nth_stage = nth_stage if kind == "F" else virtual_stages - 1 - nth_stage
        return Op(kind, nth_stage * ranks + rank, group * ranks + micro_batch)

    total = micro_batches * virtual_stages
    ahead = min(2 * (ranks - rank - 1) + (virtual_stages - 1) * ranks, total)
    ops = [nth("F", n) for n in range(ahead)]
    for n in range(total):
        if ahead + n < total:
            ops.append(nth("F", ahead + n))
        ops.append(nth("B", n))
    return ops


# ---- what a schedule costs


class Span(NamedTuple):
    """When an op runs on its rank."""

    op: Op
    rank: int
    start: float
    end: float


def times(
    plan: Schedule, forward: float = 1.0, inputs: float = 1.0, weights: float = 1.0, send: float = 0.0
) -> list[Span]:
    """Return when each op runs if a rank does them in order and each waits for what it needs.

    `forward`, and backward of `inputs` and `weights`, are durations of a *rank's* layers for one micro-batch: with
    several stages a rank each takes its share. `send` is how long an activation travels. Raises SpecError for a
    schedule in which an op waits for ever.
    """
    ranks = len(plan)
    stages = 1 + max(op.stage for ops in plan for op in ops)
    split = any(op.kind == "W" for ops in plan for op in ops)
    share = ranks / stages
    duration = {"F": forward * share, "B": (inputs if split else inputs + weights) * share, "W": weights * share}
    done: dict[Op, float] = {}
    spans: list[Span] = []
    clocks, next_op = [0.0] * ranks, [0] * ranks
    while any(next_op[rank] < len(plan[rank]) for rank in range(ranks)):
        moved = False
        for rank in range(ranks):
            while next_op[rank] < len(plan[rank]):
                op = plan[rank][next_op[rank]]
                needed = needs(op, stages)
                if any(other not in done for other in needed):
                    break
                ready = (done[other] + (send if other.stage != op.stage else 0.0) for other in needed)
                start = max([clocks[rank], *ready])
                done[op] = clocks[rank] = start + duration[op.kind]
                spans.append(Span(op, rank, start, clocks[rank]))
                next_op[rank] += 1
                moved = True
        if not moved:
            waiting = {rank: plan[rank][n] for rank, n in enumerate(next_op) if n < len(plan[rank])}
            raise SpecError(f"this schedule never ends: each rank waits for another, {waiting}")
    return spans


def needs(op: Op, stages: int) -> list[Op]:
    """Return what has to be done before `op` can run."""
    if op.kind == "F":
        return [op._replace(stage=op.stage - 1)] if op.stage else []
    if op.kind == "W":
        return [op._replace(kind="B")]
    own = [op._replace(kind="F")]
    return own if op.stage == stages - 1 else [*own, op._replace(stage=op.stage + 1)]


def bubble(spans: list[Span]) -> float:
    """Return the share of all ranks' time in which they wait."""
    busy = sum(span.end - span.start for span in spans)
    return 1 - busy / (max(span.end for span in spans) * (1 + max(span.rank for span in spans)))


def bubble_formula(name: str, ranks: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Return the same by formula, where a forward, and backward of inputs and of weights, last equally long.

    A rank waits p − 1 times for forward and backward of a stage, 3 units (arXiv 2104.04473, section 2.2), v times less
    if its stages are v times shorter; ZB-H1 for one unit (arXiv 2401.10241, section 2.2). Holds for m >= p.
    """
    waits = {"zero-bubble": 1 / 3, "interleaved": 1 / virtual_stages}.get(name, 1.0) * (ranks - 1)
    return waits / (micro_batches + waits)


def held(plan: Schedule) -> list[float]:
    """Return the most micro-batches whose activations each rank holds at once; a stage of v counts as 1 / v."""
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
