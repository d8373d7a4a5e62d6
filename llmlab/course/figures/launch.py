"""The drawings of the chapter on launching a job: nodes and ranks, a restart, and the time that is lost."""

from __future__ import annotations

from collections.abc import Mapping

from ...plots.canvas import PALETTE, WHITE, Picture
from ...plots.schematic import box, finished, grid, label, link, rank, sketch, strip

PARTS = {"training": PALETTE[5], "saves": PALETTE[2], "lost work": PALETTE[3], "restarts": PALETTE[1]}


def draw_nodes(nodes: int, gpus: int) -> Picture:
    """Draw the first two and the last of `nodes`, each with a torchrun that starts `gpus` ranks, and their store."""
    picture, ax = sketch(290)
    label(ax, 18, 14, "LOCAL_RANK")
    for local in range(gpus):
        label(ax, 32 + 28 * local, 34, str(local), "center")
    for row, node in enumerate((0, 1, nodes - 1)):
        y = 46 + 70 * row + 26 * (row == 2)
        rank(ax, 8, y, 244, 62, f"node {node}: torchrun")
        node_ranks = range(gpus * node, gpus * (node + 1))
        grid(ax, 18, y + 26, [[(str(number), PALETTE[5] if number else PALETTE[1]) for number in node_ranks]], 28, 28)
        link(ax, (252, y + 31), (314, 138 + 18 * (row - 1)))
    label(ax, 130, 199, "...", "center", weight="bold")
    box(ax, 314, 92, 78, 92, "store:\naddresses\nof all\nranks", PALETTE[1])
    for row, words in enumerate(("MASTER_ADDR,", "MASTER_PORT")):
        label(ax, 396, 56 + 18 * row, words, "right")
    for row, words in enumerate(("on the node", "of RANK 0")):
        label(ax, 396, 202 + 18 * row, words, "right")
    return finished(
        picture,
        f"{nodes} nodes of {gpus} GPUs, of which nodes 0, 1 and {nodes - 1} are drawn. On each, torchrun starts {gpus} "
        f"processes. RANK is 0 to {nodes * gpus - 1} over all nodes, LOCAL_RANK 0 to {gpus - 1} on each node. All "
        "connect to a store on the node of RANK 0, at MASTER_ADDR and MASTER_PORT.",
    )


def draw_restart(died: int, saved: int, steps: int) -> Picture:
    """Draw two ranks under torchrun: rank 1 is killed after step `died`, and both restart from the checkpoint after
    step `saved` and train until step `steps`. Waiting and starting are not drawn to scale."""
    left, wide = 66, 22
    before = [(wide, str(n), PALETTE[3] if n > saved else PALETTE[5]) for n in range(1, died + 1)]
    after = [(wide, str(n), PALETTE[5]) for n in range(saved + 1, steps + 1)]
    picture, ax = sketch(200)
    for row, name in enumerate(("torchrun", "rank 0", "rank 1")):
        label(ax, left - 6, 27 + 36 * row, name, "right")
    killed = strip(ax, left, 86, before, 1)
    label(ax, killed + 4, 99, "killed", weight="bold")
    ended = strip(ax, left, 50, [*before, (48, "waits", PALETTE[1])], 1)
    restart = strip(ax, left, 14, [(ended - left, "watches", WHITE), (48, "starts", PALETTE[4])], 1)
    strip(ax, restart, 14, [(wide * len(after), "watches", WHITE)], 1)
    for y in (50, 86):
        strip(ax, restart, y, after, 1)
    checkpoint, checkpoint_x = f"checkpoint after step {saved}", left + wide * saved
    box(ax, checkpoint_x - 80, 152, 170, 30, checkpoint, PALETTE[2])
    link(ax, (checkpoint_x, 112), (checkpoint_x, 152), "save")
    link(ax, (checkpoint_x + 90, 167), (restart, 112), "load", bend=0.25)
    return finished(
        picture,
        f"Both ranks compute steps 1 to {died} and save a {checkpoint}. Rank 1 is killed, and rank 0 waits for it. "
        f"torchrun notices this, ends rank 0 and starts both again. They load the checkpoint and compute steps "
        f"{saved + 1} to {steps}. The steps after {saved} of the first start are lost.",
    )


def draw_interval() -> Picture:
    """Draw the timeline of a job that saves every tau seconds and fails once: two saved intervals, lost work, the
    restart, and training that continues."""
    picture, ax = sketch(112)
    train, save = (70, "τ", PARTS["training"]), (18, "δ", PARTS["saves"])
    lost = (50, "lost", PARTS["lost work"])
    failed = strip(ax, 12, 40, [train, save, train, save, lost], 1, 30)
    end = strip(ax, failed, 40, [(46, "R", PARTS["restarts"]), train, save], 1, 30)
    label(ax, failed, 26, "failure", "center", weight="bold")
    link(ax, (failed, 82), (188, 82), bend=0)
    label(ax, (failed + 188) / 2, 98, "back to the last checkpoint", "center")
    label(ax, end + 4, 55, "...")
    return finished(
        picture,
        "A timeline: training for τ, a save of δ, training for τ, a save of δ, then a failure in the middle of the "
        "next interval. Its work is lost. After a restart of R, training continues from the last checkpoint.",
    )


def draw_losses(jobs: Mapping[str, Mapping[str, float]]) -> Picture:
    """Draw one bar for each job: the shares of its time that go to saves, lost work and restarts, at one scale."""
    picture, ax = sketch(34 + 52 * len(jobs))
    lost = {name: color for name, color in PARTS.items() if name != "training"}
    scale = 376 / max(1 - shares["training"] for shares in jobs.values())
    x, words = 12.0, []
    for name, color in lost.items():
        box(ax, x, 8, 12, 12, "", color)
        x = label(ax, x + 16, 14, name).get_window_extent().x1 + 14
    for row, (name, shares) in enumerate(jobs.items()):
        y = 46 + 52 * row
        label(ax, 12, y, name, weight="bold")
        label(ax, 388, y, f"{1 - shares['training']:.1%}", "right")
        strip(ax, 12, y + 11, [(shares[part], "", color) for part, color in lost.items()], scale, 18)
        words.append(f"{name}: " + ", ".join(f"{part} {shares[part]:.2%}" for part in lost))
    return finished(picture, f"Shares of the time that do not train. {'; '.join(words)}.")
