"""From moments to a Report."""

from __future__ import annotations

from ..base.errors import NotAvailable
from ..base.terms import Outcome
from ..base.units import show_bytes, show_seconds
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu
from ..hardware.links import Cluster, node_link, usual_cluster
from ..report import Report
from ..specs.check import check
from ..specs.model import ModelLike, ModelSpec
from ..specs.model import model as find_model
from ..specs.run import Run, Training
from .inference import inference_moments
from .memory.moments import Moment, amounts, moments
from .memory.share import share_of
from .serving import FRACTION, serving
from .time.distributed import Step, step
from .time.flops import flops
from .time.step import mfu, step_seconds, tokens_of
from .verdict import Verdict, verdict


def estimated(model: ModelLike, run: Run, gpu: GPU | str | None, cluster: Cluster | None = None) -> Report:
    """Return the report of `llmlab.estimate`."""
    spec = find_model(model)
    cpu = isinstance(gpu, str) and gpu.lower() == "cpu"
    card = None if gpu is None or cpu else find_gpu(gpu)
    check(spec, run, card)
    stages, detail = _stages(spec, run, card, cpu)
    totals = [[moment.total for moment in stage] for stage in stages]
    peaks = [max(each) for each in totals]
    peak = stages[0][totals[0].index(peaks[0])]
    phases: dict[str, int] = {}
    for moment, total in zip(stages[0], totals[0], strict=True):
        phases[moment.phase] = max(phases.get(moment.phase, 0), total)
    fit = verdict(max(peaks), card, run.world_size) if card else Verdict("unknown", 0, 0)
    margin = _margin_note(fit, run, card)
    outcome: Outcome = "unknown" if margin else fit.outcome
    over = outcome == "out of memory"
    seconds, time_note = _seconds(spec, run, card, cluster)
    return Report(
        source="estimated",
        model=spec.name,
        run=run,
        gpu=card.name if card else ("cpu" if cpu else None),
        outcome=outcome,
        where=_first_over(stages, totals, card.room(run.world_size)) if card and over else None,
        peak_allocated=peaks[0],
        needed=fit.least if over else None,
        capacity=card.memory if card else None,
        phases=phases,
        parts={part: size for part, size in peak.parts.items() if size},
        detail=detail,
        flops=flops(spec, run, card, cpu).total // run.world_size,
        step_seconds=seconds,
        tokens_per_second=tokens_of(run) / seconds if seconds else None,
        mfu=mfu(spec, run, card, seconds) if seconds and card else None,
        notes=(
            f"The peak is in {peak.phase}: {peak.name}.",
            *_stage_note(peaks),
            *time_note,
            *_context_note(card),
            *margin,
            *_service_note(spec, run, card),
        ),
    )


def _stages(
    spec: ModelSpec, run: Run, card: GPU | None, cpu: bool
) -> tuple[list[list[Moment]], dict[str, dict[str, int]]]:
    """Return the moments of every pipeline stage, and what the first one's blocks keep at the end of forward."""
    if not isinstance(run, Training):
        return [inference_moments(spec, run, card)], {}
    first, *others = (amounts(share_of(spec, run, card, cpu, stage)) for stage in range(run.pp))
    return [moments(first), *map(moments, others)], {"activations": first.kept.kinds}


def _seconds(
    spec: ModelSpec, run: Run, card: GPU | None, cluster: Cluster | None
) -> tuple[float | None, tuple[str, ...]]:
    """Return the seconds of a step, and, on several devices, a note of what they consist of."""
    if card is None or not isinstance(run, Training) or run.world_size == 1:
        return step_seconds(spec, run, card), ()
    try:
        nodes = cluster or _nodes(card)
        terms = step(spec, run, card, nodes)
    except NotAvailable as error:
        return None, (f"Time is not known: {error}.",)
    between = ""
    if nodes.across and run.world_size > nodes.gpus:
        between = f", {nodes.adapters} × {nodes.across.name} a node"
    return terms.seconds, (f"Time: {_shown(terms)}; {nodes.gpus} GPUs a node on {nodes.inside.name}{between}.",)


def _nodes(card: GPU) -> Cluster:
    """Return the card's usual nodes, or one node, where no such nodes are sold."""
    try:
        return usual_cluster(card)
    except NotAvailable:
        return Cluster(node_link(card))


def _shown(step: Step) -> str:
    terms = ("compute", "tensor", "context", "experts", "pipeline", "bubble", "data", "update")
    return ", ".join(f"{term} {show_seconds(value)}" for term in terms if (value := getattr(step, term)))


def _stage_note(peaks: list[int]) -> tuple[str, ...]:
    """Say which stage of a pipeline holds the most, where that is not the first."""
    most = peaks.index(max(peaks))
    if most == 0:
        return ()
    return (f"Stage {most} of the pipeline (from 0) holds more than the first: {show_bytes(peaks[most])}.",)


def _context_note(card: GPU | None) -> tuple[str, ...]:
    if card is None or card.context is not None:
        return ()
    between = "whether the run fits counts from nothing to the most of any card"
    return (f"The context that a process takes on {card.name} is not known; {between}.",)


def _margin_note(found: Verdict, run: Run, card: GPU | None) -> tuple[str, ...]:
    """Say why the formula cannot tell whether the run fits; nothing where it can, or where there is no card."""
    if card is None:
        return ()
    if found.outcome == "out of memory" and isinstance(run, Training) and run.compile:
        return ("Too large as counted, in eager mode; what a compiled step fuses away may make it fit.",)
    if found.outcome != "unknown":
        return ()
    between = f"{show_bytes(found.least)} to {show_bytes(found.most)} of {show_bytes(card.memory)}"
    return (f"Too near to tell: with what the allocator holds beside tensors it takes {between}; simulate it.",)


def _service_note(spec: ModelSpec, run: Run, card: GPU | None) -> tuple[str, ...]:
    """Say what a service of such requests would hold and cost: `llmlab.formulas.serving` has every figure."""
    if card is None or isinstance(run, Training):
        return ()
    return (f"Served by an engine with a paged cache and {FRACTION:.0%} of the memory: {serving(spec, run, card)}.",)


def _first_over(stages: list[list[Moment]], totals: list[list[int]], room: int) -> str | None:
    """Say which moment is the first, of the first stage, that is beyond `room`; None where all fit."""
    for stage, sizes in enumerate(totals):
        for moment, total in zip(stages[stage], sizes, strict=True):
            if total > room:
                return f"{moment.phase}, {moment.name}" + (f", in stage {stage} of the pipeline" if stage else "")
    return None
