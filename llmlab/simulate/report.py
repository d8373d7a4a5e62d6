"""simulate: build the run's real model on fake tensors, take its step, and report what the card would show."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..check import check
from ..errors import NotAvailable
from ..estimate.time import mfu, tokens_of
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu
from ..hardware.host import environment
from ..measure.events import exclusive
from ..measure.parts import divide, logits_sizes
from ..measure.recorder import Mark
from ..models.spec import ModelSpec
from ..models.spec import model as find_model
from ..report import Report
from ..runs import Inference, Run, Training
from ..step import Step, build_step
from ..step_model import quantization_of
from ..step_offload import check_offload
from ..step_ranks import Ranks, around_steps
from ..units import show_bytes
from .allocator import Allocator, AllocatorOutOfMemory
from .decoding import Decoder, Mispredicted, steps_that_run
from .engine import GPU_DEVICE, HOST, Engine, Extra, HostMemory
from .from_data import tensors_from_data
from .operators import Operators
from .patches import cuda_operators, fake_parameters, held_random_states
from .places import Place, Places
from .quantized import bitsandbytes_extras, cpu_bitsandbytes_extras, fake_bitsandbytes
from .ranks import checked, fake_ranks
from .ranks import notes as rank_notes
from .semantics import cuda_extras, grouped_mm
from .timeline import blocks_of, by_module, peak_place

COMPILE_NOTE = "compile=True is simulated eager: what a compiled step fuses away is counted."

# bitsandbytes computes the columns of outliers apart, in 16 bit; how many there are only values say.
INT8_NOTE = "int8 is simulated as if no activation reached the outlier threshold; each column that does takes more."


def simulated(model: ModelSpec | str | os.PathLike[str] | Mapping[str, Any], run: Run, gpu: GPU | str) -> Report:
    """Return the report of `llmlab.simulate`."""
    spec = find_model(model)
    card = None if isinstance(gpu, str) and gpu.lower() == "cpu" else find_gpu(gpu)
    return _reported(spec, run, card, recorded(spec, run, card))


def recorded(
    model: ModelSpec | str | os.PathLike[str] | Mapping[str, Any], run: Run, gpu: GPU | str | None
) -> Recording:
    """Return the simulated step itself, with its `operators`; `gpu` None is the CPU."""
    spec, card = find_model(model), find_gpu(gpu) if gpu else None
    check(spec, run, card)
    if run.world_size > 1:
        checked(spec, run)
    elif getattr(run, "offload", None):
        check_offload(run, card is not None, "simulate")
    if card and card.compute_capability is None:
        raise NotAvailable(f"{card.name} has no CUDA kernels to simulate; name an NVIDIA card")
    window = spec.config.get("sliding_window")
    runs = steps_that_run(run, window) if isinstance(run, Inference) else set()
    with exclusive("simulate()"):
        while True:
            try:
                return _take(spec, run, card, runs)
            except Mispredicted as gap:
                runs |= set(range(gap.since, gap.at + 1))


class Recording:
    """A simulated step: the engine's events, and between them marks that say which phase begins and what is alive."""

    def __init__(self, engine: Engine, gpu: GPU | None) -> None:
        self.engine = engine
        self.places = Places(engine)
        self.marks: list[Mark] = []
        self.operators = Operators(gpu)  # of the step that counts
        self.step: Step | None = None
        self.phase = "load"
        self.counting = True
        self.loaded: int | None = None  # bytes held when loading was done
        self.peak_reserved: int | None = None
        self.failed: tuple[AllocatorOutOfMemory, Place] | None = None

    def enter(self, phase: str, **alive: Any) -> None:
        """Mark that `phase` begins; `alive`: tensors by part that only the step knows of."""
        self.phase = self.operators.phase = phase
        self.engine.watch = self.operators if self.counting and phase != "load" else None
        # Optimizers scale by norms they read (Adafactor's clipping); no memory depends on them.
        self.engine.placeholder = 1.0 if phase == "optimizer" else None
        self.marks.append(Mark(self.engine.now(), phase if self.counting else None, self._alive(alive)))

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Mark what happens inside as the recomputation of a checkpointed block."""
        since = self.engine.now()
        try:
            yield
        finally:
            self.marks.append(Mark(self.engine.now(), self.phase if self.counting else None, {}, since))

    def labelled(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return `function`, what it allocates being known as `part`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            since = len(self.engine.events)
            try:
                return function(*args, **kwargs)
            finally:
                made = {event.address: part for event in self.engine.events[since:] if event.size > 0}
                if made:
                    now = self.engine.now()
                    self.marks.append(Mark(now, self.phase if self.counting else None, made, now))

        return call

    def _alive(self, named: dict[str, Any]) -> dict[int, str]:
        if self.step:
            self.places.own(self.step.model, self.step.optimizer)
        found = dict.fromkeys(self.engine.handles.values(), "workspace")
        held = self.step.tensors() if self.step else {}
        for part, tensors in [*named.items(), *held.items()]:
            for tensor in [tensors] if isinstance(tensors, Tensor) else tensors or []:
                if address := self.engine.address(tensor):
                    found[address] = part
        return found


def _take(spec: ModelSpec, run: Run, card: GPU | None, runs: set[int]) -> Recording:
    """Return the recording of a run; of a generation, the calls of the model numbered `runs` run, others may not."""
    gc.collect()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([]))
        stack.enter_context(fake_parameters())
        quantized = quantization_of(run) is not None
        if card:
            stack.enter_context(cuda_operators(card.compute_capability))
            stack.enter_context(tensors_from_data())
            memory: Allocator | HostMemory = Allocator(card.room(run.world_size))
            extras = cuda_extras(card) | (bitsandbytes_extras(card) if quantized else {})
            engine = Engine(GPU_DEVICE, memory, extras, card.cublas_workspace)
        else:
            by_bitsandbytes = getattr(run, "optimizer", None) in ("lion", "adamw-8bit")
            extras = {torch.ops.aten._grouped_mm.default: Extra(outputs=grouped_mm)}
            engine = Engine(HOST, HostMemory(), extras | (cpu_bitsandbytes_extras() if by_bitsandbytes else {}))
            stack.enter_context(held_random_states(engine))
        if quantized:
            stack.enter_context(fake_bitsandbytes(memory.empty_cache if card else None))
        recording = Recording(engine, card)
        ranks = stack.enter_context(fake_ranks(run, recording)) if run.world_size > 1 else None
        stack.enter_context(around_steps(run))
        with recording.places.watched(), engine:
            try:
                _steps(spec, run, recording, runs, ranks)
            except AllocatorOutOfMemory as error:
                recording.failed = error, engine.asked
            finally:
                recording.counting = False
                recording.enter(recording.phase)
                recording.step = None
        if card and not recording.failed:
            recording.peak_reserved = memory.peak_reserved
    return recording


def _steps(spec: ModelSpec, run: Run, recording: Recording, runs: set[int], ranks: Ranks | None) -> None:
    engine = recording.engine
    if isinstance(run, Inference):
        shapes = [(run.batch, run.prompt_len)]
    else:
        run = replace(run, compile=False)
        shapes = [(run.micro_batch, run.seq_len)] * run.accumulation
    inputs = [torch.empty(shape, dtype=torch.int64, device="meta") for shape in shapes]
    recording.enter("load")
    step = recording.step = build_step(spec, run, engine.device, inputs, recording.recomputing, ranks)
    recording.loaded = engine.memory.allocated
    recording.counting = False
    warm_up = replace(step, run=replace(run, new_tokens=min(2, run.new_tokens))) if isinstance(run, Inference) else step
    warm_up(recording.enter)
    recording.counting = True
    if isinstance(engine.memory, Allocator):
        engine.memory.reset_peak()
    if isinstance(run, Inference):
        step = recording.step = replace(step, model=Decoder(step.model, engine, recording.operators, runs))
    step(recording.enter)


def _reported(spec: ModelSpec, run: Run, card: GPU | None, recording: Recording) -> Report:
    sizes = logits_sizes(spec, run)
    division = divide(recording.engine.events, recording.marks, blocks_of(sizes) if card else sizes)
    facts = {name: version for name, version in environment().items() if name in ("torch", "transformers", "python")}
    notes = (COMPILE_NOTE,) if getattr(run, "compile", False) else ()
    if quantization_of(run) == "int8":
        notes = (*notes, INT8_NOTE)
    notes += rank_notes(spec, run, card) + recording.engine.notes()
    phases = dict(division.phases)
    if card and recording.loaded is not None:
        phases["load"] = recording.loaded
    common: dict[str, Any] = {
        "source": "simulated",
        "model": spec.name,
        "run": run,
        "gpu": card.name if card else None,
        "capacity": card.memory if card else None,
        "environment": facts,
    }
    if recording.failed:
        error, place = recording.failed
        missing = error.segment - (error.capacity - error.reserved)
        *ended, _ = dict.fromkeys([*phases, recording.phase])
        return Report(
            **common,
            outcome="out of memory",
            where=f"{recording.phase}, {place}: {show_bytes(missing)} short",
            phases={phase: phases[phase] for phase in ended if phase != recording.phase},
            notes=(str(error), *notes),
        )
    reserved = recording.peak_reserved
    outside = card.outside(run.world_size) if card else None
    return Report(
        **common,
        outcome="fits" if card else "unknown",
        peak_allocated=division.peak,
        peak_reserved=reserved,
        process=reserved + outside if outside is not None else None,
        phases=phases,
        parts=division.parts,
        detail=division.detail,
        notes=notes,
        timeline=division.timeline,
        peak_at=str(place) if (place := peak_place(division, recording.engine)) else None,
        modules=by_module(division.blocks, recording.engine.places),
        **_rates(spec, run, card, recording),
    )


def _rates(spec: ModelSpec, run: Run, card: GPU | None, recording: Recording) -> dict[str, Any]:
    """Return FLOP and, where the card's rates are known and what runs is what was simulated, the time."""
    counted = recording.operators.flops
    fused = isinstance(run, Training) and (run.compile or run.kernels)
    elsewhere = run.world_size > 1 or getattr(run, "offload", None)  # what is sent, and the host's update, take no time
    seconds = None if fused or elsewhere else recording.operators.seconds
    if card is None or seconds is None:
        return {"flops": counted}
    return {
        "flops": counted,
        "step_seconds": seconds,
        "tokens_per_second": tokens_of(run) / seconds,
        "mfu": mfu(spec, run, card, seconds),
    }
