"""Derives a trace: simulating the real step at a few sizes and two depths determines the formula of every tensor.

The step is simulated at four points (B, T), or at least three if T is fixed, where it must run the same operators. The
bytes of each request, and the numbers of each operator, at these points determine their polynomials in B and T. A step
that has too few such points is simulated at its own sizes alone, and its trace has constants. One more simulation has
one more group of layers. Each further group adds the difference between the same moments of both depths, and the
difference between their times. The trace must then reproduce the peaks of all these simulations.

Of many micro-batches, `FEW` are simulated. One more simulation shows which operators each further one adds.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..base.errors import NotAvailable
from ..hardware.gpu import GPU
from ..recording.parts import Change, changes_of, collapsed, divided, logits_sizes
from ..specs.images import images_of
from ..specs.model import ModelSpec
from ..specs.run import Training
from ..traces.kernels import Kernel, KernelFormula, KernelTrace
from ..traces.points import points
from ..traces.polynomials import Monomial, Polynomial, constant, polynomial_through
from ..traces.trace import LOADED, Moment, Term, Trace
from .allocator.config import blocks_of
from .depth import Depth, depth_of, with_layers
from .report import ROOMY, recorded

IN_FLIGHT = 2  # groups whose weights FSDP has gathered, or whose gradients it has not reduced yet
FEW = 2  # the second micro-batch adds its gradients to those of the first, and so do all others
APART = 0.015  # the largest relative difference allowed between the peaks of a trace and of its simulations


class Untraceable(NotAvailable):
    """The step has no formula, for example because it runs different operators at different sizes."""


class _Request(NamedTuple):
    """A request for memory: its size in bytes, its part of the report, and the module and operator that sent it."""

    size: int
    part: str
    module: str
    operator: str


class _Step(NamedTuple):
    """A simulated step: its requests, its changes, the peak in bytes, and the operators.

    A change consists of the phase and the number of the request, counted from 1. The number is positive if memory is
    allocated, negative if it is freed, and 0 where a phase begins.
    """

    requests: list[_Request]
    changes: list[tuple[str | None, int]]
    peak: int
    operators: list[Kernel]


def derived(spec: ModelSpec, run: Training, gpu: GPU) -> Trace:
    """Return the trace of `run` on one GPU, `gpu`. Raises Untraceable if the step has no formula."""
    images = images_of(spec, run)
    longest = 2 * run.seq_len if spec.rotary else spec.max_positions
    for fixed in range(3):
        at = points(run.micro_batch, run.seq_len, fixed, longest, images.needed if images else 1)
        if at is None:
            continue
        frozen = gc.get_freeze_count()
        if not frozen:
            gc.freeze()  # each simulation collects garbage, and no object from before it is garbage
        try:
            return _derived(spec, run, gpu, at, fixed)
        except Untraceable:
            if fixed == 2:
                raise
        finally:
            if not frozen:
                gc.unfreeze()
    raise AssertionError("the step's own sizes are a point")


def _derived(spec: ModelSpec, whole: Training, gpu: GPU, at: Sequence[tuple[int, int]], fixed: int) -> Trace:
    depth, run = depth_of(spec), replace(whole, accumulation=min(FEW, whole.accumulation))
    if run.world_size > 1:
        depth = depth.begun_after(IN_FLIGHT)
    numbers: dict[Term, int] = {}
    few = with_layers(spec, depth.least) if depth.period else spec
    shallow = deep = _traced(few, run, gpu, at, numbers)
    peaks = [(0, point, step.peak) for point, step in zip(at, shallow.steps, strict=True)]
    operators = _kernels(shallow.steps, at)
    # At this point the fewest requests and operators are equal, so they identify those of other steps.
    same, sizes = max(zip(shallow.steps, at, strict=True), key=lambda pair: _different(pair[0]))
    run = replace(run, micro_batch=sizes[0], seq_len=sizes[1])
    depths = [(few, same.operators)]
    if depth.period:
        more = with_layers(spec, depth.least + depth.period)
        step = _step(more, run, gpu)
        terms = _terms_like(shallow.terms, same.requests, step)
        deep = _Traced(_moments(step, terms, numbers), terms)
        peaks.append((1, sizes, step.peak))
        operators = _deeper(operators, same.operators, step.operators)
        depths.append((more, step.operators))
    if whole.accumulation > FEW and operators.formulas:
        orders, known = [], operators
        for (model, before), order in zip(depths, operators[1:], strict=False):
            after = _step(model, replace(run, accumulation=FEW + 1), gpu).operators
            known = _deeper(known, same.operators, after)
            start, end = _inserted(before, after)
            orders.append(order[:start] + known.deep[start:end] * (whole.accumulation - FEW) + order[start:])
        operators = KernelTrace(known.formulas, orders[0], orders[-1])
    trace = replace(_joined(depth, shallow, deep, [*numbers]), fixed=fixed, kernels=operators)
    for groups, point, peak in peaks:
        total = max(trace.totals(*point, groups=groups))
        if abs(total / peak - 1) > APART:
            raise Untraceable(f"the formulas of {spec.name} give {total:,} bytes where a simulation has {peak:,}")
    return trace


def _different(step: _Step) -> int:
    """Return the number of different requests and operators of a step."""
    return len({(request.size, request.operator) for request in step.requests}) + len({*step.operators})


def _terms_like(known: Sequence[Term], requests: Sequence[_Request], step: _Step) -> list[Term]:
    """Return the terms of a deeper step's requests. Each has the formula of one of the shallower step's `requests` for
    as many bytes, if possible from the same operator, and from the same module in another layer."""
    sized: dict[tuple[object, ...], Term] = {}
    for term, request in zip(known, requests, strict=True):
        size = request.size  # the formula's value differs from it if no polynomial fits the sizes
        for key in ((size,), (size, term.operator), (size, term.operator, term.part, collapsed(term.module))):
            sized.setdefault(key, term)
    terms = []
    for request in step.requests:
        operator = shown(request.operator)
        size, module = request.size, collapsed(request.module)
        keys = (size, operator, request.part, module), (size, operator), (size,)
        like = next((sized[key] for key in keys if key in sized), None)
        formula = like.formula if like else constant(request.size)
        terms.append(Term(formula, request.part, request.module, operator))
    return terms


def shown(operator: str) -> str:
    """Return an operator's short name: "mm" for aten.mm.default."""
    return operator.removeprefix("aten.").removesuffix(".default")


Place = tuple[str, str, str]  # phase, module, operator


class _Alive(NamedTuple):
    """The number of the term that was allocated last (-1: none), and the number of live tensors of each term."""

    last: int
    counts: dict[int, int]


class _Traced(NamedTuple):
    """The combined steps of one depth: the moments at each place, in order, and the term of each request, whose module
    path includes the layer's number."""

    moments: dict[Place, list[_Alive]]
    terms: Sequence[Term]
    steps: Sequence[_Step] = ()


def _traced(
    spec: ModelSpec, run: Training, gpu: GPU, at: Sequence[tuple[int, int]], numbers: dict[Term, int]
) -> _Traced:
    steps = [_step(spec, replace(run, micro_batch=batch, seq_len=tokens), gpu) for batch, tokens in at]
    if any(step.changes != steps[0].changes for step in steps):
        raise Untraceable(f"{spec.name} runs other operators at other sizes")
    terms = [_term([step.requests[number] for step in steps], at) for number in range(len(steps[0].requests))]
    return _Traced(_moments(steps[0], terms, numbers), terms, steps)


def _step(spec: ModelSpec, run: Training, gpu: GPU) -> _Step:
    recording = recorded(spec, run, replace(gpu, memory=ROOMY))
    engine = recording.engine
    requests: list[_Request] = []
    numbers: dict[int, int] = {}
    changes: list[tuple[str | None, int]] = []
    block_changes: list[Change] = changes_of(engine.events, recording.marks, blocks_of(logits_sizes(spec, run)))
    freed: list[int] = []  # consecutive frees, whose order may depend on addresses (autocast's cache)
    for phase, block, size in block_changes:
        if block is not None and size < 0:
            freed.append(numbers[id(block)])
            continue
        changes += [(None, -number) for number in sorted(freed)]
        freed.clear()
        if block is None:
            changes.append((phase, 0))
        else:
            place = engine.places[block.born]
            assert block.part is not None
            requests.append(_Request(engine.requests[block.born], block.part, place.module, place.operator))
            numbers[id(block)] = len(requests)
            changes.append((phase, len(requests)))
    operators = [] if engine.launches else [*recording.operators]
    return _Step(requests, changes, divided(block_changes).peak, operators)


def _kernels(steps: Sequence[_Step], at: Sequence[tuple[int, int]]) -> KernelTrace:
    """Return the formulas of a step's operators, or an empty trace if different points run different operators."""
    numbers: dict[KernelFormula, int] = {}
    order = []
    for same in zip(*[step.operators for step in steps], strict=False):
        first, *others = (kernel.with_numbers(0, 0, 0, 0, 0) for kernel in same)
        sizes = [kernel.numbers for kernel in same]
        if any(other != first for other in others) or len({*map(len, sizes)}) > 1:
            return KernelTrace()
        polynomials = tuple(_formula(values, at) for values in zip(*sizes, strict=True))
        order.append(numbers.setdefault(KernelFormula(first, polynomials), len(numbers)))
    if any(len(step.operators) != len(order) for step in steps):
        return KernelTrace()
    return KernelTrace(tuple(numbers), tuple(order), tuple(order))


def _deeper(shallow: KernelTrace, same: Sequence[Kernel], operators: Sequence[Kernel]) -> KernelTrace:
    """Return `shallow` with the `operators` of a deeper step. Each has the formula of an equal one in `same`, the
    shallower step's operators at the same point; if there are several, one that also follows the previous operator in
    the shallower step. An operator that has no such formula, such as an update of a list of all parameters, gets
    constants."""
    if not shallow.formulas:
        return shallow
    follows = {*zip(shallow.shallow, shallow.shallow[1:], strict=False)}
    known: dict[Kernel, list[int]] = {}
    for kernel, number in dict.fromkeys(zip(same, shallow.shallow, strict=True)):
        known.setdefault(kernel, []).append(number)
    formulas, order = [*shallow.formulas], [-1]
    for kernel in operators:
        if kernel not in known:
            known[kernel] = [len(formulas)]
            constants = tuple(map(constant, kernel.numbers))
            formulas.append(KernelFormula(kernel.with_numbers(0, 0, 0, 0, 0), constants))
        alike = known[kernel]
        order.append(next((number for number in alike if (order[-1], number) in follows), alike[0]))
    return KernelTrace(tuple(formulas), shallow.shallow, tuple(order[1:]))


def _inserted(operators: Sequence[object], longer: Sequence[object]) -> tuple[int, int]:
    """Return the place in `longer` of the operators that it has in addition to the same `operators`.

    >>> _inserted("abacz", "abacacz")
    (4, 6)
    """
    pairs = enumerate(zip(operators, longer, strict=False))
    start = next((place for place, (one, other) in pairs if one != other), len(operators))
    end = start + len(longer) - len(operators)
    if longer[end:] != operators[start:]:
        raise Untraceable("a further micro-batch runs other operators")
    return start, end


def _term(requests: Sequence[_Request], at: Sequence[tuple[int, int]]) -> Term:
    """Return the term of a request that has these sizes at these points. Parts are inferred from sizes, and at one
    point the logits may have the size of another tensor, so the term has the part of most points."""
    first = requests[0]
    part = Counter([request.part for request in requests]).most_common(1)[0][0]
    formula = _formula([request.size for request in requests], at)
    return Term(formula, part, first.module, shown(first.operator))


def _formula(sizes: Sequence[int], at: Sequence[tuple[int, int]]) -> Polynomial:
    """Return the polynomial through these sizes; if there is none, average bytes per token, times the tokens."""
    if len(at) == 1:
        return constant(sizes[0])
    if polynomial := polynomial_through(tuple(sizes), tuple(at)):
        return polynomial
    (batch, tokens), (other, longer) = at[0], at[-1]
    return (Monomial((sizes[0] / batch / tokens + sizes[-1] / other / longer) / 2, 1, 1),)


def _moments(step: _Step, terms: Sequence[Term], numbers: dict[Term, int]) -> dict[Place, list[_Alive]]:
    """Return the moments right before memory is freed, those at which a phase begins, and the end of loading.
    `numbers`, to which new terms are added, has one number for the same term of all layers."""
    anonymous = [term._replace(module=collapsed(term.module)) for term in terms]
    indices = [numbers.setdefault(term, len(numbers)) for term in anonymous]
    alive: dict[Place, list[_Alive]] = {}
    live: Counter[int] = Counter()
    last: tuple[str, int] | None = None
    loading = False
    for phase, number in (*step.changes, (None, 0)):
        if number > 0:
            live[indices[number - 1]] += 1
            last = (phase, number - 1) if phase is not None else None
            continue
        if last is not None:
            place = last[0], terms[last[1]].module, terms[last[1]].operator
            alive.setdefault(place, []).append(_Alive(indices[last[1]], dict(live)))
            last = None
        if number < 0:
            live[indices[-number - 1]] -= 1
        elif loading and phase != "load":
            alive["load", "", LOADED] = [_Alive(-1, dict(live))]
        if number == 0:
            loading = phase == "load"
        if number == 0 and phase is not None:  # the phase may allocate nothing
            alive.setdefault((phase, "", "its beginning"), []).append(_Alive(-1, dict(live)))
    return alive


def _pairs(shallow: Sequence[_Alive], deep: Sequence[_Alive]) -> Iterator[tuple[_Alive, _Alive]]:
    """Yield each moment at one place together with that of the deeper model. They are paired from the first one as long
    as both models allocate the same, as an optimizer does parameter by parameter, and from the end: the moment of a
    layer is that of an early and of a late one."""
    more = len(deep) - len(shallow)
    if more < 0:
        raise Untraceable("a deeper model allocates less often")
    same = more > 0
    for number, moment in enumerate(shallow):
        same = same and number < len(shallow) - 1 and moment.last == deep[number].last
        if same:
            yield moment, deep[number]
        if not same or moment.last == deep[number + more].last:
            yield moment, deep[number + more]


def _joined(depth: Depth, shallow: _Traced, deep: _Traced, terms: Sequence[Term]) -> Trace:
    """Return the trace from two depths. Tensors that the deeper model adds to the same moment are one more group's."""
    moments = []
    for (phase, module, operator), alive in shallow.moments.items():
        twins = deep.moments.get((phase, depth.deeper(module), operator))
        if twins is None:
            raise Untraceable(f"{operator} in {module} is not in a deeper model")
        place = f"{operator} in {module}" if module else operator
        for (_, base), (_, deeper) in _pairs(alive, twins):
            counts = {term: (base.get(term, 0), deeper.get(term, 0) - base.get(term, 0)) for term in base | deeper}
            moments.append(Moment(phase, place, {term: count for term, count in counts.items() if any(count)}))
    highest = _highest(moments, terms)
    used = sorted({term for moment in highest for term in moment.counts})
    fewer = {term: number for number, term in enumerate(used)}
    renumbered = (Moment(phase, place, {fewer[term]: count for term, count in counts.items()})
                  for phase, place, counts in highest)  # fmt: skip
    return Trace(depth.groups, False, tuple(terms[term] for term in used), tuple(renumbered), KernelTrace())


def _highest(moments: Sequence[Moment], terms: Sequence[Term]) -> list[Moment]:
    """Return, in order, the moments for which no other moment of their phase has at least as many tensors of every
    formula. The end of loading always stays."""
    sizes: dict[Polynomial, int] = {}
    columns = [sizes.setdefault(term.formula, len(sizes)) for term in terms]
    counts = np.zeros((len(moments), 2, len(sizes)), dtype=np.int64)
    for row, moment in zip(counts, moments, strict=True):
        for term, both in moment.counts.items():
            row[:, columns[term]] += both
    flat = counts.reshape(len(moments), -1)
    phases = np.array([moment.phase for moment in moments])
    highest = []
    for number, moment in enumerate(moments):
        others = np.flatnonzero((flat >= flat[number]).all(axis=1) & (phases == moment.phase))
        # Of equal moments the first stays.
        higher = [other for other in others if other < number or (flat[other] != flat[number]).any()]
        if moment.place == LOADED or not higher:
            highest.append(moment)
    return highest
