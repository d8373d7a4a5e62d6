"""Several ways of doing the same, side by side: a row for each task, a mark for each way."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..base.errors import SpecError
from .canvas import FAINT, INK, MUTED, PALETTE, SMALL, Picture, name_rows, new_picture, styled

MARKS = tuple(zip("osD^v", (PALETTE[3], PALETTE[1], PALETTE[4], PALETTE[2], PALETTE[0]), strict=True))


@styled
def plot_ladder(rows: Mapping[str, Mapping[str, float]], xlabel: str) -> Picture:
    """Return a row for each task of `rows`, on it a mark at the value of each way, on a logarithmic axis.

    `xlabel` carries the unit. The first way and the last are written out. No row, more than five ways, ways that differ
    between rows, and values <= 0 raise SpecError.
    """
    ways = list(next(iter(rows.values()), {}))
    if not ways or len(ways) > len(MARKS) or any(list(values) != ways for values in rows.values()):
        raise SpecError(f"{len(rows)} rows of {ways}; give each row the same 1 to {len(MARKS)} ways, in the same order")
    if any(value <= 0 for values in rows.values() for value in values.values()):
        raise SpecError("a value <= 0 cannot be on a logarithmic axis; leave the row out")
    picture, (ax,) = new_picture(1.3 + 0.42 * len(rows))
    for at, values in enumerate(rows.values()):
        known = list(values.values())
        ax.plot([min(known), max(known)], [at, at], color=MUTED, lw=1, zorder=1)
        for (marker, color), value in zip(MARKS, known, strict=False):
            ax.plot(value, at, marker, color=color, markersize=8, markeredgecolor=INK, markeredgewidth=0.6, zorder=2)
        for value in {known[0], known[-1]}:
            ax.annotate(f"{value:.3g}", (value, at), (0, 7), textcoords="offset points", ha="center", size=SMALL)
    ax.set_xscale("log", base=2)
    everything = [value for values in rows.values() for value in values.values()]
    low, high = min(everything) / 1.4, max(everything) * 1.4
    ax.set_xlim(low, high)
    ax.xaxis.set_major_locator(FixedLocator([2**n for n in range(-10, 31) if low <= 2**n <= high]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    name_rows(ax, list(rows))
    ax.grid(axis="x", color=FAINT, linewidth=0.6)
    ax.set(ylim=(len(rows) - 0.5, -0.7), xlabel=xlabel, axisbelow=True)
    handles = [
        ax.plot([], [], marker, color=color, markersize=8, markeredgecolor=INK, markeredgewidth=0.6, label=way)[0]
        for (marker, color), way in zip(MARKS, ways, strict=False)
    ]
    picture.legend(handles=handles, loc="outside lower center", ncols=min(3, len(ways)), handletextpad=0.3)
    said = {name: ", ".join(f"{way} {value:.3g}" for way, value in values.items()) for name, values in rows.items()}
    picture.alt = f"{xlabel}. " + ". ".join(f"{name}: {text}" for name, text in said.items()) + "."
    return picture
