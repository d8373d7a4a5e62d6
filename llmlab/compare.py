"""The verbs side by side."""

from __future__ import annotations

from dataclasses import replace

from .errors import NotAvailable
from .hardware.gpu import GPU
from .models.spec import ModelLike
from .report import Comparison, Report
from .runs import Run


def compare(model: ModelLike, run: Run, gpu: GPU | str | None = None) -> Comparison:
    """Return estimate, simulation and measurement of one run, side by side.

    With `gpu` None the run is measured here and now, and predicted for this machine. With a card named, the newest
    records of exactly this run on that card stand in, ours and published, each with its provenance. What cannot be
    simulated (or where torch is missing) is left out, and the estimate's notes say why.
    """
    from .estimate import estimate
    from .records import records

    if gpu is None:
        from .hardware.host import host
        from .measure import measure

        card = host().gpu or "cpu"
        return Comparison((*_predicted(estimate(model, run, card), model, run, card), measure(model, run)))
    newest = {report.source: report for report in reversed(records(model, run, gpu))}
    return Comparison((*_predicted(estimate(model, run, gpu), model, run, gpu), *newest.values()))


def _predicted(estimated: Report, model: ModelLike, run: Run, card: GPU | str) -> tuple[Report, ...]:
    from .simulate import simulate

    try:
        return estimated, simulate(model, run, card)
    except NotAvailable as error:
        return (replace(estimated, notes=(*estimated.notes, f"Not simulated: {error}")),)
