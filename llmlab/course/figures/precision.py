"""The figures of the chapter on precision: formats, numbers of a step, the loss scaler, memory and time of autocast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ...base.units import GiB
from ...plots import plot_curve
from ...plots.canvas import FAINT, INK, MUTED, PALETTE, WHITE, Picture
from ...plots.schematic import box, finished, label, link, sketch, strip
from ..techniques.precision import FORMATS

HALF, FULL = PALETTE[1], PALETTE[5]  # 16 bits, 32 bits
FIELDS = {"sign": WHITE, "exponent": PALETTE[1], "mantissa": PALETTE[5]}


def draw_bits(value: float, name: str) -> Picture:
    """Draw the bits of `value`, called `name`, in each format: sign, exponent, mantissa, and the number they encode."""
    picture, ax = sketch(54 + 48 * len(FORMATS))
    strip(ax, 12, 8, [(1 + (field != "sign"), field, color) for field, color in FIELDS.items()], 40, 20)
    label(ax, 232, 18, name)
    for row, (title, f) in enumerate(FORMATS.items()):
        y = 48 + 48 * row
        rounded = f.round(value)
        label(ax, 12, y, title, weight="bold")
        label(ax, 92, y, f"1 + {f.exponent} + {f.mantissa} bits: {'rounds to 0' if rounded == 0 else f'{rounded:.3e}'}")
        fields = ["sign"] + ["exponent"] * f.exponent + ["mantissa"] * f.mantissa
        pieces = [(1, bit, FIELDS[field]) for bit, field in zip(f"{f.encode(value):0{f.bits}b}", fields, strict=True)]
        end = strip(ax, 12, y + 10, pieces, 11.7, 19)
        if title == "tf32":  # stored in 32 bits, of which a tensor core uses 19
            strip(ax, end, y + 10, [(1, "", FAINT)] * (32 - f.bits), 11.7, 19)
    zero = ", ".join(title for title, f in FORMATS.items() if f.round(value) == 0)
    alt = f"The bits of {name} in {', '.join(FORMATS)}. It rounds to zero in {zero or 'none of them'}."
    return finished(picture, alt)


def draw_sizes(numbers: Mapping[str, Tensor]) -> Picture:
    """Draw the sizes of the `numbers` of a step as histograms over powers of 2. fp16 rounds the shaded ones to zero."""
    powers = list(range(-48, 9, 2))
    series: dict[str, list[float | None]] = {}
    for kind, values in numbers.items():
        exponents = values[values != 0].abs().log2()
        shares = 100 * exponents.histc(len(powers), powers[0], powers[-1] + 2) / len(exponents)
        series[kind] = [share if share > 0.05 else None for share in shares.tolist()]
    picture = plot_curve(powers, series, "size of the number: power of 2", "share of the numbers (%)")
    ax = picture.axes[0]
    for text in list(ax.texts):  # the name of a series stands at its peak, not at its end
        text.remove()
    for kind, side in zip(series, ("left", "right", "center", "right"), strict=True):
        top = max(share or 0 for share in series[kind])
        x = powers[[share == top for share in series[kind]].index(True)] + {"left": 1, "center": 0, "right": -1}[side]
        ax.text(x, top + 1, kind.replace(" of ", " of\n"), ha=side, va="bottom", size=9)
    ax.set_ylim(0, 1.2 * ax.get_ylim()[1])
    ax.axvspan(powers[0], -25, color=PALETTE[3], alpha=0.12, linewidth=0)
    ax.text(powers[0] + 1, 0.97 * ax.get_ylim()[1], "zero in fp16", va="top")
    return picture


def draw_loss_scaler() -> Picture:
    """Draw the loss scaler as a state machine: finite gradients let the scale grow, and an overflow halves it."""
    picture, ax = sketch(318)
    box(ax, 110, 12, 180, 34, "loss × scale, backward", PALETTE[5])
    link(ax, (200, 46), (200, 74))
    box(ax, 110, 74, 180, 34, "all gradients finite?", PALETTE[6])
    for edge, x, answer in ((110, 60, "yes"), (290, 340, "no")):
        ax.plot([edge, x, x], [91, 91, 126], color=INK, linewidth=1)
        link(ax, (x, 124), (x, 134))
        label(ax, x + (8 if x < 200 else -8), 114, answer, "left" if x < 200 else "right")
    box(ax, 12, 134, 170, 50, "gradients ÷ scale\noptimizer step", PALETTE[2])
    box(ax, 225, 134, 163, 50, "overflow: skip\nthe optimizer step", PALETTE[3])
    link(ax, (90, 184), (90, 208))
    link(ax, (310, 184), (310, 208))
    box(ax, 12, 208, 170, 50, "2,000 finite steps in\na row: scale × 2", WHITE)
    box(ax, 225, 208, 163, 50, "scale ÷ 2, and count\nfrom 0 again", WHITE)
    ax.plot([97, 97], [258, 282], color=MUTED)
    ax.plot([310, 310, 4, 4, 100], [258, 282, 282, 29, 29], color=MUTED)
    link(ax, (98, 29), (110, 29), color=MUTED)
    label(ax, 12, 306, "The next step starts at the top with the new scale.")
    return finished(
        picture,
        "The loss scaler. The loss is multiplied by the scale before the backward pass. If all gradients are finite, "
        "they are divided by the scale and the optimizer steps; after 2,000 finite steps in a row the scale doubles. "
        "If one is infinite or NaN, the step is skipped, the scale is halved and the count starts again.",
    )


def draw_lanes(lanes: Mapping[str, Sequence[tuple[str, str]]]) -> Picture:
    """Draw the tensors of a step in their order, one row per way to train; a tensor is its name and its dtype."""
    picture, ax = sketch(38 + 78 * len(lanes))
    strip(ax, 12, 8, [(1, "16 bits", HALF), (1, "32 bits", FULL)], 70, 20)
    words = []
    for row, (title, tensors) in enumerate(lanes.items()):
        y = 50 + 78 * row
        label(ax, 12, y, title, weight="bold")
        for place, (name, dtype) in enumerate(tensors):
            x = 12 + 77 * place
            box(ax, x, y + 12, 68, 38, f"{name}\n{dtype}", FULL if dtype == "fp32" else HALF)
            if place:
                link(ax, (x - 9, y + 31), (x, y + 31))
        words.append(f"{title}: " + ", ".join(f"{name} {dtype}" for name, dtype in tensors))
    return finished(picture, "The tensors of a training step in their order. " + "; ".join(words) + ".")


def draw_ledger(terms: Mapping[str, tuple[float, float]]) -> Picture:
    """Draw how autocast changes each term of the peak: (bytes in fp32, bytes under autocast)."""
    picture, ax = sketch(52 + 40 * (len(terms) + 1))
    changes = {name: after - before for name, (before, after) in terms.items()}
    changes["sum"] = sum(changes.values())
    scale, middle = 108 / max(map(abs, changes.values())), 200
    label(ax, middle - 8, 16, "saved", "right", color=MUTED)
    label(ax, middle + 8, 16, "added (GiB)", color=MUTED)
    for row, (name, change) in enumerate(changes.items()):
        y = 40 + 40 * row
        label(ax, 12, y, name, weight="bold" if name == "sum" else "normal")
        end = middle + change * scale
        box(ax, min(middle, end), y + 10, max(abs(end - middle), 1), 15, color=PALETTE[3 if change > 0 else 2])
        label(ax, end + (6 if change > 0 else -6), y + 17.5, f"{change / GiB:+.2f}", "left" if change > 0 else "right")
    ax.plot([middle, middle], [28, 48 + 40 * len(terms) + 28], color=MUTED, linewidth=1)
    words = ", ".join(f"{name} {change / GiB:+.2f} GiB" for name, change in changes.items())
    return finished(picture, f"Change of the peak from fp32 to autocast: {words}.")
