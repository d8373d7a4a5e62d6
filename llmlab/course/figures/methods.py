"""The drawing of the page on post-training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...plots.canvas import COLORS, MUTED, PALETTE, WHITE, Picture
from ...plots.schematic import box, finished, label, sketch

LEFT, RIGHT, TOP, BOTTOM = 54, 390, 34, 250  # pixels
KINDS = {"weights": COLORS["weights"], "optimizer": COLORS["optimizer"], "activations": COLORS["activations"],
         "engine": PALETTE[4]}  # fmt: skip


def draw_phases(phases: Mapping[str, tuple[float, Sequence[tuple[str, float]]]], capacity: float) -> Picture:
    """Draw the phases of an update from left to right, as wide as their seconds and as high as their memory.

    `phases` has the seconds of each and its memory, (kind, GiB) from the bottom up; `capacity` is that of the GPU.
    """
    picture, ax = sketch(BOTTOM + 44)
    x, width = float(LEFT), (RIGHT - LEFT) / sum(seconds for seconds, _ in phases.values())
    height = (BOTTOM - TOP) / capacity
    box(ax, LEFT, TOP, RIGHT - LEFT, BOTTOM - TOP, "", WHITE, MUTED)
    label(ax, LEFT - 6, TOP + 6, f"{capacity:.0f} GiB", "right", color=MUTED)
    label(ax, LEFT - 6, BOTTOM - 4, "0", "right", color=MUTED)
    for name, (seconds, pieces) in phases.items():
        y = float(BOTTOM)
        for kind, size in pieces:
            y -= size * height
            words, fits = f"{kind} {size:.0f}", size * height >= 18
            box(ax, x, y, seconds * width, size * height, words if fits else "", KINDS[kind])
            if not fits:
                label(ax, x + seconds * width / 2, y - 10, words, "center")
        label(ax, x + seconds * width / 2, BOTTOM + 16, name, "center")
        label(ax, x + seconds * width / 2, BOTTOM + 34, f"{seconds:.0f} s", "center", color=MUTED)
        x += seconds * width
    descriptions = "; ".join(f"{name}: {seconds:.0f} s, " + ", ".join(f"{kind} {size:.0f} GiB" for kind, size in pieces)
                     for name, (seconds, pieces) in phases.items())  # fmt: skip
    return finished(picture, f"An update over time, and its memory. {descriptions}.")
