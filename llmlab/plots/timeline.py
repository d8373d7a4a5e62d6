"""How the peak arises: live bytes over the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ..base.errors import SpecError
from ..base.terms import PARTS, TimelinePoint
from ..base.units import show_bytes, unit_of
from .canvas import COLORS, INK, PANEL, SMALL, Picture, legend, new_picture, spread, styled
from .reads import Report

POINTS = 3000  # of a timeline that are drawn; more than twice the pixels across


@styled()
def plot_timeline(report: Report) -> Picture:
    """Return the live bytes over the step, stacked by part, with the phases' boundaries and the peak marked.

    The horizontal axis counts the timeline's points, not seconds. A report without a timeline raises SpecError.
    """
    if not report.timeline:
        raise SpecError(
            f"this {report.source} report of {report.model} has no timeline; "
            "formulas have none, lab.measure(model, run) records one"
        )
    return plot_live_bytes(report.timeline, report.title, report.capacity, report.peak_at)


@styled()
def plot_live_bytes(
    timeline: Sequence[TimelinePoint], title: str, capacity: int | None = None, peak_at: str | None = None
) -> Picture:
    """Return the picture of plot_timeline for the points of any timeline; `peak_at` says what made the peak.

    `capacity` is the device's memory in bytes. No points at all raise SpecError.
    """
    if not timeline:
        raise SpecError(f"the timeline of {title} is empty: nothing was allocated; plot it after a step")
    points = _thin(timeline)
    totals = [sum(sizes.values()) for _, sizes in points]
    peak = max(totals)
    at = totals.index(peak)
    unit, unit_name = unit_of(peak)
    used = [part for part in PARTS if any(sizes.get(part, 0) for _, sizes in points)]

    picture, (ax,) = new_picture(3.9)
    x = [i for i, _ in enumerate(points)]
    layers = [[sizes.get(part, 0) / unit for _, sizes in points] for part in used]
    edges = [*x, len(points)]  # each point lasts until the next one, the last as long as the others
    ax.stackplot(
        edges, [[*layer, layer[-1]] for layer in layers], colors=[COLORS[part] for part in used], step="post",
        edgecolor=INK, linewidth=0.3,
    )  # fmt: skip
    ax.set(xlim=(0, len(points)), ylim=(0, max(peak / unit * 1.3, 1e-9)))
    if capacity is not None and capacity / unit < ax.get_ylim()[1]:
        ax.axhline(capacity / unit, color=INK, linestyle="--", linewidth=1.4)
        ax.text(len(points), capacity / unit, f"device {show_bytes(capacity)}", ha="right", va="bottom", size=SMALL)
    label = f"peak {show_bytes(peak)} in {points[at][0]}" + (f"\n{peak_at}" if peak_at else "")
    ax.plot([at + 0.5], [peak / unit], marker="v", color=INK, markersize=8, linestyle="none", zorder=5)
    box = {"facecolor": PANEL, "edgecolor": "none", "pad": 1}
    side = "left" if at < 0.5 * len(points) else "right"
    ax.annotate(label, (at + 0.5, peak / unit), (0, 9), textcoords="offset points", ha=side, va="bottom", weight="bold",
                bbox=box, zorder=5)  # fmt: skip
    ax.set(xlabel="moment in the step (order of events)", ylabel=f"live tensors ({unit_name})")
    ax.set_title(title, loc="left", weight="bold", pad=22)
    if len(points) < len(timeline):
        step = len(timeline) / len(points)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v * step:,.0f}"))
    legend(picture, {part: COLORS[part] for part in reversed(used)})
    _name_phases(picture, ax, [phase for phase, _ in points])

    phases = [phase for phase, _ in groupby(phase for phase, _ in timeline)]
    parts = ", ".join(f"{part} {show_bytes(size)}" for part in PARTS if (size := points[at][1].get(part, 0)))
    picture.alt = (
        f"Live bytes by part over the step of {title}: {' then '.join(phases[:12])}. "
        f"The peak, {show_bytes(peak)}, is in {points[at][0]}{f', at {peak_at}' if peak_at else ''}: {parts}."
    )
    return picture


def _name_phases(picture: Figure, ax: Axes, phases: Sequence[str]) -> None:
    """Mark where each phase begins and write its name above its longest span."""
    spans: dict[str, tuple[int, int]] = {}
    start = 0
    for phase, group in groupby(phases):
        length = len(list(group))
        if start:
            ax.axvline(start, color=INK, linewidth=0.8, linestyle=":")
        if length > spans.get(phase, (0, 0))[1]:
            spans[phase] = (start, length)
        start += length
    names = sorted(spans, key=lambda phase: spans[phase][0])
    texts = [
        ax.text(spans[p][0] + spans[p][1] / 2, 1.02, p, transform=ax.get_xaxis_transform(), ha="center", size=SMALL)
        for p in names
    ]
    for text in texts:
        text.set_in_layout(False)
    picture.draw_without_rendering()
    per_pixel = len(phases) / ax.get_window_extent().width
    widths = [text.get_window_extent().width * per_pixel for text in texts]
    places = spread([text.get_position()[0] for text in texts], [w * 1.15 for w in widths], 0, len(phases))
    for text, place in zip(texts, places, strict=True):
        text.set_x(place)


def _thin(timeline: Sequence[tuple[str, Mapping[str, int]]]) -> Sequence[tuple[str, Mapping[str, int]]]:
    """Return at most about POINTS of the timeline: of each run of neighbours in one phase, the one with most bytes."""
    if len(timeline) <= POINTS:
        return timeline
    width = math.ceil(len(timeline) / POINTS)
    groups = groupby(enumerate(timeline), key=lambda item: (item[0] // width, item[1][0]))
    return [max((point for _, point in group), key=lambda point: sum(point[1].values())) for _, group in groups]
