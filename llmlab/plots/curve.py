"""One quantity against another: lines, each named at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import FixedLocator, NullLocator

from ..base.errors import SpecError
from .canvas import COLORS, INK, PANEL, SMALL, Picture, contrast, new_picture, number_axes, spread, styled

LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")  # by contrast as a line
MARKERS = "osD^vPX"
DASHES = ("-", (0, (5, 2)), (0, (2, 1)), (0, (7, 2, 2, 2)), (0, (1, 1)), (0, (9, 3)), (0, (3, 3)))  # lower lines show


@styled()
def plot_curve(
    x: Sequence[float], series: Mapping[str, Sequence[float | None]], xlabel: str, ylabel: str, log: bool = False
) -> Picture:
    """Return one line per series over `x`, each named at its end; `log` makes both axes logarithmic.

    `ylabel` and `xlabel` carry the unit, for example "activations (GiB)". A series named as a part of a report takes
    the part's colour. None in a series is a gap. Lengths that differ, more than seven series, an empty label, and
    values <= 0 with `log` raise SpecError.
    """
    _check_curve(x, series, xlabel, ylabel, log)
    picture, (ax,) = new_picture(3.6)
    if log:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
    free = iter(color for color in LINES if color not in {COLORS.get(name) for name in series})
    last_points: list[tuple[str, float, float]] = []
    for i, (name, values) in enumerate(series.items()):
        color = COLORS.get(name) or next(free)
        y = [math.nan if v is None else float(v) for v in values]
        outline = [Stroke(linewidth=3.4, foreground=INK), Normal()] if contrast(color, PANEL) < 3 else []
        ax.plot(
            x, y, color=color, linewidth=2.2, linestyle=DASHES[i], marker=MARKERS[i], markersize=6, markeredgecolor=INK,
            path_effects=outline,
        )  # fmt: skip
        known = [(a, b) for a, b in zip(x, y, strict=True) if not math.isnan(b)]
        if known:
            last_points.append((name, *known[-1]))
    if not log:
        ax.set_ylim(bottom=min(0, *(b for values in series.values() for b in values if b is not None)))
    if len(x) <= 8 and log:
        ax.xaxis.set_major_locator(FixedLocator(list(x)))
        ax.xaxis.set_minor_locator(NullLocator())
    number_axes(ax, xlabel, ylabel)
    _name_ends(picture, ax, last_points)
    picture.alt = f"{ylabel} against {xlabel}. " + " ".join(
        f"{name}: " + ", ".join(f"{b:.4g} at {a:g}" for a, b in _few(list(zip(x, values, strict=True)))) + "."
        for name, values in series.items()
    )
    return picture


def _name_ends(picture: Figure, ax: Axes, last_points: Sequence[tuple[str, float, float]]) -> None:
    """Write each series' name right of its last point, moved apart where names would overlap."""
    right = ax.get_yaxis_transform()
    texts = [
        ax.annotate(name, (1, y), xycoords=right, xytext=(8, 0), textcoords="offset points", va="center", size=SMALL)
        for name, _, y in last_points
    ]
    picture.draw_without_rendering()
    bottom, top = ax.get_window_extent().y0, ax.get_window_extent().y1
    per_point = picture.dpi / 72
    order = sorted(range(len(last_points)), key=lambda i: last_points[i][2])
    wanted = [ax.transData.transform((last_points[i][1], last_points[i][2]))[1] for i in order]
    places = spread(wanted, [SMALL * 1.3 * per_point] * len(order), bottom, top)
    for i, want, place in zip(order, wanted, places, strict=True):
        texts[i].set_position((8, (place - want) / per_point))


def _few(points: list[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """Return the first, middle and last known point."""
    known = [(a, b) for a, b in points if b is not None]
    return known if len(known) <= 3 else [known[0], known[len(known) // 2], known[-1]]


def _check_curve(
    x: Sequence[float], series: Mapping[str, Sequence[float | None]], xlabel: str, ylabel: str, log: bool
) -> None:
    if not xlabel or not ylabel:
        raise SpecError(f"xlabel={xlabel!r}, ylabel={ylabel!r}: name both axes, with units, as in 'activations (GiB)'")
    if not x or not series or len(series) > len(LINES):
        raise SpecError(f"{len(series)} series over {len(x)} points; give 1 to {len(LINES)} series, and a point")
    for name, values in series.items():
        if len(values) != len(x):
            raise SpecError(f"series {name!r} has {len(values)} values for {len(x)} points of x; give one for each")
        if log and any(v is not None and v <= 0 for v in [*x, *values]):
            raise SpecError(
                f"series {name!r} or x has a value <= 0, which a logarithmic axis cannot show; use log=False"
            )
