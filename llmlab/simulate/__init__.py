"""The GPU memory of a PyTorch step, computed on a machine without a GPU: the real code, on fake tensors.

Light to import: torch comes with the first call.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..errors import NotAvailable

if TYPE_CHECKING:
    from ..hardware.gpu import GPU
    from ..models.spec import ModelLike
    from ..report import Report
    from ..runs import Run


def simulate(model: ModelLike, run: Run, gpu: GPU | str) -> Report:
    """Return what `run` of `model` would show on `gpu`: its peaks, allocated and reserved, phase by phase.

    The real model, loss, backward and optimizer run on fake tensors: no weights are made. `gpu` is a card or its name,
    or "cpu", where nothing is rounded or reserved and the answer is that of `lab.measure`, but for the scratch of
    oneDNN's largest bf16 products (simulate/onednn.py). As there, one step warms up and the next counts; of a long
    generation, most steps are not run but played back (simulate/decoding.py).
    A run on several devices is that of rank 0, by PyTorch's own engines, whose other ranks are not there: DDP, with
    ZeroRedundancyOptimizer for zero=1, FSDP2 for zero=2 and 3, parallelize_module for tp; the report's notes say which,
    and what is not known: what NCCL takes, and the time.

    phases["load"] is what is held when loading is done. Too small a card is an outcome, "out of memory", with the phase
    and the operator in `where`; the step is then taken again without the limit, for the other sizes and `needed`, what
    it would have taken. Sizes are bytes; `process` adds the CUDA context.

    Raises NotAvailable for what cannot be simulated, SpecError and UnknownName for what cannot be.
    """
    if missing := [package for package in ("torch", "transformers") if find_spec(package) is None]:
        raise NotAvailable(f"simulating needs {', '.join(missing)}: pip install 'llmlab[torch]'")
    from .report import simulated

    return simulated(model, run, gpu)


__all__ = ["simulate"]
