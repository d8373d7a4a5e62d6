"""Drawings of the page on how a GPU runs a kernel: streams, blocks and warps, sectors, and tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...plots.canvas import FAINT, MUTED, PALETTE, WHITE, Picture
from ...plots.schematic import box, finished, grid, label, link, rank, sketch

LEFT, WIDTH = 12, 376  # pixels
OUTPUT, INPUT, WEIGHT = PALETTE[5], PALETTE[1], PALETTE[2]
LANES = {"CPU": PALETTE[1], "GPU": PALETTE[5]}


class Span(NamedTuple):
    """A piece of work of a lane, "CPU" or "GPU": its name, and when it begins and ends."""

    lane: str
    name: str
    begin: float
    end: float


def draw_lanes(cases: Mapping[str, Sequence[Span]], unit: str) -> Picture:
    """Draw the work of the CPU and the GPU over time, for each case. Spans named "wait" are drawn empty."""
    picture, ax = sketch(6 + 112 * len(cases))
    scale = 330 / max(span.end for spans in cases.values() for span in spans)
    words = []
    for number, (case, spans) in enumerate(cases.items()):
        top = 14 + 112 * number
        end_of_case = max(span.end for span in spans)
        label(ax, LEFT, top, f"{case}: {end_of_case:g} {unit}", weight="bold")
        rows = {lane: top + 14 + 38 * row for row, lane in enumerate(LANES)}
        for lane, y in rows.items():
            label(ax, LEFT, y + 12, lane)
            box(ax, 52, y, 330, 24, edge=FAINT)
        for lane, name, begin, end in spans:
            color = WHITE if name == "wait" else LANES[lane]
            box(ax, 52 + scale * begin, rows[lane], scale * (end - begin), 24, name, color)
        busy = sum(end - begin for lane, _, begin, end in spans if lane == "GPU")
        words.append(f"{case}: {end_of_case:g} {unit}, in which the GPU works for {busy:g}")
    return finished(picture, f"What the CPU and the GPU do over time. {'; '.join(words)}.")


def draw_grid(gpu: str, multiprocessors: int, registers: str, shared: str, cache: str) -> Picture:
    """Draw a grid of blocks, a block of warps, and the multiprocessor of `gpu` on which the block runs.

    `registers` and `shared` are sizes per multiprocessor, `cache` is the size of the L2 cache.
    """
    picture, ax = sketch(342)
    label(ax, LEFT, 16, "grid: all blocks of a launch", weight="bold")
    names = [[(f"{x},{y}", OUTPUT if (x, y) == (1, 0) else WHITE) for x in range(4)] for y in range(3)]
    grid(ax, LEFT, 30, names, 36, 26)
    link(ax, (84, 56), (84, 138))
    rank(ax, LEFT, 138, 236, 160, "block 1,0: 1,024 threads")
    for warp in range(3):
        y = 166 + 34 * warp
        label(ax, 22, y + 12, f"warp {warp}")
        for lane in range(8):
            box(ax, 76 + 15 * lane, y, 15, 24, "", INPUT if warp == 0 else WHITE)
        label(ax, 202, y + 12, "… 32")
    label(ax, 22, 284, "… 32 warps of 32 threads")
    rank(ax, 262, 30, 128, 268, "multiprocessor")
    for number in range(4):
        box(ax, 270, 58 + 30 * number, 112, 24, "scheduler", PALETTE[6])
    box(ax, 270, 184, 112, 44, f"registers\n{registers}", WEIGHT)
    box(ax, 270, 238, 112, 50, f"shared memory\n{shared}", PALETTE[4])
    link(ax, (248, 222), (262, 222))
    label(ax, LEFT, 322, f"{gpu}: {multiprocessors} multiprocessors, {cache} of L2 cache, memory")
    return finished(
        picture,
        "A grid of 4 by 3 blocks. One block has 1,024 threads, which are 32 warps of 32 threads, and runs on one "
        f"multiprocessor. The multiprocessor has four schedulers, {registers} of registers and {shared} of shared "
        f"memory. A {gpu} has {multiprocessors} multiprocessors, {cache} of L2 cache and its memory.",
    )


def draw_sectors() -> Picture:
    """Draw which sectors of memory the threads of a warp read along a row of fp32 values, and along a column."""
    picture, ax = sketch(194)
    cases = ((34, "along a row: 4 sectors for the warp", 5, 1), (128, "along a column: 32 sectors", 40, 8))
    for top, name, pitch, sectors in cases:
        label(ax, LEFT, top - 14, name, weight="bold")
        for thread in range(8):
            box(ax, LEFT + 20 * thread, top, 20, 18, "", INPUT)
            link(ax, (22 + 20 * thread, top + 18), (14.5 + pitch * thread, top + 42), color=MUTED)
        label(ax, 180, top + 9, "… 32 threads")
        grid(ax, LEFT, top + 42, [[("32 B", OUTPUT if sector < sectors else WHITE) for sector in range(9)]], 40, 18)
    return finished(
        picture,
        "Eight of the 32 threads of a warp. Along a row, eight neighbors read one sector of 32 bytes together, which "
        "makes 4 sectors for the warp. Along a column, each thread reads a sector of its own, which makes 32.",
    )


def draw_tiles(side: str) -> Picture:
    """Draw the output in tiles, and the tiles of both inputs that the block of one output tile needs."""
    picture, ax = sketch(306)
    label(ax, 200, 14, "W: p × q")
    grid(ax, 160, 26, [[("", WEIGHT if x == 1 else WHITE) for x in range(4)] for _ in range(4)], 26, 26)
    label(ax, 28, 136, "x: T × p")
    grid(ax, 28, 148, [[("", INPUT if y == 2 else WHITE) for _ in range(4)] for y in range(4)], 26, 26)
    label(ax, 272, 150, "y: T × q,\nin tiles")
    grid(ax, 160, 148, [[("", OUTPUT if (x, y) == (1, 2) else WHITE) for x in range(4)] for y in range(4)], 26, 26)
    link(ax, (34, 213), (126, 213))
    link(ax, (199, 32), (199, 124))
    rank(ax, 268, 186, 126, 112, "shared memory")
    box(ax, 280, 214, 44, 44, "of x", INPUT)
    box(ax, 338, 214, 44, 44, "of W", WEIGHT)
    label(ax, 331, 278, side, "center")
    return finished(
        picture,
        "The output y is divided into tiles. The block of one tile walks along a row of tiles of x and down a column "
        f"of tiles of W, and has two tiles at a time in shared memory. {side}.",
    )


def draw_levels(levels: Sequence[tuple[str, str, str]]) -> Picture:
    """Draw tiles inside each other, the largest first: (size, owner, memory of the inputs)."""
    height = 34 + 48 * len(levels)
    picture, ax = sketch(height + 20)
    words = []
    for number, (size, owner, place) in enumerate(levels):
        x, y = LEFT + 18 * number, 10 + 34 * number
        box(ax, x, y, WIDTH - 36 * number, height - 48 * number, color=(WHITE, INPUT, OUTPUT)[number % 3])
        label(ax, x + 10, y + 17, f"{size}: {owner}, inputs in {place}", color="#000000")
        words.append(f"{size}: {owner}, its inputs in {place}")
    return finished(picture, f"Tiles inside each other. {'; '.join(words)}.")
