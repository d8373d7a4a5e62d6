"""Drawings of the last chapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...base.units import show_bytes
from ...plots.canvas import FAINT, MUTED, PALETTE, Picture
from ...plots.schematic import box, finished, label, link, sketch

FILE = PALETTE[1]


class Rung(NamedTuple):
    """A state of a job: its name, its peak memory and the memory of its GPU in bytes, and its speed in words."""

    name: str
    peak: int
    room: int
    speed: str


def draw_look_back(jobs: Sequence[tuple[str, Rung, Rung]]) -> Picture:
    """Return a drawing of each job's first and last state: the peak memory of a GPU as a share of all it has."""
    picture, ax = sketch(30 + 116 * len(jobs))
    scale = 130  # pixels for all of a GPU's memory
    words = []
    label(ax, 12, 14, "Peak memory of a GPU; blue: all it has", color=PALETTE[0])
    for number, (title, *rungs) in enumerate(jobs):
        top = 42 + 116 * number
        label(ax, 12, top, title, weight="bold")
        for place, rung in enumerate(rungs):
            y, long = top + 12 + 42 * place, min(rung.peak / rung.room, 2.9) * scale
            fits = rung.peak <= rung.room
            box(ax, 12, y, long, 16, color=(PALETTE[2] if place else FAINT) if fits else PALETTE[3])
            ax.plot((12 + scale, 12 + scale), (y - 2, y + 18), color=PALETTE[0], linewidth=2)
            figures = f"{show_bytes(rung.peak)}, {rung.speed}"
            label(ax, 12, y + 28, f"{rung.name}: {figures}", color=MUTED)
            words.append(f"{title}, {rung.name}: {figures}")
    return finished(picture, "; ".join(words) + ".")


def draw_script(parts: Sequence[tuple[str, str, float]]) -> Picture:
    """Return a drawing of the script: its parts (name, file that it writes, core seconds), one after the other."""
    picture, ax = sketch(34 + 58 * len(parts))
    label(ax, 12, 14, "part", weight="bold")
    label(ax, 178, 14, "file", weight="bold")
    label(ax, 388, 14, "core seconds", "right", weight="bold")
    for number, (name, file, seconds) in enumerate(parts):
        y = 30 + 58 * number
        box(ax, 12, y, 124, 34, name, PALETTE[5])
        if file:
            box(ax, 178, y + 2, 142, 30, file, FILE)
            link(ax, (136, y + 17), (178, y + 17))
        label(ax, 388, y + 17, f"{seconds:.1f}", "right")
        if number:
            link(ax, (74, y - 24), (74, y))
    words = [f"{name} writes {file}, {seconds:.1f} s" if file else f"{name}: {seconds:.1f} s"
             for name, file, seconds in parts]  # fmt: skip
    return finished(picture, "; ".join(words) + ".")


def draw_lives(lives: Sequence[tuple[int, int]], steps: int, every: int) -> Picture:
    """Return a drawing of a run that was killed: for each life its steps, (first, last), over a grid of checkpoints."""
    picture, ax = sketch(58 + 24 * len(lives))
    left, scale = 66, 320 / steps
    label(ax, left, 14, f"steps 0 to {steps}, a checkpoint after every {every}")
    for step in range(0, steps + 1, every):
        ax.plot((left + step * scale,) * 2, (28, 40 + 24 * len(lives)), color=FAINT, linewidth=1)
    reached = 0
    for number, (first, last) in enumerate(lives):
        y = 34 + 24 * number
        label(ax, left - 8, y + 8, f"life {number + 1}", "right")
        repeated = max(0, min(last, reached) - first + 1)
        if repeated:
            box(ax, left + (first - 1) * scale, y, repeated * scale, 16, color=PALETTE[3])
        new = last - first + 1 - repeated
        if new > 0:
            box(ax, left + (first - 1 + repeated) * scale, y, new * scale, 16, color=PALETTE[2])
        reached = max(reached, last)
    words = "; ".join(f"life {number + 1}: steps {first} to {last}" for number, (first, last) in enumerate(lives))
    return finished(picture, f"A run of {steps} steps with a checkpoint after every {every}. {words}.")
