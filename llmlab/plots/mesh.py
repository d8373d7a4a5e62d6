"""Which rank is where: nodes, the GPUs in them, and whom rank 0 talks to along each axis."""

from __future__ import annotations

from ..base.errors import SpecError
from ..specs.mesh import AXES, coordinates, ranks_along
from ..specs.run import Training
from .canvas import MUTED, PALETTE, PANEL, SMALL, Picture, cell, ink_on, key, legend, new_panels, styled

NAMES = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
MOST = 128  # ranks whose numbers can still be read


@styled
def plot_mesh(runs: dict[str, Training], gpus: int = 8) -> Picture:
    """Return one panel per mesh: rows are nodes of `gpus` GPUs, a cell is a rank, its colour the pipeline stage.

    The letters T, C, D and P mark the ranks that rank 0 communicates with along tensor, context, data and pipeline.
    More than 128 ranks, more than eight stages, and ranks that fill no whole nodes raise SpecError.
    """
    for name, run in runs.items():
        if run.world_size > MOST or run.pp > len(PALETTE) or run.world_size % min(gpus, run.world_size):
            raise SpecError(f"{name}: {run.world_size} ranks, pp={run.pp}; give whole nodes of at most {MOST} ranks, "
                            f"and at most {len(PALETTE)} stages")  # fmt: skip
    rows = {name: -(-run.world_size // gpus) for name, run in runs.items()}
    height = 0.5 + sum(0.4 + 0.34 * n for n in rows.values())
    picture, panels = new_panels(height, len(runs), 1, height_ratios=[n + 1 for n in rows.values()])
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
            style = {"ha": "center", "va": "center", "size": SMALL, "color": ink_on(color), "gid": f"rank {rank}"}
            weight = "bold" if marks or not rank else "normal"
            ax.text(place + 0.5, node, f"{rank} {marks}".strip(), weight=weight, **style)
        talks = "; ".join(f"{NAMES[axis]} {' '.join(map(str, group))}" for axis, group in groups.items())
        said.append(f"{name}: {rows[name]} nodes; rank 0 is with {talks or 'nobody'}")
    stages = max(run.pp for run in runs.values())
    used = [axis for axis in AXES if any(getattr(run, axis) > 1 for run in runs.values())]
    partners = [key(f"{axis[0].upper()}: with rank 0 in {NAMES[axis]}", PANEL) for axis in used]
    legend(picture, [*(key(f"stage {stage}", PALETTE[stage]) for stage in range(stages)), *partners])
    picture.alt = "Which rank is in which node. " + ". ".join(said) + "."
    return picture
