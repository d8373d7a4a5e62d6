"""The Report of an estimate, from the moments of memory and the time of a step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from ..base.notes import Note
from ..base.terms import PHASES
from ..base.units import show_bytes
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu
from ..hardware.links import Cluster
from ..report import Report
from ..specs.check import check, has_formulas
from ..specs.model import ModelLike, ModelSpec
from ..specs.model import model as find_model
from ..specs.run import Inference, Run, Training, stack_of
from ..traces.trace import LOADED, Trace
from .inference import inference_moments
from .memory.moments import Moment
from .memory.share import bytes_of, share_of
from .memory.states import states
from .memory.step import step_memory
from .time.flops import flops
from .time.kernels import kernels
from .time.operators import durations, logits_of
from .time.step import Traced, tokens_of, utilisation
from .time.timing import timing
from .verdict import DRAWN, MEGATRON_DEEPSPEED, Kind, Verdict, kind, largest_context, plainness, verdict

OF_UPDATE = "temporaries of the optimizer"
PAGED_STATES = Note(
    "paged-states",
    "The states of PagedAdamW8bit, 2 bytes per parameter, are in memory that the driver moves between GPU and host. "
    "They are not part of these sizes.",
)


def estimated(
    model: ModelLike, run: Run, gpu: GPU | str | None, cluster: Cluster | None = None, trace: Trace | None = None
) -> Report:
    """Return the report of `llmlab.estimate`."""
    return assessed(model, run, gpu, cluster, trace)[0]


def assessed(
    model: ModelLike, run: Run, gpu: GPU | str | None, cluster: Cluster | None = None, trace: Trace | None = None
) -> tuple[Report, Verdict]:
    """Return the report of `llmlab.estimate`, and the verdict on the fullest pipeline stage: by the formulas of
    `trace`, the run's own, or without one by the written ones."""
    spec = find_model(model)
    cpu = isinstance(gpu, str) and gpu.lower() == "cpu"
    card = None if gpu is None or cpu else find_gpu(gpu)
    run = check(spec, run, card)
    memory = _traced(trace, run) if trace and isinstance(run, Training) else _memory(spec, run, card, cpu)
    peaks, peak = memory.peaks, memory.peak
    sort, fit = kind(spec, run, peak), Verdict("unknown", 0, 0)
    if card:
        fit = verdict(max(peaks), card, run.world_size, sort.holes, 1.0 if trace else plainness(spec, run))
    # A compiled step that is counted as an eager one may need less, but not less than weights and optimizer states.
    undecided = _counted_eager(spec, run, card) and card is not None and _states(memory) <= card.memory
    refused = fit.outcome == "out of memory" and not undecided
    traced = _durations(spec, run, card, trace) if trace and card and isinstance(run, Training) else None
    time = timing(spec, run, card, cluster, traced)
    seconds, counted = time.seconds, flops(spec, run, card, cpu)
    report = Report(
        source="estimated",
        model=spec.name,
        run=run,
        gpu=card.name if card else ("cpu" if cpu else None),
        outcome="unknown" if fit.outcome == "out of memory" and not refused else fit.outcome,
        where=_first_over(spec, run, memory.stages, card.room(run.world_size)) if card and refused else None,
        peak_at=peak.name,
        peak_allocated=peaks[0],
        needed=fit.least if refused else None,
        capacity=card.memory if card else None,
        phases=dict(memory.phases),
        parts={part: size for part, size in peak.parts.items() if size},
        detail=_detail(memory) if isinstance(run, Training) else {},
        flops=counted.total // run.world_size,
        step_seconds=seconds,
        step_seconds_low=time.low,
        step_seconds_high=time.high,
        time=time.parts,
        time_sources=time.sources,
        time_hidden=time.hidden,
        layer_time=time.layer,
        tokens_per_second=tokens_of(run) / seconds if seconds else None,
        mfu=utilisation(counted.model, run, card, seconds) if seconds and card else None,
        notes=(
            Note("peak-phase", f"Memory peaks during {PHASES[peak.phase]}, at {peak.name}."),
            *_origin(spec, run, trace, traced),
            *_notes(spec, run, card, peaks, sort, fit, undecided, time.notes),
        ),
    )
    return report, fit


def fullest(spec: ModelSpec, run: Training, card: GPU) -> Verdict:
    """Return only the verdict of `assessed` for a run that has been checked, which is faster for searches. If the run
    does not fit, it is the verdict at the first stage found not to fit.

    Of the stages after the second, only the last, which has the head, can need more memory than the second.
    """
    total = 0
    for stage in dict.fromkeys((0, run.pp - 1, min(1, run.pp - 1))):
        moments = step_memory(share_of(spec, run, card, False, stage)).moments()
        totals = [moment.total for moment in moments]
        peak = moments[totals.index(max(totals))]
        total = max(total, *totals)
        fit = verdict(total, card, run.world_size, kind(spec, run, peak).holes, plainness(spec, run))
        if fit.outcome == "out of memory":
            break
    return fit


def _counted_eager(spec: ModelSpec, run: Run, gpu: GPU | None) -> bool:
    """Whether a compiled step is counted as an eager one."""
    return isinstance(run, Training) and run.compile and not share_of(spec, run, gpu).compiled


def _states(memory: _Memory) -> int:
    """Return the bytes of weights and optimizer states on the fullest stage."""
    parts = [moment.parts for stage in memory.stages for moment, _ in stage]
    return max(part.get("weights", 0) + part.get("optimizer", 0) for part in parts)


class _Memory(NamedTuple):
    """The moments of each pipeline stage with their bytes (`stages`), and the peak of each stage (`peaks`).

    The other fields describe stage 0: the moment of its peak, the peak of each phase, and the bytes that blocks save in
    the forward pass, by kind.
    """

    stages: list[list[tuple[Moment, int]]]
    peaks: list[int]
    peak: Moment
    phases: dict[str, int]
    activations: dict[str, int]


def _detail(memory: _Memory) -> dict[str, dict[str, int]]:
    """Return the kinds of activations and, if the peak is in the update, the temporary tensors of the optimizer."""
    first, peak = memory.stages[0][0][0], memory.peak
    temporary = peak.parts.get("other", 0) - first.parts.get("other", 0) if peak.phase == "optimizer" else 0
    return {"activations": dict(memory.activations), **({"other": {OF_UPDATE: temporary}} if temporary > 0 else {})}


def _memory(spec: ModelSpec, run: Run, gpu: GPU | None, cpu: bool) -> _Memory:
    if isinstance(run, Training):
        return _training_memory(spec, run, gpu and _alike(gpu, run), cpu)
    return _summed([inference_moments(spec, run, gpu)], {})


@lru_cache(maxsize=64)  # callers often compare one run on several GPUs
def _training_memory(spec: ModelSpec, run: Training, gpu: GPU | None, cpu: bool) -> _Memory:
    stages = [step_memory(share_of(spec, run, gpu, cpu, stage)) for stage in range(run.pp)]
    return _summed([stage.moments() for stage in stages], stages[0].activations_by_kind)


def _traced(trace: Trace, run: Training) -> _Memory:
    """Return the memory of a traced step, which never has a pipeline."""
    sizes = run.micro_batch, run.seq_len
    moments = [Moment(moment.phase, moment.place, trace.parts(moment, *sizes)) for moment in trace.moments]
    memory = _summed([moments], {})
    loaded = [moment.total for moment, place in zip(moments, trace.moments, strict=True) if place.place == LOADED]
    return memory._replace(phases=memory.phases | {"load": loaded[0]}) if loaded else memory


def _durations(spec: ModelSpec, run: Training, gpu: GPU, trace: Trace) -> Traced | None:
    """Return the times of a trace's operators on `gpu`, or None if the trace has no operators, or a rate is
    unknown."""
    shallow, deep = trace.kernels.at(run.micro_batch, run.seq_len)
    both = [durations(operators, logits_of(spec, run), kernels(gpu)) for operators in (shallow, deep) if operators]
    if not both or both[0] is None or both[1] is None:
        return None
    return both[0].extrapolated(both[1], trace.groups).traced


def _origin(spec: ModelSpec, run: Run, trace: Trace | None, traced: Traced | None) -> Iterator[Note]:
    """Yield the note on the source of an estimate that is not of written formulas alone."""
    plain = f"a plain transformer with the sizes of {spec.name}, with a wider margin"
    real = "`llmlab simulate` runs the real class"
    if trace:
        code = f"derived from the code of {spec.family} in transformers"
        time = f"the time is that of {plain}" if not spec.has_formulas else "the time is that of hand-written formulas"
        yield Note("derived", f"Memory and time are {code}.") if traced else Note(
            "derived-memory", f"The memory is {code}; {time}."
        )
    elif not spec.has_formulas:
        no = f"{spec.family} has no formulas here. The estimate is that of {plain}; {real}."
        yield Note("plain-transformer", no)
    elif not has_formulas(spec, run):
        average = f"The formulas count all layers of {spec.name} as layers of average size"
        yield Note("plain-transformer", f"{average}, with a wider margin; {real}.")


def _summed(stages: list[list[Moment]], activations: dict[str, int]) -> _Memory:
    totals = [[(moment, moment.total) for moment in stage] for stage in stages]
    peaks = [max([total for _, total in stage]) for stage in totals]
    phases: dict[str, int] = {}
    for moment, total in totals[0]:
        if total >= phases.get(moment.phase, 0):
            phases[moment.phase] = total
    first = next(moment for moment, total in totals[0] if total == peaks[0])
    return _Memory(totals, peaks, first, phases, activations)


_KINDS: dict[tuple[object, ...], GPU] = {}  # the first GPU of each kind that was needed


def _alike(gpu: GPU, run: Training) -> GPU:
    """Return the first GPU so far on which a step needs as many bytes as on `gpu`, because both agree in all values
    that formulas/memory reads of a GPU."""
    kind: tuple[object, ...] = (gpu.cublas_workspace, gpu.supports_flash_attention_2, gpu.compute_capability)
    if stack_of(run).own_kernels:
        kind = (*kind, gpu.sms)
    if stack_of(run).own_zero:  # which flattens the weights on the GPU only if there is room
        kind = (*kind, gpu.room(run.world_size))
    return _KINDS.setdefault(kind, gpu)


def _notes(
    spec: ModelSpec,
    run: Run,
    gpu: GPU | None,
    peaks: list[int],
    sort: Kind,
    fit: Verdict,
    undecided: bool,
    of_time: tuple[Note, ...],
) -> Iterator[Note]:
    """Yield the notes on what the figures do not show: pipeline stages, unknown sizes, and serving."""
    if isinstance(run, Training) and run.quantization:
        yield from _around_quantized(run)
    if stack_of(run).paged(run):
        yield PAGED_STATES
    if stack_of(run).cuda_graph_impl:
        yield Note("cuda-graph-pool", "CUDA graphs have private memory pools, which are not counted.")
    if backend := stack_of(run).moe_flex_dispatcher_backend:
        yield Note("dispatcher-buffers", f"The buffers in which {backend} sends tokens to experts are not counted.")
    if most := peaks.index(max(peaks)):
        figures = f"The figures are of stage 0; its peak is {show_bytes(peaks[0])}, that of stage {most}"
        yield Note("fullest-stage", f"{figures} is the highest of the pipeline: {show_bytes(peaks[most])}.")
    yield from of_time
    if gpu is None:
        return
    if gpu.context is None:
        largest = f"up to {show_bytes(largest_context())}, the largest that was measured on another GPU"
        unknown = f"The CUDA context of the {gpu.name} has not been measured"
        yield Note("context-unknown", f"{unknown}; the outcome allows for {largest}.")
    if fit.outcome == "unknown":
        between = f"{show_bytes(fit.least)} to {show_bytes(fit.most)}, and the GPU has {show_bytes(gpu.memory)}"
        needs = f"With CUDA context and fragmentation the process needs {between}"
        close = "That is too close for formulas; `llmlab simulate` decides, if it supports the run."
        if sort is MEGATRON_DEEPSPEED:
            close = "DeepSpeed's buffers in Megatron-DeepSpeed are unknown, so only a run on the GPU decides."
        yield Note("near-limit", f"{needs}. {close}")
    if fit.outcome == "fits" and sort in DRAWN and verdict(max(peaks), gpu, run.world_size).outcome != "fits":
        needs = f"With CUDA context and fragmentation the process needs at most {show_bytes(fit.most)}"
        steps = f"in 95 % of simulated steps of this kind ({sort.what})"
        yield Note("probably-fits", f"{needs} {steps}, and the GPU has {show_bytes(gpu.memory)}. "
                   "`llmlab simulate` decides, if it supports the run.")  # fmt: skip
    if isinstance(run, Inference):
        engine = "`llmlab serve` predicts an engine that batches requests: its KV cache, latency and price"
        yield Note("serving", f"This is Hugging Face's generate(). {engine}.")
    elif fit.outcome == "out of memory" and undecided:
        eager = "The memory is that of an eager step, which does not fit"
        yield Note("counted-eager", f"{eager}; torch.compile fuses operators, so the compiled step may still fit.")


def _around_quantized(run: Training) -> Iterator[Note]:
    """Yield the note on the layers that compute in fp32 around quantized weights without autocast, which most people do
    not want. It does not say how many seconds this costs, because that needs a second estimate."""
    if run.precision == "fp32" or bytes_of(run).compute != 4:
        return
    left = "norms and the head" if run.attention == "flash" else "norms, attention and the head"
    half = run.compute_dtype
    yield Note(
        "fp32-around-quantized",
        f"peft casts all unquantized weights to fp32. Without autocast, the {left} therefore compute in fp32."
        f" The Trainer's {half}=True corresponds to precision='autocast-{half}'; if peft does not prepare the model, "
        "also give half_layers='all'.",
    )


def _first_over(spec: ModelSpec, run: Run, stages: list[list[tuple[Moment, int]]], room: int) -> str | None:
    """Return the phase and the name of the first moment that needs more than `room` bytes, in the first stage that has
    one; None if all fit. The moments of the first step come first: they lack the states that its update allocates."""
    for later in (False, True):
        for stage, moments in enumerate(stages):
            missing = 0 if later else _first_states(spec, run, stage)
            for moment, total in moments:
                absent = 0 if moment.phase == "optimizer" else min(missing, moment.parts.get("optimizer", 0))
                if total - absent > room:
                    place = moment.name.removesuffix(f" of {moment.phase}")
                    place += ", in a step after the first" if later else ""
                    return f"{moment.phase} ({place})" + (f", in stage {stage} of the pipeline" if stage else "")
    return None


def _first_states(spec: ModelSpec, run: Run, stage: int) -> int:
    """Return the bytes of the optimizer's states that the first update allocates, all but the master weights; 0 if the
    stack allocates its states before the first step, or updates weights in the backward pass."""
    stack = stack_of(run)
    if not isinstance(run, Training) or stack.own_zero or stack.steps_in_backward(run):
        return 0
    sizes = states(spec, run, stage)
    return max(0, sizes.optimizer - bytes_of(run).master * sizes.trained * (not run.lora))
