"""Drawings of Memory anatomy: lifetimes of parts, tensors that a block saves, moments of a step, and segments.

All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from ...base.units import GiB, MiB, show_bytes
from ...plots.canvas import COLORS, FAINT, MUTED, PALETTE, WHITE, Picture
from ...plots.schematic import box, finished, keys, label, link, sketch, strip, tensor

BLOCKS = 4  # drawn of a model that has more


def draw_lifetimes() -> Picture:
    """Return a drawing of the time in a step at which each part is in memory. Neither times nor sizes are to scale."""
    times = {"forward": 98.0, "loss": 190.0, "backward": 232.0, "update": 322.0, "end": 388.0}
    forward, loss, backward, update, end = times.values()
    picture, ax = sketch(264)
    for (name, start), stop in zip(times.items(), [*times.values()][1:], strict=False):
        label(ax, (start + stop) / 2, 14, name, "center", weight="bold")
        ax.plot([start, start], [24, 256], color=FAINT, zorder=0)
    rows = {"weights": 32, "optimizer": 66, "gradients": 100, "activations": 136, "logits": 208, "workspace": 238}
    for name, y in rows.items():
        label(ax, 12, y + 11, name)
    box(ax, forward, rows["weights"], end - forward, 24, "always", COLORS["weights"])
    box(ax, forward, rows["optimizer"], update - forward, 24, "from the 2nd step on", WHITE)
    box(ax, update, rows["optimizer"], end - update, 24, "always", COLORS["optimizer"])
    for block in range(BLOCKS):  # the last block's gradients come first, and all stay until zero_grad
        start = backward + (update - backward) * (BLOCKS - 1 - block) / BLOCKS
        box(ax, start, rows["gradients"] + 6 * block, end - start, 6, "", COLORS["gradients"])
    for block in range(BLOCKS):  # the block whose activations are saved first needs them last
        start = forward + (loss - forward) * block / BLOCKS
        stop = update - (update - backward) * block / BLOCKS
        box(ax, start, rows["activations"] + 16 * block, stop - start, 16, f"block {block + 1}", COLORS["activations"])
    box(ax, loss - 6, rows["logits"], backward - loss + 12, 22, "", COLORS["logits"])
    box(ax, backward + 6, rows["logits"] + 16, end - backward - 6, 6, "", COLORS["logits"])  # `outputs.logits`
    for x in range(106, 380, 19):
        box(ax, x, rows["workspace"] + 4, 6, 14, "", COLORS["workspace"])
    return finished(
        picture,
        "When each part is in memory during a step. Weights: always. Optimizer states: from the first update on. "
        "Gradients: from backward, the last block's first, to the end. A block's activations: from its forward to its "
        "backward, the first block's longest. Logits: around the loss, one tensor to the end. Workspace: while "
        "operators run.",
    )


def draw_block(saved: Sequence[tuple[str, str, int]], caption: str) -> Picture:
    """Return a drawing of a Llama block, from its input to the next block, and of the tensors it saves for backward.

    `saved`: a row for each operator in the order of forward: the operator, the tensors that are saved as it runs, and
    their bytes. The first and the fifth row begin with the residual stream, which is drawn around four operators each.
    """
    top, step, largest = 66, 54, max(size for *_, size in saved)
    picture, ax = sketch(top + step * len(saved) + 56)
    tensor(ax, 30, top - 42, 100, 26, "T", "h", "block input", PALETTE[5])
    for number, (operator, words, size) in enumerate(saved):
        y = top + step * number - 16
        link(ax, (80, y), (80, y + 24))
        box(ax, 30, y + 24, 100, 30, operator)
        label(ax, 150, y + 3, f"{words}: {size / MiB:,.0f} MiB")
        strip(ax, 150, y + 13, [(size, "", COLORS["activations"])], 240 / largest, height=9)
    for start in (top - 10, top + 4 * step - 10):
        ax.plot([80, 14, 14], [start, start, start + 4 * step], color=MUTED, linestyle=":")
        link(ax, (14, start + 4 * step), (78, start + 4 * step), color=MUTED)
    y = top + step * len(saved) - 16
    link(ax, (80, y), (80, y + 24))
    box(ax, 30, y + 24, 100, 30, "next block", PALETTE[5])
    total = sum(size for *_, size in saved)
    label(ax, 150, y + 30, f"one block saves {total / MiB:,.0f} MiB", weight="bold")
    label(ax, 150, y + 48, caption, color=MUTED)
    rows = "; ".join(f"{operator}: {words}, {size / MiB:,.0f} MiB" for operator, words, size in saved)
    return finished(picture, f"What a Llama block saves for backward, {caption}. {rows}. Together {show_bytes(total)}.")


def draw_moments(moments: Mapping[str, Mapping[str, int]], room: int, gpu: str) -> Picture:
    """Return a stacked bar for each moment of a step: the bytes of each part, and a line at the `room` of a GPU.

    `moments`: for each moment, in the order of the step, bytes by part.
    """
    totals = {name: sum(parts.values()) for name, parts in moments.items()}
    scale = 290 / max(totals.values())
    used = [part for part in COLORS if any(parts.get(part) for parts in moments.values())]
    picture, ax = sketch(74 + 44 * len(moments))
    limit = 12 + room * scale
    keys(ax, {part: COLORS[part] for part in used}, (12, 137, 262), 8, line=20)
    top = 52
    for number, (name, parts) in enumerate(moments.items()):
        y = top + 44 * number
        label(ax, 12, y + 4, name)
        ax.plot((limit, limit), (y + 12, y + 34), color=PALETTE[0], linewidth=2, zorder=5)
        pieces = [(parts[part], "", COLORS[part]) for part in used if parts.get(part)]
        stop = strip(ax, 12, y + 13, pieces, scale, height=18)
        label(ax, max(stop, limit) + 8, y + 22, f"{totals[name] / GiB:.1f} GiB", weight="bold")
    label(ax, 12, top + 44 * len(moments) + 8, f"blue line: the {show_bytes(room)} that a {gpu} has for tensors",
          color=PALETTE[0])  # fmt: skip
    rows = "; ".join(f"{name}: {', '.join(f'{part} {size / GiB:.1f}' for part, size in parts.items() if size)}"
                     for name, parts in moments.items())  # fmt: skip
    return finished(picture, f"Memory in GiB at moments of a step; a {gpu} has {show_bytes(room)}. {rows}.")


def draw_segments(segments: Sequence[Mapping[str, Any]], context: int) -> Picture:
    """Return a drawing of the allocator's segments, largest first, and of the process: all segments and the context.

    `segments`: those of PyTorch's memory snapshot; `context`: bytes of the CUDA context.
    """
    ordered = sorted(segments, key=lambda segment: -segment["total_size"])
    scale = 376 / ordered[0]["total_size"]
    picture, ax = sketch(96 + 56 * len(ordered))
    for number, segment in enumerate(ordered):
        y = 12 + 56 * number
        total, used = (segment[f"{name}_size"] / MiB for name in ("total", "allocated"))
        label(ax, 12, y + 6, f"segment of {total:g} MiB: {used:g} MiB allocated")
        _draw_blocks(ax, y + 18, segment["blocks"], scale)
    reserved, allocated = (sum(row[f"{name}_size"] for row in ordered) for name in ("total", "allocated"))
    y = 24 + 56 * len(ordered)
    parts = f"{reserved / MiB:.0f} MiB in segments, {context / MiB:.0f} MiB of context"
    label(ax, 12, y, f"the process: {parts}")
    pieces = ((reserved, "", PALETTE[5]), (context, "", FAINT))
    strip(ax, 12, y + 12, pieces, 376 / (reserved + context))
    sizes = f"{allocated / MiB:g} MiB allocated, {reserved / MiB:g} MiB reserved"
    label(ax, 12, y + 54, sizes, weight="bold")
    rows = ", ".join(f"{row['total_size'] / MiB:g} MiB with {row['allocated_size'] / MiB:g} allocated"
                     for row in ordered)  # fmt: skip
    process = f"{(reserved + context) / MiB:.0f} MiB"
    return finished(picture, f"Segments: {rows}. {sizes}; with the CUDA context the process uses {process}.")


def _draw_blocks(ax: Axes, y: float, blocks: Sequence[Mapping[str, Any]], scale: float) -> None:
    """Draw the blocks of a segment side by side; tensors are dark, free blocks white."""
    pieces = []
    for block in blocks:
        free = block["state"] == "inactive"
        words = f"{block['size'] / MiB:g}{' free' if free else ''}" if block["size"] > 2 * MiB else ""
        pieces.append((block["size"], words, WHITE if free else COLORS["weights"]))
    strip(ax, 12, y, pieces, scale)
