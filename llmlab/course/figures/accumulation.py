"""Drawings of the chapter on gradient accumulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from ...base.units import show_bytes
from ...plots.canvas import COLORS, INK, MUTED, PALETTE, Picture
from ...plots.schematic import box, finished, grid, label, sketch

LEFT, WIDTH, TALLEST = 12, 376, 150  # pixels
UPDATE = 0.12  # of the width


class Cut(NamedTuple):
    """One update in `passes` micro-batches, in bytes.

    `constant` is always in memory, and `gradients` from the first backward pass to the update. `each_pass` is the peak
    of the memory that a pass allocates and frees, and `update` is the optimizer's temporary memory.
    """

    name: str
    passes: int
    constant: int
    gradients: int
    each_pass: int
    update: int

    @property
    def peak(self) -> int:
        """The bytes at the highest peak of the passes."""
        return self.constant + self.each_pass + (self.gradients if self.passes > 1 else 0)


def plot_passes(cuts: Sequence[Cut], capacity: int, gpu: str) -> Picture:
    """Return a drawing of memory over the time of one update, a panel per cut, with the memory of the GPU as a line."""
    scale = TALLEST / max(cut.peak for cut in cuts)
    picture, ax = sketch(58 + (TALLEST + 56) * len(cuts))
    for number, cut in enumerate(cuts):
        floor = (TALLEST + 56) * (number + 1) - 8
        label(ax, LEFT, floor - TALLEST - 34, cut.name, weight="bold")
        _draw_cut(ax, cut, floor, scale)
        height = floor - capacity * scale
        ax.plot((LEFT, LEFT + WIDTH), (height, height), color=INK, linestyle="--", linewidth=1.2, zorder=4)
    bottom = (TALLEST + 56) * len(cuts)
    names = (("weights, optimizer states", "weights"), ("gradients", "gradients"),
             ("activations, logits, fp16 copies", "activations"), ("update's buffers", "other"))  # fmt: skip
    for number, (name, part) in enumerate(names):
        x, y = LEFT + 240 * (number % 2), bottom + 12 + 18 * (number // 2)
        box(ax, x, y - 5, 12, 10, color=COLORS[part])
        label(ax, x + 18, y, name)
    label(ax, LEFT, bottom + 48, f"Dashed: the {show_bytes(capacity)} of a {gpu}. Time is not to scale.", color=MUTED)
    panels = "; ".join(
        f"{cut.name}: {cut.passes} {'peak' if cut.passes == 1 else 'peaks'}, the highest {show_bytes(cut.peak)}, over "
        f"{show_bytes(cut.constant)} that never change" for cut in cuts
    )  # fmt: skip
    return finished(picture, f"Memory over one update. {panels}. A {gpu} has {show_bytes(capacity)}.")


def _draw_cut(ax: Axes, cut: Cut, floor: float, scale: float) -> None:
    """Draw the constant bytes, the passes on them, and the update at the end."""
    base = floor - cut.constant * scale
    grown = base - cut.gradients * scale
    end, pass_width = LEFT + WIDTH * (1 - UPDATE), WIDTH * (1 - UPDATE) / cut.passes
    for number in range(cut.passes):
        start = LEFT + number * pass_width
        # The backward pass takes twice as long as the forward pass.
        middle, stop = start + pass_width / 3, start + pass_width
        ground = base if number == 0 else grown
        top = ground - cut.each_pass * scale
        gradients = ((start, middle, stop, stop, start), (ground, ground, grown, base, base))
        ax.fill(*gradients, color=COLORS["gradients"], linewidth=0, zorder=2)
        ax.fill((start, middle, stop, middle), (ground, top, grown, ground), color=COLORS["activations"], linewidth=0)
        size = cut.constant + cut.each_pass + (cut.gradients if number else 0)
        label(ax, min(max(middle, LEFT + 26), LEFT + WIDTH - 26), top - 9, show_bytes(size), "center")
    box(ax, LEFT, base, WIDTH, floor - base, show_bytes(cut.constant), COLORS["weights"], COLORS["weights"])
    box(ax, end, grown, WIDTH * UPDATE, base - grown, color=COLORS["gradients"], edge=COLORS["gradients"])
    height = cut.update * scale
    box(ax, end, grown - height, WIDTH * UPDATE, height, color=COLORS["other"], edge=COLORS["other"])


def plot_groups(loops: Sequence[tuple[str, Sequence[Sequence[int | None]]]]) -> Picture:
    """Return a drawing of which update each micro-batch goes into.

    A loop is its name and, for each epoch, the number of the update of each micro-batch; None is for a micro-batch
    that no update uses.
    """
    epochs = len(loops[0][1])
    picture, ax = sketch(8 + len(loops) * (34 + 28 * epochs))
    words = []
    for number, (name, rows) in enumerate(loops):
        top = 14 + number * (34 + 28 * epochs)
        label(ax, LEFT, top, name, weight="bold")
        for epoch, updates in enumerate(rows):
            y = top + 16 + 28 * epoch
            label(ax, LEFT, y + 11, f"epoch {epoch + 1}")
            boxes = [(str(update or "–"), _color(update)) for update in updates]
            grid(ax, 76, y, [boxes], 30, 22)
        used = [update for updates in rows for update in updates if update]
        sizes = [str(used.count(update)) for update in sorted(set(used))]
        unused = sum(update is None for updates in rows for update in updates)
        words.append(f"{name}: updates of {', '.join(sizes)} micro-batches, and {unused} in none")
    return finished(picture, f"Micro-batches and the updates that use them. {'; '.join(words)}.")


def _color(update: int | None) -> str:
    return "#FFFFFF" if update is None else PALETTE[(1, 5, 2, 4, 6)[update % 5]]
