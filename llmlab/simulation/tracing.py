"""Derivation of a trace: the real step, simulated at a few sizes and two depths, gives every tensor its formula.

At four points (B, T) the step runs the same operators; the bytes of each request at these points determine its power of
B and its polynomial in T. At two depths the step has the same moments, but for those of the layers in between; their
difference is one more group of layers. The trace must then give the peaks of all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from ..base.errors import NotAvailable
from ..hardware.gpu import GPU
from ..recording.parts import Change, changes_of, divided, logits_sizes
from ..specs.model import ModelSpec
from ..specs.run import Training
from ..traces.points import points
from ..traces.trace import Moment, Term, Trace
from .allocator.config import blocks_of
from .depth import Depth, depth_of, with_layers
from .profile.recording import collapsed
from .report import ROOMY, recorded

APART = 0.015  # by which a trace may differ from the simulations that it is made of


class Untraceable(NotAvailable):
    """The step runs other operators at other sizes, so it has no formula."""


class _Request(NamedTuple):
    """A request for memory: bytes, and what for."""

    size: int
    part: str
    module: str
    operator: str


class _Step(NamedTuple):
    """A simulated step: its requests, what changes, and the peak in bytes.

    A change has the phase and the number of the request, counted from 1: positive if memory is allocated, negative if
    it is freed, 0 where a phase begins.
    """

    requests: list[_Request]
    changes: list[tuple[str | None, int]]
    peak: int


def derived(spec: ModelSpec, run: Training, card: GPU) -> Trace:
    """Return the trace of `run` on one `card`. Raises Untraceable for a step without one."""
    for fixed in (False, True):
        at = points(run.micro_batch, run.seq_len, fixed)
        if at is None:
            continue
        try:
            return _derived(spec, run, card, at, fixed)
        except Untraceable:
            if fixed:
                raise
    raise Untraceable(f"a step of {run.micro_batch} × {run.seq_len} tokens has too few sizes that are alike")


def _derived(spec: ModelSpec, run: Training, card: GPU, at: Sequence[tuple[int, int]], fixed: bool) -> Trace:
    depth = depth_of(spec)
    shallow = deep = _traced(with_layers(spec, depth.least) if depth.period else spec, run, card, at)
    peaks = [(0, sizes, step.peak) for sizes, step in zip(at, shallow.steps, strict=True)]
    if depth.period:
        more = with_layers(spec, depth.least + depth.period)
        step = _step(more, replace(run, micro_batch=at[0][0], seq_len=at[0][1]), card)
        deep = _Traced(dict(_moments(step, _terms_like(shallow.terms, step, at[0]))))
        peaks.append((1, at[0], step.peak))
    trace = replace(_joined(depth, shallow, deep), fixed=fixed)
    for groups, sizes, peak in peaks:
        found = max(trace.totals(*sizes, groups=groups))
        if abs(found / peak - 1) > APART:
            raise Untraceable(f"the formulas of {spec.name} give {found:,} bytes where a simulation has {peak:,}")
    return trace


def _terms_like(known: Sequence[Term], step: _Step, at: tuple[int, int]) -> list[Term]:
    """Return the formulas of a deeper step's requests: those that ask for as many bytes, of the same module in another
    layer if there is one."""
    sized: dict[tuple[object, ...], Term] = {}
    for term in known:
        size = term.size(*at)
        for key in ((size,), (size, term.operator), (size, term.operator, term.part, collapsed(term.module))):
            sized.setdefault(key, term)
    found = []
    for request in step.requests:
        operator = shown(request.operator)
        size, module = request.size, collapsed(request.module)
        keys = (size, operator, request.part, module), (size, operator), (size,)
        like = next((sized[key] for key in keys if key in sized), None)
        formula = (like.batch, like.coefficients) if like else (0, (float(request.size),))
        found.append(Term(*formula, request.part, request.module, operator))
    return found


def shown(operator: str) -> str:
    """Return an operator's name as people say it: "mm" for aten.mm.default."""
    return operator.removeprefix("aten.").removesuffix(".default")


class _Traced(NamedTuple):
    """The steps of one depth as one: its moments by name, and the terms of its requests."""

    moments: dict[tuple[str, ...], tuple[str, str, Counter[Term]]]
    terms: Sequence[Term] = ()
    steps: Sequence[_Step] = ()


def _traced(spec: ModelSpec, run: Training, card: GPU, at: Sequence[tuple[int, int]]) -> _Traced:
    steps = [_step(spec, replace(run, micro_batch=batch, seq_len=tokens), card) for batch, tokens in at]
    if any(step.changes != steps[0].changes for step in steps):
        raise Untraceable(f"{spec.name} runs other operators at other sizes")
    terms = [_term([step.requests[number] for step in steps], at) for number in range(len(steps[0].requests))]
    return _Traced(dict(_moments(steps[0], terms)), terms, steps)


def _step(spec: ModelSpec, run: Training, card: GPU) -> _Step:
    recording = recorded(spec, run, replace(card, memory=ROOMY))
    engine = recording.engine
    requests: list[_Request] = []
    numbers: dict[int, int] = {}
    changes: list[tuple[str | None, int]] = []
    found: list[Change] = changes_of(engine.events, recording.marks, blocks_of(logits_sizes(spec, run)))
    for phase, block, size in found:
        if block is None:
            changes.append((phase, 0))
        elif size < 0:
            changes.append((phase, -numbers[id(block)]))
        else:
            place = engine.places[block.born]
            assert block.part is not None
            requests.append(_Request(engine.requests[block.born], block.part, place.module, place.operator))
            numbers[id(block)] = len(requests)
            changes.append((phase, len(requests)))
    peak = divided(found).peak
    return _Step(requests, changes, peak)


def _term(requests: Sequence[_Request], at: Sequence[tuple[int, int]]) -> Term:
    """Return the formula of a request that has these sizes at these points."""
    first = requests[0]
    batch, coefficients = _formula([request.size for request in requests], at)
    return Term(batch, coefficients, first.part, first.module, shown(first.operator))


def _formula(sizes: Sequence[int], at: Sequence[tuple[int, int]]) -> tuple[int, tuple[float, ...]]:
    """Return the power of B and the coefficients of T's polynomial; of sizes that are none, the nearest one through two
    points."""
    for power in (0, 1, 2):
        for degree in (0, 1, 2):
            monomials = [batch**power * tokens**degree for batch, tokens in at]
            shares = [Fraction(size, one) for size, one in zip(sizes, monomials, strict=True)]
            if len({*shares}) == 1:
                return power, (*[0.0] * degree, float(shares[0]))
    for power in (0, 1):
        values = [Fraction(size, batch**power) for size, (batch, _) in zip(sizes, at, strict=True)]
        lengths = [tokens for _, tokens in at]
        if len({*lengths}) >= 3 and (found := _parabola(values, lengths)):
            return power, tuple(map(float, found))
    (batch, tokens), (other, longer) = at[0], at[-1]
    return 1, (0.0, (sizes[0] / batch / tokens + sizes[-1] / other / longer) / 2)


def _parabola(values: Sequence[Fraction], lengths: Sequence[int]) -> tuple[Fraction, ...] | None:
    """Return c + c' T + c'' T² through the points; None where there is none."""
    (x, y, z), (u, v, w) = lengths[:3], values[:3]
    slope, other = (v - u) / (y - x), (w - v) / (z - y)
    square = (other - slope) / (z - x)
    linear = slope - square * (x + y)
    constant = u - linear * x - square * x * x
    found = constant, linear, square
    right = all(constant + linear * at + square * at * at == value for value, at in zip(values, lengths, strict=True))
    return found if right else None


def _moments(step: _Step, terms: list[Term]) -> Iterator[tuple[tuple[str, ...], tuple[str, str, Counter[Term]]]]:
    """Yield the name of each moment at which something was allocated last, its phase, its place, and what is alive."""
    live: Counter[Term] = Counter()
    last: tuple[str, Term] | None = None
    seen: Counter[tuple[str, ...]] = Counter()
    for phase, number in (*step.changes, (None, 0)):
        if number > 0:
            term = terms[number - 1]
            live[term] += 1
            last = (phase, term) if phase is not None else None
            continue
        if last is not None:
            name = (last[0], last[1].module, last[1].operator)
            seen[name] += 1
            yield (*name, str(seen[name])), (last[0], last[1].operator, Counter(live))
            last = None
        if number < 0:
            live[terms[-number - 1]] -= 1


def _joined(depth: Depth, shallow: _Traced, deep: _Traced) -> Trace:
    """Return the trace of two depths: what the deeper one has more in the same moment is one more group of layers."""
    terms: dict[Term, int] = {}
    moments = []
    for name, (phase, place, counts) in shallow.moments.items():
        twin = deep.moments.get((name[0], depth.deeper(name[1]), *name[2:]))
        if twin is None:
            raise Untraceable(f"{place} in {name[1]} is not in a deeper model")
        few, many = _anonymous(counts), _anonymous(twin[2])
        moments.append(Moment(phase, f"{place} in {name[1]}", {
            terms.setdefault(term, len(terms)): (few[term], many[term] - few[term]) for term in {**few, **many}
            if few[term] or many[term]
        }))  # fmt: skip
    return Trace(depth.groups, False, tuple(terms), tuple(_highest(moments, len(terms))))


def _anonymous(counts: Counter[Term]) -> Counter[Term]:
    """Return counts by term, those of all layers together."""
    found: Counter[Term] = Counter()
    for term, count in counts.items():
        found[term._replace(module=collapsed(term.module))] += count
    return found


def _highest(moments: list[Moment], terms: int) -> list[Moment]:
    """Return the moments that no other one of their phase contains, in their order."""
    counts = np.zeros((len(moments), 2 * terms), dtype=np.int64)
    for row, moment in zip(counts, moments, strict=True):
        for term, (few, each) in moment.counts.items():
            row[term], row[terms + term] = few, each
    kept = []
    for number, moment in enumerate(moments):
        contain = (counts >= counts[number]).all(axis=1)
        equal = (counts == counts[number]).all(axis=1)
        others = (i for i in np.flatnonzero(contain) if i != number and moments[i].phase == moment.phase)
        if not any(not equal[i] or i < number for i in others):  # of equal ones the first stays
            kept.append(moment)
    return kept
