"""Drawings of the page on profiles: calls inside calls, and the CPU and the GPU side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...plots.canvas import MUTED, PALETTE, WHITE, Picture
from ...plots.schematic import box, finished, label, link, sketch

LEFT, WIDTH = 66, 322  # pixels
ROW, HEIGHT = 36, 26


class Call(NamedTuple):
    """A call in a trace: its begin and end, and its depth, which is the number of calls around it."""

    name: str
    begin: float
    end: float
    depth: int


def draw_calls(calls: Sequence[Call]) -> Picture:
    """Draw calls as boxes, a row for each depth. The time that a call spends in no other call is colored."""
    start, last = min(call.begin for call in calls), max(call.end for call in calls)
    scale = WIDTH / (last - start)
    depths = max(call.depth for call in calls) + 1
    picture, ax = sketch(20 + ROW * depths + 26)
    words = []
    for call in calls:
        y = 12 + ROW * call.depth
        inside = sorted((child.begin, child.end) for child in calls
                        if child.depth == call.depth + 1 and call.begin <= child.begin < call.end)  # fmt: skip
        begin, self_time = call.begin, 0.0
        for child_begin, end in (*inside, (call.end, call.end)):
            if child_begin > begin:
                ax.fill_between((LEFT + scale * (begin - start), LEFT + scale * (child_begin - start)), y, y + HEIGHT,
                                color=PALETTE[5], linewidth=0, zorder=1)  # fmt: skip
            self_time += child_begin - begin
            begin = end
        x, width = LEFT + scale * (call.begin - start), scale * (call.end - call.begin)
        ax.plot((x, x + width, x + width, x, x), (y, y, y + HEIGHT, y + HEIGHT, y), color="#000000", linewidth=1,
                zorder=3)  # fmt: skip
        label(ax, x + width / 2, y + HEIGHT / 2, call.name, "center", zorder=4)
        words.append(f"{call.name}, total {call.end - call.begin:g}, self {self_time:g}")
    for depth in range(depths):
        label(ax, 12, 12 + ROW * depth + HEIGHT / 2, f"depth {depth}", color=MUTED)
    bottom = 20 + ROW * depths + 8
    box(ax, 12, bottom - 7, 14, 14, color=PALETTE[5])
    label(ax, 32, bottom, "time that the call spends in no other call", color=MUTED)
    return finished(picture, f"Calls in a trace, by depth: {'; '.join(words)}.")


class Lanes(NamedTuple):
    """A sequence of kernels: the seconds to launch each, and when it begins and ends on the GPU.

    The CPU launches the next kernel right away, or after it waited for the kernels whose numbers are in `waits`.
    """

    name: str
    launches: Sequence[float]
    kernels: Sequence[tuple[float, float]]
    waits: Sequence[int] = ()


def draw_lanes(cases: Sequence[Lanes]) -> Picture:
    """Draw the work of the CPU and the GPU, two rows for each case, with an arrow from each launch to its kernel."""
    scale = 332 / max(end for case in cases for _, end in case.kernels)
    picture, ax = sketch(114 * len(cases) + 4)
    words = []
    for number, case in enumerate(cases):
        top = 14 + 114 * number
        for y, text, weight in ((0, case.name, "bold"), (31, "CPU", "normal"), (75, "GPU", "normal")):
            label(ax, 12, top + y, text, weight=weight)
        cpu, texts = 0.0, []
        for place, (seconds, (begin, end)) in enumerate(zip(case.launches, case.kernels, strict=True)):
            box(ax, 56 + scale * cpu, top + 18, scale * seconds, 26, str(place + 1), WHITE)
            cpu += seconds
            box(ax, 56 + scale * begin, top + 62, scale * (end - begin), 26, str(place + 1), PALETTE[2])
            link(ax, (56 + scale * cpu, top + 44), (56 + scale * begin, top + 62), color=MUTED)
            if place in case.waits:
                box(ax, 56 + scale * cpu, top + 18, scale * (end - cpu), 26, "waits", PALETTE[6])
                cpu = end
            texts.append(f"{begin:g} to {end:g}")
        words.append(f"{case.name}: kernels run from {', '.join(texts)}")
    return finished(picture, f"The CPU launches kernels, the GPU runs them. {'; '.join(words)}.")
