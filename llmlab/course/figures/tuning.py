"""Drawings of the page on learning rates that carry over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...plots.canvas import COLORS, MUTED, PALETTE, PHONE, SMALL, WHITE, Picture, new_picture, number_axes, styled
from ...plots.curve import MARKERS
from ...plots.schematic import box, finished, label, link, sketch, tensor

LINES = ("#56B4E9", "#0072B2", "#009E73", "#D55E00", "#000000")  # the last ones are the widest


def plot_sums(sums: Mapping[str, Sequence[float]]) -> Picture:
    """Return a drawing of the terms of each sum: blue ones are positive, white ones negative.

    `sums` maps a name to the terms, which are 1 or -1.
    """
    picture, ax = sketch(18 + 48 * len(sums))
    words = []
    for row, (name, terms) in enumerate(sums.items()):
        y, total = 14 + 48 * row, abs(sum(terms))
        label(ax, 12, y, name, weight="bold")
        label(ax, 388, y, f"|sum| = {total:.0f}", "right")
        pitch = 376 / len(terms)
        for place, term in enumerate(terms):
            box(ax, 12 + pitch * place, y + 10, pitch, 20, color=PALETTE[0] if term > 0 else WHITE, edge=MUTED)
        words.append(f"{name}: {total:.0f}")
    return finished(picture, f"Sums of positive and negative terms, and their absolute values. {'; '.join(words)}.")


@styled()
def plot_widths(methods: Mapping[str, Mapping[int, Mapping[int, Sequence[float]]]]) -> Picture:
    """Return a panel for each method: held-out loss against learning rate, one line per width, a dot at its best rate.

    `methods` maps a name to the losses of its seeds by width and by learning rate, as a power of two. A bar reaches
    from the best to the worst seed.
    """
    picture, axes = new_picture(2.5 * len(methods) + 0.4, rows=len(methods), width=PHONE, sharex=True, sharey=True)
    alts = []
    for ax, (name, widths) in zip(axes, methods.items(), strict=True):
        ax.set_title(name, loc="left", fontweight="bold")
        for (width, losses), color, marker in zip(widths.items(), LINES, MARKERS, strict=False):
            powers = sorted(losses)
            means = [sum(losses[power]) / len(losses[power]) for power in powers]
            for power in powers:
                ax.plot([power, power], [min(losses[power]), max(losses[power])], color=color, linewidth=1.2)
            ax.plot(powers, means, color=color, linewidth=1.6, label=f"width {width}" if ax is axes[0] else None)
            best = means.index(min(means))
            ax.plot([powers[best]], [means[best]], color=color, marker=marker, markersize=7, linestyle="none")
            alts.append(f"{name}, width {width}: {means[best]:.2f} at {powers[best]}")
        number_axes(ax, "peak learning rate, power of two" if ax is axes[-1] else "", "held-out loss")
    picture.legend(loc="outside lower center", ncols=2, fontsize=SMALL)
    picture.alt = f"Held-out loss against learning rate; the lowest means. {'. '.join(alts)}."
    return picture


@styled()
def plot_losses(steps: Sequence[int], losses: Mapping[str, Sequence[float]], event: int, name: str) -> Picture:
    """Return the losses at `steps`, one line for each name, and a vertical line at step `event`, called `name`."""
    picture, (ax,) = new_picture(3.2, width=PHONE)
    for (line, values), color, style in zip(losses.items(), LINES[1:], ("-", "--", "-.", ":"), strict=False):
        ax.plot(steps, values, color=color, linestyle=style, linewidth=2, label=line)
    ax.axvline(event, color=MUTED, linewidth=1)
    ax.annotate(name, (event, 1), xycoords=("data", "axes fraction"), xytext=(-4, -6), textcoords="offset points",
                ha="right", va="top", fontsize=SMALL, color=MUTED)  # fmt: skip
    number_axes(ax, "step", "loss of an ordinary batch")
    picture.legend(loc="outside lower center", ncols=2, fontsize=SMALL)
    peaks = ", ".join(f"{line} {max(values):.2f}" for line, values in losses.items())
    picture.alt = f"Loss against step, with {name} at step {event}. The highest losses: {peaks}."
    return picture


def plot_singular_values(before: Sequence[float], after: Sequence[float]) -> Picture:
    """Return a drawing of a gradient and of its orthogonalized update: U, bars for the singular values, and Vᵀ."""
    picture, ax = sketch(300)
    for row, (name, values) in enumerate((("the gradient", before), ("the update of Muon", after))):
        y = 12 + 146 * row
        label(ax, 12, y, name, weight="bold")
        tensor(ax, 30, y + 28, 70, 90, "m", f"{len(values)}", "U", PALETTE[5])
        tensor(ax, 282, y + 28, 90, 70, f"{len(values)}", "n", "Vᵀ", PALETTE[5])
        for place, size in enumerate(values):
            box(ax, 134 + 21 * place, y + 118 - 66 * size, 17, 66 * size, color=COLORS["gradients"])
        label(ax, 196, y + 127, f"{max(values):.2f} to {min(values):.2f}", "center")
    link(ax, (196, 145), (196, 170))
    return finished(
        picture,
        f"A gradient is U, singular values from {max(before):g} to {min(before):g}, and V transposed. The update of "
        f"Muon has the same U and V, and singular values from {max(after):.2f} to {min(after):.2f}.",
    )
