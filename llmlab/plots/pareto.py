"""Memory against time of what a search estimated: each technique a mark, the front, the GPU, and the chosen one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..base.errors import SpecError
from ..base.units import GiB, show_bytes, show_seconds
from .canvas import FAINT, INK, PALETTE, Picture, new_picture, number_axes, styled

CHOSEN = 170  # points², of the ring around the best
REFUTED = 40  # points², of the cross over what its simulation did not confirm
MARKS = {None: ("o", "nothing recomputed"), "selective": ("s", "selective checkpointing"),
         "full": ("^", "full checkpointing")}  # fmt: skip


class Plan(Protocol):
    """A `llmlab.planning.result.Plan`."""

    @property
    def model(self) -> str: ...
    @property
    def gpus(self) -> str: ...
    @property
    def best(self) -> Any: ...
    @property
    def seen(self) -> Sequence[Any]: ...
    @property
    def refuted(self) -> Sequence[Any]: ...


def technique(run: Any) -> str:
    """Return who holds the states of `run`, in a word: offload, a ZeRO stage, or every GPU all of them."""
    if run.offload:
        return "offload"
    return f"ZeRO-{run.zero}" if run.zero else "no ZeRO"


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (time, memory) that none is better than in both, by time.

    >>> front([(2, 5), (1, 9), (3, 6), (4, 1)])
    [(1, 9), (2, 5), (4, 1)]
    """
    front: list[tuple[float, float]] = []
    for time, memory in sorted(points):
        if not front or memory < front[-1][1]:
            front.append((time, memory))
    return front


@styled()
def plot_pareto(plan: Plan) -> Picture:
    """Return the picture; raises SpecError where nothing with a known time was estimated."""
    best = plan.best
    seen = [candidate for candidate in plan.seen
            if candidate.seconds and (best is None or candidate.machines == best.machines)]  # fmt: skip
    if not seen or best is None:
        raise SpecError(f"nothing fits {plan.model} on {plan.gpus}: there is no time and no memory to draw")
    colors = dict(zip(("no ZeRO", "ZeRO-1", "ZeRO-2", "ZeRO-3", "offload"), PALETTE, strict=False))
    picture, (ax,) = new_picture(4.2)
    for checkpointing, (mark, _) in MARKS.items():
        for name, color in colors.items():
            alike = [candidate for candidate in seen
                     if candidate.run.checkpointing == checkpointing and technique(candidate.run) == name]  # fmt: skip
            xs, ys = [candidate.seconds for candidate in alike], [candidate.memory / GiB for candidate in alike]
            ax.scatter(xs, ys, 16, color=color, marker=mark, alpha=0.6, lw=0)
    refuted = [candidate for candidate in seen if candidate.run in plan.refuted]
    if refuted:
        xs, ys = [candidate.seconds for candidate in refuted], [candidate.memory / GiB for candidate in refuted]
        ax.scatter(xs, ys, REFUTED, color=INK, marker="x", lw=1.2)
    edge = front([(candidate.seconds, candidate.memory) for candidate in seen if candidate not in refuted])
    ax.step([time for time, _ in edge], [memory / GiB for _, memory in edge], where="post", color=INK, lw=1)
    chosen = next((candidate for candidate in seen if candidate.run == best.run), None)
    if chosen:
        ax.scatter([chosen.seconds], [chosen.memory / GiB], CHOSEN, facecolor="none", edgecolor=INK, lw=1.8, zorder=3)
    capacity = best.report.capacity
    if capacity:
        ax.axhline(capacity / GiB, color=FAINT, lw=1.2, ls="--")
        ax.set_ylim(0, 1.1 * capacity / GiB)
        place = (1, 1.01 * capacity / GiB)  # the right edge, above the line
        ax.text(
            *place, "the GPU ", transform=ax.get_yaxis_transform(), color=INK, size="small", ha="right", va="bottom"
        )
    slowest, last = edge[-1][0], max(candidate.seconds for candidate in seen)
    left, right = 0.97 * min(candidate.seconds for candidate in seen), 1.05 * min(last, max(slowest, 1.5 * edge[0][0]))
    ax.set_xlim(left, right)
    number_axes(ax, "seconds of an update", "GiB of the fullest GPU, at least")
    handles = [ax.scatter([], [], 30, color=color, label=name) for name, color in colors.items()
               if any(technique(candidate.run) == name for candidate in seen)]  # fmt: skip
    handles += [ax.scatter([], [], 30, color=INK, marker=mark, label=name) for mark, name in MARKS.values()]
    handles.append(ax.scatter([], [], 90, facecolor="none", edgecolor=INK, lw=1.5, label="chosen"))
    if refuted:
        handles.append(ax.scatter([], [], 30, color=INK, marker="x", label="refuted by simulation"))
    picture.legend(handles=handles, loc="outside lower center", ncols=3)
    span = f"from {show_seconds(edge[0][0])} with {show_bytes(round(edge[0][1]))}"
    span += f" to {show_seconds(edge[-1][0])} with {show_bytes(round(edge[-1][1]))}"
    picture.alt = f"{plan.model} on {plan.gpus}: {len(seen)} configurations, memory against time; the front goes {span}"
    picture.alt += f"; chosen is {show_seconds(chosen.seconds)} with {show_bytes(chosen.memory)}" if chosen else ""
    picture.alt += f"; {len(refuted)} are crossed out, refuted by their simulation." if refuted else "."
    return picture
