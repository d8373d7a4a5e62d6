"""What one thing costs in another: points, and lines through those of one method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from ..base.errors import SpecError
from .canvas import INK, MUTED, SMALL, Picture, faint_grid, new_picture, plain_numbers, styled
from .curve import DASHES, LINES, MARKERS

Points = Sequence[tuple[float, float]]


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
    `baseline` is a named horizontal line. Points above `top` are drawn at it, as arrows, with their value. Both labels
    carry the unit. No points, more than seven lines, an empty label and y <= 0 raise SpecError.
    """
    everything = [point for points in lines.values() for point in points] + list(singles.values())
    if not everything or len(lines) > len(LINES) or not xlabel or not ylabel:
        given = f"{len(everything)} points in {len(lines)} lines, labels {xlabel!r} and {ylabel!r}"
        raise SpecError(f"{given}; give points, at most {len(LINES)} lines, and a name for both axes")
    if any(y <= 0 for _, y in everything):
        raise SpecError("a point has y <= 0, which a logarithmic axis cannot show")
    picture, ax = new_picture(4.6)
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
    for name, (x, y) in singles.items():
        ax.plot([x], [min(y, top)], "*", color=INK, markersize=9, zorder=4, label=f"_{name}")
    for names in neighbours(singles):
        middle = sum(singles[name][0] for name in names) / len(names)
        ax.annotate("\n".join(names), (middle, min(singles[names[0]][1], top)), (0, 9), textcoords="offset points",
                    size=SMALL, ha="center", va="bottom", zorder=4)  # fmt: skip
    plain_numbers(ax)
    low, high = ax.get_ylim()
    ax.yaxis.set_minor_formatter(ax.yaxis.get_major_formatter() if high / low < 8 else NullFormatter())
    faint_grid(ax, "y", "both")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if lines:
        picture.legend(loc="outside lower center", ncols=min(4, len(lines)), handlelength=2.6)
    said = [f"{baseline[0]} {baseline[1]:.4g}."] if baseline else []
    said += [f"{name}: " + ", ".join(f"{y:.4g} at {x:.3g}" for x, y in sorted(points)) + "."
             for name, points in {**lines, **{name: [point] for name, point in singles.items()}}.items()]  # fmt: skip
    picture.alt = f"{ylabel} against {xlabel}. " + " ".join(said)
    return picture


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
