"""What each rank, or each part of a machine, does when: a bar for each task, gaps where it waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..base.errors import SpecError
from .canvas import PALETTE, PANEL, SMALL, WIDTH, Picture, bar, cell, legend, name_rows, new_picture, styled, write


class Task(NamedTuple):
    """One bar: `row` from 0, times in any unit, `kind` one of the legend's names, `label` written into it."""

    row: int
    start: float
    end: float
    kind: str
    label: str = ""


@styled
def plot_gantt(
    plans: Mapping[str, Sequence[Task]], row: str = "rank", xlabel: str = "time (forwards of a rank's layers)"
) -> Picture:
    """Return one chart per plan, one under the other on the same scale; the share of waiting is in each title.

    No plan, an empty one and more than eight kinds raise SpecError.
    """
    sizes = {name: len(tasks) for name, tasks in plans.items()}
    fine = plans and all(sizes.values())
    colors = _colors([task.kind for tasks in plans.values() for task in tasks], f"plot_gantt got {sizes} tasks", fine)
    end = max(task.end for tasks in plans.values() for task in tasks)
    rows = [1 + max(task.row for task in tasks) for tasks in plans.values()]
    height = 0.9 + sum(0.55 + 0.26 * n for n in rows)
    picture, axes = new_picture(height, len(plans), 1, height_ratios=[n + 1.5 for n in rows])
    said = []
    for ax, (name, tasks), count in zip(axes, plans.items(), rows, strict=True):
        ax.set(xlim=(0, end), ylim=(count - 0.5, -0.5))
        for task in tasks:
            color = colors[task.kind]
            cell(ax, task.start, task.row - 0.45, color, PANEL, task.end - task.start, 0.9, line=0.8)
            # A label that would be wider than its bar is left out: 0.09 inches a digit.
            if task.label and (task.end - task.start) / end * (WIDTH - 0.8) > 0.09 * len(task.label):
                middle = (task.start + task.end) / 2
                write(ax, middle, task.row, task.label, color, gid=task.kind)
        waits = 1 - sum(task.end - task.start for task in tasks) / (count * max(task.end for task in tasks))
        ax.set_title(f"{name}: {waits:.0%} waiting", loc="left", weight="bold")
        name_rows(ax, [f"{row} {n}" for n in range(count)], axis=False)
        ax.tick_params(length=0)
        ax.spines["bottom"].set_visible(False)
        if ax is not axes[-1]:
            ax.set_xticks([])
        said.append(f"{name}: done at {max(task.end for task in tasks):g}, {waits:.1%} of the time waiting")
    axes[-1].set_xlabel(xlabel)
    legend(picture, colors)
    picture.alt = f"What each {row} does when. " + "; ".join(said) + "."
    return picture


class Work(NamedTuple):
    """One bar: in which lane, from when to when in seconds, and what is done."""

    lane: str
    start: float
    end: float
    kind: str


@styled
def plot_lanes(works: Sequence[Work], title: str) -> Picture:
    """Return one lane per name, in order of appearance, with one colour per kind; the axis is in seconds.

    No work, work that ends before it begins, and more than eight kinds raise SpecError.
    """
    lanes = list(dict.fromkeys(work.lane for work in works))
    fine = works and all(work.start <= work.end for work in works)
    colors = _colors([work.kind for work in works], f"plot_lanes got {len(works)} works", fine)
    picture, (ax,) = new_picture(1.5 + 0.45 * len(lanes))
    end = max(work.end for work in works)
    for work in works:
        bar(ax, lanes.index(work.lane), work.start, work.end - work.start, colors[work.kind])
    for row, lane in enumerate(lanes):
        busy = sum(work.end - work.start for work in works if work.lane == lane)
        last = max(work.end for work in works if work.lane == lane)
        ax.text(last + 0.01 * end, row, f"{busy:.2g} s", va="center", size=SMALL)
    name_rows(ax, lanes, axis=False)
    # 1.1: room for the last label
    ax.set(xlim=(0, 1.1 * end), ylim=(len(lanes) - 0.5, -0.5), xlabel="time (s)")
    ax.set_title(title, loc="left", weight="bold")
    legend(picture, colors)
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


def _colors(kinds: Sequence[str], given: str, fine: Any) -> dict[str, str]:
    """Return a colour for each kind, in order of appearance; SpecError for what is not `fine`, and for over eight."""
    each = list(dict.fromkeys(kinds))
    if not fine or len(each) > len(PALETTE):
        raise SpecError(f"{given} of {len(each)} kinds; give some with start <= end, of at most {len(PALETTE)} kinds")
    return dict(zip(each, PALETTE, strict=False))
