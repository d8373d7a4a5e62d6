"""Drawings of the chapter on optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb

from ...plots.canvas import COLORS, FAINT, MUTED, PALETTE, WHITE, Picture
from ...plots.schematic import box, finished, label, link, sketch, strip

LEFT, RIGHT = 12, 388  # pixels
WEIGHTS, GRADIENTS, STATES, TEMPORARY = PALETTE[5], COLORS["gradients"], PALETTE[2], COLORS["activations"]


def plot_states(states: Mapping[str, tuple[str, float]]) -> Picture:
    """Return a drawing of the bytes of each parameter: weight and gradient in fp32, and the states of each optimizer.

    `states` maps the name of an optimizer to the name of its states and their bytes per parameter.
    """
    picture, ax = sketch(30 + 33 * len(states))
    label(ax, LEFT, 12, "bytes per parameter", weight="bold")
    for row, (name, (state_names, size)) in enumerate(states.items()):
        y = 26 + 33 * row
        words = f"{state_names} {round(size, 3):.3g}" if state_names else "none"
        inside = words if size > 3 else ""
        label(ax, 100, y + 13, name, "right")
        pieces = [(4, "weight 4", WEIGHTS), (4, "gradient 4", GRADIENTS)]
        end = strip(ax, 108, y, [*pieces, (size, inside, STATES)] if size else pieces, 17)
        if not inside:
            label(ax, end + 6, y + 13, words)
    sizes = ", ".join(f"{name} {size:.3f}" for name, (_, size) in states.items())
    return finished(picture, f"Each parameter has 4 bytes of weight, 4 of gradient, and states of: {sizes} bytes.")


class Layout(NamedTuple):
    """One implementation of an update: its name, temporary bytes per parameter at its peak, and the temporary
    tensors of each layer at that moment ("" for none)."""

    name: str
    temporary: float
    layers: Sequence[str]


def plot_update(layouts: Sequence[Layout], alive: int) -> Picture:
    """Return a drawing of the temporary tensors of an AdamW update, one row for each implementation.

    `alive` is the bytes per parameter of weights, gradients and states, which exist all the time.
    """
    picture, ax = sketch(30 + 62 * len(layouts))
    label(ax, LEFT, 12, f"temporary tensors, on top of {alive} bytes per parameter", color=MUTED)
    for row, layout in enumerate(layouts):
        y = 30 + 62 * row
        label(ax, LEFT, y + 6, layout.name, weight="bold")
        label(ax, RIGHT, y + 6, f"{layout.temporary:.1f} bytes per parameter", "right")
        pitch = (RIGHT - LEFT) / len(layout.layers)
        for number, words in enumerate(layout.layers):
            place = (LEFT + pitch * number, y + 18, pitch - 3, 26)
            box(ax, *place, words or "–", TEMPORARY if words else WHITE, edge=FAINT)
    sizes = ", ".join(f"{layout.name} {layout.temporary:.1f}" for layout in layouts)
    return finished(picture, f"Temporary bytes per parameter at the peak of an AdamW update: {sizes}.")


def plot_factors(squares: Sequence[Sequence[float]], rows: Sequence[float], columns: Sequence[float]) -> Picture:
    """Return a drawing of a matrix of mean squares, of the means over its rows and columns, and of their product.

    The darker a cell, the larger its number.
    """
    height, width, cell = len(squares), len(squares[0]), 24
    mean = sum(rows) / len(rows)
    outer = [[row * column / mean for column in columns] for row in rows]
    largest = max(max(max(row) for row in matrix) for matrix in (squares, outer, [rows], [columns]))
    picture, ax = sketch(112 + cell * height)
    top, left, right = 78, LEFT, 388 - cell * width
    label(ax, left, 14, "AdamW stores", weight="bold")
    label(ax, left, 32, f"{height} × {width} = {height * width} numbers")
    _cells(ax, left, top, squares, largest)
    label(ax, right - 40, 14, "Adafactor stores", weight="bold")
    label(ax, right - 40, 32, f"{height} + {width} = {height + width} numbers")
    _cells(ax, right, top - cell - 6, [columns], largest, edge=PALETTE[0])
    _cells(ax, right - cell - 6, top, [[row] for row in rows], largest, edge=PALETTE[0])
    _cells(ax, right, top, outer, largest)
    middle = (left + cell * width + right - cell - 6) / 2
    label(ax, middle, top + cell * height / 2, "≈", "center", size=16)
    y = top + cell * height + 16
    label(ax, left, y, "v", style="italic")
    label(ax, right, y, "product: not stored")
    errors = [abs(p / v - 1) for ps, vs in zip(outer, squares, strict=True) for p, v in zip(ps, vs, strict=True)]
    return finished(
        picture,
        f"A matrix of {height} × {width} second moments, next to {height} row means, {width} column means and their "
        f"product, which differs from the matrix by {sum(errors) / len(errors):.0%} on average.",
    )


def _cells(ax: Axes, x: float, y: float, numbers: Sequence[Sequence[float]], largest: float, edge: str = WHITE) -> None:
    for i, row in enumerate(numbers):
        for j, number in enumerate(row):
            box(ax, x + 24 * j, y + 24 * i, 24, 24, color=_shade(number / largest), edge=edge)


def _shade(share: float) -> str:
    """Return a colour between white for 0 and dark blue for 1."""
    dark = to_rgb("#003B5C")
    return to_hex(tuple(1 - min(1.0, share) ** 0.5 * (1 - part) for part in dark))


class Block(NamedTuple):
    """A few numbers of one block in 8-bit storage: their values, their bytes, and the values that the bytes restore."""

    name: str
    values: Sequence[float]
    stored: Sequence[int]
    restored: Sequence[float]


def plot_blocks(blocks: Sequence[Block]) -> Picture:
    """Return a drawing of block-wise quantization: numbers, numbers over the largest of their block, bytes, result."""
    picture, ax = sketch(10 + 168 * len(blocks))
    alts = []
    for panel, block in enumerate(blocks):
        top = 14 + 168 * panel
        largest = max(block.values)
        label(ax, LEFT, top, block.name, weight="bold")
        rows = (
            ("v in fp32", [_short(value) for value in block.values], PALETTE[5]),
            ("v / largest", [_short(value / largest) for value in block.values], WHITE),
            ("stored byte", [f"{byte}" for byte in block.stored], STATES),
            ("read back", [_short(value) for value in block.restored], PALETTE[5]),
        )
        for row, (name, words, color) in enumerate(rows):
            y = top + 14 + 31 * row
            label(ax, LEFT, y + 12, name)
            pitch = (RIGHT - 92) / len(words)
            for column, word in enumerate(words):
                box(ax, 92 + pitch * column, y, pitch, 24, word, color)
            if row:
                link(ax, (92 + pitch / 2, y - 7), (92 + pitch / 2, y))
        label(ax, LEFT, top + 144, f"stored once for the block: {_short(largest)}", color=MUTED)
        alts.append(f"{block.name}: {sum(byte == 0 for byte in block.stored)} of {len(block.stored)} bytes are 0")
    return finished(picture, f"Block-wise quantization of second moments. {'; '.join(alts)}.")


def _short(number: float) -> str:
    """Return a number with two digits, in at most six characters."""
    if number == 0 or 1e-3 <= number < 1e4:
        return f"{number:.2g}" if number < 100 else f"{number:.0f}"
    mantissa, exponent = f"{number:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"
