"""Drawings of the chapter on the caching allocator: counters, segments with their blocks, fragmentation, verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from ...base.units import GiB
from ...formulas.verdict import Verdict
from ...plots.canvas import COLORS, FAINT, INK, MUTED, PALETTE, WHITE, Picture
from ...plots.schematic import box, finished, label, sketch, strip
from ...report import Report
from ..techniques.caching_allocator import Block, MiB

USED, ASKED, CONTEXT = PALETTE[0], PALETTE[1], PALETTE[7]
LEFT, WIDTH = 12, 376  # pixels
Segments = Sequence[Sequence[Block]]
Snapshot = Mapping[str, Any]  # of torch.cuda.memory._snapshot


class Fragmented(NamedTuple):
    """An allocator that cannot serve a request: its segments, the MiB requested, and the outcome of each remedy."""

    segments: Segments
    request: int
    outcomes: Mapping[str, str]


def draw_counters(reports: Mapping[str, Report]) -> Picture:
    """Return three bars for each report: the bytes of its tensors, of the allocator's segments, and of the process."""
    largest = max(report.process or 0 for report in reports.values())
    picture, ax = sketch(14 + 124 * len(reports))
    words = []
    for number, (name, report) in enumerate(reports.items()):
        top = 14 + 124 * number
        sizes = {"tensors": report.peak_allocated or 0, "segments": report.peak_reserved or 0,
                 "process": report.process or 0}  # fmt: skip
        label(ax, LEFT, top, name, weight="bold")
        for row, (counter, size) in enumerate(sizes.items()):
            y = top + 14 + 30 * row
            label(ax, LEFT, y + 11, counter)
            tensors, reserved = (min(size, sizes[kind]) for kind in ("tensors", "segments"))
            pieces = [(tensors, "", USED), (reserved - tensors, "", WHITE), (size - reserved, "", CONTEXT)]
            stop = strip(ax, 84, y, [piece for piece in pieces if piece[0]], 226 / largest, height=22)
            label(ax, stop + 8, y + 11, f"{size / GiB:.2f} GiB")
        words.append(f"{name}: {', '.join(f'{size / GiB:.2f} GiB of {counter}' for counter, size in sizes.items())}")
    return finished(picture, f"What three counters show. {'; '.join(words)}.")


def draw_segments(states: Mapping[str, Segments]) -> Picture:
    """Return the segments of one allocator or several, a row each, with a title for each allocator or moment."""
    longest = max(sum(block.size for block in segment) for segments in states.values() for segment in segments)
    rows = sum(len(segments) for segments in states.values())
    picture, ax = sketch(4 + 26 * len(states) + 34 * rows)
    y, words = 14, []
    for title, segments in states.items():
        label(ax, LEFT, y, title, weight="bold")
        for number, segment in enumerate(segments):
            _draw_blocks(ax, LEFT, y + 12 + 34 * number, segment, WIDTH * MiB / longest)
        y += 26 + 34 * len(segments)
        used = sum(block.size for segment in segments for block in segment if not block.free)
        reserved = sum(block.size for segment in segments for block in segment)
        words.append(f"{title}: {used / MiB:.3g} MiB allocated in {len(segments)} segments of {reserved / MiB:.3g} MiB")
    return finished(picture, f"Segments with blocks in use (blue) and free blocks (white). {'; '.join(words)}.")


def draw_requests(cases: Mapping[str, Segments]) -> Picture:
    """Return a row for each case: the one segment that its requests allocate. Rows of up to 2 MiB are magnified."""
    picture, ax = sketch(12 + 56 * len(cases))
    words = []
    for row, (title, (segment,)) in enumerate(cases.items()):
        size = sum(block.size for block in segment) / MiB
        label(ax, LEFT, 14 + 56 * row, title)
        _draw_blocks(ax, LEFT, 26 + 56 * row, segment, 340 / size if size <= 2 else 16)
        used = sum(block.size for block in segment if not block.free) / MiB
        words.append(f"{title}: {used:.3g} of {size:.3g} MiB allocated")
    return finished(picture, f"Segments on a fresh GPU, allocated blocks blue and free ones white. {'; '.join(words)}.")


def draw_fragmentation(patterns: Mapping[str, Fragmented]) -> Picture:
    """Return for each pattern its segments, the request that fails, and the outcome of each remedy."""
    lines = max(len(pattern.outcomes) for pattern in patterns.values())
    height = 122 + 18 * lines
    picture, ax = sketch(height * len(patterns))
    words = []
    for row, (name, (segments, request, outcomes)) in enumerate(patterns.items()):
        y, x = 14 + height * row, float(LEFT)
        free = sum(block.size for segment in segments for block in segment if block.free) // MiB
        label(ax, LEFT, y, name, weight="bold")
        for segment in segments:
            x = _draw_blocks(ax, x, y + 14, segment, 9.2) + 8
        label(ax, LEFT, y + 56, f"{free} MiB are free. The request:")
        strip(ax, LEFT, y + 68, [(request, f"{request} MiB", ASKED)], 9.2)
        for line, (remedy, outcome) in enumerate(outcomes.items()):
            label(ax, LEFT, y + 108 + 18 * line, f"{remedy}: {outcome}")
        results = ", ".join(f"{remedy}: {outcome}" for remedy, outcome in outcomes.items())
        words.append(f"{name}: {free} MiB free, {request} MiB requested; {results}")
    return finished(picture, f"Fragmentation of a GPU of 40 MiB. {'. '.join(words)}.")


def draw_verdicts(verdicts: Mapping[str, tuple[Verdict, int]]) -> Picture:
    """Return a row for each GPU: the range of bytes that the process may need, and the memory of the GPU as a line.

    `verdicts`: for each GPU the verdict of the run, and the bytes of the GPU.
    """
    largest = max(max(verdict.most, memory) for verdict, memory in verdicts.values())
    scale = WIDTH / largest
    picture, ax = sketch(34 + 58 * len(verdicts))
    label(ax, LEFT, 14, "orange: least to most that the process needs; line: the GPU", color=MUTED)
    words = []
    for row, (gpu, (verdict, memory)) in enumerate(verdicts.items()):
        y = 40 + 58 * row
        least, most, limit = (size / GiB for size in (verdict.least, verdict.most, memory))
        label(ax, LEFT, y, f"{gpu}, {limit:.1f} GiB: {verdict.outcome}", weight="bold")
        box(ax, LEFT, y + 12, verdict.least * scale, 20, "", FAINT, FAINT)
        label(ax, LEFT + verdict.least * scale - 6, y + 22, f"at least {least:.1f}", "right")
        box(ax, LEFT + verdict.least * scale, y + 12, (verdict.most - verdict.least) * scale, 20, "", ASKED, ASKED)
        label(ax, LEFT + verdict.most * scale + 6, y + 22, f"at most {most:.1f}")
        x = LEFT + memory * scale
        ax.plot((x, x), (y + 7, y + 37), color=INK, linewidth=2.5, zorder=5)
        words.append(f"{gpu}: {least:.1f} to {most:.1f} GiB needed, {limit:.1f} GiB there, {verdict.outcome}")
    return finished(picture, f"Verdicts. {'; '.join(words)}.")


def draw_largest_segments(snapshots: Mapping[str, Snapshot], size: int) -> Picture:
    """Return the segments of `size` bytes in each snapshot of a step: logits, AdamW's moments, activations, free.

    A block as large as its segment is a tensor of logits, and zeros_like allocates the moments.
    """
    rows = {title: [_owners(segment, snapshot) for segment in snapshot["segments"] if segment["total_size"] == size]
            for title, snapshot in snapshots.items()}  # fmt: skip
    picture, ax = sketch(30 + sum(28 + 28 * len(segments) for segments in rows.values()))
    for number, (part, name) in enumerate((("logits", "logits"), ("optimizer", "moments"),
                                           ("activations", "activations"), ("", "free"))):  # fmt: skip
        box(ax, LEFT + 96 * number, 8, 12, 12, "", COLORS[part] if part else WHITE)
        label(ax, LEFT + 17 + 96 * number, 14, name)
    y, words = 42, []
    for title, segments in rows.items():
        label(ax, LEFT, y, title, weight="bold")
        in_use = []
        for number, blocks in enumerate(segments):
            top = y + 12 + 28 * number
            pieces = [(block, "", COLORS[part] if part else WHITE) for block, part in blocks]
            strip(ax, LEFT, top, pieces, 280 / size, 20)
            in_use.append(f"{sum(block for block, part in blocks if part) / MiB:,.0f} MiB")
            label(ax, LEFT + 288, top + 10, f"{in_use[-1]} used")
        y += 28 + 28 * len(segments)
        words.append(f"{title}: {', '.join(in_use)} used")
    return finished(picture, f"Segments of {size / MiB:,.0f} MiB. {'; '.join(words)}.")


def _owners(segment: Mapping[str, Any], snapshot: Snapshot) -> list[tuple[int, str]]:
    """Return the bytes of each block of a segment, and the part of the step that uses it: "" for a free block."""
    operators = {event["addr"]: event["frames"][0]["name"] for event in snapshot["device_traces"][0]
                 if event["action"] == "alloc"}  # fmt: skip
    address, owners = segment["address"], []
    for block in segment["blocks"]:
        moment = operators.get(address) == "aten.zeros_like.default"
        part = "logits" if block["size"] == segment["total_size"] else "optimizer" if moment else "activations"
        owners.append((block["size"], "" if block["state"] == "inactive" else part))
        address += block["size"]
    return owners


def _draw_blocks(ax: Axes, x: float, y: float, segment: Sequence[Block], scale: float) -> float:
    """Draw the blocks of a segment with their sizes in MiB, `scale` pixels per MiB, and return where they end."""
    pieces = [(block.size / MiB, f"{block.size / MiB:.3g}", WHITE if block.free else USED) for block in segment]
    return strip(ax, x, y, pieces, scale)
