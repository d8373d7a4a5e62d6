"""Drawings of the page on batches: texts of different lengths in rows of equal width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...plots.canvas import MUTED, PALETTE, WHITE, Picture
from ...plots.schematic import box, finished, label, sketch

LEFT, WIDTH, ROW = 12, 376, 22  # pixels
Batch = Sequence[Sequence[int]]  # rows, each with the lengths of its texts


def draw_batches(batchings: Mapping[str, Sequence[Batch]]) -> Picture:
    """Draw each way to form batches: a row of boxes for each row of a batch, as wide as its texts; padding is hatched.

    A row is padded to the longest row of its batch.
    """
    longest = max(sum(row) for batches in batchings.values() for batch in batches for row in batch)
    height = sum(34 + sum(len(batch) * ROW + 8 for batch in batches) for batches in batchings.values())
    picture, ax = sketch(height + 12)
    y, words = 8.0, []
    for name, batches in batchings.items():
        positions = sum(len(batch) * max(sum(row) for row in batch) for batch in batches)
        padding = positions - sum(sum(row) for batch in batches for row in batch)
        title = f"{name}: {positions:,} positions, {padding / positions:.0%} padding"
        label(ax, LEFT, y + 10, title, weight="bold")
        words.append(title)
        y += 26
        for batch in batches:
            width = max(sum(row) for row in batch)
            for row in batch:
                x = float(LEFT)
                for length in row:
                    box(ax, x, y, length / longest * WIDTH, ROW, f"{length:,}", PALETTE[5])
                    x += length / longest * WIDTH
                end = LEFT + width / longest * WIDTH
                if end > x:
                    box(ax, x, y, end - x, ROW, color=WHITE, edge=MUTED, hatch="///")
                y += ROW
            y += 8
        y += 8
    return finished(picture, f"Texts in batches. {'; '.join(words)}.")
