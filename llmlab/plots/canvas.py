"""What all pictures share: colours, fonts, the figure that shows itself, and pieces to draw with."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter

from ..base.terms import PARTS

PANEL, INK, MUTED = "#FBFBF8", "#1F2328", "#57606A"
WHITE, FAINT = "#FFFFFF", "#D0D0CC"  # FAINT: lines of a grid, and around what is empty
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#CCCCCC")
COLORS = dict(zip(PARTS, PALETTE, strict=True))

WIDTH = 7.0  # inches: half the pixels of a laptop page, all of a phone held sideways
PHONE = 4.0  # inches, 400 pixels: drawn as wide as the narrowest page, so that its words are never smaller
FONT = 10.0  # points; nothing on a figure is smaller than 9
SMALL = 9.0
DPI = 150  # of the PNG, which is shown at 100 pixels an inch: sharp on a phone, and small in a committed notebook

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": FONT, "axes.titlesize": FONT, "axes.labelsize": FONT,
    "xtick.labelsize": SMALL, "ytick.labelsize": SMALL, "legend.fontsize": SMALL,
    "figure.facecolor": PANEL, "savefig.facecolor": PANEL, "axes.facecolor": PANEL, "legend.facecolor": PANEL,
    "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "legend.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.edgecolor": MUTED,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": False, "axes.unicode_minus": True,
    "legend.frameon": False, "hatch.color": MUTED, "hatch.linewidth": 0.6, "text.usetex": False,
}  # fmt: skip


class Picture(Figure):
    """A Figure that shows itself once in any notebook, with or without `%matplotlib inline`; `alt` describes it."""

    alt: str = ""

    def __repr__(self) -> str:
        return self.alt or super().__repr__()

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
        out = BytesIO()
        with rc_context(STYLE):
            # No version in the file: the same picture is the same bytes.
            self.savefig(out, format="png", dpi=DPI, metadata={"Software": None}, pil_kwargs={"optimize": True})
        png = {"alt": self.alt, "width": round(self.get_size_inches()[0] * 100)}
        return {"image/png": b64encode(out.getvalue()).decode(), "text/plain": repr(self)}, {"image/png": png}


@contextmanager
def styled() -> Iterator[None]:
    """Draw in this module's style, whatever the reader has set: `with styled():`, or `@styled()` on a function."""
    with rc_context(STYLE):
        yield


def contrast(one: Any, other: Any) -> float:
    """Return the contrast ratio of two colours, 1 to 21 (WCAG 2.1, relative luminance of sRGB)."""

    def luminance(color: Any) -> float:
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def ink_on(color: Any, dark: str = INK) -> str:
    """Return `dark` or white, whichever reads better on `color`, matplotlib's in any form."""
    return max((dark, WHITE), key=lambda ink: contrast(ink, color))


def new_picture(
    height: float, rows: int = 1, columns: int = 1, width: float = WIDTH, **how: Any
) -> tuple[Picture, list[Axes]]:
    """Return a picture of `height` × `width` inches and its axes, row by row; call it under `styled`.

    `how` goes to matplotlib's subplots.
    """
    picture = Picture(figsize=(width, height), layout="constrained")
    return picture, list(picture.subplots(rows, columns, squeeze=False, **how).flat)


def name_rows(ax: Axes, names: Sequence[str], axis: bool = True) -> None:
    """Write a name left of each row 0, 1, …, without tick marks; `axis` False takes the axis' line away too."""
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(axis)


def number_axes(ax: Axes, xlabel: str, ylabel: str) -> None:
    """Name both axes, write their numbers in full, also logarithmic ones, and draw faint lines at the ticks of y."""
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    ax.grid(axis="y", color=FAINT, linewidth=0.6)
    ax.set(xlabel=xlabel, ylabel=ylabel, axisbelow=True)


def cell(ax: Axes, x: float, y: float, color: str, edge: str, width: float = 1.0, height: float = 1.0,
         line: float = 0.6, order: int = 1, hatch: str | None = None) -> Rectangle:  # fmt: skip
    """Draw a filled rectangle whose corner is at (x, y) and return it; a higher `order` is drawn later."""
    patch = Rectangle((x, y), width, height, facecolor=color, edgecolor=edge, linewidth=line, hatch=hatch, zorder=order)
    ax.add_patch(patch)
    return patch


def bar(ax: Axes, row: int, left: float, width: float, color: str, hatch: str | None = None) -> Rectangle:
    """Draw one piece of a horizontal bar and return it."""
    return cell(ax, left, row - 0.36, color, INK, width, 0.72, order=2, hatch=hatch)


def write(ax: Axes, x: float, y: float, text: str, ground: str, **how: Any) -> None:
    """Write small text centred on (x, y), in the ink that reads best on the colour `ground`."""
    ax.text(x, y, text, color=ink_on(ground), ha="center", va="center", size=SMALL, **how)


def legend(picture: Figure, colors: Mapping[str, str], hatched: Mapping[str, str] = {}, **how: Any) -> None:
    """Write the names and their colours below the axes, where they hide nothing; `hatched` has hatches by name."""
    handles = [
        Patch(facecolor=color, edgecolor=INK, linewidth=0.6, hatch=hatched.get(name), label=name)
        for name, color in colors.items()
    ]
    if handles:
        look = {"ncols": min(4, len(handles)), "handlelength": 1.2, **how}
        picture.legend(handles=handles, loc="outside lower center", **look)


def spread(centres: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Return `centres` (ascending), moved so that neighbours of `sizes` do not overlap and stay inside low..high.

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


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return each model's name without its owner, where that still tells it from the others."""
    short = {name: name.rsplit("/", 1)[-1] for name in names}
    return short if len(set(short.values())) == len(short) else {name: name for name in names}
