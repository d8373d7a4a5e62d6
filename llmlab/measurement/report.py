"""measure: build the run's real model, run its step, and report memory and time."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base.compat import symbol
from ..base.errors import NotAvailable, check_counts
from ..base.notes import Note
from ..base.units import show_bytes
from ..formulas.time.flops import flops
from ..formulas.time.step import peak_dtype, tokens_of
from ..hardware import pretend
from ..hardware.this_machine import environment, host
from ..recording.events import CPUEvents, CUDAEvents, exclusive
from ..recording.parts import Division, divide, logits_sizes
from ..recording.phases import Recorder
from ..recording.timing import count_flops, median_seconds
from ..report import Report
from ..specs.check import check
from ..specs.model import ModelLike, ModelSpec
from ..specs.model import model as find_model
from ..specs.run import Inference, Run, Training, stack_of
from ..step.model import confined_kernels, pinned_attention
from ..step.optimizer import check_offload
from ..step.ranks import check_one_device
from ..step.step import Step, build_step, texts
from .devices import Peaks, cuda_context_bytes, pick_device
from .memory_limit import available_memory, is_out_of_memory, least_bytes, limited_to_available

CPU_NOTE = Note(
    "cpu-allocator",
    "PyTorch's CPU allocator has no cache, so `peak reserved` is unknown. MKL's scratch memory is not counted, and "
    "oneDNN's only for 16-bit matmuls.",
)
MPS_NOTE = Note(
    "mps-no-peaks",
    "torch.mps records no peaks, so each phase shows the memory allocated at its end, and parts are unknown.",
)


@dataclass
class Figures:
    """What one run yielded before it ended or ran out of memory."""

    recorder: Recorder
    peaks: Peaks | None
    baseline: int = 0
    context: int | None = None
    flops: int | None = None
    seconds: float | None = None
    failed: bool = False


def measured(
    model: ModelLike,
    run: Run,
    device: str | torch.device | None = None,
    repeats: int = 5,
) -> Report:
    """Return the report of `llmlab.measure`."""
    spec = find_model(model)
    run = check(spec, run)
    if (stack := stack_of(run)).own_program:
        raise NotAvailable(f"measure supports stack='transformers' only, not {stack.name!r}; ask lab.simulate")
    check_one_device(run)
    check_counts(repeats=repeats)
    picked = pick_device(device)
    if isinstance(run, Training) and run.offload:
        check_offload(run, picked.type == "cuda", "measure")
    least, available = least_bytes(spec, run), available_memory()
    if picked.type == "cpu" and available is not None and least > available:
        sizes = f"the weights alone need {show_bytes(least)}, and {show_bytes(available)} is free"
        note = Note("not-started", f"The run was not started: {sizes}.")
        return _report(spec, run, picked, outcome="out of memory", where="load", notes=(note,))
    with exclusive("measure()"), torch.cuda.device(picked) if picked.type == "cuda" else nullcontext():
        figures = _take(spec, run, picked, repeats)
    _free(picked)
    return _reported(spec, run, picked, figures)


def _take(spec: ModelSpec, run: Run, device: torch.device, repeats: int) -> Figures:
    """Run the steps; an error other than out of memory passes through, with the recording ended."""
    if device.type == "cuda":
        pretend.apply()
        symbol("torch._C._cuda_clearCublasWorkspaces")()  # of earlier code: this run takes, and shows, its own
    _free(device)
    cuda, cpu = device.type == "cuda", device.type == "cpu"
    peaks = None if cpu else Peaks(device)  # a CPU's events tell all
    figures = Figures(Recorder(CUDAEvents(device) if cuda else CPUEvents() if cpu else None, peaks), peaks)
    if cuda:
        figures.baseline = torch.cuda.memory_allocated(device)
    random_state = torch.random.fork_rng([device] if cuda else [])
    limit = limited_to_available() if cpu else nullcontext()
    backends = pretend.sdpa_backends()
    sdpa = torch.nn.attention.sdpa_kernel(backends) if backends else nullcontext()
    with random_state, limit, sdpa, pinned_attention(run), confined_kernels(spec, run):
        torch.manual_seed(0)
        try:
            _steps(spec, run, device, repeats, figures)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            figures.failed = True
        finally:
            figures.recorder.stop()
            figures.recorder.step = None
    return figures


def _steps(spec: ModelSpec, run: Run, device: torch.device, repeats: int, figures: Figures) -> None:
    recorder = figures.recorder
    inputs = texts(spec, run)  # before the recording: reading the corpus is no part of the run
    step = recorder.record(
        lambda: build_step(spec, run, device, inputs, recorder.recomputing), lambda step: _warm_up(step, recorder)
    )
    if device.type == "cuda":
        figures.context = cuda_context_bytes(device)
    recorder.step = None
    figures.seconds = median_seconds(step, device, repeats)
    figures.flops = _flops(step)


def _warm_up(step: Step, recorder: Recorder) -> None:
    if isinstance(step.run, Inference):
        step = replace(step, run=replace(step.run, new_tokens=min(2, step.run.new_tokens)))
    step(recorder.enter)


def _flops(step: Step) -> int | None:
    """Return the FLOP of a step where they can be counted: not in generation, not in compiled code. Counting holds an
    operator's arguments a little longer than the run does: it comes last, and may find no room."""
    if isinstance(step.run, Inference) or step.run.compile:
        return None
    try:
        return count_flops(step)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def _reported(spec: ModelSpec, run: Run, device: torch.device, figures: Figures) -> Report:
    recorder, peaks = figures.recorder, figures.peaks
    division = divide(recorder.events, recorder.marks, _logits_sizes(spec, run))
    phases = peaks.allocated if peaks else division.phases
    parts, detail = _parts(division, phases, figures) if recorder.source else ({}, {})
    notes: tuple[Note, ...] = {"cpu": (CPU_NOTE,), "mps": (MPS_NOTE,)}.get(device.type, ())
    if figures.baseline:
        before = f"{show_bytes(figures.baseline)} were allocated before the run began"
        notes += (Note("allocated-before", f"{before}; they count as part of `other`."),)
    if figures.failed:  # the phases that ended, and the peak so far, which is no peak of the run
        *ended, _ = dict.fromkeys([*phases, recorder.phase])
        return _report(
            spec, run, device,
            outcome="out of memory",
            where=recorder.phase,
            phases={phase: phases[phase] for phase in ended if phase != recorder.phase},
            notes=notes,
        )  # fmt: skip
    assert figures.seconds is not None  # the last thing that a run which did not fail leaves
    reserved = max(peaks.reserved.values()) if peaks else None
    return _report(
        spec, run, device,
        outcome="fits",
        peak_allocated=max(phases.values()),
        peak_reserved=reserved,
        process=reserved + figures.context if reserved is not None and figures.context is not None else None,
        phases=phases,
        parts=parts,
        detail=detail,
        flops=figures.flops,
        step_seconds=figures.seconds,
        tokens_per_second=tokens_of(run) / figures.seconds,
        notes=notes,
        timeline=division.timeline if recorder.source else (),
    )  # fmt: skip


def _report(spec: ModelSpec, run: Run, device: torch.device, **figures: Any) -> Report:
    here = host()
    facts = environment()
    if device.type == "cpu":
        facts["device"] = f"CPU: {here.cpu}, {here.cores} cores"
    gpu = here.gpu if device.type == "cuda" else None
    peak, fits = gpu.peak(_peak_dtype(run)) if gpu else None, figures["outcome"] == "fits"
    return Report(
        source="measured",
        model=spec.name,
        run=run,
        gpu=None if device.type == "cpu" else gpu.name if gpu else here.name,
        capacity=here.memory if here.device == device.type else None,
        mfu=flops(spec, run, gpu).model / figures["step_seconds"] / peak if peak and fits else None,
        environment=facts,
        **figures,
    )


def _parts(division: Division, phases: Mapping[str, int], figures: Figures) -> tuple[dict, dict]:
    """Return parts and detail that add up to the device's own peak.

    On CUDA the events hold rounded requests; what the allocator counts beyond them (blocks not split) and what was
    there before the run go to "other".
    """
    remainder = max(phases.values()) - division.peak if phases else 0
    if not remainder:
        return division.parts, division.detail
    parts = {**division.parts, "other": division.parts.get("other", 0) + remainder}
    other = {**division.detail.get("other", {}), "before the run, blocks not split": remainder}
    return parts, {**division.detail, "other": other}


def _logits_sizes(spec: ModelSpec, run: Run) -> list[int]:
    half, single = logits_sizes(spec, run)
    return [single] if _peak_dtype(run) in ("fp32", "tf32") else [half, single]


def _peak_dtype(run: Run) -> str:
    dtype = peak_dtype(run)
    return "tf32" if dtype == "fp32" and _tf32() else dtype


def _tf32() -> bool:
    matmul = torch.backends.cuda.matmul
    # torch 2.9 renamed the switch; reading the old name raises once somebody (transformers' Trainer, say) set the new
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
