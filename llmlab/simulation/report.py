"""`lab.simulate`: builds the run's real model on fake tensors, runs its step, and reports its memory and time."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..base.compat import disable_current_modes
from ..base.errors import NotAvailable, SpecError
from ..base.notes import Note
from ..base.terms import Outcome
from ..base.units import show_bytes
from ..formulas.report import PAGED_STATES
from ..formulas.time.operators import logits_of
from ..formulas.time.step import mfu, tokens_of
from ..formulas.time.timing import timing
from ..hardware import this_machine
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu
from ..recording.events import exclusive
from ..recording.parts import divide, logits_sizes
from ..report import Report
from ..specs.check import check, is_derived
from ..specs.images import images_of
from ..specs.model import ModelLike, ModelSpec
from ..specs.model import model as find_model
from ..specs.run import Inference, Run, Training, stack_of
from ..step.batch import with_images
from ..step.model import pinned_attention, quantization_of
from ..step.optimizer import check_offload
from ..step.quantized import LoadOrder, one_at_a_time
from ..step.ranks import Ranks, around_steps
from ..step.step import build_step
from .allocator.caching import Allocator
from .allocator.config import blocks_of
from .allocator.memory import HostMemory
from .capability import capability_of
from .decode_replay import Decoder, Mispredicted, steps_that_run
from .devices import HOST
from .distributed.notes import notes as rank_notes
from .distributed.torch_engines import checked, fake_ranks
from .engine.engine import Engine, notes_of
from .engine.real_host import RealHost
from .patching.bitsandbytes import fake_bitsandbytes
from .patching.imports import swept
from .patching.install import as_cuda, installed
from .patching.patches import count_random_states, fake_parameters, tensors_on_gpu
from .profile.recording import StepRecording
from .profile.timeline import by_module, peak_place
from .simulated_gpu import SimulatedGPU
from .simulator import EAGER_TOO_LARGE
from .stacks import builder

EAGER_ON_CPU = Note(
    "simulated-eager",
    "On a CPU compile=True is simulated as an eager step, whose memory is an upper bound of a compiled one's.",
)

ROOMY = 2**50  # bytes of a GPU on which memory never runs out

# bitsandbytes computes outlier columns separately, in 16 bits, and their number depends on values.
INT8_NOTE = Note(
    "int8-outliers",
    "The simulation assumes that no activation exceeds int8's outlier threshold; outlier columns need more memory.",
)

# benchmarks/memory/loading.py simulates the order of threads, and shows how much more the published rows reserved.
NF4_NOTE = Note(
    "nf4-load-order",
    "The simulation loads NF4 weights one at a time, as transformers 5.4 and later do. Earlier versions load them in "
    "several threads, whose order differs between runs, and so does the reserved memory.",
)


def simulated(
    model: ModelLike, run: Run, gpu: GPU | str, load_order: LoadOrder = one_at_a_time, how_much: bool = True
) -> Report:
    """Return the report of `llmlab.simulate`; quantized weights load in `load_order`.

    Of a pipeline, the first, the second and the last stage are simulated: among the stages after the second, only the
    last one can need more than the second, because it has the head. If memory runs out, a stage is simulated a second
    time, without a limit, to find the bytes that it needs. If `how_much` is False, this is skipped, and the report says
    only where memory ran out. If torch.compile ran code eagerly, sizes are upper bounds, so the outcome is "unknown" if
    memory runs out.
    """
    spec = find_model(model)
    device = None if isinstance(gpu, str) and gpu.lower() == "cpu" else find_gpu(gpu)
    stages = sorted({0, min(1, run.pp - 1), run.pp - 1}) if isinstance(run, Training) else [0]
    reports: list[Report] = []
    for stage in stages:
        reports.append(_of_stage(spec, run, device, load_order, stage, how_much))
        if not how_much and reports[-1].outcome != "fits":
            return reports[-1]
    first, *later_reports = reports
    if not later_reports:
        return first
    peaks_by_stage = ", ".join(f"stage {stage} {show_bytes(report.peak_allocated)}"
                               for stage, report in zip(stages[1:], later_reports, strict=True))  # fmt: skip
    peaks = Note("other-stages", f"The figures are of pipeline stage 0; peaks of other stages: {peaks_by_stage}.")
    first = replace(first, notes=(peaks, *first.notes))
    out_of_memory = [report for report in later_reports if report.outcome == "out of memory"]
    if not out_of_memory and device and any(report.outcome == "unknown" for report in later_reports):
        notes = tuple(dict.fromkeys((EAGER_TOO_LARGE, *first.notes)))
        return replace(first, outcome="unknown", process=None, notes=notes)
    if not out_of_memory:
        return first
    needed = max(report.needed or 0 for report in [first, *out_of_memory])
    where = first.where or out_of_memory[0].where
    return replace(first, outcome="out of memory", where=where, needed=needed, process=None)


def _of_stage(
    spec: ModelSpec, run: Run, gpu: GPU | None, load_order: LoadOrder, stage: int, how_much: bool
) -> Report:
    recording = recorded(spec, run, gpu, load_order=load_order, stage=stage)
    if gpu is None or recording.failed is None:
        return _reported(spec, run, gpu, recording)
    error, place = recording.failed
    upper = recording.engine.has_upper_sizes
    outcome: Outcome = "unknown" if upper else "out of memory"
    where = f"{recording.phase}, {place}, whose request lacked {show_bytes(error.lacked)}"
    where += f", in stage {stage} of the pipeline" if stage else ""
    why = EAGER_TOO_LARGE if upper else Note("refused-request", str(error))
    if not how_much:
        return Report(source="simulated", model=spec.name, run=run, gpu=gpu.name, capacity=gpu.memory,
                      outcome=outcome, where=None if upper else where, notes=(why,))  # fmt: skip
    roomy = recorded(spec, run, replace(gpu, memory=ROOMY), load_order=load_order, stage=stage)
    report = _reported(spec, run, gpu, roomy)
    needed = max(roomy.peak_reserved or 0, roomy.reserved_before) + gpu.memory - gpu.room(run.world_size)
    return replace(
        report, outcome=outcome, where=None if upper else where, needed=None if upper else needed, process=None,
        notes=(why, *report.notes), step_seconds=None, step_seconds_low=None, step_seconds_high=None,
        tokens_per_second=None, mfu=None,
    )  # fmt: skip


def recorded(
    model: ModelLike,
    run: Run,
    gpu: GPU | str | None,
    allocator: Callable[[int], Allocator] = Allocator,
    on_phase: Callable[[str | None], None] | None = None,
    load_order: LoadOrder = one_at_a_time,
    stage: int = 0,
) -> StepRecording:
    """Return the recording of the simulated step, with its `operators`; `gpu` None is the CPU. Of a pipeline, the first
    rank of `stage` is simulated.

    `allocator` creates the GPU's allocator from the number of bytes that the driver can allocate. `on_phase` is called
    when a phase begins, with None for a phase that does not count, such as those of the warm-up step. Quantized weights
    load in `load_order`.
    """
    spec, gpu = find_model(model), find_gpu(gpu) if gpu else None
    run = check(spec, run, gpu)
    check_simulated(spec, run, gpu)
    if gpu:
        capability_of(gpu)
    window = spec.config.get("sliding_window")
    runs = steps_that_run(run, window) if isinstance(run, Inference) else set()
    with exclusive("simulate()"):
        while True:
            try:
                return _take(spec, run, gpu, runs, allocator, on_phase, load_order, stage)
            except Mispredicted as gap:
                runs |= set(range(gap.since, gap.at + 1))
            except Exception as error:  # from a model class that was never tried with this run
                expected = isinstance(error, (NotAvailable, SpecError))
                if expected or (spec.has_formulas and not is_derived(spec, run)):
                    raise
                reason = " ".join(str(error).split())[:300]
                raise NotAvailable(f"the step of {spec.name} failed in transformers' {spec.family} ({reason}); change "
                                   "the run, or ask lab.estimate") from error  # fmt: skip


def check_simulated(spec: ModelSpec, run: Run, gpu: GPU | None) -> None:
    """Raise NotAvailable for a run that cannot be simulated, without starting it."""
    if isinstance(run, Training) and (own := stack_of(run)).own_program:
        if gpu is None:
            raise NotAvailable(f"simulate supports stack={own.name!r} on GPUs only; name one")
        builder(spec, run)
    elif run.world_size > 1:
        checked(spec, run)
    elif isinstance(run, Training) and run.offload:
        check_offload(run, gpu is not None, "simulate")


def _take(
    spec: ModelSpec, run: Run, gpu: GPU | None, runs: set[int], allocator: Callable[[int], Allocator],
    on_phase: Callable[[str | None], None] | None, load_order: LoadOrder, stage: int,
) -> StepRecording:  # fmt: skip
    """Return the recording of a run. In a generation, the model's calls numbered `runs` run; others may be replayed."""
    own, host = stack_of(run), None
    gc.collect()
    with swept() as look, ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([]))
        if gpu:
            memory = allocator(gpu.room(run.world_size))
            if own.expandable_segments:
                memory.configure(replace(memory.config, expandable_segments=True))
            host = RealHost(None) if own.names_cuda else None
            simulated_gpu = SimulatedGPU(gpu, memory, host)
            stack.enter_context(as_cuda(simulated_gpu, host, run.world_size, 0) if host else installed(simulated_gpu))
            engine = simulated_gpu.engine
            if isinstance(run, Training) and run.expert_imbalance > 1:
                engine.busiest = run.expert_imbalance, run.ep
        else:
            engine = Engine(HOST, HostMemory())  # this machine's own libraries run on fake tensors
            for patch in (fake_parameters(), tensors_on_gpu(), count_random_states(engine),
                          fake_bitsandbytes(on_gpu=False)):  # fmt: skip
                stack.enter_context(patch)
        recording = StepRecording(engine, gpu, on_phase)
        ranks = None
        if isinstance(run, Training) and (own.own_program or run.world_size > 1) and not host:
            ranks = stack.enter_context(fake_ranks(run, engine, recording.labelled, stage))
        stack.enter_context(around_steps(run))
        stack.enter_context(pinned_attention(run))
        with recording.watched(), nullcontext() if host else engine:
            try:
                _steps(spec, run, recording, runs, ranks, load_order, stage)
            except Mispredicted:
                engine.stop()  # in the middle of a step, tensors are not at the addresses that the engine knows
                raise
            except torch.OutOfMemoryError:
                assert engine.refused is not None
                recording.failed = engine.refused, engine.asked
            finally:
                look()
                recording.counting = False
                recording.enter(recording.phase)
                recording.step = None
        if isinstance(engine.memory, Allocator) and not recording.failed:
            recording.peak_reserved = engine.memory.peak_reserved
    return recording


def _steps(
    spec: ModelSpec, run: Run, recording: StepRecording, runs: set[int], ranks: Ranks | None, load_order: LoadOrder,
    stage: int,
) -> None:  # fmt: skip
    engine = recording.engine
    if isinstance(run, Inference):
        shapes = [(run.batch, run.prompt_len)]
    else:
        if run.compile and engine.gpu is None:
            run = replace(run, compile=False)
            engine.remark(EAGER_ON_CPU)
        shapes = [(run.sequences, run.seq_len)] * run.accumulation
    inputs = [torch.empty(shape, dtype=torch.int64, device="meta") for shape in shapes]
    if isinstance(run, Training) and (images := images_of(spec, run)):  # the positions of images decide shapes
        with disable_current_modes():
            inputs = [with_images(torch.zeros(shape, dtype=torch.int64), images) for shape in shapes]
    recording.enter("load")
    if isinstance(run, Training) and stack_of(run).own_program:
        where = (stage,) if run.pp > 1 else ()  # only stacks with pipelines have this parameter
        step = builder(spec, run)(spec, run, engine.device, inputs, recording.recomputing, *where)
    else:
        step = build_step(spec, run, engine.device, inputs, recording.recomputing, ranks, load_order)
    recording.step = step
    recording.loaded = engine.memory.allocated
    recording.counting = False
    warm_up = replace(step, run=replace(run, new_tokens=min(2, run.new_tokens))) if isinstance(run, Inference) else step
    warm_up(recording.enter)
    recording.counting = True
    if isinstance(engine.memory, Allocator):
        recording.reserved_before = engine.memory.peak_reserved
        engine.memory.reset_peak()
    if isinstance(run, Inference):
        step = recording.step = replace(step, decoder=Decoder(step.model, engine, recording.operators, runs))
    step(recording.enter)


def _reported(spec: ModelSpec, run: Run, gpu: GPU | None, recording: StepRecording) -> Report:
    sizes = logits_sizes(spec, run)
    division = divide(recording.engine.events, recording.marks, blocks_of(sizes) if gpu else sizes)
    libraries = {name: version for name in ("torch", "transformers") if (version := this_machine.installed(name))}
    phases = dict(division.phases)
    if gpu and recording.loaded is not None:
        phases["load"] = recording.loaded
    reserved, outside = recording.peak_reserved, gpu.outside(run.world_size) if gpu else None
    peak_at = peak_place(division, recording.engine)
    return Report(
        source="simulated",
        model=spec.name,
        run=run,
        gpu=gpu.name if gpu else None,
        capacity=gpu.memory if gpu else None,
        environment={"python": platform.python_version(), **libraries},
        outcome="fits" if gpu else "unknown",
        peak_allocated=division.peak,
        peak_reserved=reserved,
        process=reserved + outside if reserved is not None and outside is not None else None,
        phases=phases,
        parts=division.parts,
        detail=division.detail,
        notes=_notes(spec, run, gpu, recording),
        timeline=division.timeline,
        peak_at=str(peak_at) if peak_at else None,
        modules=by_module(division.blocks, recording.engine.places),
        **_rates(spec, run, gpu, recording),
    )


def _notes(spec: ModelSpec, run: Run, gpu: GPU | None, recording: StepRecording) -> tuple[Note, ...]:
    notes = []
    if quantization_of(run) == "int8":
        notes.append(INT8_NOTE)
    if gpu and quantization_of(run) == "nf4":
        notes.append(NF4_NOTE)
    if stack_of(run).paged(run):
        notes.append(PAGED_STATES)
    return (*notes, *rank_notes(spec, run, gpu), *notes_of(recording.engine))


def _rates(spec: ModelSpec, run: Run, gpu: GPU | None, recording: StepRecording) -> dict[str, Any]:
    """Return the FLOP and, if the time of every kernel is known, the time: that of the kernels that ran, and the
    communication time that `estimate` computes."""
    operators = recording.operators
    rates: dict[str, Any] = {"flops": operators.flops}
    seconds: float | None
    low: float | None
    high: float | None
    if gpu is None or recording.engine.launches:
        return rates
    if isinstance(run, Training):
        if stack_of(run).own_kernels:
            return rates  # some functions are compiled, and of Apex's kernels only the allocations are simulated
        traced = operators.traced(logits_of(spec, run))
        timed = timing(spec, run, gpu, traced=traced) if traced else None
        if timed is None or timed.seconds is None:
            return rates
        rates |= {"time": timed.parts, "time_sources": timed.sources, "time_hidden": timed.hidden,
                  "layer_time": timed.layer}  # fmt: skip
        seconds, low, high = timed.seconds, timed.low, timed.high
    else:
        seconds = operators.seconds
        if seconds is None:
            return rates
        low, high = seconds / operators.interval, seconds * operators.interval
    return rates | {
        "step_seconds": seconds,
        "step_seconds_low": low,
        "step_seconds_high": high,
        "tokens_per_second": tokens_of(run) / seconds,
        "mfu": mfu(spec, run, gpu, seconds),
    }
