"""Drawings of the chapter on activation checkpointing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...base.units import show_bytes
from ...plots.canvas import FAINT, MUTED, PALETTE, WHITE, Picture
from ...plots.schematic import box, finished, keys, label, link, sketch, strip

LEFT, WIDTH, RIGHT = 12, 376, 388  # pixels
KEPT, RECOMPUTED, MOVED = PALETTE[0], PALETTE[1], PALETTE[4]


class Policy(NamedTuple):
    """A way to checkpoint: bytes (kept, recomputed) of every block as the backward pass begins."""

    name: str
    blocks: Sequence[tuple[int, int]]


def policies(layers: int, whole: int, block_input: int, matmul_outputs: int, spacing: int) -> list[Policy]:
    """Return four ways to checkpoint `layers` blocks, at the moment at which the last segment is recomputed.

    Sizes are the bytes of a block: `whole` is everything that it saves, including its input, and `matmul_outputs` are
    saved by selective checkpointing. `spacing` is the number of blocks per segment of the third way.
    """
    saved, recomputed = block_input + matmul_outputs, whole - block_input
    segment = [(block_input, 0), *[(0, 0)] * (spacing - 1)]
    last = [(block_input, recomputed), *[(0, whole)] * (spacing - 1)]
    return [
        Policy("keep everything", [(whole, 0)] * layers),
        Policy("keep the input of every block", [(block_input, 0)] * (layers - 1) + [(block_input, recomputed)]),
        Policy(f"keep the input of every {spacing}th block", segment * (layers // spacing - 1) + last),
        Policy("selective: keep inputs and matmul outputs", [(saved, 0)] * (layers - 1) + [(saved, whole - saved)]),
    ]


def plot_policies(ways: Sequence[Policy]) -> Picture:
    """Return a drawing of every block's memory at the start of the backward pass, a row for each way to checkpoint.

    The height of a bar is its share of the largest block.
    """
    largest = max(saved + recomputed for way in ways for saved, recomputed in way.blocks)
    picture, ax = sketch(44 + 82 * len(ways))
    totals = []
    for row, way in enumerate(ways):
        y = 14 + 82 * row
        total = show_bytes(sum(saved + recomputed for saved, recomputed in way.blocks))
        label(ax, LEFT, y, way.name, weight="bold")
        label(ax, RIGHT, y, total, "right")
        totals.append(f"{way.name} {total}")
        pitch = WIDTH / len(way.blocks)
        for number, (saved, recomputed) in enumerate(way.blocks):
            x, bottom = LEFT + pitch * number, y + 60
            box(ax, x, bottom - 46, pitch - 2, 46, edge=FAINT)
            for low, size, color in ((0, saved, KEPT), (saved, recomputed, RECOMPUTED)):
                if size:
                    height = max(2.5, 46 * size / largest)
                    box(ax, x, bottom - 46 * low / largest - height, pitch - 2, height, color=color)
    colors = {"kept": KEPT, "recomputed": RECOMPUTED, "not in memory": WHITE}
    keys(ax, colors, (LEFT, 110, 248), 14 + 82 * len(ways), side=16)
    blocks = len(ways[0].blocks)
    return finished(picture, f"The memory of {blocks} blocks as the backward pass begins. {'; '.join(totals)}.")


def plot_recomputation(block_input: int, whole: int, blocks: int = 4) -> Picture:
    """Return a drawing of `blocks` checkpointed blocks during the backward pass, a row per moment, with their bytes."""
    moments = [("forward pass is over", blocks, 0)]
    for block in range(blocks, 0, -1):
        moments.append((f"recompute block {block}", block, block))
        if block > 1:
            moments.append((f"block {block} is done", block - 1, 0))
    picture, ax = sketch(28 + 33 * len(moments))
    label(ax, 146, 12, "block", "right", color=MUTED)
    for place in range(blocks):
        label(ax, 170 + 36 * place, 12, f"{place + 1}", "center")
    words = []
    for row, (name, inputs, recomputed) in enumerate(moments):
        y = 24 + 33 * row
        size = show_bytes(inputs * block_input + (whole - block_input if recomputed else 0))
        label(ax, LEFT, y + 13, name)
        for place in range(blocks):
            box(ax, 153 + 36 * place, y, 34, 26, color=RECOMPUTED if recomputed == place + 1 else WHITE, edge=FAINT)
            if place < inputs:
                box(ax, 153 + 36 * place, y + 22, 34, 4, color=KEPT)
        label(ax, RIGHT, y + 13, size, "right")
        words.append(f"{name}: {size}")
    return finished(picture, f"The memory of {blocks} checkpointed blocks over time. {'; '.join(words)}.")


def plot_offload(forward: float, backward: float, block_input: float, whole: float, blocks: int = 3) -> Picture:
    """Return a drawing of a GPU's work on `blocks` checkpointed blocks, and of the traffic on PCIe in two cases.

    The arguments are seconds of one block: its forward pass, its backward pass with the recomputation, and the
    transfers of its input and of everything that it would save without checkpointing.
    """
    scale = WIDTH / (blocks * (forward + backward))
    numbers = range(1, blocks + 1)
    picture, ax = sketch(226)
    label(ax, LEFT, 14, "GPU: forward (F), recomputation and backward (B)")
    end = strip(ax, LEFT, 26, [(forward, f"F{n}", PALETTE[5]) for n in numbers], scale)
    strip(ax, end, 26, [(backward, f"B{n}", PALETTE[2]) for n in reversed(numbers)], scale)
    for n in range(1, blocks):  # the last block's input is needed immediately
        for start, leaves in ((forward * n, True), (blocks * forward + backward * n - block_input, False)):
            width = max(4, block_input * scale)
            x = LEFT + start * scale if leaves else LEFT + (start + block_input) * scale  # begins, or ends there
            box(ax, x if leaves else x - width, 90, width, 26, color=RECOMPUTED if leaves else MOVED)
            link(ax, (x, 53 if leaves else 89), (x, 89 if leaves else 53), color=MUTED)
    label(ax, LEFT, 130, f"PCIe: only inputs leave and return, {block_input * 1e3:.1f} ms each")
    start = 0.0
    for n in numbers:
        start = max(start, forward * n)
        box(ax, LEFT + start * scale, 160, whole * scale, 26, f"{n}", color=RECOMPUTED)
        start += whole
    label(ax, LEFT, 204, f"PCIe: everything leaves, {whole * 1e3:.0f} ms for each block")
    return finished(
        picture,
        f"The GPU computes the forward pass of {blocks} blocks, {forward * 1e3:.1f} ms each, and then their backward "
        f"pass with recomputation, {backward * 1e3:.1f} ms each. On PCIe the input of a block takes "
        f"{block_input * 1e3:.1f} ms each way. Everything that a block keeps takes {whole * 1e3:.0f} ms and is still "
        "leaving during the backward pass.",
    )
