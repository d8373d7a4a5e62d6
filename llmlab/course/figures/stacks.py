"""The figures of the page on training stacks: the shards on a rank, and the copies of the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...base.units import GiB
from ...plots.canvas import PALETTE, WHITE, Picture
from ...plots.schematic import finished, grid, label, sketch, strip

COPY_COLORS = {"logits": PALETTE[5], "log_softmax": PALETTE[1], "softmax": PALETTE[1], "gradient": PALETTE[4]}


def draw_shards(shards: Mapping[str, Mapping[str, int]], ranks: int) -> Picture:
    """Draw how many of the `ranks` shards of weights, gradients and optimizer states rank 0 stores, by method."""
    picture, ax = sketch(8 + 134 * len(shards))
    words = []
    for number, (method, parts) in enumerate(shards.items()):
        y = 16 + 134 * number
        label(ax, 12, y, f"{method}: rank 0 of {ranks}", weight="bold")
        for row, (part, stored) in enumerate(parts.items()):
            label(ax, 12, y + 30 + 32 * row, part)
            cells = [("", PALETTE[row])] * stored + [("", WHITE)] * (ranks - stored)
            grid(ax, 92, y + 18 + 32 * row, [cells], 26, 24)
            label(ax, 308, y + 30 + 32 * row, f"{stored}/{ranks}")
        words.append(f"{method}: " + ", ".join(f"{n} of {ranks} shards of {part}" for part, n in parts.items()))
    return finished(picture, f"Shards on rank 0 after the backward pass. {'; '.join(words)}.")


def draw_logits(copies: Mapping[str, Sequence[tuple[str, float]]], sizes: Mapping[str, int]) -> Picture:
    """Draw the copies of the logits at the peak of each stack, (name, bytes per logit), with their `sizes` in bytes."""
    picture, ax = sketch(8 + 56 * len(copies))
    words = []
    widest = max(sum(width for _, width in tensors) for tensors in copies.values())
    for number, (stack, tensors) in enumerate(copies.items()):
        per_logit = sum(width for _, width in tensors)
        title = f"{stack}: {per_logit:g} bytes per logit, {sizes[stack] / GiB:.1f} GiB"
        label(ax, 12, 14 + 56 * number, title, weight="bold")
        pieces = [(width, name if width >= 2 else "", COPY_COLORS.get(name, PALETTE[2])) for name, width in tensors]
        strip(ax, 12, 26 + 56 * number, pieces, 376 / widest, 24)
        words.append(f"{stack}: " + ", ".join(f"{name} {width:g}" for name, width in tensors))
    return finished(picture, f"Copies of the logits at the peak, in bytes per logit. {'; '.join(words)}.")
