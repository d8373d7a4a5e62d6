"""The frontier of served models: tokens per second of a GPU against those of a user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from matplotlib.ticker import FixedLocator, NullLocator

from .canvas import FAINT, SMALL, Picture, new_picture, number_axes, styled
from .curve import LINES, MARKERS

LABELLED = (1, 64, 256)  # users


class Point(Protocol):
    """A `llmlab.serving.sizing.Point`."""

    @property
    def users(self) -> int: ...
    @property
    def tpot(self) -> float: ...
    @property
    def tokens_per_second_per_gpu(self) -> float: ...


@styled()
def plot_frontier(frontiers: Mapping[str, Sequence[Point]], least: float | None = None) -> Picture:
    """Return a picture with a line for each deployment, by its name; some points of the first have their users.

    `least` is the tokens per second of a user that a service level requires; the area left of it is too slow.
    """
    picture, (ax,) = new_picture(4.4, width=4.0)
    for number, (name, points) in enumerate(frontiers.items()):
        speeds = [1 / point.tpot for point in points]
        rates = [point.tokens_per_second_per_gpu for point in points]
        ax.plot(speeds, rates, color=LINES[number], marker=MARKERS[number], markersize=5, linewidth=2, label=name)
        for point, place in zip(points, zip(speeds, rates, strict=True), strict=True):
            if number == 0 and point.users in LABELLED:
                words = f"{point.users} users" if point.users > 1 else "1 user"
                ax.annotate(words, place, xytext=(-5, -4), textcoords="offset points", size=SMALL, ha="right", va="top")
    ax.set_xscale("log")
    ax.set_yscale("log")
    if least is not None:
        ax.axvspan(ax.get_xlim()[0], least, color=FAINT, alpha=0.45, linewidth=0)
    ax.set_xlim(ax.get_xlim()[0] * 0.8, None)
    for axis in (ax.xaxis, ax.yaxis):
        low, high = axis.get_view_interval()
        digits = (1, 2, 5) if high > 10 * low else range(1, 10)
        axis.set_major_locator(FixedLocator([digit * 10**power for power in range(6) for digit in digits]))
        axis.set_minor_locator(NullLocator())
    number_axes(ax, "tokens/s of a user (1 / TPOT)", "tokens/s of a GPU")
    picture.legend(loc="outside lower center", ncols=2)
    ends = [
        f"{name}: {points[-1].tokens_per_second_per_gpu:,.0f} tokens/s with {points[-1].users} users"
        for name, points in frontiers.items()
    ]
    level = "" if least is None else f"; {least:.0f} tokens/s are asked for"
    picture.alt = f"Throughput of a GPU against the speed of a user{level}. {'; '.join(ends)}."
    return picture
