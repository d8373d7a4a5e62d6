"""Which token reads which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.errors import SpecError
from .canvas import COLORS, MUTED, PANEL, WIDTH, Picture, cell, new_panels, styled


@styled
def plot_influence(matrices: Mapping[str, Any]) -> Picture:
    """Return one square per matrix, T × T and bool: row t, column s is filled where token t reads token s.

    A matrix is nested lists or a tensor. No matrices, and one that is not square, raise SpecError.
    """
    rows = {name: [[bool(seen) for seen in row] for row in matrix] for name, matrix in matrices.items()}
    if not rows or any(len(row) != len(matrix) for matrix in rows.values() for row in matrix):
        sizes = {name: [len(row) for row in matrix] for name, matrix in rows.items()}
        raise SpecError(f"plot_influence got rows of {sizes}; give {{'name': T rows of T}}")
    picture, panels = new_panels(0.95 + 0.9 * WIDTH / len(rows), 1, len(rows))
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
