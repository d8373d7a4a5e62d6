"""Collectives: what each rank has before, and what it has after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from ..base.errors import SpecError
from .canvas import FAINT, INK, MUTED, PALETTE, PANEL, SMALL, WHITE, Picture, cell, ink_on, key, new_panels, styled

Cells = Sequence[Sequence[float] | None]
MOST = 4  # ranks: cells of more are narrower than their numbers
OWNERS = (PALETTE[5], PALETTE[1], PALETTE[2], PALETTE[4])
SUM = WHITE


@styled
def plot_collectives(found: Mapping[str, tuple[Cells, Cells]]) -> Picture:
    """Return a panel for each collective of `found`, as techniques.collectives.run_all gives them: ranks are rows.

    A number is coloured by the rank that gave it, its power of ten; a sum of all is white. More than four
    ranks, or before and after of unequal numbers of them, raise SpecError.
    """
    ranks = {len(cells) for pair in found.values() for cells in pair}
    if len(ranks) != 1 or not 1 <= max(ranks) <= MOST:
        raise SpecError(f"collectives of {sorted(ranks)} ranks; give 1 to {MOST} ranks, the same in all")
    count, rows = max(ranks), -(-len(found) // 2)
    picture, panels = new_panels(0.55 + rows * (0.42 + 0.25 * count), rows, 2)
    for ax in panels:
        ax.axis("off")
    for ax, (name, (before, after)) in zip(panels, found.items(), strict=False):
        ax.set_title(name, pad=3)
        ax.set(xlim=(-0.65, 2 * count + 0.95), ylim=(count - 0.4, -0.6))
        for row in range(count):
            ax.text(-0.2, row, f"{row}", ha="right", va="center", color=MUTED, size=SMALL)
            _cells(ax, row, 0, before[row], count)
            _cells(ax, row, count + 0.9, after[row], count)
        middle = (count - 1) / 2
        ax.annotate("", (count + 0.85, middle), (count + 0.05, middle), arrowprops={"arrowstyle": "->", "color": INK})
    entries = [key(f"from rank {r}", OWNERS[r]) for r in range(count)]
    entries.append(key("sum of all", SUM))
    picture.legend(handles=entries, loc="outside lower center", ncols=len(entries), handlelength=1.0, columnspacing=1.2)
    picture.alt = " ".join(
        f"{name}: " + "; ".join(f"rank {r} {_said(before[r])} -> {_said(after[r])}" for r in range(count)) + "."
        for name, (before, after) in found.items()
    )
    return picture


def _cells(ax: Axes, row: int, left: float, numbers: Sequence[float] | None, count: int) -> None:
    for place in range(count):
        value = numbers[place] if numbers is not None and place < len(numbers) else None
        if value is None:
            cell(ax, left + place, row - 0.42, PANEL, FAINT, height=0.84, line=0.5)
            continue
        digits = f"{value:.0f}"
        whole = digits.count("0") == 0 and count > 1 and len(digits) == count
        color = SUM if whole else OWNERS[min(len(digits), count) - 1]
        cell(ax, left + place, row - 0.42, color, INK, height=0.84)
        ax.text(left + place + 0.5, row, digits, ha="center", va="center", size=SMALL, color=ink_on(color))


def _said(numbers: Sequence[float] | None) -> str:
    return "nothing" if numbers is None else "[" + " ".join(f"{number:.0f}" for number in numbers) + "]"
