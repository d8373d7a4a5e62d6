"""From allocation events to parts: what each live byte is for, and what the peak consists of.

A block is the time between an allocation at an address and its free. What it holds is known
    by address         weights, gradients, optimizer states, the KV cache, output.logits: their tensors were at hand
    by when it lived   activations: allocated in a forward (or a recomputation) and alive when that ended, which is
                       what autograd keeps; in generation, which keeps nothing, whatever the forward is working on
    by size            logits: tokens × vocabulary elements of 2 or 4 bytes (log-softmax's output, its gradient), which
                       is wrong for another tensor of exactly that size; cuBLAS workspaces
and the rest is "other": temporaries of the operator that runs at the moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..base.terms import PARTS, TimelinePoint
from ..specs.model import ModelSpec
from ..specs.run import Run, Training

# Of "other", told apart in the report's detail; the last two of a rank among several.
BUFFERS, INPUTS, GATHERED, COMMUNICATION = "buffers", "inputs", "gathered parameters", "communication buffers"
TIMELINE_POINTS = 300
# What a cuBLAS handle takes by default: aten/src/ATen/cuda/CublasHandlePool.cpp, before Hopper and from it on.
CUBLAS_WORKSPACES = frozenset({8_519_680, 33_554_432})
GENERATING = ("prefill", "decode")
TEMPORARIES = "temporaries"


class Event(NamedTuple):
    """One allocation (`size` > 0) or free (`size` < 0) of `size` bytes at `address`; `time` is Unix time in ns."""

    time: int
    address: int
    size: int


class Mark(NamedTuple):
    """The moment `phase` begins; `parts` says of addresses alive then what they hold. `time` is Unix time in ns.

    `phase` None ends the recording of phases: what comes after belongs to no phase until the next mark.
    `recomputed` marks the end of a block's recomputation, which began at Unix time `since`: what was allocated in
    between and lives on is activations, in backward.
    """

    time: int
    phase: str | None
    parts: dict[int, str]
    since: int | None = None


@dataclass(slots=True)
class Block:
    """`size` bytes at one address from `born` (ns) on, first in phase `phase`; `part` once it is known."""

    size: int
    born: int
    phase: str | None
    part: str | None = None


@dataclass(frozen=True)
class Division:
    """The peak over all phases and its parts, which add up to it; the peak of each phase; all in bytes."""

    peak: int = 0
    phase: str | None = None
    parts: dict[str, int] = field(default_factory=dict)
    detail: dict[str, dict[str, int]] = field(default_factory=dict)
    phases: dict[str, int] = field(default_factory=dict)
    timeline: tuple[TimelinePoint, ...] = ()
    blocks: tuple[Block, ...] = ()  # alive at the peak, in order of birth: the last one made it


def logits_sizes(spec: ModelSpec, run: Run) -> list[int]:
    """Return the bytes of the logits of one forward pass: in half precision, and in fp32."""
    if isinstance(run, Training):
        elements = run.sequences * run.num_labels if run.num_labels else run.tokens * spec.vocab
    else:
        elements = run.batch * spec.vocab
    return [2 * elements, 4 * elements]


def divide(events: Sequence[Event], marks: Sequence[Mark], logits: Iterable[int] = ()) -> Division:
    """Return what `events` amounted to in the phases that `marks` begin; `logits`: sizes of a logits tensor, bytes."""
    return divided(changes_of(events, marks, logits))


# A change of the live bytes: the phase it happened in, the block it is of, and +size, -size or, at a phase's begin, 0.
Change = tuple[str | None, Block | None, int]


def changes_of(events: Sequence[Event], marks: Sequence[Mark], sizes: Iterable[int] = ()) -> list[Change]:
    """Return the changes in their order, every block with its part; `sizes` as `divide` takes them for `logits`."""
    moments: list[Event | Mark] = [*events, *marks]
    moments.sort(key=lambda moment: moment.time)
    logits = frozenset(sizes)
    changes: list[Change] = []
    live: dict[int, Block] = {}
    phase, start = None, 0
    for moment in moments:
        if isinstance(moment, Event):
            if moment.size > 0:
                if lost := live.get(moment.address):  # freed by a thread that was not recorded
                    changes.append((phase, lost, -lost.size))
                block = live[moment.address] = Block(moment.size, moment.time, phase)
                changes.append((phase, block, moment.size))
            elif freed := live.pop(moment.address, None):  # else it is older than the recording
                changes.append((phase, freed, -freed.size))
            continue
        for address, part in moment.parts.items():
            if address in live:
                live[address].part = part
        if moment.since is not None:
            _keep_as_activations(live, moment.since)
            continue
        if phase in ("forward", "no-grad"):
            _keep_as_activations(live, start)
        phase, start = moment.phase, moment.time
        changes.append((phase, None, 0))
    survivors = {id(block) for block in live.values()}
    for _, born, size in changes:
        if born and size > 0:
            born.part = _part(born, logits, forever=id(born) in survivors)
    return changes


def _keep_as_activations(live: dict[int, Block], since: int) -> None:
    for block in reversed(live.values()):  # the youngest first
        if block.born < since:
            break
        block.part = block.part or "activations"


def _part(block: Block, logits: frozenset[int], forever: bool) -> str:
    if block.part in (None, "activations") and block.size in logits and block.phase not in (None, "load", "optimizer"):
        return "logits"
    if block.part is None and block.phase in GENERATING:
        return "activations"
    if block.part is None and forever and block.size in CUBLAS_WORKSPACES:
        return "workspace"
    return block.part or TEMPORARIES


def divided(changes: Sequence[Change]) -> Division:
    """Return what these changes amounted to."""
    phases: dict[str, int] = {}
    live_bytes: dict[str, int] = {}
    total, peak, peak_phase, at_peak, peak_change = 0, -1, None, {}, -1
    points: list[tuple[int, TimelinePoint]] = []
    counted = sum(phase is not None for phase, _, _ in changes)
    # The timeline keeps the highest point of each stretch of `stride` changes, so the peak is one of them.
    stride, seen = -(-counted // TIMELINE_POINTS) or 1, 0
    for number, (phase, block, size) in enumerate(changes):
        if block:
            assert block.part is not None  # _blocks has given every block one
            total += size
            live_bytes[block.part] = live_bytes.get(block.part, 0) + size
        if phase is None:
            continue
        phases[phase] = max(phases.get(phase, 0), total)
        if total > peak:
            peak, peak_phase, at_peak, peak_change = total, phase, dict(live_bytes), number
        if seen % stride == 0:
            points.append((total, (phase, _report_parts(live_bytes))))
        elif total > points[-1][0]:
            points[-1] = (total, (phase, _report_parts(live_bytes)))
        seen += 1
    told_apart = (BUFFERS, INPUTS, GATHERED, COMMUNICATION, TEMPORARIES)
    detail = {name: at_peak[name] for name in told_apart if at_peak.get(name)}
    return Division(
        peak=max(peak, 0),
        phase=peak_phase,
        parts=_report_parts(at_peak),
        detail={"other": detail} if detail else {},
        phases=phases,
        timeline=tuple(point for _, point in points),
        blocks=_alive(changes[: peak_change + 1]),
    )


def _alive(changes: Sequence[Change]) -> tuple[Block, ...]:
    live: dict[int, Block] = {}
    for _, block, size in changes:
        if block and size > 0:
            live[id(block)] = block
        elif block:
            live.pop(id(block), None)
    return tuple(live.values())


def _report_parts(sizes_by_part: dict[str, int]) -> dict[str, int]:
    """Return the parts of a Report, those that hold something, in its order."""
    sizes = dict.fromkeys(PARTS, 0)
    for name, size in sizes_by_part.items():
        sizes[name if name in sizes else "other"] += size
    return {name: size for name, size in sizes.items() if size}


def collapsed(path: str) -> str:
    """Return `path` with its layers' numbers as *, and cut below the layers' own modules.

    >>> collapsed("model.layers.31.mlp.down_proj"), collapsed("lm_head")
    ('model.layers.*.mlp', 'lm_head')
    """
    names = ["*" if name.isdigit() else name for name in path.split(".")]
    return ".".join(names[: names.index("*") + 2] if "*" in names else names[:3])
