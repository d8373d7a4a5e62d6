"""Closed formulas for memory (and, chapter by chapter, time): pure Python, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..hardware.gpu import GPU
    from ..hardware.links import Cluster
    from ..models.spec import ModelLike
    from ..report import Report
    from ..runs import Run


def estimate(model: ModelLike, run: Run, gpu: GPU | str | None = None, cluster: Cluster | None = None) -> Report:
    """Return what formulas say `run` costs on `gpu`: the peak, its parts, each phase's peak, and whether it fits.

    `gpu` is a card, its name, "cpu" (the CPU's operators: no workspace, dropout masks in full) or None (any card: no
    capacity, no workspace). Sizes are bytes on rank 0, in the first stage of a pipeline; `outcome` and `where` are of
    all stages. `peak_reserved` is None: a formula does not see the allocator's segments. Whether a run fits counts a
    margin for them, and is "unknown" within it (estimate/verdict.py); `lab.simulate` decides. Time on several devices
    is that of `llmlab.estimate.distributed` on `cluster` (None: the card's usual nodes; a note says which). Raises
    SpecError or UnknownName for what cannot be.
    """
    from .report import estimated

    return estimated(model, run, gpu, cluster)
