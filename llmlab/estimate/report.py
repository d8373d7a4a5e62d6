"""From moments to a Report."""

from __future__ import annotations

from typing import Any

from ..check import check
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu
from ..models.spec import ModelSpec
from ..models.spec import model as find_model
from ..report import Report
from ..runs import Run, Training
from .activations import attention_kernel, block_saved, checkpointed, per_device
from .flops import flops
from .inference import inference_moments
from .memory import Moment, training_moments
from .precision import PRECISION
from .serving import FRACTION, serving
from .time import mfu, step_seconds, tokens_of


def estimated(model: ModelSpec | str | dict[str, Any], run: Run, gpu: GPU | str | None) -> Report:
    """Return the report of `llmlab.estimate`."""
    spec = find_model(model)
    cpu = isinstance(gpu, str) and gpu.lower() == "cpu"
    card = None if gpu is None or cpu else find_gpu(gpu)
    check(spec, run, card)
    if isinstance(run, Training):
        moments = training_moments(spec, run, card, cpu)
        detail = _activation_detail(spec, run, card, cpu)
    else:
        moments, detail = inference_moments(spec, run, card), {}
    peak = max(moments, key=lambda moment: moment.total)
    phases: dict[str, int] = {}
    for moment in moments:
        phases[moment.phase] = max(phases.get(moment.phase, 0), moment.total)
    parts = dict(peak.parts)
    capacity = card.memory if card else None
    context = (card.context or 0) if card else 0
    outcome, where = "unknown", None
    if capacity is not None:
        fits = peak.total + context <= capacity
        outcome = "fits" if fits else "out of memory"
        where = None if fits else _first_over(moments, capacity - context)
    counted = flops(spec, run, card, cpu)
    seconds = step_seconds(spec, run, card)
    return Report(
        source="estimated",
        model=spec.name,
        run=run,
        gpu=card.name if card else ("cpu" if cpu else None),
        outcome=outcome,
        where=where,
        peak_allocated=peak.total,
        capacity=capacity,
        phases=phases,
        parts=parts,
        detail=detail,
        flops=counted.total // run.world_size,
        step_seconds=seconds,
        tokens_per_second=tokens_of(run) / seconds if seconds else None,
        mfu=mfu(spec, run, card, seconds) if seconds and card else None,
        notes=(f"The peak is in {peak.phase}: {peak.name}.", *_context_note(card), *_service_note(spec, run, card)),
    )


def _context_note(card: GPU | None) -> tuple[str, ...]:
    if card is None or card.context is not None:
        return ()
    return (f"The context that a process takes on {card.name} is not known; whether the run fits counts it as 0.",)


def _service_note(spec: ModelSpec, run: Run, card: GPU | None) -> tuple[str, ...]:
    """Say what a service of such requests would hold and cost: `llmlab.estimate.serving` has every figure."""
    if card is None or isinstance(run, Training):
        return ()
    return (f"Served by an engine with a paged cache and {FRACTION:.0%} of the memory: {serving(spec, run, card)}.",)


def _first_over(moments: list[Moment], room: int) -> str | None:
    for moment in moments:
        if moment.total > room:
            return f"{moment.phase}, {moment.name}"
    return None


def _activation_detail(spec: ModelSpec, run: Training, card: GPU | None, cpu: bool) -> dict[str, dict[str, int]]:
    """Return what the blocks keep at the end of forward, by kind."""
    b = PRECISION[run.precision]
    whole = per_device(block_saved(spec, run, b, card, cpu), run)
    kinds = checkpointed(spec, run, b, attention_kernel(spec, run, card, cpu)) if run.checkpointing else whole
    return {"activations": {kind: size * (spec.layers // run.pp) for kind, size in kinds.items() if size}}
