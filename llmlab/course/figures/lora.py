"""The figures of the chapter on LoRA and QLoRA: bytes, losses on new and on old text, and NF4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...base.units import GiB
from ...plots.canvas import FAINT, INK, MUTED, PALETTE, PHONE, SMALL, Picture, new_picture, number_axes, styled
from ...plots.schematic import box, finished, grid, label, link, sketch, strip, tensor

LINES = {"full": "#000000", "lora": ("#56B4E9", "#0072B2", "#009E73", "#D55E00"), "targets": ("#CC79A7", "#B07000")}
MARKERS = "osD^vPX*"
Losses = Sequence[tuple[float, float]]  # (new text, old text), one pair for each seed


def draw_update(side: int, rank: int, tokens: int, sizes: Mapping[str, Sequence[float]]) -> Picture:
    """Draw a frozen square matrix next to A and B, and a table of MiB.

    `sizes` maps a name to the MiB of weights, gradients, optimizer states, and tensors saved for backward.
    """
    picture, ax = sketch(306 + 30 * len(sizes))
    box(ax, 40, 12, 320, 28, f"x: {tokens:,} tokens × {side:,}", PALETTE[5])
    tensor(ax, 50, 80, 120, 120, "out", "in", f"W, frozen\n{side:,} × {side:,}", FAINT)
    box(ax, 230, 80, 120, 14, "", PALETTE[1])
    box(ax, 283, 114, 14, 86, "", PALETTE[1])
    label(ax, 306, 104, f"A: {rank} × in")
    label(ax, 306, 157, f"B: out × {rank},\nzero at first")
    for x, start, end in ((140, 40, 80), (140, 200, 234), (290, 40, 80), (290, 94, 114), (290, 200, 234)):
        link(ax, (x, start), (x, end))
    box(ax, 40, 234, 320, 28, "W x + (α / r) B A x")
    for column, name in enumerate(("MiB", "weights", "gradients", "AdamW", "saved")):
        label(ax, 54 + 76 * column, 284, name, "center", color=MUTED)
    for row, (name, values) in enumerate(sizes.items()):
        label(ax, 6, 310 + 30 * row - 3, name)
        boxes = [(f"{size:.4g}", PALETTE[1] if size and "frozen" not in name else FAINT) for size in values]
        grid(ax, 92, 297 + 30 * row - 3, [boxes], 76, 26)
    words = "; ".join(f"{name} {', '.join(f'{size:.4g}' for size in values)}" for name, values in sizes.items())
    return finished(
        picture,
        f"W, {side} by {side}, is frozen; A, {rank} by in, and B, out by {rank}, are trained. MiB of weights, of "
        f"gradients, of AdamW's states and of tensors saved for the backward pass: {words}.",
    )


@styled()
def plot_bytes_per_weight(ranks: Sequence[int], lines: Mapping[str, Sequence[float]], trained: float) -> Picture:
    """Plot the bytes of states per weight of a matrix against the rank, one line for each name, and that of training
    the matrix itself, `trained`, as a horizontal line."""
    picture, (ax,) = new_picture(3.6, width=PHONE)
    for (name, values), color, style in zip(lines.items(), LINES["lora"], ("-", "--", "-.", ":"), strict=False):
        ax.plot(ranks, values, color=color, linestyle=style, linewidth=2, label=name)
    ax.axhline(trained, color=INK, linewidth=1.4)
    ax.annotate("trained without LoRA", (ranks[0], trained), xytext=(2, 4), textcoords="offset points", fontsize=SMALL)
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(ranks)[::2])
    ax.set_ylim(0, 1.6 * trained)
    number_axes(ax, "rank", "states, bytes per weight")
    picture.legend(loc="outside lower center", ncols=1, fontsize=SMALL)
    end_texts = "; ".join(
        f"{name}: {values[0]:.2f} at rank {ranks[0]}, {values[-1]:.1f} at rank {ranks[-1]}"
        for name, values in lines.items()
    )
    picture.alt = f"Bytes of states per weight against the rank; {trained:g} without LoRA. {end_texts}."
    return picture


def _styles(methods: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return a colour and a marker for each method."""
    ranks, targets = iter(LINES["lora"]), iter(LINES["targets"])
    full = iter((LINES["full"], MUTED))
    styles = {}
    for name, marker in zip(methods, MARKERS, strict=False):
        colors = ranks if name.startswith("rank") else targets if "only" in name else full
        styles[name] = (str(next(colors)), marker)
    return styles


@styled()
def plot_rates(methods: Mapping[str, Mapping[float, Losses]], start: float) -> Picture:
    """Plot the loss on the new text against the learning rate, one line for each method, with a marker at the best.

    A line connects the first seeds; at the best rate a bar reaches from the best to the worst seed. The axis ends at
    `start`, the loss before training.
    """
    picture, (ax,) = new_picture(4.4, width=PHONE)
    styles = _styles(list(methods))
    words = []
    for name, losses in methods.items():
        color, marker = styles[name]
        rates = sorted(losses)
        first = [losses[rate][0][0] for rate in rates]
        place = first.index(min(first))
        seeds = [new for new, _ in losses[rates[place]]]
        ax.plot(rates, first, color=color, linewidth=1.6, linestyle="--" if name[0] in "lMa" else "-")
        ax.plot([rates[place]] * 2, [min(seeds), max(seeds)], color=color, linewidth=3)
        ax.plot([rates[place]], [first[place]], color=color, marker=marker, markersize=8, linestyle="none", label=name)
        words.append(f"{name}: {first[place]:.2f} at {rates[place]:g}")
    ax.set_xscale("log")
    ax.set_ylim(top=start)
    number_axes(ax, "peak learning rate", "loss on code")
    picture.legend(loc="outside lower center", ncols=2, fontsize=SMALL)
    picture.alt = f"Loss on the new text against the learning rate; the lowest of each method: {'; '.join(words)}."
    return picture


@styled()
def plot_tradeoff(methods: Mapping[str, Mapping[float, Losses]], start: tuple[float, float]) -> Picture:
    """Plot the loss on the old text against the loss on the new text, a point for each method, rate and seed.

    A line connects the first seeds of a method in the order of their rates, from `start`, the losses before training.
    The points at the best rate are larger. Runs whose loss on the new text rises are not drawn.
    """
    picture, (ax,) = new_picture(5.2, width=PHONE)
    styles = _styles(list(methods))
    words = []
    for name, losses in methods.items():
        color, marker = styles[name]
        rates = [rate for rate in sorted(losses) if losses[rate][0][0] < start[0]]
        path = [start, *(losses[rate][0] for rate in rates)]
        best = min(rates, key=lambda rate: losses[rate][0][0])
        ax.plot(*zip(*path, strict=True), color=color, linewidth=1, linestyle="--" if name[0] in "lMa" else "-")
        ax.plot(*zip(*path[1:], strict=True), color=color, marker=marker, markersize=4, linestyle="none")
        new, old = zip(*losses[best], strict=True)
        ax.plot(new, old, color=color, marker=marker, markersize=8, linestyle="none", label=name)
        words.append(f"{name}: {sum(new) / len(new):.2f} and {sum(old) / len(old):.2f}")
    ax.plot(*start, color=INK, marker="*", markersize=12, linestyle="none")
    ax.annotate("before", start, xytext=(-6, 8), textcoords="offset points", ha="right", fontsize=SMALL)
    number_axes(ax, "loss on code (new)", "loss on documentation (old)")
    picture.legend(loc="outside lower center", ncols=2, fontsize=SMALL)
    picture.alt = (
        f"Loss on the old text against loss on the new text, {start[1]:.2f} and {start[0]:.2f} before training. Means "
        f"of new and old at the best rate: {'; '.join(words)}."
    )
    return picture


def draw_nf4(bits: Mapping[str, Sequence[float]], codes: Sequence[int], scale: float, weights: int) -> Picture:
    """Draw the bits per weight of formats, the first 16 codes of a block with its scale, and how they are used.

    `bits` maps a format to the bits of its code and of its shares of scales; `weights` weights are stored in it.
    """
    picture, ax = sketch(372)
    for row, (name, parts) in enumerate(bits.items()):
        y, size = 14 + 52 * row, weights * sum(parts) / 8 / GiB
        total = f" = {sum(parts):.3f}" if len(parts) > 1 else ""
        label(ax, 12, y, f"{name}: {' + '.join(f'{part:.3g}' for part in parts)}{total} bits")
        label(ax, 388, y, f"{size:.2f} GiB", "right")
        pieces = [(part, "", color) for part, color in zip(parts, PALETTE, strict=False)]
        strip(ax, 12, y + 11, pieces, 370 / 16, 18)
    label(ax, 12, 182, "a block: 64 codes and one scale", weight="bold")
    for column, code in enumerate(codes[:16]):
        box(ax, 12 + 18 * column, 194, 18, 24, f"{code:x}".upper(), PALETTE[0])
    label(ax, 306, 206, "… 64")
    box(ax, 346, 194, 44, 24, f"{scale:.2f}", PALETTE[1])
    link(ax, (100, 218), (100, 250), "value of each code × scale")
    box(ax, 12, 250, 176, 28, "W in 16 bits, temporary", FAINT)
    link(ax, (188, 264), (246, 264))
    box(ax, 246, 250, 144, 28, "x W, plus B A x")
    label(ax, 12, 300, "forward pass: W is used and freed")
    label(ax, 12, 322, "backward pass: W is dequantized again")
    label(ax, 12, 344, "weight gradients: only of A and B")
    words = ", ".join(f"{name} {sum(parts):.3f}" for name, parts in bits.items())
    return finished(
        picture,
        "A block of 64 codes of 4 bits and one scale becomes W in 16 bits when the layer is computed, and again in the "
        f"backward pass, for the gradient of x. Bits per weight: {words}.",
    )
