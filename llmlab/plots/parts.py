"""What the peak consists of: one stacked bar a report."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..base.errors import SpecError
from ..base.terms import PARTS
from ..base.units import show_bytes
from .canvas import (
    COLORS,
    INK,
    PANEL,
    SMALL,
    Picture,
    bar,
    ink_on,
    key,
    legend,
    new_picture,
    short_names,
    styled,
    unit_of,
)
from .reads import Report


@styled
def plot_parts(reports: Sequence[Report], names: Sequence[str] | None = None) -> Picture:
    """Return one stacked bar of parts a report, with the peak at its end and the device's memory as a line.

    `names` label the bars; without them, source and first difference do.
    What is not divided into parts stays white; a report without a peak gives a row that says so. What the allocator
    reserved beyond the peak is hatched. An empty `reports` raises SpecError.
    """
    if not reports:
        raise SpecError("plot_parts got no reports; give at least one, for example [lab.estimate('gpt2', run, 'T4')]")
    bars = [max([sum(r.parts.values()), r.peak_allocated or 0, r.peak_reserved or 0]) for r in reports]
    largest = max(bars)
    unit, unit_name = unit_of(largest)
    capacities = [r.capacity for r in reports]
    # A device many times larger than the run would flatten the bars: it is named at the edge instead.
    drawn = [c for c in capacities if c is not None and c <= 4 * max(largest, 1)]
    limit = 1.25 * max([largest, *drawn, 1]) / unit

    picture, ax = new_picture(1.5 + 0.62 * len(reports))
    ax.set_xlim(0, limit)
    ax.set_ylim(len(reports) - 0.45, -0.65)
    segments: list[tuple[Rectangle, str, str]] = []  # the patch, its part, its text
    for row, report in enumerate(reports):
        left = 0.0
        for part in PARTS:
            if size := report.parts.get(part, 0):
                patch = bar(ax, row, left, size / unit, COLORS[part])
                segments.append((patch, part, f"{part}\n{size / unit:,.2f}"))
                left += size / unit
        if (rest := (report.peak_allocated or 0) / unit - left) > 1e-9:  # a record may know some parts, or none
            segments.append((bar(ax, row, left, rest, PANEL), "not divided", "parts not known"))
            left += rest
        if report.peak_reserved and report.peak_reserved / unit > left:
            bar(ax, row, left, report.peak_reserved / unit - left, PANEL, hatch="////")
        end = max(left, (report.peak_reserved or 0) / unit)
        peak = report.peak_allocated
        total = "peak not known" if peak is None else f"{peak / unit:,.2f} {unit_name}"
        if report.peak_reserved is not None:
            total += f"\nreserved {report.peak_reserved / unit:,.2f}"
        if report.outcome == "out of memory":
            total += "\nout of memory"
        box = {"facecolor": PANEL, "edgecolor": "none", "pad": 1}
        ax.text(end + limit * 0.012, row, total, va="center", weight="bold", size=SMALL, bbox=box, zorder=4)
        _capacity(ax, report, row, limit, unit, named=row == 0 or capacities[row] != capacities[row - 1])
    ax.set_yticks(range(len(reports)), _row_names(reports) if names is None else names)
    ax.set_xlabel(f"memory ({unit_name})")
    ax.tick_params(axis="y", length=0)
    same = [values.pop() for values in ({r.model for r in reports}, {r.gpu for r in reports}) if len(values) == 1]
    ax.set_title(" on ".join(name for name in same if name), loc="left", weight="bold")

    used = [part for part in PARTS if any(part == used for _, used, _ in segments)]
    handles = [key(part, COLORS[part]) for part in used]
    if any((r.peak_reserved or 0) > (r.peak_allocated or sum(r.parts.values())) for r in reports):
        handles.append(key("reserved, not allocated", PANEL, hatch="////"))
    legend(picture, handles)
    _write_inside(picture, ax, segments)
    picture.alt = "Stacked bars of memory by part. " + " ".join(_say(report) for report in reports)
    return picture


def _capacity_name(report: Report) -> str:
    return f"{report.gpu or 'device'} has {show_bytes(report.capacity)}"


def _capacity(ax: Axes, report: Report, row: int, limit: float, unit: int, named: bool) -> None:
    if report.capacity is None:
        return
    x = report.capacity / unit
    inside = x <= limit
    if inside:
        ax.plot([x, x], [row - 0.48, row + 0.48], color=INK, linestyle="--", linewidth=1.6, zorder=3)
    if named:
        name = _capacity_name(report) + ("" if inside else " →")
        side = "right" if not inside or x > 0.6 * limit else "left"
        at = x + (0.006 if side == "left" else -0.006) * limit if inside else limit
        ax.text(at, row - 0.42, name, ha=side, va="bottom", size=SMALL, zorder=4)


def _row_names(reports: Sequence[Report]) -> list[str]:
    """Name each row by its source and by what else differs between the rows."""
    lines: list[list[str]] = [[r.source] for r in reports]
    if len({r.gpu for r in reports}) > 1:
        lines = [[*line, r.gpu or "this machine"] for line, r in zip(lines, reports, strict=True)]
    if len({r.model for r in reports}) > 1:
        short = short_names([r.model for r in reports])
        lines = [[*line, short[r.model]] for line, r in zip(lines, reports, strict=True)]
    shown = [r.run.to_dict() for r in reports]
    differing = [key for key in shown[0] if any(run.get(key) != shown[0][key] for run in shown)]
    for line, run in zip(lines, shown, strict=True):
        line += [f"{key} {run[key]}" for key in differing[:1] if key in run]
    return ["\n".join(line) for line in lines]


def _write_inside(picture: Figure, ax: Axes, segments: Sequence[tuple[Rectangle, str, str]]) -> None:
    """Write each segment's text into it where it fits; the legend names the rest."""
    picture.draw_without_rendering()  # the layout decides how wide a segment is
    for patch, part, words in segments:
        color = ink_on(patch.get_facecolor(), dark="#000000")
        x, y = patch.get_x() + patch.get_width() / 2, patch.get_y() + patch.get_height() / 2
        text = ax.text(x, y, words, color=color, ha="center", va="center", size=SMALL, zorder=3)
        text.set_in_layout(False)
        text.set_gid(part)
        room = patch.get_window_extent().width - 6
        if text.get_window_extent().width > room:
            text.set_text(words.splitlines()[-1] if part in COLORS else "")
            if text.get_window_extent().width > room:
                text.remove()


def _say(report: Report) -> str:
    parts = ", ".join(f"{part} {show_bytes(size)}" for part in PARTS if (size := report.parts.get(part, 0)))
    peak = "not known" if report.peak_allocated is None else show_bytes(report.peak_allocated)
    device = "" if report.capacity is None else f", of {show_bytes(report.capacity)} on the device"
    return f"{report.title}: peak {peak}{device}{': ' if parts else ''}{parts}; {report.outcome}."
