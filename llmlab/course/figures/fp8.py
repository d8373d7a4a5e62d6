"""Drawings of the page on fp8 training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, cat

from ...plots.canvas import INK, MUTED, PALETTE, PHONE, WHITE, Picture, new_picture, number_axes, styled
from ...plots.schematic import box, finished, label, link, sketch
from ..techniques.precision import Format

E4M3, E5M2 = PALETTE[5], PALETTE[1]


class Layer(NamedTuple):
    """A linear layer: its name, its inputs and outputs per token, and the tokens that it multiplies together."""

    name: str
    inputs: int
    outputs: int
    tokens: int

    @property
    def width(self) -> float:
        """The width of the square layer whose casts cost as much per FLOP: the harmonic mean of inputs and outputs."""
        return 2 / (1 / self.inputs + 1 / self.outputs)


def draw_ranges(formats: Mapping[str, Format], numbers: Mapping[str, Sequence[Tensor]]) -> Picture:
    """Draw the range of each format in powers of two, and the range of 98 % of each kind of `numbers`.

    The hatched part of a format shows its subnormal numbers.
    """
    pixels, lowest = 7.4, -34  # per power of two; the first one that is drawn
    picture, ax = sketch(44 + 26 * (len(formats) + len(numbers)))

    def x_of(power: float) -> float:
        return 12 + pixels * (max(power, lowest) - lowest)

    def power_of(value: float) -> float:
        return float(Tensor([value]).log2())

    y, words = 16, []
    for (name, f), color in zip(formats.items(), (E4M3, E5M2), strict=True):
        low, normal, high = (power_of(value) for value in (f.smallest, f.smallest_normal, f.largest))
        box(ax, x_of(low), y, x_of(normal) - x_of(low), 14, "", WHITE, hatch="////")
        box(ax, x_of(normal), y, x_of(high) - x_of(normal), 14, "", color)
        label(ax, x_of(low) - 6, y + 7, name, "right")
        words.append(f"{name} reaches from 2^{low:.0f}, with full precision from 2^{normal:.0f}, to 2^{high:.1f}")
        y += 26
    for name, tensors in numbers.items():
        sizes = cat([t.flatten() for t in tensors]).abs()
        low, high = (sizes[sizes > 0].log2().quantile(share).item() for share in (0.01, 0.99))
        box(ax, x_of(low), y, x_of(high) - x_of(low), 14, "", PALETTE[2])
        side, x = ("left", x_of(high) + 6) if high < -4 else ("right", x_of(low) - 6)
        label(ax, x, y + 7, name, side)
        words.append(f"{name} 2^{low:.0f} to 2^{high:.0f}")
        y += 26
    for power in range(-30, 17, 10):
        label(ax, x_of(power), y + 6, f"$2^{{{power}}}$", "center", color=MUTED)
    return finished(picture, f"Sizes on a scale of powers of two: {'; '.join(words)}.")


def draw_matmul() -> Picture:
    """Draw a matmul of two bf16 matrices in fp8: amax, scale and cast of both, the matmul, and both scales again."""
    picture, ax = sketch(212)
    for y, name in ((16, "A"), (118, "B")):
        box(ax, 12, y, 56, 38, f"{name}\nbf16")
        box(ax, 104, y, 62, 38, "÷ scale\nand cast")
        box(ax, 202, y, 56, 38, "codes\nfp8", E4M3)
        link(ax, (68, y + 19), (104, y + 19))
        link(ax, (166, y + 19), (202, y + 19))
        link(ax, (40, y + 38), (40, y + 56))
        box(ax, 12, y + 56, 168, 22, "amax: reads all of it first")
        link(ax, (135, y + 56), (135, y + 38))
    box(ax, 286, 56, 102, 60, "matmul\nin fp8,\nsum in fp32", E4M3)
    link(ax, (258, 35), (286, 68))
    link(ax, (258, 137), (286, 104))
    box(ax, 286, 148, 102, 40, "× both scales\nto bf16")
    link(ax, (337, 116), (337, 148))
    return finished(
        picture,
        "A matmul of two bf16 matrices A and B. First the amax of each is found, which reads the whole matrix. Then "
        "the matrix is divided by its scale and cast to fp8. The matmul of the codes sums in fp32, and the sum is "
        "multiplied by both scales and stored in bf16.",
    )


def draw_layer() -> Picture:
    """Draw the three matmuls of a linear layer with the formats of their operands, and list what stays in bf16."""
    picture, ax = sketch(312)
    label(ax, 12, 14, "stored in bf16", weight="bold")
    label(ax, 148, 14, "fp8: for one matmul", weight="bold")
    matmuls = (
        ("output y", "input x", "E4M3", "weight Wᵀ", "E4M3"),
        ("gradient of x", "gradient dy", "E5M2", "weight W", "E4M3"),
        ("gradient of W", "gradient dyᵀ", "E5M2", "input x", "E4M3"),
    )
    for number, (result, left, left_format, right, right_format) in enumerate(matmuls):
        top = 28 + 76 * number
        for row, (name, form) in enumerate(((left, left_format), (right, right_format))):
            box(ax, 12, top + 30 * row, 96, 24, name)
            box(ax, 148, top + 30 * row, 48, 24, form, E4M3 if form == "E4M3" else E5M2)
            link(ax, (108, top + 12 + 30 * row), (148, top + 12 + 30 * row))
            link(ax, (196, top + 12 + 30 * row), (222, top + 27))
        box(ax, 222, top + 15, 24, 24, "×", PALETTE[2])
        link(ax, (246, top + 27), (274, top + 27))
        box(ax, 274, top + 12, 114, 30, result)
    for row, words in enumerate(("not in fp8: embedding, head, norms, attention,", "residual stream, loss, gradients, "
                                 "master weights,", "optimizer states")):  # fmt: skip
        label(ax, 12, 264 + 17 * row, words)
    return finished(
        picture,
        "The three matmuls of a linear layer. Output: input times weight, both cast to E4M3. Gradient of the input: "
        "the gradient of the output in E5M2 times the weight in E4M3. Gradient of the weight: the gradient of the "
        "output in E5M2 times the input in E4M3. All operands are stored in bf16. Embedding, head, norms, attention, "
        "residual stream, loss, gradients, master weights and optimizer states are not in fp8.",
    )


@styled()
def draw_border(layers: Sequence[Layer], activation: float, weight: float, limit: float) -> Picture:
    """Draw the border beyond which fp8 makes a linear layer faster, and where `layers` lie.

    A cast moves `activation` and `weight` bytes per number; fp8 pays where 2 · activation / width + weight / tokens is
    below `limit`.
    """
    picture, (ax,) = new_picture(3.8, width=PHONE)
    widths = [2 ** (step / 200) for step in range(1800, 2801)]
    least = 2 * activation / limit
    border = [(n, weight / (limit - 2 * activation / n)) for n in widths if n > least * 1.001]
    x, y = zip(*((n, tokens) for n, tokens in border if tokens < 2**15), strict=True)
    ax.plot(x, y, color=INK, linewidth=1.5)
    ax.fill_between(x, y, 2**15, color=E4M3, alpha=0.25, linewidth=0)
    words = []
    for layer in layers:
        pays = 2 * activation / layer.width + weight / layer.tokens < limit
        ax.plot([layer.width], [layer.tokens], "o", color=E4M3 if pays else PALETTE[3], mec=INK, mew=0.6, ms=7)
        ax.annotate(layer.name, (layer.width, layer.tokens), (0, 7), textcoords="offset points", ha="center", size=9)
        words.append(f"{layer.name} ({layer.width:,.0f}, {layer.tokens:,}): {'faster' if pays else 'slower'}")
    ax.set(xscale="log", yscale="log", xlim=(widths[0], widths[-1]), ylim=(2**9, 2**15))
    number_axes(ax, "width of the layer (harmonic mean)", "tokens per micro-batch")
    for axis, ticks in ((ax.xaxis, (512, 1024, 2048, 4096, 8192)), (ax.yaxis, (512, 1024, 2048, 4096, 8192, 16384))):
        axis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.set_ticks([], minor=True)
    ax.text(widths[-1] * 0.95, 2**14.3, "fp8 is faster", ha="right", size=9)
    picture.alt = (f"Layers by width and tokens. fp8 is faster to the upper right of a border that begins at a width "
                   f"of {least:,.0f}. {'; '.join(words)}.")  # fmt: skip
    return picture
