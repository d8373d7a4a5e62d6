"""Drawings of the page on learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...plots.canvas import FAINT, INK, MUTED, PALETTE, PHONE, SMALL, Picture, new_picture, number_axes, styled
from ...plots.curve import LINES, MARKERS
from ...plots.schematic import box, finished, label, sketch


@styled()
def plot_rates(curves: Mapping[str, Mapping[float, Sequence[float]]]) -> Picture:
    """Return held-out loss against learning rate: a line through the means, a bar from the best to the worst seed.

    `curves` maps a name to its losses by learning rate, one loss for each seed.
    """
    picture, (ax,) = new_picture(3.6, width=PHONE)
    ax.set_xscale("log")
    alts = []
    for (name, by_rate), color, marker in zip(curves.items(), LINES, MARKERS, strict=False):
        rates = sorted(by_rate)
        means = [sum(by_rate[rate]) / len(by_rate[rate]) for rate in rates]
        for rate in rates:
            ax.plot([rate, rate], [min(by_rate[rate]), max(by_rate[rate])], color=color, linewidth=2)
        ax.plot(rates, means, color=color, marker=marker, markersize=5, linewidth=1.5, label=name)
        points = ", ".join(f"{mean:.2f} at {rate:g}" for rate, mean in zip(rates, means, strict=True))
        alts.append(f"{name}: {points}")
    number_axes(ax, "peak learning rate", "held-out loss (nats per token)")
    picture.legend(loc="outside lower center", ncols=1 if len(curves) < 3 else 2, fontsize=SMALL)
    picture.alt = f"Held-out loss against peak learning rate, means of the seeds. {'. '.join(alts)}."
    return picture


def plot_seeds(losses: Mapping[str, Sequence[float]]) -> Picture:
    """Return a drawing with a row for each name: a dot for the loss of each seed, and a tick at their mean."""
    low = min(min(values) for values in losses.values())
    high = max(max(values) for values in losses.values())
    left, right, words = 178, 340, []

    def place(loss: float) -> float:
        return left + (right - left) * (loss - low) / (high - low)

    picture, ax = sketch(50 + 28 * len(losses))
    label(ax, 12, 14, "held-out loss of each seed, mean", color=MUTED)
    for row, (name, values) in enumerate(losses.items()):
        y = 42 + 28 * row
        mean = sum(values) / len(values)
        label(ax, 12, y, name)
        ax.plot((left - 6, right + 6), (y, y), color=FAINT, linewidth=1)
        box(ax, place(mean) - 1, y - 9, 2, 18, color=INK)
        ax.plot([place(loss) for loss in values], [y] * len(values), "o", color=PALETTE[0], markersize=6, zorder=4)
        label(ax, 388, y, f"{mean:.2f}", "right")
        words.append(f"{name} {mean:.2f}, from {min(values):.2f} to {max(values):.2f}")
    return finished(picture, f"Held-out loss at the end: {'; '.join(words)}.")


@styled()
def plot_schedules(factors: Mapping[str, Sequence[float]]) -> Picture:
    """Return the factor of the peak learning rate against the step, one line per schedule."""
    picture, (ax,) = new_picture(2.8, width=PHONE)
    for (name, values), color, style in zip(factors.items(), LINES, ("-", "--", ":"), strict=False):
        ax.plot(range(len(values)), values, color=color, linestyle=style, linewidth=2.2, label=name)
    number_axes(ax, "step", "share of the peak rate")
    picture.legend(loc="outside lower center", ncols=3, fontsize=SMALL)
    middles = ", ".join(f"{name} {values[len(values) // 2]:.2f}" for name, values in factors.items())
    picture.alt = f"Learning-rate schedules over {len(next(iter(factors.values()))) - 1} steps. At half: {middles}."
    return picture
