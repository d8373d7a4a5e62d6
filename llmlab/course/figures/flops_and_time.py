"""Drawings of the chapter on FLOPs and time: FLOP of a block, seconds of a step, the roofline, errors of estimates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from ...plots.canvas import FAINT, INK, MUTED, PALETTE, PHONE, Picture, new_picture, number_axes, styled
from ...plots.schematic import box, finished, keys, label, sketch, strip

COMPUTE, MEMORY = PALETTE[5], PALETTE[1]


class Work(NamedTuple):
    """FLOP and bytes of some kernels, and the seconds that they take."""

    flop: float
    moved: float
    seconds: float


class Error(NamedTuple):
    """An estimate's relative error, and those of both ends of its interval, at the MFU that was measured; all in %."""

    mfu: float
    error: float
    low: float
    high: float


def draw_block_flop(forward: Mapping[str, float], weights: float) -> Picture:
    """Draw the FLOP of a block's matmuls for one token: forward, and the two matmuls of the backward pass.

    `forward`: FLOP of the forward pass, by matmul; `weights`: the parameters of the block.
    """
    columns = {"forward": COMPUTE, "input gradient": MEMORY, "weight gradient": PALETTE[2]}
    picture, ax = sketch(66 + 30 * len(forward))
    scale = 236 / (3 * max(forward.values()))
    keys(ax, columns, (12, 104, 240), 8, side=14)
    for row, (name, flop) in enumerate(forward.items()):
        y = 36 + 30 * row
        label(ax, 82, y + 11, name, "right")
        end = strip(ax, 90, y, [(flop, "", color) for color in columns.values()], scale, 22)
        label(ax, end + 6, y + 11, f"{3 * flop / 1e6:.0f}")
    label(ax, 12, 50 + 30 * len(forward), f"MFLOP per token of one block, which has {weights / 1e6:.1f}M weights",
          color=MUTED)  # fmt: skip
    rows = ", ".join(f"{name} {3 * flop / 1e6:.0f}" for name, flop in forward.items())
    return finished(picture, f"MFLOP per token of a block's matmuls, a third of them in the forward pass: {rows}.")


def draw_seconds(seconds: Mapping[str, float], compute: Sequence[str], title: str) -> Picture:
    """Draw a bar for the seconds of each group of kernels; those named in `compute` are bound by FLOP."""
    picture, ax = sketch(52 + 40 * len(seconds))
    scale = 290 / max(seconds.values())
    label(ax, 12, 14, title, weight="bold")
    keys(ax, {"bound by FLOP": COMPUTE, "bound by memory bandwidth": MEMORY}, (12, 150), 29, side=14)
    for row, (name, value) in enumerate(seconds.items()):
        y = 60 + 40 * row
        label(ax, 12, y, name)
        box(ax, 12, y + 9, max(2, value * scale), 16, color=COMPUTE if name in compute else MEMORY)
        label(ax, 12 + value * scale + 8, y + 17, f"{value:.2f} s")
    return finished(picture, f"{title}: {', '.join(f'{name} {value:.2f} s' for name, value in seconds.items())}.")


def draw_pipes(kernels: Mapping[str, Work], rate: float, bandwidth: float) -> Picture:
    """Draw for each kind of kernel the seconds of its FLOP at `rate`, and those of its bytes at `bandwidth`."""
    times = {name: (work.flop / rate, work.moved / bandwidth) for name, work in kernels.items()}
    longest = max(max(pair) for pair in times.values())
    picture, ax = sketch(8 + 82 * len(times))
    for number, (name, pair) in enumerate(times.items()):
        y = 14 + 82 * number
        label(ax, 12, y, f"{name}: {max(pair):.2f} s", weight="bold")
        for row, (words, seconds, color) in enumerate(zip(("FLOP", "bytes"), pair, (COMPUTE, MEMORY), strict=True)):
            top = y + 12 + 27 * row
            label(ax, 12, top + 11, words)
            box(ax, 58, top, 330, 22, edge=FAINT)
            box(ax, 58, top, max(2, 330 * seconds / longest), 22, color=color)
    rows = "; ".join(f"{name} {flop:.2f} and {moved:.2f} s" for name, (flop, moved) in times.items())
    return finished(picture, f"The seconds of FLOP and of bytes: {rows}.")


@styled()
def draw_roofline(kernels: Mapping[str, Work], roofs: Mapping[str, tuple[float, float]]) -> Picture:
    """Draw kernels as dots under rooflines; a dot's area is its share of the time.

    `roofs`: FLOP/s and bytes/s, by name; the last one is drawn solid, the others dashed.
    """
    picture, (ax,) = new_picture(4.2, width=PHONE)
    intensities = [10 ** (step / 20) for step in range(-36, 72)]
    for number, (name, (rate, bandwidth)) in enumerate(roofs.items()):
        last = number == len(roofs) - 1
        roof = [min(rate, intensity * bandwidth) for intensity in intensities]
        ax.plot(intensities, roof, color=INK if last else MUTED, linestyle="-" if last else "--", linewidth=1.3,
                label=f"{name}: {rate / 1e12:g} TFLOP/s, {bandwidth / 1e9:.0f} GB/s")  # fmt: skip
    total = sum(work.seconds for work in kernels.values())
    rate, bandwidth = [*roofs.values()][-1]
    ridge = rate / bandwidth
    words = []
    for name, work in kernels.items():
        x, y = work.flop / work.moved, work.flop / work.seconds
        size = 30 + 500 * work.seconds / total
        ax.scatter([x], [y], [size], color=COMPUTE if x > ridge else MEMORY, edgecolor=INK, linewidth=0.5, zorder=3)
        gap = 1 + size**0.5 / 2  # points from the middle of a dot to its name
        memory_bound = x < ridge
        ax.annotate(name, (x, y), (gap + 3, -4) if memory_bound else (0, gap), textcoords="offset points", size=9,
                    ha="left" if memory_bound else "center", va="center" if memory_bound else "bottom")  # fmt: skip
        words.append(f"{name} {x:.3g} FLOP per byte, {y / 1e12:.2g} TFLOP/s")
    ax.axvline(ridge, color=FAINT, linewidth=1, zorder=0)
    ax.text(ridge * 0.93, 2e9, f"ridge: {ridge:.0f}", rotation=90, ha="right", va="bottom", color=MUTED, size=9)
    ax.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="FLOP/s", xlim=(intensities[0], intensities[-1]),
           ylim=(1.5e9, 1e15))  # fmt: skip
    ax.legend(loc="upper left", fontsize=9)
    picture.alt = f"A roofline with its ridge at {ridge:.0f} FLOP per byte. {'; '.join(words)}."
    return picture


@styled()
def draw_errors(errors: Sequence[Error], title: str) -> Picture:
    """Draw the error of each estimate over the measured MFU, with a line for its interval."""
    picture, (ax,) = new_picture(3.6, width=PHONE)
    ax.axhline(0, color=INK, linewidth=1)
    mfu = [row.mfu for row in errors]
    ax.vlines(mfu, [row.low for row in errors], [row.high for row in errors], color=COMPUTE, linewidth=2)
    ax.plot(mfu, [row.error for row in errors], "o", color=PALETTE[0], markersize=4)
    number_axes(ax, "measured MFU (%)", "error of the estimated time (%)")
    ax.set_title(title)
    sizes = [abs(row.error) for row in errors]
    inside = sum(row.low <= 0 <= row.high for row in errors)
    picture.alt = (
        f"Errors of {len(errors)} estimated times: median {median(sizes):.0f} %, at worst {max(sizes):.0f} %, {inside} "
        f"inside their intervals, at a measured MFU of {min(mfu):.0f} to {max(mfu):.0f} %."
    )
    return picture
