"""What a run costs on the machine at hand, taken from the real device: `measure` a run, `meter` your own code.

Light to import: torch comes with the first call.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..errors import NotAvailable

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from ..models.spec import ModelLike
    from ..report import Report
    from ..runs import Run
    from .meters import CPUMeter, CUDAMeter, MPSMeter


def measure(
    model: ModelLike,
    run: Run,
    device: str | torch.device | None = None,
    repeats: int = 5,
) -> Report:
    """Return what `run` of `model` takes on `device`: CUDA's GPU, else Apple's, else the CPU. Weights are random.

    One step warms up and one is recorded, so the optimizer's states exist; then `repeats` steps are timed, without any
    recording, and their median reported. Bytes are the device's own: the caching allocator's statistics on CUDA, every
    event of the allocator on a CPU (where only what the run allocates counts), torch.mps polled on an Apple GPU. Out
    of memory is an outcome, with the phase in `where`; on a CPU a model whose weights exceed the memory available is
    not started. The global random state is as before afterwards, and nothing stays allocated.

    Raises NotAvailable for what this machine cannot run, SpecError and UnknownName for what cannot be.
    """
    _need("torch", "transformers", "tokenizers")
    from .report import measured

    return measured(model, run, device, repeats)


def meter(device: str | torch.device | None = None) -> AbstractContextManager[CPUMeter | CUDAMeter | MPSMeter]:
    """Return a context manager that yields the meter of the block's memory on `device` (default: as for `measure`).

    Its attributes, in bytes: `allocated`, `reserved`, `peak_allocated`, `peak_reserved`, and `timeline`; `reset_peak()`
    starts the peak anew. Raises NotAvailable inside another meter or where `device` is missing.
    """
    _need("torch")
    from .meters import metered

    return metered(device)


def _need(*packages: str) -> None:
    if missing := [package for package in packages if find_spec(package) is None]:
        raise NotAvailable(f"measuring needs {', '.join(missing)}: pip install 'llmlab[torch]'")


__all__ = ["measure", "meter"]
