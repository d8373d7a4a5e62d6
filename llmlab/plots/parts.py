"""What the peak consists of: one stacked bar per report."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..base.errors import SpecError
from ..base.terms import PARTS
from ..base.units import show_bytes, unit_of
from .canvas import COLORS, INK, PANEL, SMALL, Picture, bar, ink_on, legend, name_rows, new_picture, short_names, styled
from .reads import Report

RESERVED = "////"  # the hatch of what the allocator reserved beyond the peak


# One piece of a bar, the part it stands for, and the text that is written into it where it fits.
Segment = tuple[Rectangle, str, str]


@styled()
def plot_parts(reports: Sequence[Report], names: Sequence[str] | None = None) -> Picture:
    """Return one stacked bar of parts per report, with the peak at its end and the device's memory as a line.

    `names` label the bars; without them, source and first difference do.
    What is not divided into parts stays white; a report without a peak gives a row that says so. What the allocator
    reserved beyond the peak is hatched. An empty `reports` raises SpecError.
    """
    if not reports:
        raise SpecError("plot_parts got no reports; give at least one, for example [lab.estimate('gpt2', run, 'T4')]")
    largest = max(map(_extent, reports))
    unit, unit_name = unit_of(largest)
    # A device many times larger than the run would flatten the bars: it is named at the edge instead.
    near = [r.capacity for r in reports if r.capacity is not None and r.capacity <= 4 * max(largest, 1)]
    right = 1.25 * max([largest, *near, 1]) / unit
    picture, (ax,) = new_picture(1.5 + 0.62 * len(reports))
    ax.set(xlim=(0, right), ylim=(len(reports) - 0.45, -0.65), xlabel=f"memory ({unit_name})")
    segments: list[Segment] = []
    for row, report in enumerate(reports):
        segments += _draw_bar(ax, row, report, unit)
        box = {"facecolor": PANEL, "edgecolor": "none", "pad": 1}
        words = _peak_in_words(report, unit, unit_name)
        x = _extent(report) / unit + right * 0.012
        ax.text(x, row, words, va="center", weight="bold", size=SMALL, bbox=box, zorder=4)
        if report.capacity is not None:
            new_capacity = row == 0 or report.capacity != reports[row - 1].capacity
            name = f"{report.gpu or 'device'} has {show_bytes(report.capacity)}" if new_capacity else ""
            _mark_capacity(ax, row, report.capacity / unit, name)
    name_rows(ax, _row_names(reports) if names is None else names)
    ax.set_title(_title(reports), loc="left", weight="bold")
    _draw_legend(picture, reports)
    _write_sizes(picture, ax, segments)
    picture.alt = "Stacked bars of memory by part. " + " ".join(map(_in_words, reports))
    return picture


def _extent(report: Report) -> int:
    """Return the bytes at which the report's bar ends."""
    return max(sum(report.parts.values()), report.peak_allocated or 0, report.peak_reserved or 0)


def _draw_bar(ax: Axes, row: int, report: Report, unit: int) -> list[Segment]:
    """Draw the parts, what is not divided, and what is reserved beyond the peak; return those that have a name."""
    segments: list[Segment] = []
    left = 0.0
    for part in PARTS:
        if size := report.parts.get(part, 0) / unit:
            segments.append((bar(ax, row, left, size, COLORS[part]), part, f"{part}\n{size:,.2f}"))
            left += size
    if (rest := (report.peak_allocated or 0) / unit - left) > 1e-9:  # a record may know some parts, or none
        segments.append((bar(ax, row, left, rest, PANEL), "not divided", "parts not known"))
        left += rest
    if (reserved := (report.peak_reserved or 0) / unit) > left:
        bar(ax, row, left, reserved - left, PANEL, hatch=RESERVED)
    return segments


def _peak_in_words(report: Report, unit: int, unit_name: str) -> str:
    """Return the peak, what is reserved, and that memory ran out, a line each."""
    peak = report.peak_allocated
    lines = ["peak not known" if peak is None else f"{peak / unit:,.2f} {unit_name}"]
    if report.peak_reserved is not None:
        lines.append(f"reserved {report.peak_reserved / unit:,.2f}")
    if report.outcome == "out of memory":
        lines.append("out of memory")
    return "\n".join(lines)


def _mark_capacity(ax: Axes, row: int, x: float, name: str) -> None:
    """Draw the device's memory, at x, as a line across the row, with its name, and an arrow where it is outside."""
    right = ax.get_xlim()[1]
    inside = x <= right
    if inside:
        ax.plot([x, x], [row - 0.48, row + 0.48], color=INK, linestyle="--", linewidth=1.6, zorder=3)
    if name:
        side = "right" if not inside or x > 0.6 * right else "left"
        at = x + (0.006 if side == "left" else -0.006) * right if inside else right
        ax.text(at, row - 0.42, name + ("" if inside else " →"), ha=side, va="bottom", size=SMALL, zorder=4)


def _title(reports: Sequence[Report]) -> str:
    """Return the model and the GPU, each where it is the same in all reports."""
    same = [values.pop() for values in ({r.model for r in reports}, {r.gpu for r in reports}) if len(values) == 1]
    return " on ".join(name for name in same if name)


def _row_names(reports: Sequence[Report]) -> list[str]:
    """Name each row by its source and by what else differs between the rows."""
    short = short_names([r.model for r in reports])
    runs = [r.run.to_dict() for r in reports]
    differing = [field for field in runs[0] if any(run.get(field) != runs[0][field] for run in runs)][:1]
    names = []
    for report, run in zip(reports, runs, strict=True):
        lines = [report.source]
        if len({r.gpu for r in reports}) > 1:
            lines.append(report.gpu or "this machine")
        if len(set(short)) > 1:
            lines.append(short[report.model])
        names.append("\n".join([*lines, *(f"{field} {run[field]}" for field in differing if field in run)]))
    return names


def _draw_legend(picture: Figure, reports: Sequence[Report]) -> None:
    colors = {part: COLORS[part] for part in PARTS if any(r.parts.get(part) for r in reports)}
    if any((r.peak_reserved or 0) > (r.peak_allocated or sum(r.parts.values())) for r in reports):
        colors["reserved, not allocated"] = PANEL
    legend(picture, colors, hatched={"reserved, not allocated": RESERVED})


def _write_sizes(picture: Figure, ax: Axes, segments: Sequence[Segment]) -> None:
    """Write each segment's text into it, or the size alone, where it fits; the legend names the rest."""
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


def _in_words(report: Report) -> str:
    parts = ", ".join(f"{part} {show_bytes(size)}" for part in PARTS if (size := report.parts.get(part, 0)))
    peak = "not known" if report.peak_allocated is None else show_bytes(report.peak_allocated)
    device = "" if report.capacity is None else f", of {show_bytes(report.capacity)} on the device"
    return f"{report.title}: peak {peak}{device}{': ' if parts else ''}{parts}; {report.outcome}."
