"""Pipeline schedules as lists of operations per rank, and their cost: times of operations, bubble and memory.

gpipe         all forward passes, then all backward passes           Huang et al., arXiv 1811.06965
1f1b          a backward pass as soon as one can run                 Narayanan et al., arXiv 2104.04473, section 2.2.1
interleaved   1f1b with several distant stages per rank              the same, section 2.2.2
zero-bubble   1f1b whose weight gradients fill the gaps              Qi et al., arXiv 2401.10241, ZB-H1
dualpipe      micro-batches enter at both ends (function `dualpipe`) DeepSeek-V3, arXiv 2412.19437, section 3.2.1

pp  ranks    m  micro-batches of a step    v  virtual stages per rank: rank r has the stages r, pp + r, 2 pp + r, ...
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ...base.errors import SpecError, check_counts

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


class Op(NamedTuple):
    """One operation of a rank: F forward, B backward, W gradients of weights. If a schedule has a W for a stage and a
    micro-batch, the B of both computes only the gradient of the input."""

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
        counts = f"virtual_stages={virtual_stages} with {name}"
        raise SpecError(f"{counts}: interleaved takes 2 or more stages per rank, the others one")
    if name == "interleaved" and micro_batches % ranks:
        raise SpecError(f"{micro_batches} micro-batches are not a multiple of {ranks} ranks; interleaved needs that")
    return [operations(name, rank, ranks, micro_batches, virtual_stages) for rank in range(ranks)]


def operations(name: str, rank: int, ranks: int, micro_batches: int, virtual_stages: int) -> list[Op]:
    """Return the operations of a rank: some forward passes ahead, then a backward and a forward pass in turn.

    With virtual stages, `ranks` micro-batches pass through one stage of the rank, and then through the next.
    """
    forwards, backwards = [], []
    for n in range(micro_batches * virtual_stages):
        group, place = divmod(n, ranks * virtual_stages)
        chunk, number = divmod(place, ranks)
        micro_batch = group * ranks + number
        forwards.append(Op("F", chunk * ranks + rank, micro_batch))
        backwards.append(Op("B", (virtual_stages - 1 - chunk) * ranks + rank, micro_batch))

    behind = ranks - rank - 1  # ranks after this one
    ahead = behind  # 1f1b and zero-bubble
    if name == "gpipe":
        ahead = micro_batches
    elif name == "interleaved":
        ahead = 2 * behind + (virtual_stages - 1) * ranks

    ops = forwards[:ahead]
    for n, backward in enumerate(backwards):
        ops += [*forwards[ahead + n :][:1], backward]
        if name == "zero-bubble" and n >= rank:  # rank r defers its weight gradients by r micro-batches
            ops.append(Op("W", rank, n - rank))
    if name == "zero-bubble":  # the deferred ones fill the gap at the end
        ops += [Op("W", rank, n) for n in range(max(0, micro_batches - rank), micro_batches)]
    return ops


def dualpipe(ranks: int, micro_batches: int) -> Schedule:
    """Return the schedule of DualPipe. Rank r has stage r for the first half of the micro-batches, and stage
    ranks - 1 - r for the second half, which pass through the ranks in reverse order.

    The order is that of `step` in https://github.com/deepseek-ai/DualPipe, dualpipe/dualpipe.py (2025). Raises
    SpecError unless both counts are even, with at least twice as many micro-batches as ranks.
    """
    check_counts(ranks=ranks, micro_batches=micro_batches)
    if ranks % 2 or micro_batches % 2 or micro_batches < 2 * ranks:
        counts = f"{micro_batches} micro-batches on {ranks} ranks"
        raise SpecError(f"{counts}: dualpipe needs even numbers, and two micro-batches per rank or more")
    return [_dualpipe_rank(rank, ranks, micro_batches // 2) for rank in range(ranks)]


def _dualpipe_rank(rank: int, ranks: int, half: int) -> list[Op]:
    ops: list[Op] = []
    deferred: deque[Op] = deque()
    counts = {kind + end: 0 for kind in "FB" for end in "01"}
    inner = min(rank, ranks - 1 - rank)  # 0 on the outer ranks
    outside = ranks // 2 - inner - 1
    middle = (inner + 1) // 2

    def run(names: str) -> None:
        """Append operations: F or B with 0 for the direction that enters at the nearer end, or 1 for the other; b for a
        backward pass that defers the gradients of weights; W for the oldest deferred ones."""
        for name in names.split():
            if name == "W":
                ops.append(deferred.popleft())
                continue
            reverse = (name[1] == "1") != (rank >= ranks // 2)
            number = counts[name.upper()]
            counts[name.upper()] += 1
            op = Op(name[0].upper(), ranks - 1 - rank if reverse else rank, number + half * reverse)
            ops.append(op)
            if name[0] == "b":
                deferred.append(op._replace(kind="W"))

    run(2 * outside * "F0 ")
    run((inner + 1) * "F0 F1 ")
    run(outside * "b1 W F1 ")
    run((half - ranks + inner + 1) * "F0 B1 F1 B0 ")
    run(outside * "B1 F1 B0 ")
    for n in range(inner + 1):
        run("b1" if n > middle or (n == middle and inner % 2) else "B1")
        run("b0" if n >= middle else "B0")
    run(outside * "W b0 ")
    run(len(deferred) * "W ")
    return ops


# ---- the cost of a schedule


class Span(NamedTuple):
    """Start and end of an operation on its rank."""

    op: Op
    rank: int
    start: float
    end: float


def times(
    plan: Schedule, forward: float = 1.0, inputs: float = 1.0, weights: float = 1.0, send: float = 0.0
) -> list[Span]:
    """Return the times of all operations, if each rank runs its own in order, as soon as their inputs have arrived.

    `forward`, `inputs` and `weights` are the seconds of all layers of a *rank* for one micro-batch: of the forward
    pass, and of the gradients of inputs and of weights. A virtual stage takes its share. `send` is the time to send an
    activation. Raises SpecError for a schedule that deadlocks.
    """
    ranks = len(plan)
    all_ops = [op for ops in plan for op in ops]
    stages = 1 + max(op.stage for op in all_ops)
    share = ranks / stages
    split = {op._replace(kind="B") for op in all_ops if op.kind == "W"}
    seconds = {"F": forward * share, "B": (inputs + weights) * share, "W": weights * share}
    end_times: dict[Op, float] = {}
    spans: list[Span] = []
    clocks, queues = [0.0] * ranks, [deque(ops) for ops in plan]
    while any(queues):
        finished = len(spans)
        for rank, queue in enumerate(queues):
            while queue and all(need in end_times for need in needs(queue[0], stages)):
                op = queue.popleft()
                ready = (end_times[need] + (send if need.stage != op.stage else 0.0) for need in needs(op, stages))
                start = max([clocks[rank], *ready])
                end_times[op] = clocks[rank] = start + (inputs * share if op in split else seconds[op.kind])
                spans.append(Span(op, rank, start, clocks[rank]))
        if len(spans) == finished:
            waiting = {rank: queue[0] for rank, queue in enumerate(queues) if queue}
            raise SpecError(f"this schedule deadlocks: each rank waits for another, {waiting}")
    return spans


def needs(op: Op, stages: int) -> list[Op]:
    """Return the operations that must end before `op` can run."""
    if op.kind == "F":
        return [op._replace(stage=op.stage - 1)] if op.stage else []
    if op.kind == "W":
        return [op._replace(kind="B")]
    own = [op._replace(kind="F")]
    return own if op.stage == stages - 1 else [*own, op._replace(stage=op.stage + 1)]


def bubble(spans: list[Span]) -> float:
    """Return the fraction of the time of all ranks that they spend waiting."""
    busy = sum(span.end - span.start for span in spans)
    return 1 - busy / (max(span.end for span in spans) * (1 + max(span.rank for span in spans)))


def bubble_formula(name: str, ranks: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Return `bubble` by formula, if the forward pass, the gradients of inputs and those of weights take equally long.

    A rank waits pp - 1 times for the passes of a stage (arXiv 2104.04473, section 2.2). Stages that are v times shorter
    divide this wait by v. ZB-H1 divides it by three (arXiv 2401.10241, section 2.2). The formula holds for m >= pp.
    """
    waits = {"zero-bubble": 1 / 3, "interleaved": 1 / virtual_stages}.get(name, 1.0) * (ranks - 1)
    return waits / (micro_batches + waits)


def in_flight(plan: Schedule) -> list[float]:
    """Return, for each rank, the most micro-batches whose activations it stores at the same time. One of v virtual
    stages counts as 1 / v."""
    stages = 1 + max(op.stage for ops in plan for op in ops)
    split = {op._replace(kind="B") for ops in plan for op in ops if op.kind == "W"}
    most = []
    for ops in plan:
        stored, peak = 0, 0
        for op in ops:
            stored += (op.kind == "F") - (op.kind == "W" or (op.kind == "B" and op not in split))
            peak = max(peak, stored)
        most.append(peak * len(plan) / stages)
    return most
