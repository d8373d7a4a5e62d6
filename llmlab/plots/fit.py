"""What fits where: a table of models by GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.errors import SpecError
from ..base.units import GiB
from .canvas import PANEL, SMALL, WIDTH, Picture, cell, new_picture, short_names, styled
from .reads import Report

FITS = {"fits": ("#BFE0F2", "fits"), "out of memory": ("#F6C9A8", "no"), "unknown": ("#E6E6E3", "unknown")}


@styled
def plot_fit(reports: Sequence[Report]) -> Picture:
    """Return a table of models by GPUs: the bytes each run needs in GiB, coloured and worded by whether it fits.

    Needs one report for each pair; a pair without one stays blank. The number is the largest that is known of process,
    reserved and allocated peak, and what the run would have taken where it ran out of memory.
    Two reports for one pair, or a report without a GPU, raise SpecError.
    """
    cells: dict[tuple[str, str], Report] = {}
    for report in reports:
        if report.gpu is None:
            raise SpecError(f"the report of {report.model} names no GPU; plot_fit needs reports made for one")
        if (report.model, report.gpu) in cells:
            raise SpecError(f"two reports for {report.model} on {report.gpu}; give one each")
        cells[report.model, report.gpu] = report
    if not cells:
        raise SpecError("plot_fit got no reports; give one for each model and GPU")
    models, gpus = list(dict.fromkeys(m for m, _ in cells)), list(dict.fromkeys(g for _, g in cells))
    # The longer list goes down the page: a phone scrolls that way.
    down_gpus = len(gpus) >= len(models)
    rows, columns = (gpus, models) if down_gpus else (models, gpus)

    picture, (ax,) = new_picture(1.1 + 0.42 * len(rows), width=max(WIDTH, 1.8 + 0.9 * len(columns)))
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            here = cells.get((column, row) if down_gpus else (row, column))
            color, word = FITS[here.outcome] if here else (PANEL, "")
            cell(ax, x, y, color, PANEL, line=2)
            need = _need(here) if here else None
            number = "" if need is None else f"{need / GiB:,.1f} "
            weight = "bold" if word == "fits" else "normal"
            ax.text(x + 0.5, y + 0.5, f"{number}{word}", ha="center", va="center", size=SMALL, weight=weight)
    short = short_names(models)
    names = [short.get(name, name) for name in columns]
    ax.set_xticks([i + 0.5 for i in range(len(columns))], ["\n".join(_wrap(name, 13)) for name in names])
    ax.set_yticks([i + 0.5 for i in range(len(rows))], [short.get(name, name) for name in rows])
    ax.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    ax.spines[:].set_visible(False)
    ax.set(xlim=(0, len(columns)), ylim=(len(rows), 0), xlabel="peak memory (GiB), and whether the device holds it")
    said = []
    for gpu in gpus:
        held = [short[m] for m in models if (m, gpu) in cells and cells[m, gpu].outcome == "fits"]
        said.append(f"{gpu} fits {', '.join(held) or 'none'}")
    picture.alt = f"What fits, {len(models)} models by {len(gpus)} GPUs: {'; '.join(said)}."
    return picture


def _wrap(name: str, width: int) -> list[str]:
    lines = [""]
    for piece in name.replace("-", "-\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return lines


def _need(report: Report) -> int | None:
    sizes = (report.peak_allocated, report.peak_reserved, report.process, report.needed)
    return max((size for size in sizes if size is not None), default=None)
