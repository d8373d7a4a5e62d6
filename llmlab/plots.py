"""Pictures of reports: what the peak consists of, how it comes about over the step, and what fits where.

Figures are made without pyplot, so nothing is left open and no display is needed. They look the same on a light and on
a dark page: an opaque light panel, dark text (contrast >= 4.5:1, WCAG 2.1 SC 1.4.3), Okabe and Ito's colour-blind-safe
palette (https://jfly.uni-koeln.de/color/), and one colour a part, everywhere. Each figure says in words what it shows
(`alt`); that text is its repr, so a notebook's stored output keeps the numbers of the picture.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from io import BytesIO
from itertools import groupby
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .errors import SpecError
from .report import PARTS, Report, TimelinePoint
from .units import GiB, MiB, show_bytes

PANEL, INK, MUTED = "#FBFBF8", "#1F2328", "#57606A"
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#CCCCCC")
COLORS = dict(zip(PARTS, PALETTE, strict=True))
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")  # by contrast as a line
MARKERS = "osD^vPX"
DASHES = ("-", (0, (5, 2)), (0, (2, 1)), (0, (7, 2, 2, 2)), (0, (1, 1)), (0, (9, 3)), (0, (3, 3)))  # lower lines show
FITS = {"fits": ("#BFE0F2", "fits"), "out of memory": ("#F6C9A8", "no"), "unknown": ("#E6E6E3", "unknown")}

WIDTH = 7.0  # inches: half the pixels of a laptop page, all of a phone held sideways
FONT = 10.0  # points; nothing on a figure is smaller than 9
SMALL = 9.0
DPI = 150  # of the PNG, which is shown at 100 pixels an inch: sharp on a phone, and small in a committed notebook
POINTS = 3000  # of a timeline that are drawn; more than twice the pixels across

_STYLE = {
    "font.family": "DejaVu Sans", "font.size": FONT, "axes.titlesize": FONT, "axes.labelsize": FONT,
    "xtick.labelsize": SMALL, "ytick.labelsize": SMALL, "legend.fontsize": SMALL,
    "figure.facecolor": PANEL, "savefig.facecolor": PANEL, "axes.facecolor": PANEL, "legend.facecolor": PANEL,
    "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "legend.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.edgecolor": MUTED,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": False, "axes.unicode_minus": True,
    "legend.frameon": False, "hatch.color": MUTED, "hatch.linewidth": 0.6, "text.usetex": False,
}  # fmt: skip


class _Picture(Figure):
    """A Figure that shows itself once in any notebook, with or without `%matplotlib inline`; `alt` is it in words."""

    alt: str = ""

    def __repr__(self) -> str:
        return self.alt or super().__repr__()

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
        out = BytesIO()
        with rc_context(_STYLE):
            # No version in the file: the same picture is the same bytes.
            self.savefig(out, format="png", dpi=DPI, metadata={"Software": None}, pil_kwargs={"optimize": True})
        png = {"alt": self.alt, "width": round(self.get_size_inches()[0] * 100)}
        return {"image/png": b64encode(out.getvalue()).decode(), "text/plain": repr(self)}, {"image/png": png}


def _styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Run `draw` under this module's style, whatever style the reader has set."""

    @wraps(draw)
    def inner(*args: Any, **kwargs: Any) -> Figure:
        with rc_context(_STYLE):
            return draw(*args, **kwargs)

    return inner


@_styled
def plot_parts(reports: Sequence[Report], names: Sequence[str] | None = None) -> Figure:
    """Return one stacked bar of parts a report, with the peak at its end and the device's memory as a line.

    `names` label the bars; without them, source and first difference do.
    What is not divided into parts stays white; a report without a peak gives a row that says so. What the allocator
    reserved beyond the peak is hatched. An empty `reports` raises SpecError.
    """
    if not reports:
        raise SpecError("plot_parts got no reports; give at least one, for example [lab.estimate('gpt2', run, 'T4')]")
    bars = [max([sum(r.parts.values()), r.peak_allocated or 0, r.peak_reserved or 0]) for r in reports]
    largest = max(bars)
    unit, unit_name = _unit(largest)
    capacities = [r.capacity for r in reports]
    # A device many times larger than the run would flatten the bars: it is named at the edge instead.
    drawn = [c for c in capacities if c is not None and c <= 4 * max(largest, 1)]
    limit = 1.25 * max([largest, *drawn, 1]) / unit

    picture, ax = _picture(1.5 + 0.62 * len(reports))
    ax.set_xlim(0, limit)
    ax.set_ylim(len(reports) - 0.45, -0.65)
    segments: list[tuple[Rectangle, str, str]] = []  # the patch, its part, its text
    for row, report in enumerate(reports):
        left = 0.0
        for part in PARTS:
            if size := report.parts.get(part, 0):
                patch = _bar(ax, row, left, size / unit, COLORS[part])
                segments.append((patch, part, f"{part}\n{size / unit:,.2f}"))
                left += size / unit
        if (rest := (report.peak_allocated or 0) / unit - left) > 1e-9:  # a record may know some parts, or none
            segments.append((_bar(ax, row, left, rest, PANEL), "not divided", "parts not known"))
            left += rest
        if report.peak_reserved and report.peak_reserved / unit > left:
            _bar(ax, row, left, report.peak_reserved / unit - left, PANEL, hatch="////")
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
    handles = [_key(part, COLORS[part]) for part in used]
    if any((r.peak_reserved or 0) > (r.peak_allocated or sum(r.parts.values())) for r in reports):
        handles.append(_key("reserved, not allocated", PANEL, hatch="////"))
    _legend(picture, handles)
    _write_inside(picture, segments)
    picture.alt = "Stacked bars of memory by part. " + " ".join(_say(report) for report in reports)
    return picture


@_styled
def plot_timeline(report: Report) -> Figure:
    """Return the live bytes over the step, stacked by part, with the phases' boundaries and the peak marked.

    The horizontal axis counts the timeline's points, not seconds. A report without a timeline raises SpecError.
    """
    if not report.timeline:
        raise SpecError(
            f"this {report.source} report of {report.model} has no timeline; "
            "formulas have none, lab.measure(model, run) records one"
        )
    return plot_live_bytes(report.timeline, report.title, report.capacity, report.peak_at)


@_styled
def plot_live_bytes(
    timeline: Sequence[TimelinePoint], title: str, capacity: int | None = None, peak_at: str | None = None
) -> Figure:
    """Return the picture of plot_timeline for the points of any timeline; `peak_at` says what made the peak.

    `capacity` is the device's memory in bytes. No points at all raise SpecError.
    """
    if not timeline:
        raise SpecError(f"the timeline of {title} is empty: nothing was allocated; plot it after a step")
    points = _thin(timeline)
    totals = [sum(sizes.values()) for _, sizes in points]
    peak = max(totals)
    at = totals.index(peak)
    unit, unit_name = _unit(peak)
    used = [part for part in PARTS if any(sizes.get(part, 0) for _, sizes in points)]

    picture, ax = _picture(3.9)
    x = [i for i, _ in enumerate(points)]
    layers = [[sizes.get(part, 0) / unit for _, sizes in points] for part in used]
    edges = [*x, len(points)]  # each point lasts until the next one, the last as long as the others
    ax.stackplot(
        edges, [[*layer, layer[-1]] for layer in layers], colors=[COLORS[part] for part in used], step="post",
        edgecolor=INK, linewidth=0.3,
    )  # fmt: skip
    ax.set_xlim(0, len(points))
    ax.set_ylim(0, max(peak / unit * 1.3, 1e-9))
    if capacity is not None and capacity / unit < ax.get_ylim()[1]:
        ax.axhline(capacity / unit, color=INK, linestyle="--", linewidth=1.4)
        ax.text(len(points), capacity / unit, f"device {show_bytes(capacity)}", ha="right", va="bottom", size=SMALL)
    ax.plot([at + 0.5], [peak / unit], marker="v", color=INK, markersize=8, linestyle="none", zorder=5)
    side = "left" if at < 0.5 * len(points) else "right"
    said = f"peak {show_bytes(peak)} in {points[at][0]}"
    ax.annotate(
        said + (f"\n{peak_at}" if peak_at else ""), (at + 0.5, peak / unit), xytext=(0, 9), textcoords="offset points",
        ha=side, va="bottom", weight="bold",
        bbox={"facecolor": PANEL, "edgecolor": "none", "pad": 1}, zorder=5,
    )  # fmt: skip
    ax.set_xlabel("moment in the step (order of events)")
    ax.set_ylabel(f"live tensors ({unit_name})")
    ax.set_title(title, loc="left", weight="bold", pad=22)
    if len(points) < len(timeline):
        step = len(timeline) / len(points)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v * step:,.0f}"))
    _legend(picture, [_key(part, COLORS[part]) for part in reversed(used)])
    _name_phases(picture, ax, [phase for phase, _ in points])

    phases = [phase for phase, _ in groupby(phase for phase, _ in timeline)]
    parts = ", ".join(f"{part} {show_bytes(size)}" for part in PARTS if (size := points[at][1].get(part, 0)))
    picture.alt = (
        f"Live bytes by part over the step of {title}: {' then '.join(phases[:12])}. "
        f"The peak, {show_bytes(peak)}, is in {points[at][0]}{f', at {peak_at}' if peak_at else ''}: {parts}."
    )
    return picture


@_styled
def plot_fit(reports: Sequence[Report]) -> Figure:
    """Return a table of models by GPUs: the bytes each run needs in GiB, coloured and worded by whether it fits.

    Needs one report for each pair; a pair without one stays blank. The number is the largest that is known of process,
    reserved and allocated peak. Two reports for one pair, or a report without a GPU, raise SpecError.
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

    picture, ax = _picture(1.1 + 0.42 * len(rows), width=max(WIDTH, 1.8 + 0.9 * len(columns)))
    ax.set_xlim(0, len(columns))
    ax.set_ylim(len(rows), 0)
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            report = cells.get((column, row) if down_gpus else (row, column))
            color, word = FITS[report.outcome] if report else (PANEL, "")
            ax.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor=PANEL, linewidth=2))
            need = _need(report) if report else None
            number = "" if need is None else f"{need / GiB:,.1f} "
            weight = "bold" if word == "fits" else "normal"
            ax.text(x + 0.5, y + 0.5, f"{number}{word}", ha="center", va="center", size=SMALL, weight=weight)
    short = _short_names(models)
    names = [short.get(name, name) for name in columns]
    ax.set_xticks([i + 0.5 for i in range(len(columns))], ["\n".join(_wrap(name, 13)) for name in names])
    ax.set_yticks([i + 0.5 for i in range(len(rows))], [short.get(name, name) for name in rows])
    ax.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_xlabel("peak memory (GiB), and whether the device holds it")
    said = []
    for gpu in gpus:
        held = [short[m] for m in models if (m, gpu) in cells and cells[m, gpu].outcome == "fits"]
        said.append(f"{gpu} fits {', '.join(held) or 'none'}")
    picture.alt = f"What fits, {len(models)} models by {len(gpus)} GPUs: {'; '.join(said)}."
    return picture


@_styled
def plot_curve(
    x: Sequence[float], series: Mapping[str, Sequence[float | None]], xlabel: str, ylabel: str, log: bool = False
) -> Figure:
    """Return one line a series over `x`, each named at its end; `log` makes both axes logarithmic.

    `ylabel` and `xlabel` carry the unit, for example "activations (GiB)". A series named as a part of a report takes
    the part's colour. None in a series is a gap. Lengths that differ, more than seven series, an empty label, and
    values <= 0 with `log` raise SpecError.
    """
    _check_curve(x, series, xlabel, ylabel, log)
    picture, ax = _picture(3.6)
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
    plain = FuncFormatter(lambda value, _: f"{value:,.6g}")
    ax.xaxis.set_major_formatter(plain)
    ax.yaxis.set_major_formatter(plain)
    ax.grid(axis="y", color="#D0D0CC", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    _name_ends(picture, ax, ends)
    picture.alt = f"{ylabel} against {xlabel}. " + " ".join(
        f"{name}: " + ", ".join(f"{b:.4g} at {a:g}" for a, b in _few(list(zip(x, values, strict=True)))) + "."
        for name, values in series.items()
    )
    return picture


@_styled
def plot_segments(moments: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Return an allocator's segments as bars, cut into blocks: blocks in use filled, free ones white.

    `moments` maps a title to segments in the shape of torch.cuda.memory._snapshot()["segments"], of which `total_size`
    and each block's `size` and `state` are read; the moments stand one under the other on one scale of bytes.
    """
    rows = [(title if number == 0 else "", s) for title, given in moments.items() for number, s in enumerate(given)]
    if not rows:
        raise SpecError("plot_segments got no segments; give {'title': allocator.segments()}")
    largest = max(segment["total_size"] for _, segment in rows)
    unit, unit_name = _unit(largest)
    picture, ax = _picture(0.9 + 0.3 * len(rows))
    ax.set_xlim(0, 1.02 * largest / unit)
    ax.set_ylim(len(rows) - 0.45, -0.6)
    for row, (_, segment) in enumerate(rows):
        left = 0.0
        for block in segment["blocks"]:
            used = block["state"] != "inactive"
            _bar(ax, row, left, block["size"] / unit, COLORS["weights"] if used else PANEL)
            left += block["size"] / unit
    ax.set_yticks(range(len(rows)), [title for title, _ in rows])
    ax.set_xlabel(f"address in the segment ({unit_name}); blue is allocated, white is free")
    ax.tick_params(axis="y", length=0)

    def said(segments: Sequence[Mapping[str, Any]]) -> str:
        used = sum(b["size"] for s in segments for b in s["blocks"] if b["state"] != "inactive")
        reserved = sum(s["total_size"] for s in segments)
        return f"{show_bytes(used)} allocated in {len(segments)} segments of {show_bytes(reserved)}"

    picture.alt = "Segments of an allocator. " + "; ".join(f"{title}: {said(s)}" for title, s in moments.items()) + "."
    return picture


@_styled
def plot_influence(matrices: Mapping[str, Any]) -> Figure:
    """Return one square a matrix, T × T and bool: row t, column s is filled where token t reads token s.

    A matrix is nested lists or a tensor. No matrices, and one that is not square, raise SpecError.
    """
    rows = {name: [[bool(seen) for seen in row] for row in matrix] for name, matrix in matrices.items()}
    if not rows or any(len(row) != len(matrix) for matrix in rows.values() for row in matrix):
        sizes = {name: [len(row) for row in matrix] for name, matrix in rows.items()}
        raise SpecError(f"plot_influence got rows of {sizes}; give {{'name': T rows of T}}")
    picture = _Picture(figsize=(WIDTH, 0.95 + 0.9 * WIDTH / len(rows)), layout="constrained")
    for ax, (name, matrix) in zip(picture.subplots(1, len(rows), squeeze=False)[0], rows.items(), strict=True):
        T = len(matrix)
        for t, s in ((t, s) for t in range(T) for s in range(T)):
            color = COLORS["weights"] if matrix[t][s] else PANEL
            ax.add_patch(Rectangle((s, t), 1, 1, facecolor=color, edgecolor=MUTED, linewidth=0.4))
        ax.set(xlim=(0, T), ylim=(T, 0), aspect="equal", xticks=(), yticks=(), xlabel="token read")
        ax.set_title(name, loc="left", weight="bold")
    picture.axes[0].set_ylabel("token that reads")

    def said(matrix: list[list[bool]]) -> str:
        T = len(matrix)
        seen = [(t, s) for t in range(T) for s in range(T) if matrix[t][s]]
        counts = (sum(s < t for t, s in seen), sum(s == t for t, s in seen), sum(s > t for t, s in seen))
        return "{} earlier, {} own, {} later".format(*counts)

    picture.alt = "Tokens that each token reads. " + " ".join(f"{name}: {said(m)}." for name, m in rows.items())
    return picture


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, 1 to 21 (WCAG 2.1, relative luminance of sRGB)."""

    def luminance(color: str) -> float:
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


# ---- pieces


def _picture(height: float, width: float = WIDTH) -> tuple[_Picture, Axes]:
    picture = _Picture(figsize=(width, height), layout="constrained")
    return picture, picture.add_subplot()


def _unit(largest: int) -> tuple[int, str]:
    return (GiB, "GiB") if largest >= GiB // 4 else (MiB, "MiB")


def _bar(ax: Axes, row: int, left: float, width: float, color: str, hatch: str | None = None) -> Rectangle:
    patch = Rectangle((left, row - 0.36), width, 0.72, facecolor=color, edgecolor=INK, hatch=hatch, zorder=2)
    patch.set_linewidth(0.6)
    ax.add_patch(patch)
    return patch


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
    lines = [[r.source] for r in reports]
    if len({r.gpu for r in reports}) > 1:
        lines = [[*line, r.gpu or "this machine"] for line, r in zip(lines, reports, strict=True)]
    if len({r.model for r in reports}) > 1:
        short = _short_names([r.model for r in reports])
        lines = [[*line, short[r.model]] for line, r in zip(lines, reports, strict=True)]
    shown = [r.run.to_dict() for r in reports]
    differing = [key for key in shown[0] if any(run.get(key) != shown[0][key] for run in shown)]
    for line, run in zip(lines, shown, strict=True):
        line += [f"{key} {run[key]}" for key in differing[:1] if key in run]
    return ["\n".join(line) for line in lines]


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """Return each model's name without its owner, where that still tells it from the others."""
    short = {name: name.rsplit("/", 1)[-1] for name in names}
    return short if len(set(short.values())) == len(short) else {name: name for name in names}


def _wrap(name: str, width: int) -> list[str]:
    lines = [""]
    for piece in name.replace("-", "-\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return lines


def _key(name: str, color: str, hatch: str | None = None) -> Patch:
    return Patch(facecolor=color, edgecolor=INK, linewidth=0.6, hatch=hatch, label=name)


def _legend(picture: Figure, handles: list[Patch]) -> None:
    if handles:
        picture.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), handlelength=1.2)


def _write_inside(picture: Figure, segments: Sequence[tuple[Rectangle, str, str]]) -> None:
    """Write each segment's text into it where it fits; the legend names the rest."""
    picture.draw_without_rendering()  # the layout decides how wide a segment is
    for patch, part, words in segments:
        under = patch.get_facecolor()
        color = max(("#000000", "#FFFFFF"), key=lambda ink, under=under: contrast(ink, under))
        x, y = patch.get_x() + patch.get_width() / 2, patch.get_y() + patch.get_height() / 2
        text = patch.axes.text(x, y, words, color=color, ha="center", va="center", size=SMALL, zorder=3)
        text.set_in_layout(False)
        text.set_gid(part)
        room = patch.get_window_extent().width - 6
        if text.get_window_extent().width > room:
            text.set_text(words.splitlines()[-1] if part in COLORS else "")
            if text.get_window_extent().width > room:
                text.remove()


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
    places = _spread([text.get_position()[0] for text in texts], [w * 1.15 for w in widths], 0, len(phases))
    for text, place in zip(texts, places, strict=True):
        text.set_x(place)


def _name_ends(picture: Figure, ax: Axes, ends: Sequence[tuple[str, float, float]]) -> None:
    """Write each series' name right of its last point, moved apart where names would overlap."""
    place = {"xycoords": ax.get_yaxis_transform(), "xytext": (8, 0), "textcoords": "offset points"}
    texts = [ax.annotate(name, (1, y), va="center", size=SMALL, **place) for name, _, y in ends]
    picture.draw_without_rendering()
    bottom, top = ax.get_window_extent().y0, ax.get_window_extent().y1
    per_point = picture.dpi / 72
    order = sorted(range(len(ends)), key=lambda i: ends[i][2])
    wanted = [ax.transData.transform((ends[i][1], ends[i][2]))[1] for i in order]
    places = _spread(wanted, [SMALL * 1.3 * per_point] * len(order), bottom, top)
    for i, want, place in zip(order, wanted, places, strict=True):
        texts[i].set_position((8, (place - want) / per_point))


def _spread(centres: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Return `centres` (ascending) moved as little as keeps neighbours of `sizes` apart and inside low..high.

    When they do not all fit, the last ones run over `low`.
    """
    places = list(centres)
    edge = low
    for i, size in enumerate(sizes):
        places[i] = max(places[i], edge + size / 2)
        edge = places[i] + size / 2
    edge = high
    for i in reversed(range(len(places))):
        places[i] = min(places[i], edge - sizes[i] / 2)
        edge = places[i] - sizes[i] / 2
    return places


def _thin(timeline: Sequence[tuple[str, Mapping[str, int]]]) -> Sequence[tuple[str, Mapping[str, int]]]:
    """Return at most about POINTS of the timeline: of each run of neighbours in one phase, the one with most bytes."""
    if len(timeline) <= POINTS:
        return timeline
    width = math.ceil(len(timeline) / POINTS)
    groups = groupby(enumerate(timeline), key=lambda item: (item[0] // width, item[1][0]))
    return [max((point for _, point in group), key=lambda point: sum(point[1].values())) for _, group in groups]


def _need(report: Report) -> int | None:
    known = [size for size in (report.peak_allocated, report.peak_reserved, report.process) if size is not None]
    return max(known) if known else None


def _say(report: Report) -> str:
    parts = ", ".join(f"{part} {show_bytes(size)}" for part in PARTS if (size := report.parts.get(part, 0)))
    peak = "not known" if report.peak_allocated is None else show_bytes(report.peak_allocated)
    device = "" if report.capacity is None else f", of {show_bytes(report.capacity)} on the device"
    return f"{report.title}: peak {peak}{device}{': ' if parts else ''}{parts}; {report.outcome}."


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
