"""Pieces of drawings: blocks of memory, spans of time, tensors, tiles and pages, ranks, and what passes between them.

A drawing is as wide as a phone's page, so that its words are never smaller than they are here, and its coordinates are
pixels from the upper left corner. Colours and fonts are those of all pictures (`canvas`). A chapter draws in a cell:

    picture, ax = sketch(120)
    box(ax, 20, 20, 120, 40, "RMSNorm")
    link(ax, (140, 40), (240, 40), "16 MiB")
    finished(picture, "A norm, and the 16 MiB that it passes on.")

Words that do not fit into their box raise SpecError as they are written; words that lie on one another, or leave the
drawing, raise it in `finished`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from matplotlib.axes import Axes
from matplotlib.text import Text

from ..base.errors import SpecError
from .canvas import INK, MUTED, PALETTE, PANEL, PHONE, SMALL, WHITE, Picture, cell, ink_on, styled

PIXELS = 100  # per inch
OWNERS = [PALETTE[i] for i in (5, 1, 2, 4)]  # the colours of four ranks or experts, and of their shares
Point = tuple[float, float]


@styled()
def sketch(height: int) -> tuple[Picture, Axes]:
    """Return an empty drawing, 400 × `height` pixels, and its axes."""
    width = round(PHONE * PIXELS)
    picture = Picture(figsize=(PHONE, height / PIXELS), dpi=PIXELS)
    ax = picture.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.axis("off")
    return picture, ax


@styled()
def label(ax: Axes, x: float, y: float, words: str, align: str = "left", **how: Any) -> Text:
    """Write `words` beside a point, in the middle of their height; `how` goes to matplotlib."""
    return ax.text(x, y, words, **{"ha": align, "va": "center", "size": SMALL, "color": INK, **how})


def box(ax: Axes, x: float, y: float, width: float, height: float, words: str = "", color: str = WHITE,
        edge: str = INK, hatch: str | None = None) -> None:  # fmt: skip
    """Draw a box with `words` in it: an operator, a block of memory, a page. Words wider than it raise SpecError."""
    cell(ax, x, y, color, edge, width, height, hatch=hatch)
    if not words:
        return
    text = label(ax, x + width / 2, y + height / 2, words, "center", color=ink_on(color, dark="#000000"))
    extent = text.get_window_extent()
    if extent.width > width or extent.height > height:
        raise SpecError(
            f"{words!r} is {extent.width:.0f} × {extent.height:.0f} pixels large, its box {width:.0f} × {height:.0f}: "
            "make the box larger, or label it from outside"
        )


def tensor(ax: Axes, x: float, y: float, width: float, height: float, rows: str, columns: str, words: str = "",
           color: str = WHITE) -> None:  # fmt: skip
    """Draw a matrix with its dimensions: `rows` left of it, `columns` above it."""
    box(ax, x, y, width, height, words, color)
    label(ax, x - 5, y + height / 2, rows, "right")
    label(ax, x + width / 2, y - 9, columns, "center")


def strip(ax: Axes, x: float, y: float, pieces: Iterable[tuple[float, str, str]], scale: float,
          height: float = 26) -> float:  # fmt: skip
    """Draw `pieces` (size, words, colour) one after the other, `scale` pixels per unit of size; return where they end.

    Sizes are bytes for the blocks of a memory, or seconds for the spans of a timeline.
    """
    for size, words, color in pieces:
        box(ax, x, y, size * scale, height, words, color)
        x += size * scale
    return x


def grid(ax: Axes, x: float, y: float, rows: Sequence[Sequence[tuple[str, str]]], width: float, height: float) -> None:
    """Draw rows of equal boxes (words, colour): tiles of a matrix, pages of a cache, chunks of a bucket."""
    for row, boxes in enumerate(rows):
        for column, (words, color) in enumerate(boxes):
            box(ax, x + column * width, y + row * height, width, height, words, color)


def keys(ax: Axes, colors: Mapping[str, str], xs: Sequence[float], y: float, side: float = 12,
         line: float = 18) -> None:  # fmt: skip
    """Draw a legend: a square of `side` pixels and its name for each of `colors`, at the places `xs` of a line."""
    for number, (name, color) in enumerate(colors.items()):
        row, column = divmod(number, len(xs))
        box(ax, xs[column], y + line * row, side, side, color=color)
        label(ax, xs[column] + side + 6, y + line * row + side / 2, name)


def rank(ax: Axes, x: float, y: float, width: float, height: float, name: str) -> None:
    """Draw the frame of a rank, a GPU or a node, with its name at the top; draw first what lies within others."""
    cell(ax, x, y, PANEL, MUTED, width, height, line=1.2, order=0)
    label(ax, x + 8, y + 13, name, weight="bold")


def link(ax: Axes, start: Point, end: Point, words: str = "", color: str = INK, bend: float = 0.0) -> None:
    """Draw an arrow from `start` to `end`, with `words` on the middle of it; `bend` curves it (matplotlib's rad)."""
    how = {"arrowstyle": "-|>", "color": color, "shrinkA": 0, "shrinkB": 0, "connectionstyle": f"arc3,rad={bend}"}
    ax.annotate("", end, start, arrowprops=how, zorder=3)
    if words:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        label(ax, x, y, words, "center", bbox={"facecolor": PANEL, "edgecolor": "none", "pad": 1.5}, zorder=4)


@styled()
def finished(picture: Picture, alt: str) -> Picture:
    """Return the drawing with `alt`, which says in words what it shows; raise SpecError for words one cannot read."""
    if not alt:
        raise SpecError("a drawing needs alt: say in words what it shows, with its numbers")
    picture.draw_without_rendering()
    texts = [text for text in picture.findobj(Text) if text.get_text() and text.get_visible()]
    extents = [(text.get_text(), text.get_window_extent()) for text in texts]
    width, height = (round(side * PIXELS) for side in picture.get_size_inches())
    for words, extent in extents:
        if extent.x0 < 0 or extent.y0 < 0 or extent.x1 > width or extent.y1 > height:
            raise SpecError(f"{words!r} leaves the drawing of {width} × {height} pixels")
    for (one, first), (other, second) in combinations(extents, 2):
        if first.overlaps(second):
            raise SpecError(f"{one!r} and {other!r} lie on one another")
    picture.alt = alt
    return picture
