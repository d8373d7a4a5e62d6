"""One quantity against another: lines named at their ends, and points, with lines through those of one method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from ..base.errors import SpecError
from .canvas import COLORS, INK, MUTED, PANEL, SMALL, Picture, contrast, new_picture, number_axes, spread, styled

LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")  # by contrast as a line
MARKERS = "osD^vPX"
DASHES = ("-", (0, (5, 2)), (0, (2, 1)), (0, (7, 2, 2, 2)), (0, (1, 1)), (0, (9, 3)), (0, (3, 3)))  # lower lines show

Points = Sequence[tuple[float, float]]


@styled
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
    ends: list[tuple[str, float, float]] = []
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
            ends.append((name, *known[-1]))
    if not log:
        ax.set_ylim(bottom=min(0, *(b for values in series.values() for b in values if b is not None)))
    if len(x) <= 8 and log:
        ax.xaxis.set_major_locator(FixedLocator(list(x)))
        ax.xaxis.set_minor_locator(NullLocator())
    number_axes(ax, xlabel, ylabel)
    _name_ends(picture, ax, ends)
    picture.alt = f"{ylabel} against {xlabel}. " + " ".join(
        f"{name}: " + ", ".join(f"{b:.4g} at {a:g}" for a, b in _few(list(zip(x, values, strict=True)))) + "."
        for name, values in series.items()
    )
    return picture


def _name_ends(picture: Figure, ax: Axes, ends: Sequence[tuple[str, float, float]]) -> None:
    """Write each series' name right of its last point, moved apart where names would overlap."""
    right = ax.get_yaxis_transform()
    texts = [
        ax.annotate(name, (1, y), xycoords=right, xytext=(8, 0), textcoords="offset points", va="center", size=SMALL)
        for name, _, y in ends
    ]
    picture.draw_without_rendering()
    bottom, top = ax.get_window_extent().y0, ax.get_window_extent().y1
    per_point = picture.dpi / 72
    order = sorted(range(len(ends)), key=lambda i: ends[i][2])
    wanted = [ax.transData.transform((ends[i][1], ends[i][2]))[1] for i in order]
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


@styled
def plot_tradeoff(
    lines: Mapping[str, Points],
    singles: Mapping[str, tuple[float, float]],
    xlabel: str,
    ylabel: str,
    baseline: tuple[str, float] | None = None,
    top: float | None = None,
) -> Picture:
    """Return (x, y) points: one line per method, and `singles`, stars named above them, in their order from the top.

    The y axis does not begin at 0, and is logarithmic where the values differ by more than three times.
    `baseline` is a named horizontal line. Points above `top` are drawn at it. Both labels carry the unit. No
    points, more than seven lines, an empty label and y <= 0 raise SpecError.
    """
    everything = [point for points in lines.values() for point in points] + list(singles.values())
    if not everything or len(lines) > len(LINES) or not xlabel or not ylabel:
        given = f"{len(everything)} points in {len(lines)} lines, labels {xlabel!r} and {ylabel!r}"
        raise SpecError(f"{given}; give points, at most {len(LINES)} lines, and a name for both axes")
    if any(y <= 0 for _, y in everything):
        raise SpecError("a point has y <= 0, which a logarithmic axis cannot show")
    picture, (ax,) = new_picture(4.6)
    heights = [min(y, top or y) for _, y in everything] + ([baseline[1]] if baseline else [])
    _scale(ax, min(heights), max(heights))
    top = top or max(heights)
    if baseline:
        ax.axhline(baseline[1], color=MUTED, linewidth=1.2, linestyle="--", zorder=1)
        right = max(x for x, _ in everything)
        ax.annotate(baseline[0], (right, baseline[1]), (0, -4), textcoords="offset points", ha="right", va="top",
                    size=SMALL, color=MUTED)  # fmt: skip
    for i, (name, points) in enumerate(lines.items()):
        ordered = sorted(points)
        shown = [min(y, top) for _, y in ordered]
        ax.plot([x for x, _ in ordered], shown, color=LINES[i], linestyle=DASHES[i], marker=MARKERS[i], markersize=6,
                linewidth=2, markeredgecolor=INK, label=name, zorder=3, clip_on=False)  # fmt: skip
    _draw_singles(ax, singles, top)
    number_axes(ax, xlabel, ylabel, "both")
    low, high = ax.get_ylim()
    ax.yaxis.set_minor_formatter(ax.yaxis.get_major_formatter() if high / low < 8 else NullFormatter())
    if lines:
        picture.legend(loc="outside lower center", ncols=min(4, len(lines)), handlelength=2.6)
    said = [f"{baseline[0]} {baseline[1]:.4g}."] if baseline else []
    said += [f"{name}: " + ", ".join(f"{y:.4g} at {x:.3g}" for x, y in sorted(points)) + "."
             for name, points in {**lines, **{name: [point] for name, point in singles.items()}}.items()]  # fmt: skip
    picture.alt = f"{ylabel} against {xlabel}. " + " ".join(said)
    return picture


def _draw_singles(ax: Axes, singles: Mapping[str, tuple[float, float]], top: float) -> None:
    """Draw a star for each point, and above those close together their names in one stack."""
    for name, (x, y) in singles.items():
        ax.plot([x], [min(y, top)], "*", color=INK, markersize=9, zorder=4, label=f"_{name}")
    for names in neighbours(singles):
        middle = sum(singles[name][0] for name in names) / len(names)
        ax.annotate("\n".join(names), (middle, min(singles[names[0]][1], top)), (0, 9), textcoords="offset points",
                    size=SMALL, ha="center", va="bottom", zorder=4)  # fmt: skip


def _scale(ax: Axes, low: float, high: float) -> None:
    """Let the y axis hold `low` to `high` with some room, in powers where they are far apart."""
    if high > 3 * low:
        ax.set_yscale("log")
        ax.set_ylim(low / (high / low) ** 0.08, high * (high / low) ** 0.05)
    else:
        margin = (high - low) or 0.1 * high
        ax.set_ylim(low - 0.12 * margin, high + 0.06 * margin)


def neighbours(singles: Mapping[str, tuple[float, float]], apart: float = 0.45) -> list[list[str]]:
    """Return the names of points whose x lie within `apart` of the one before, the highest of each group first."""
    groups: list[list[str]] = []
    last = None
    for name in sorted(singles, key=lambda name: singles[name][0]):
        x = singles[name][0]
        if last is None or x - last > apart:
            groups.append([])
        groups[-1].append(name)
        last = x
    return [sorted(group, key=lambda name: -singles[name][1]) for group in groups]
