"""The verbs: check what is given, then call what answers. Light to import: torch comes with the first call."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .archive.lookup import records
from .base.errors import NotAvailable, SpecError
from .formulas.report import estimated
from .hardware.gpu import GPU
from .hardware.links import Cluster
from .hardware.this_machine import host
from .report import Comparison, Report
from .specs.model import ModelLike
from .specs.run import Run

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from .measurement.meters import CPUMeter, CUDAMeter, MPSMeter

__all__ = ["compare", "estimate", "measure", "meter", "records", "simulate"]


def estimate(model: ModelLike, run: Run, gpu: GPU | str | None = None, cluster: Cluster | None = None) -> Report:
    """Return what formulas say `run` costs on `gpu`: the peak, its parts, each phase's peak, and whether it fits.

    `gpu` is a card, its name, "cpu" (the CPU's operators: no workspace, dropout masks in full) or None (any card: no
    capacity, no workspace). Sizes are bytes on rank 0, in the first stage of a pipeline; `outcome` and `where` are of
    all stages. `peak_reserved` is None: a formula does not see the allocator's segments. Whether a run fits counts a
    margin for them, and is "unknown" within it (formulas/verdict.py); `lab.simulate` decides. Time on several devices
    is that of `llmlab.formulas.time.distributed` on `cluster` (None: the card's usual nodes; a note says which). Raises
    SpecError or UnknownName for what cannot be.
    """
    return estimated(model, run, gpu, cluster)


def simulate(model: ModelLike, run: Run, gpu: GPU | str) -> Report:
    """Return what `run` of `model` would show on `gpu`: its peaks, allocated and reserved, phase by phase.

    The real model, loss, backward and optimizer run on fake tensors: no weights are made. `gpu` is a card or its name,
    or "cpu", where nothing is rounded or reserved and the answer is that of `lab.measure`, but for the scratch of
    oneDNN's largest bf16 products (simulation/workspaces/onednn.py). As there, one step warms up and the next counts;
    of a long generation, most steps are not run but played back (simulation/decode_replay.py).
    A run on several devices is that of rank 0, by PyTorch's own engines, whose other ranks are not there: DDP, with
    ZeroRedundancyOptimizer for zero=1, FSDP2 for zero=2 and 3, parallelize_module for tp; the report's notes say which,
    and what is not known: what NCCL takes, and the time.

    phases["load"] is what is held when loading is done. Too small a card is an outcome, "out of memory", with the phase
    and the operator in `where`; the step is then taken again without the limit, for the other sizes and `needed`, what
    it would have taken. Sizes are bytes; `process` adds the CUDA context.

    Raises NotAvailable for what cannot be simulated, SpecError and UnknownName for what cannot be.
    """
    _need("simulating", "torch", "transformers")
    from .simulation.report import simulated

    return simulated(model, run, gpu)


def measure(model: ModelLike, run: Run, device: str | torch.device | None = None, repeats: int = 5) -> Report:
    """Return what `run` of `model` takes on `device`: CUDA's GPU, else Apple's, else the CPU. Weights are random.

    One step warms up and one is recorded, so the optimizer's states exist; then `repeats` steps are timed, without any
    recording, and their median reported. Bytes are the device's own: the caching allocator's statistics on CUDA, every
    event of the allocator on a CPU (where only what the run allocates counts), torch.mps polled on an Apple GPU. Out
    of memory is an outcome, with the phase in `where`; on a CPU a model whose weights exceed the memory available is
    not started. The global random state is as before afterwards, and nothing stays allocated.

    Raises NotAvailable for what this machine cannot run, SpecError and UnknownName for what cannot be.
    """
    _need("measuring", "torch", "transformers", "tokenizers")
    from .measurement.report import measured

    return measured(model, run, device, repeats)


_measured = measure  # for compare, whose argument has the verb's name


def meter(device: str | torch.device | None = None) -> AbstractContextManager[CPUMeter | CUDAMeter | MPSMeter]:
    """Return a context manager that yields the meter of the block's memory on `device` (default: as for `measure`).

    Its attributes, in bytes: `allocated`, `reserved`, `peak_allocated`, `peak_reserved`, and `timeline`; `reset_peak()`
    starts the peak anew. Raises NotAvailable inside another meter or where `device` is missing.
    """
    _need("measuring", "torch")
    from .measurement.meters import metered

    return metered(device)


def compare(
    model: ModelLike,
    run: Run,
    gpu: GPU | str | None = None,
    *,
    measure: bool = False,
    cluster: Cluster | None = None,
) -> Comparison:
    """Return estimate, simulation and records of one run, side by side; with `measure` it runs, here and now.

    `gpu` is a card or its name; None is this machine's. Beside the predictions stand the newest records of exactly this
    run on that card, ours and published, each with its provenance; with `measure`, which is for this machine only and
    takes no `gpu`, the new measurement instead. `cluster` is that of `estimate`. What cannot be simulated (or where
    torch is missing) is left out, and the estimate's notes say why. Raises SpecError for both `gpu` and `measure`.
    """
    card = (host().gpu or "cpu") if gpu is None else gpu
    if measure:
        if gpu is not None:
            raise SpecError(f"measure=True with gpu={gpu!r}: a measurement is of this machine; give one of the two")
        return Comparison((*_predicted(model, run, card, cluster), _measured(model, run)))
    newest = {report.source: report for report in reversed(records(model, run, card))}
    return Comparison((*_predicted(model, run, card, cluster), *newest.values()))


def _predicted(model: ModelLike, run: Run, card: GPU | str, cluster: Cluster | None) -> tuple[Report, ...]:
    """Return the estimate and the simulation; where there is no simulation, the estimate with a note that says why."""
    formulas = estimate(model, run, card, cluster)
    try:
        return formulas, simulate(model, run, card)
    except NotAvailable as error:
        return (replace(formulas, notes=(*formulas.notes, f"Not simulated: {error}")),)


def _need(what: str, *packages: str) -> None:
    if missing := [package for package in packages if find_spec(package) is None]:
        raise NotAvailable(f"{what} needs {', '.join(missing)}: pip install 'llmlab[torch]'")
