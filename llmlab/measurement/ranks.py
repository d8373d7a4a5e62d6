"""The memory of each of several ranks on this machine: processes on its CPU, joined by gloo."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..base.compat import storage_use_count, symbol
from ..base.errors import SpecError
from ..base.notes import Note
from ..hardware.this_machine import environment
from ..ranks.launch import launch
from ..recording.events import CPUEvents
from ..recording.parts import Event, divide, logits_sizes
from ..recording.phases import Recorder
from ..report import Report
from ..specs.check import check
from ..specs.model import ModelLike, ModelSpec
from ..specs.model import model as find_model
from ..specs.run import Training
from ..step.ranks import around_steps, check_ranks, join
from ..step.step import build_step, texts
from .report import CPU_NOTE

SETTLED = 5.0  # seconds at most until gloo's thread lets go of a tensor
CLOCKS = 1_000_000  # ns by which the profiler's clock and this process's may differ


def measure_ranks(*cases: tuple[ModelLike, Training], limit: float | None = None) -> list[list[Report]]:
    """Return what each rank takes on this machine's CPU: for each (model, run), reports by rank, of bytes, not times.

    The cases run one after another in one launch, so all ask for the same number of ranks. One step warms up, the next
    is recorded. `limit`: seconds after which the launch ends (None: no limit). Raises SpecError and NotAvailable before
    any process starts, RankFailed where a rank fails.
    """
    checked = [(find_model(model), run) for model, run in cases]
    for spec, run in checked:
        check(spec, run)
        check_ranks(spec, run, "measure_ranks")
    sizes = {run.world_size for _, run in checked}
    if len(sizes) != 1:
        raise SpecError(f"cases with {', '.join(map(str, sorted(sizes)))} ranks cannot be one launch; give them apart")
    by_rank = launch(_rank, sizes.pop(), [(spec.config, run) for spec, run in checked], limit=limit)
    return [[Report.from_json(report) for report in reports] for reports in zip(*by_rank, strict=True)]


Span = tuple[int, int]  # Unix times in ns


@contextmanager
def _settled_collectives(spans: list[Span]) -> Iterator[None]:
    """Let collectives end before the caller goes on, and note when each ran in `spans`.

    Gloo has threads of its own, and what they free nobody records. If they let go of its tensors first, the caller
    frees them; what gloo made itself (a reduce-scatter reduces a copy of its input) went in that time.
    """
    functional = symbol("torch.distributed._functional_collectives")
    fsdp = symbol("torch.distributed.fsdp._fully_shard._fsdp_collectives")

    def settled(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            tensors = [value for value in (*args, *named.values()) if isinstance(value, Tensor)]
            users, since = sum(map(_users, tensors)), time.time_ns()
            out = collective(*args, **named)
            if isinstance(out, functional.AsyncCollectiveTensor):
                out = out.wait()
            end = time.monotonic() + SETTLED
            while sum(map(_users, tensors)) > users and time.monotonic() < end:
                time.sleep(1e-4)
            spans.append((since, time.time_ns()))
            return out

        return call

    owners = [(comm, "__call__") for comm in (fsdp.DefaultAllGather, fsdp.DefaultReduceScatter)]
    owners += [(functional, name) for name in ("all_gather_tensor", "reduce_scatter_tensor", "all_reduce")]
    with ExitStack() as stack:
        for owner, name in owners:
            stack.enter_context(mock.patch.object(owner, name, settled(getattr(owner, name))))
        yield


def _with_frees(events: list[Event], spans: list[Span]) -> list[Event]:
    """Return `events`, and a free at the end of its span for what was made in one and never seen to go."""
    frees = []
    last: dict[int, Event] = {}
    gone_unseen = []
    for event in events:
        before = last.get(event.address)
        if before is not None and before.size > 0 and event.size > 0:
            gone_unseen.append(before)
        last[event.address] = event
    gone_unseen += [event for event in last.values() if event.size > 0]
    for made in gone_unseen:
        span_ends = [until for since, until in spans if since - CLOCKS <= made.time <= until]
        frees += [Event(span_ends[0], made.address, -made.size)] if span_ends else []
    return sorted([*events, *frees], key=lambda event: event.time)


def _users(tensor: Tensor) -> int:
    """Return how many tensors and others share the memory of `tensor`."""
    return storage_use_count(tensor.untyped_storage()._cdata)


def _rank(cases: list[tuple[dict[str, Any], Training]]) -> list[str]:
    """Run in each rank: take the steps of each case and return its report as JSON."""
    return [_report(find_model(config), run).to_json() for config, run in cases]


def _report(spec: ModelSpec, run: Training) -> Report:
    torch.manual_seed(0)
    inputs = texts(spec, run)
    ranks = join(run)
    recorder = Recorder(CPUEvents(), None)
    spans: list[Span] = []
    with around_steps(run), _settled_collectives(spans):
        recorder.record(
            lambda: build_step(spec, run, "cpu", inputs, recorder.recomputing, ranks),
            lambda step: step(recorder.enter),
        )
    division = divide(_with_frees(recorder.events, spans), recorder.marks, logits_sizes(spec, run))
    return Report(
        source="measured",
        model=spec.name,
        run=run,
        outcome="fits",
        peak_allocated=division.peak,
        phases=division.phases,
        parts=division.parts,
        detail=division.detail,
        environment=environment(),
        notes=(CPU_NOTE, Note("gloo-rank", f"This is one of {run.world_size} processes that gloo connects; memory of "
                              "gloo's own threads is not counted.")),
    )
