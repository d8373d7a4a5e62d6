"""The update of a step whose optimizer is offloaded: techniques/offload.py, as simulate and measure run it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ..base.errors import NotAvailable
from ..specs.run import Training
from ..techniques.offload import Offloaded
from .optimizer import LEARNING_RATE, TORCH_OPTIMIZERS

PRECISIONS = ("fp32", "autocast-bf16", "mixed-bf16")  # a loss scaler would have to look into the host's gradients
OPTIMIZERS = ("sgd", "adamw")  # they treat every element alike, so a flat bucket is as good


def check_offload(run: Training, on_gpu: bool, verb: str) -> None:
    """Raise NotAvailable for what this step does not do; `verb` is who asks, `on_gpu` whether for a GPU."""
    given = f"{verb} has no offload={run.offload!r}"
    if not on_gpu:
        raise NotAvailable(f"{given} on the CPU, whose memory the host's is; name a GPU")
    if run.offload != "optimizer":
        raise NotAvailable(f"{given}, only 'optimizer'; see lab.estimate")
    for name, allowed in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS)):
        if getattr(run, name) not in allowed:
            raise NotAvailable(f"{given} with {name}={getattr(run, name)!r}; give {', '.join(allowed)}")


def offloaded(run: Training, parameters: Iterable[nn.Parameter]) -> Offloaded:
    """Return the run's optimizer for `parameters`, with its states in the host's memory."""
    return Offloaded(parameters, TORCH_OPTIMIZERS[run.optimizer], lr=LEARNING_RATE)
