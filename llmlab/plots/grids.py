"""Number formats as what they are: the few values that a weight may take, under the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..base.errors import SpecError
from .canvas import INK, MUTED, PALETTE, Picture, name_rows, new_picture, styled

BINS = 81


@styled
def plot_grids(sample: Sequence[float], grids: Mapping[str, Sequence[float]], xlabel: str) -> Picture:
    """Return the histogram of `sample` and, under it, one row of marks per grid: the values that it can hold.

    `sample` and `grids` are in the unit that `xlabel` names. No sample, no grid and an empty one raise SpecError.
    """
    values = np.asarray(sample, dtype=float).reshape(-1)
    if not values.size or not grids or not all(len(grid) for grid in grids.values()):
        raise SpecError(f"{values.size} numbers and {len(grids)} grids; give at least one of each, none of them empty")
    largest = max(float(np.abs(values).max()), *(max(abs(v) for v in grid) for grid in grids.values()))
    sizes = (1.2, 0.36 * len(grids))
    picture, (top, rows) = new_picture(1.7 + 0.36 * len(grids), 2, 1, sharex=True, height_ratios=sizes)
    counts, edges = np.histogram(values, bins=BINS, range=(-largest, largest))
    top.stairs(counts, edges, fill=True, color=PALETTE[5], edgecolor=INK, linewidth=0.6)
    top.set(yticks=(), ylabel="weights")
    top.spines["left"].set_visible(False)
    for row, grid in enumerate(grids.values()):
        rows.hlines(row, -largest, largest, color=MUTED, linewidth=0.5)
        rows.vlines(list(grid), row - 0.32, row + 0.32, color=PALETTE[0], linewidth=1.4)
    name_rows(rows, list(grids), axis=False)
    rows.set(xlim=(-1.03 * largest, 1.03 * largest), ylim=(len(grids) - 0.4, -0.6), xlabel=xlabel)

    def said(grid: Sequence[float]) -> str:
        inside = np.asarray(sorted(grid))
        used = np.unique(np.abs(values[:, None] - inside[None]).argmin(axis=1)).size
        return f"{len(grid)} values from {inside[0]:.3g} to {inside[-1]:.3g}, {used} of them nearest to some weight"

    spread = (
        f"{values.size} weights from {values.min():.2g} to {values.max():.2g}, standard deviation {values.std():.2g}"
    )
    picture.alt = f"{spread}. " + " ".join(f"{name}: {said(grid)}." for name, grid in grids.items())
    return picture
