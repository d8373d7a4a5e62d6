"""What each part of a machine does when: a lane a part, on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import SpecError
from .canvas import PALETTE, SMALL, Picture, bar, key, legend, new_picture, styled


class Work(NamedTuple):
    """One bar: in which lane, from when to when in seconds, and what is done."""

    lane: str
    start: float
    end: float
    kind: str


@styled
def plot_lanes(works: Sequence[Work], title: str) -> Picture:
    """Return one lane a name, in order of appearance, with one colour a kind; the axis is in seconds.

    No work, work that ends before it begins, and more than eight kinds raise SpecError.
    """
    kinds = list(dict.fromkeys(work.kind for work in works))
    lanes = list(dict.fromkeys(work.lane for work in works))
    if not works or len(kinds) > len(PALETTE) or any(work.end < work.start for work in works):
        raise SpecError(
            f"plot_lanes got {len(works)} works of {len(kinds)} kinds; give some, of at most {len(PALETTE)}"
        )
    colors = dict(zip(kinds, PALETTE, strict=False))
    picture, ax = new_picture(1.5 + 0.45 * len(lanes))
    end = max(work.end for work in works)
    for work in works:
        bar(ax, lanes.index(work.lane), work.start, work.end - work.start, colors[work.kind])
    for row, lane in enumerate(lanes):
        busy = sum(work.end - work.start for work in works if work.lane == lane)
        last = max(work.end for work in works if work.lane == lane)
        ax.text(last + 0.01 * end, row, f"{busy:.2g} s", va="center", size=SMALL)
    ax.set_xlim(0, 1.1 * end)  # room for the last label
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.set_yticks(range(len(lanes)), lanes)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("time (s)")
    ax.set_title(title, loc="left", weight="bold")
    legend(picture, [key(kind, colors[kind]) for kind in kinds])
    said = [f"{work.kind} in {work.lane} from {work.start:.3g} to {work.end:.3g} s" for work in merged(works)]
    picture.alt = f"{title}: {'; '.join(said)}."
    return picture


def merged(works: Sequence[Work]) -> list[Work]:
    """Return each lane's kinds, from the first start to the last end."""
    spans: dict[tuple[str, str], Work] = {}
    for work in works:
        known = spans.get((work.lane, work.kind), work)
        spans[work.lane, work.kind] = Work(work.lane, min(known.start, work.start), max(known.end, work.end), work.kind)
    return list(spans.values())
