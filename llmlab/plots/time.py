"""How a step's seconds pass: what computes and what is sent, in two lanes, for one layer and for the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from matplotlib.axes import Axes

from ..base.errors import SpecError
from ..base.units import show_seconds
from .canvas import FAINT, PALETTE, PHONE, WHITE, Picture, bar, legend, name_rows, new_picture, styled
from .reads import Report

COMPUTED = ("products", "attention", "elementwise", "launches")
SENT = ("tensor", "context", "experts")  # within the layers, and waited for
BLUE, ORANGE, GREEN, RED, PINK, SKY, YELLOW, GREY = PALETTE
COLORS = {
    "forward": SKY, "backward": SKY, "gather": YELLOW, "reduce": PINK, "products": BLUE, "attention": ORANGE,
    "elementwise": GREEN, "launches": GREY, "tensor": YELLOW, "context": SKY, "experts": GREEN, "pipeline": ORANGE,
    "data": PINK, "data, hidden": WHITE, "bubble": WHITE, "optimizer": RED, "offload": RED, "scale": FAINT,
}  # fmt: skip
HATCHES = {
    "backward": "..", "tensor": "//", "context": "//", "experts": "//", "pipeline": "//", "data, hidden": "\\\\",
    "bubble": "xx", "offload": "//",
}  # fmt: skip
COMPUTE, COMMUNICATION = 0, 1


class Span(NamedTuple):
    """What takes `seconds` from `start` on, in a lane."""

    lane: int
    name: str
    start: float
    seconds: float


@styled()
def plot_time(report: Report) -> Picture:
    """Return the picture of a report's time: above one layer in one micro-batch, below the whole step.

    The step's micro-batches are drawn as one forward and one backward. Communication that nothing hides leaves the
    lane of computation empty. A report whose time is not divided raises SpecError.
    """
    if not report.time or not report.layer_time:
        raise SpecError(
            f"the time of this {report.source} report of {report.model} is not divided; "
            "lab.estimate(model, lab.Training(...), gpu) does that"
        )
    picture, axes = new_picture(4.6, rows=2, width=PHONE)
    made = {"One layer, one micro-batch": _layer(report), "The step": _step(report)}
    panels = {title: [span for span in spans if span.seconds] for title, spans in made.items()}
    for ax, (title, spans) in zip(axes, panels.items(), strict=True):
        _draw(ax, title, spans)
    names = dict.fromkeys(span.name for spans in panels.values() for span in spans)
    legend(picture, {name: COLORS[name] for name in names}, HATCHES, ncols=3)
    picture.alt = f"Time of {report.title}. " + " ".join(_said(title, spans) for title, spans in panels.items())
    return picture


def _layer(report: Report) -> Iterator[Span]:
    """Yield a layer forward and backward: meanwhile the next is gathered, and in backward the one before summed."""
    layer = report.layer_time
    sent = {name: layer[name] for name in SENT if name in layer}
    gather, reduce, now = layer.get("gather", 0.0), layer.get("reduce", 0.0), 0.0
    for phase, behind in (("forward", {"gather": gather}), ("backward", {"gather": gather, "reduce": reduce})):
        share = layer[phase] / (layer["forward"] + layer["backward"])
        yield Span(COMPUTE, phase, now, layer[phase])
        hidden = now
        for name, seconds in behind.items():
            yield Span(COMMUNICATION, name, hidden, seconds)
            hidden += seconds
        now = max(now + layer[phase], hidden if sent else 0.0)
        for name, seconds in sent.items():
            yield Span(COMMUNICATION, name, now, share * seconds)
            now += share * seconds
        now = max(now, hidden)


def _step(report: Report) -> Iterator[Span]:
    """Yield the step: forward, backward, what data parallelism is waited for, the update, and what is lost beside."""
    layer, time, now = report.layer_time, report.time, 0.0
    share = layer["forward"] / (layer["forward"] + layer["backward"])
    for part in (share, 1 - share):
        for lane, names in ((COMPUTE, COMPUTED), (COMMUNICATION, SENT)):
            for name in names:
                yield Span(lane, name, now, part * time.get(name, 0.0))
                now += part * time.get(name, 0.0)
    hidden = report.time_hidden.get("data", 0.0)
    within = sum(time.get(name, 0.0) for name in SENT)
    yield Span(COMMUNICATION, "data, hidden", max(0.0, now - within * (1 - share) - hidden), hidden)
    for lane, name in ((COMMUNICATION, "data"), (COMMUNICATION, "pipeline"), (COMPUTE, "bubble"),
                       (COMPUTE, "optimizer"), (COMPUTE, "offload"), (COMPUTE, "scale")):  # fmt: skip
        yield Span(lane, name, now, time.get(name, 0.0))
        now += time.get(name, 0.0)


def _draw(ax: Axes, title: str, spans: list[Span]) -> None:
    end = max(span.start + span.seconds for span in spans)
    unit, name = (1e-3, "ms") if end < 1 else (1.0, "s")
    for lane, what, start, seconds in spans:
        bar(ax, lane, start / unit, seconds / unit, COLORS[what], HATCHES.get(what))
    name_rows(ax, ["compute", "sent"], axis=False)
    ax.set(xlim=(0, 1.01 * end / unit), ylim=(1.5, -0.5), xlabel=f"time ({name})")
    ax.set_title(title, loc="left", weight="bold")


def _said(title: str, spans: list[Span]) -> str:
    """Return a panel in words: each lane, and what takes how long in it."""
    lanes = []
    for lane, what in ((COMPUTE, "compute"), (COMMUNICATION, "sent")):
        seconds: dict[str, float] = {}
        for span in spans:
            if span.lane == lane:
                seconds[span.name] = seconds.get(span.name, 0.0) + span.seconds
        lanes.append(f"{what}: " + (", ".join(f"{n} {show_seconds(s)}" for n, s in seconds.items()) or "nothing"))
    return f"{title}: {'; '.join(lanes)}."
