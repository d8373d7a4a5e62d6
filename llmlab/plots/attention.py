"""Attention: which token reads which, what online softmax knows after each tile, and which tiles are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..base.errors import SpecError
from .canvas import COLORS, INK, MUTED, PALETTE, PANEL, SMALL, WIDTH, Picture, cell, legend, new_picture, styled

SHADE = "#EDEDE6"  # every other tile of a row of values
KINDS = {"computed": PALETTE[5], "computed, half masked": PALETTE[1], "skipped": "#FFFFFF"}
MOST = 32  # tiles in a row: more would be narrower than their lines


@styled
def plot_influence(matrices: Mapping[str, Any]) -> Picture:
    """Return one square per matrix, T × T and bool: row t, column s is filled where token t reads token s.

    A matrix is nested lists or a tensor. No matrices, and one that is not square, raise SpecError.
    """
    rows = {name: [[bool(seen) for seen in row] for row in matrix] for name, matrix in matrices.items()}
    if not rows or any(len(row) != len(matrix) for matrix in rows.values() for row in matrix):
        sizes = {name: [len(row) for row in matrix] for name, matrix in rows.items()}
        raise SpecError(f"plot_influence got rows of {sizes}; give {{'name': T rows of T}}")
    picture, panels = new_picture(0.95 + 0.9 * WIDTH / len(rows), 1, len(rows))
    for ax, (name, matrix) in zip(panels, rows.items(), strict=True):
        T = len(matrix)
        for t, s in ((t, s) for t in range(T) for s in range(T)):
            color = COLORS["weights"] if matrix[t][s] else PANEL
            cell(ax, s, t, color, MUTED, line=0.4)
        ax.set(xlim=(0, T), ylim=(T, 0), aspect="equal", xticks=(), yticks=(), xlabel="token read")
        ax.set_title(name, loc="left", weight="bold")
    panels[0].set_ylabel("token that reads")

    def said(matrix: list[list[bool]]) -> str:
        T = len(matrix)
        seen = [(t, s) for t in range(T) for s in range(T) if matrix[t][s]]
        counts = (sum(s < t for t, s in seen), sum(s == t for t, s in seen), sum(s > t for t, s in seen))
        return "{} earlier, {} own, {} later".format(*counts)

    picture.alt = "Tokens that each token reads. " + " ".join(f"{name}: {said(m)}." for name, m in rows.items())
    return picture


@styled
def plot_online_softmax(x: Sequence[float], steps: Sequence[tuple[float, float]], tile: int) -> Picture:
    """Return the values of x as bars in tiles of `tile`, with what was known after each tile: its step, (m, l).

    m is the maximum so far, l the sum of exp(x − m) so far, as techniques.flash_attention.online_softmax gives them.
    More than 32 tiles, and a number of steps that is not theirs, raise SpecError.
    """
    values, known = [float(value) for value in x], [(float(m), float(total)) for m, total in steps]
    if tile < 1 or not 1 <= math.ceil(len(values) / max(tile, 1)) == len(known) <= MOST:
        given = f"{len(values)} values in tiles of {tile} and {len(known)} steps"
        raise SpecError(f"{given}; give a tile >= 1 that makes 1 to {MOST} tiles, and a step for each")
    picture, (ax,) = new_picture(3.2)
    low, high = min(0.0, *values), max(0.0, *values)
    room = 0.3 * (high - low or 1.0)
    ax.bar(range(len(values)), values, width=0.7, color=PALETTE[0], edgecolor=INK, linewidth=0.5, zorder=2)
    for number, (m, total) in enumerate(known):
        left, right = number * tile - 0.5, min((number + 1) * tile, len(values)) - 0.5
        if number % 2 == 0:
            ax.axvspan(left, right, color=SHADE, zorder=0)
        ax.plot([left, right], [m, m], color=PALETTE[3], linewidth=2.4, zorder=3)
        if number and m > known[number - 1][0]:
            ax.plot([left, left], [known[number - 1][0], m], color=PALETTE[3], linewidth=1.2, linestyle=":", zorder=3)
        said = f"m = {m:.1f}\nl = {total:.2f}"
        ax.text((left + right) / 2, high + room * 0.92, said, ha="center", va="top", size=SMALL)
    ax.axhline(0, color=MUTED, linewidth=0.8)
    ax.set(xlim=(-0.6, len(values) - 0.4), ylim=(low - 0.05 * room, high + room), xlabel="position", ylabel="score")
    legend(picture, {"score": PALETTE[0], "maximum so far, m": PALETTE[3]})
    picture.alt = (
        f"Online softmax over {len(values)} scores in tiles of {tile}. Maximum and sum so far after each tile: "
        + ", ".join(f"{m:.2f} and {total:.3f}" for m, total in known)
        + "."
    )
    return picture


@styled
def plot_score_tiles(T: int, tile: int, causal: bool = True) -> Picture:
    """Return the (T, T) scores cut into tiles of `tile` rows: computed, on the diagonal, or skipped by a causal mask.

    Arrows follow one program of the forward pass, along a row of tiles. More than 32 tiles a row raise SpecError.
    """
    count = math.ceil(T / tile) if tile >= 1 else 0
    if not 1 <= count <= MOST:
        raise SpecError(f"T={T} in tiles of {tile}; give a tile >= 1 that makes 1 to {MOST} tiles a row")
    picture, (ax,) = new_picture(3.7, width=4.6)
    found = dict.fromkeys(KINDS, 0)
    for row in range(count):
        for column in range(count):
            kind = "computed" if not causal or column < row else "skipped"
            if causal and column == row:
                kind = "computed, half masked"
            found[kind] += 1
            cell(ax, column + 0.04, row - 0.46, KINDS[kind], INK, 0.92, 0.92, order=2)
    row = count - 1 if count < 3 else count - 2
    last = row if causal else count - 1
    if last:
        ax.annotate(
            "", (last + 0.85, row), (0.15, row), arrowprops={"arrowstyle": "->", "lw": 2, "color": INK}, zorder=4
        )  # fmt: skip
    marks = list(range(0, count, max(1, count // 4)))
    ax.set_xticks([mark + 0.5 for mark in marks], [f"{mark * tile}" for mark in marks])
    ax.set_yticks(marks, [f"{mark * tile}" for mark in marks])
    ax.set(xlim=(-0.1, count + 0.1), ylim=(count - 0.4, -0.6), aspect="equal")
    ax.set(xlabel=f"first key of {tile}", ylabel=f"first query of {tile}")
    legend(picture, {kind: color for kind, color in KINDS.items() if found[kind]})
    shown = ", ".join(f"{number} {kind}" for kind, number in found.items() if number)
    picture.alt = f"Scores of {T} tokens in tiles of {tile} × {tile}: {shown}. A program goes along one row of tiles."
    return picture
