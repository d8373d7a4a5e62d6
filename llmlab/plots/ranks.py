"""Ranks: what each has before and after a collective, and which node and pipeline stage each is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from ..base.errors import SpecError
from ..specs.mesh import AXES, coordinates, ranks_along
from ..specs.run import Training
from .canvas import FAINT, INK, MUTED, PALETTE, PANEL, SMALL, WHITE, Picture, cell, legend, new_picture, styled, write

Cells = Sequence[Sequence[float] | None]
MOST_IN_COLLECTIVES = 4  # ranks: cells of more are narrower than their numbers
OWNERS = (PALETTE[5], PALETTE[1], PALETTE[2], PALETTE[4])
NAMES = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
MOST_IN_MESH = 128  # ranks whose numbers can still be read


@styled
def plot_collectives(found: Mapping[str, tuple[Cells, Cells]]) -> Picture:
    """Return a panel for each collective of `found`, as techniques.collectives.run_all gives them: ranks are rows.

    A number is coloured by the rank that gave it, its power of ten; a sum of all is white. More than four
    ranks, or before and after of unequal numbers of them, raise SpecError.
    """
    ranks = {len(cells) for pair in found.values() for cells in pair}
    if len(ranks) != 1 or not 1 <= max(ranks) <= MOST_IN_COLLECTIVES:
        raise SpecError(f"collectives of {sorted(ranks)} ranks; give 1 to {MOST_IN_COLLECTIVES} ranks, the same in all")
    count, rows = max(ranks), -(-len(found) // 2)
    picture, panels = new_picture(0.55 + rows * (0.42 + 0.25 * count), rows, 2)
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
    owners = {f"from rank {r}": OWNERS[r] for r in range(count)}
    legend(picture, {**owners, "sum of all": WHITE}, ncols=count + 1, handlelength=1.0, columnspacing=1.2)
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
        color = WHITE if whole else OWNERS[min(len(digits), count) - 1]
        cell(ax, left + place, row - 0.42, color, INK, height=0.84)
        write(ax, left + place + 0.5, row, digits, color)


def _said(numbers: Sequence[float] | None) -> str:
    return "nothing" if numbers is None else "[" + " ".join(f"{number:.0f}" for number in numbers) + "]"


@styled
def plot_mesh(runs: dict[str, Training], gpus: int = 8) -> Picture:
    """Return one panel per mesh: rows are nodes of `gpus` GPUs, a cell is a rank, its colour the pipeline stage.

    The letters T, C, D and P mark the ranks that rank 0 communicates with along tensor, context, data and pipeline.
    More than 128 ranks, more than eight stages, and ranks that fill no whole nodes raise SpecError.
    """
    for name, run in runs.items():
        if run.world_size > MOST_IN_MESH or run.pp > len(PALETTE) or run.world_size % min(gpus, run.world_size):
            limits = f"whole nodes of at most {MOST_IN_MESH} ranks, and at most {len(PALETTE)} stages"
            raise SpecError(f"{name}: {run.world_size} ranks, pp={run.pp}; give {limits}")
    rows = {name: -(-run.world_size // gpus) for name, run in runs.items()}
    height = 0.5 + sum(0.4 + 0.34 * n for n in rows.values())
    picture, panels = new_picture(height, len(runs), 1, height_ratios=[n + 1 for n in rows.values()])
    said = []
    for ax, (name, run) in zip(panels, runs.items(), strict=True):
        across = min(gpus, run.world_size)
        groups = {axis: ranks_along(run, axis) for axis in AXES if getattr(run, axis) > 1}
        ax.axis("off")
        ax.set(xlim=(-1.1, across), ylim=(rows[name] - 0.4, -0.6))
        ax.set_title(name, loc="left", weight="bold")
        for node in range(rows[name]):
            ax.text(-0.12, node, f"node {node}", ha="right", va="center", size=SMALL, color=MUTED)
        for rank in range(run.world_size):
            node, place = divmod(rank, gpus)
            color = PALETTE[coordinates(run, rank)["pp"]]
            cell(ax, place + 0.03, node - 0.43, color, PANEL, 0.94, 0.86)
            marks = "".join(axis[0].upper() for axis, group in groups.items() if rank in group and rank)
            weight = "bold" if marks or not rank else "normal"
            write(ax, place + 0.5, node, f"{rank} {marks}".strip(), color, weight=weight, gid=f"rank {rank}")
        talks = "; ".join(f"{NAMES[axis]} {' '.join(map(str, group))}" for axis, group in groups.items())
        said.append(f"{name}: {rows[name]} nodes; rank 0 is with {talks or 'nobody'}")
    stages = max(run.pp for run in runs.values())
    used = [axis for axis in AXES if any(getattr(run, axis) > 1 for run in runs.values())]
    partners = {f"{axis[0].upper()}: with rank 0 in {NAMES[axis]}": PANEL for axis in used}
    legend(picture, {**{f"stage {stage}": PALETTE[stage] for stage in range(stages)}, **partners})
    picture.alt = "Which rank is in which node. " + ". ".join(said) + "."
    return picture
