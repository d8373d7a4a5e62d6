"""Drawings of the chapter that builds a GPT: the whole model, attention, and the four parts that Llama replaces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from torch import Tensor

from ...plots import plot_curve
from ...plots.canvas import COLORS, FAINT, INK, MUTED, PALETTE, PANEL, WHITE, Picture, new_picture, styled
from ...plots.schematic import box, finished, grid, label, link, rank, sketch, tensor

STREAM, STREAM_X = PALETTE[0], 75
NEW = PALETTE[6]  # a part that differs from GPT-2


class Drawn(NamedTuple):
    """The words in a drawing of a model: its name, its layers and its parts, one or two lines each.

    `positions` is the text of the position embedding, or empty. `new` names the fields that are highlighted.
    """

    name: str
    layers: int
    embedding: str
    positions: str
    norm: str
    attention: str
    mlp: str
    head: str
    new: tuple[str, ...] = ()


def draw_model(model: Drawn) -> Picture:
    """Draw a decoder from the token ids to the logits: the residual stream on the left, the branches on the right."""

    def part(x: float, y: float, width: float, height: float, field: str) -> None:
        box(ax, x, y, width, height, getattr(model, field), NEW if field in model.new else WHITE)

    picture, ax = sketch(494)
    box(ax, 25, 10, 100, 24, "token ids", PALETTE[7])
    label(ax, 136, 22, "(B, S)", color=MUTED)
    link(ax, (STREAM_X, 34), (STREAM_X, 54))
    part(5, 54, 140, 36, "embedding")
    _stream(ax, 90, 108 if model.positions else 179)
    if model.positions:
        part(225, 54, 160, 36, "positions")
        _into_sum(ax, 305, 90, 116)
        _stream(ax, 124, 179)
    rank(ax, 8, 140, 384, 190, "")
    label(ax, 384, 154, f"{model.layers} blocks, each with two branches", "right", weight="bold")
    for top, field in ((170, "attention"), (248, "mlp")):
        middle = top + 21
        link(ax, (STREAM_X, middle), (118, middle))
        part(118, middle - 15, 84, 30, "norm")
        link(ax, (202, middle), (226, middle))
        part(226, top, 158, 42, field)
        _into_sum(ax, 305, top + 42, top + 60)
        _stream(ax, top + 9, top + 52)
        _stream(ax, top + 68, 350 if field == "mlp" else 257)
    part(33, 350, 84, 28, "norm")
    label(ax, 96, 132, "residual stream (B, S, h): a vector per token", color=STREAM)
    link(ax, (STREAM_X, 378), (STREAM_X, 400))
    part(5, 400, 140, 36, "head")
    label(ax, 156, 418, "the embedding again, transposed", color=MUTED)
    link(ax, (STREAM_X, 436), (STREAM_X, 458))
    box(ax, 25, 458, 100, 24, "logits", PALETTE[7])
    label(ax, 136, 470, "(B, S, V): a score for every next token", color=MUTED)
    words = {field: getattr(model, field).replace("\n", ", ") for field in Drawn._fields[2:8]}
    return finished(
        picture,
        f"{model.name} from top to bottom. Token ids; {words['embedding']}{' + ' if model.positions else ''}"
        f"{words['positions']}; then {model.layers} blocks with two branches that are added to the residual stream: "
        f"{words['norm']} and {words['attention']}; {words['norm']} and {words['mlp']}. At the end {words['norm']}, "
        f"{words['head']}, logits.",
    )


def _stream(ax: Axes, start: float, end: float) -> None:
    ax.plot((STREAM_X, STREAM_X), (start, end), color=STREAM, linewidth=5, solid_capstyle="butt", zorder=1)


def _into_sum(ax: Axes, x: float, start: float, y: float) -> None:
    """Draw the way from a box at (x, start) down and left into a sum on the stream at height `y`."""
    ax.plot((x, x), (start, y), color=INK, linewidth=1)
    link(ax, (x, y), (STREAM_X + 9, y))
    ax.plot([STREAM_X], [y], marker="o", markersize=12, color=WHITE, markeredgecolor=INK, zorder=3)
    label(ax, STREAM_X, y, "+", "center", zorder=4)


def draw_attention(scores: Tensor, weights: Tensor) -> Picture:
    """Draw attention of one head: `scores` (S, S) before the causal mask, and `weights` (S, S) after the softmax."""

    def cells(matrix: Tensor, form: str, color: str, hidden: str = "") -> list[list[tuple[str, str]]]:
        rows = range(len(matrix))
        texts = [[f"{matrix[t, s]:{form}}".replace("-", "−") for s in rows] for t in rows]
        return [[(hidden, FAINT) if hidden and s > t else (texts[t][s], color) for s in rows] for t in rows]

    picture, ax = sketch(440)
    for x, name, role in ((30, "q", "queries"), (122, "k", "keys")):
        tensor(ax, x, 34, 62, 92, "S", "d", name, PALETTE[5])
        label(ax, x + 31, 140, role, "center", color=MUTED)
    grid(ax, 240, 34, cells(scores, "+.1f", WHITE), 36, 23)
    label(ax, 312, 20, "scores, S × S", "center")
    link(ax, (188, 80), (238, 80))
    label(ax, 213, 66, "q·k/√d", "center")
    link(ax, (312, 128), (312, 182), "causal mask")
    grid(ax, 240, 184, cells(scores, "+.1f", WHITE, "−∞"), 36, 23)
    link(ax, (236, 230), (180, 230))
    label(ax, 208, 216, "softmax", "center")
    label(ax, 208, 244, "by row", "center")
    grid(ax, 30, 184, cells(weights, ".2f", PALETTE[1], "0"), 36, 23)
    label(ax, 102, 170, "weights: each row sums to 1", "center")
    tensor(ax, 260, 330, 62, 92, "S", "d", "v", PALETTE[5])
    label(ax, 330, 376, "values", color=MUTED)
    tensor(ax, 71, 330, 62, 92, "S", "d", "output", PALETTE[2])
    link(ax, (102, 278), (102, 310))
    link(ax, (236, 376), (140, 376), "weights · v")
    last = ", ".join(f"{weight:.2f}" for weight in weights[-1])
    return finished(
        picture,
        "Attention of four tokens. Queries and keys, S × d each, give S × S scores. The causal mask sets the scores of "
        "later tokens to −∞, the softmax makes each row sum to 1, and the weights average the rows of v. The weights "
        f"of the last row: {last}.",
    )


@styled()
def draw_influence(models: Mapping[str, Tensor]) -> Picture:
    """Draw which tokens change the prediction at each position, a panel per model: bool, (S, S)."""
    picture, panels = new_picture(3.05, columns=len(models))
    words = []
    for ax, (name, changed) in zip(panels, models.items(), strict=True):
        reads = changed.int()
        ax.pcolormesh(
            reads, cmap=ListedColormap([PANEL, COLORS["weights"]]), vmin=0, vmax=1, edgecolors=MUTED,
            linewidth=0.4,
        )  # fmt: skip
        ax.set(aspect="equal", ylim=(len(reads), 0), xticks=(), yticks=(), xlabel="token that is replaced")
        ax.set_title(name, loc="left", weight="bold")
        from_same, from_earlier, from_later = reads.trace(), reads.tril(-1).sum(), reads.triu(1).sum()
        pairs = f"{from_earlier} pairs with an earlier token, {from_same} with the same, {from_later} with a later one"
        words.append(f"{name}: {pairs}")
    panels[0].set_ylabel("position of the prediction")
    picture.alt = f"Which token changes which prediction. {'; '.join(words)}."
    return picture


def draw_mlps(h: int, wide: int, gated: int) -> Picture:
    """Draw the MLP of GPT-2, h → `wide` → h, and SwiGLU, h → `gated` twice → h, with their numbers of parameters."""
    picture, ax = sketch(350)
    plain, swiglu = 2 * h * wide, 3 * h * gated
    scale = 104 / max(wide, gated)
    label(ax, 12, 14, f"GELU MLP: 2 × {h:,} × {wide:,} = {plain:,}", weight="bold")
    label(ax, 12, 176, f"SwiGLU: 3 × {h:,} × {gated:,} = {swiglu:,}", weight="bold")
    for y, width in ((84, wide), (266, gated)):
        for x, channels in ((20, h), (244, width), (360, h)):
            _layer(ax, x, y, channels * scale, f"{channels:,}")
        link(ax, (262, y), (359, y), "down")
    _layer(ax, 122, 84, wide * scale, f"{wide:,}")
    link(ax, (38, 84), (121, 84), "up")
    link(ax, (140, 84), (243, 84), "GELU")
    for y, y_of_words, name, function, end in ((228, 200, "gate", "SiLU", 262), (304, 334, "up", "×", 270)):
        _layer(ax, 122, y, gated * scale, "")
        label(ax, 146, y_of_words, f"{gated:,}")
        link(ax, (38, 266), (121, y), name)
        link(ax, (140, y), (243, end), function)
    return finished(
        picture,
        f"Two MLPs. GELU: a matmul from {h:,} to {wide:,} channels, GELU, a matmul back, {plain:,} weights. SwiGLU: "
        f"two matmuls from {h:,} to {gated:,} channels, SiLU of the gate times up, a matmul back, {swiglu:,} weights.",
    )


def _layer(ax: Axes, x: float, middle: float, height: float, words: str) -> None:
    box(ax, x, middle - height / 2, 18, height, color=PALETTE[5])
    label(ax, x + 9, middle + height / 2 + 11, words, "center")


def draw_rope(turns: Sequence[float], pairs: Sequence[int], query: int, key: int, shift: int) -> Picture:
    """Draw rotary positions. `turns` are the radians per position of each pair of channels; `pairs` are three of them.

    Above, one key at positions 0 to 4. Below, a query and a key at two positions, and `shift` positions later.
    """

    def hand(x: float, y: float, angle: float, words: str, color: str, radius: float = 46) -> None:
        tip, text_place = ((x + r * math.cos(angle), y - r * math.sin(angle)) for r in (radius, radius + 9))
        link(ax, (x, y), tip, color=color)
        if words:
            label(ax, *text_place, words, "center")

    def circle(x: float, y: float, radius: float = 46) -> None:
        around = [math.tau * n / 90 for n in range(91)]
        ax.plot([x + radius * math.cos(a) for a in around], [y - radius * math.sin(a) for a in around], color=FAINT)

    picture, ax = sketch(354)
    label(ax, 12, 16, "One key at positions 0 to 4, three pairs of channels")
    rate_texts = []
    for x, pair in zip((68, 200, 332), pairs, strict=True):
        circle(x, 92)
        for position in range(5):
            labelled = turns[pair] > 0.3 or (turns[pair] > 0.05 and position in (0, 4))
            hand(x, 92, 0.3 + position * turns[pair], str(position) if labelled else "", PALETTE[position])
        rate_texts.append(f"pair {pair}: {math.degrees(turns[pair]):.2g}° each")
        label(ax, x, 158, rate_texts[-1], "center")
    middle = pairs[1]
    label(ax, 12, 196, f"Pair {middle} of a query and of a key, {query - key} tokens apart")
    angle_texts = []
    for x, offset in ((100, 0), (300, shift)):
        circle(x, 268)
        angles = 1.9 + (query + offset) * turns[middle], 0.7 + (key + offset) * turns[middle]
        hand(x, 268, angles[0], "q", PALETTE[0])
        hand(x, 268, angles[1], "k", PALETTE[3])
        angle_texts.append(f"{math.degrees(angles[0] - angles[1]) % 360:.0f}°")
        label(ax, x, 340, f"at {query + offset} and {key + offset}: {angle_texts[-1]} apart", "center")
    return finished(
        picture,
        f"RoPE turns pairs of channels by an angle per position. {'; '.join(rate_texts)}. A query at {query} and a key "
        f"at {key} are {angle_texts[0]} apart in pair {middle}; {shift} positions later they are {angle_texts[1]} "
        "apart.",
    )


def draw_groups(heads: int, groups: Mapping[str, int]) -> Picture:
    """Draw which query heads share a key/value head, for each name in `groups` and its number of key/value heads."""
    picture, ax = sketch(14 + 112 * len(groups))
    words = []
    pitch = 300 / heads
    for row, (name, shared) in enumerate(groups.items()):
        top = 12 + 112 * row
        count = f"{shared} key/value {'head' if shared == 1 else 'heads'}"
        label(ax, 12, top + 4, f"{name}: {count}", weight="bold")
        label(ax, 12, top + 28, "queries")
        label(ax, 12, top + 80, "k and v")
        size = heads // shared
        for group in range(shared):
            left = 90 + group * size * pitch
            middle = left + size * pitch / 2
            color = PALETTE[(5, 1, 2, 4)[group % 4]]
            box(ax, middle - pitch / 2 + 3, top + 68, pitch - 6, 24, color=color)
            for head in range(size):
                x = left + head * pitch
                box(ax, x + 3, top + 18, pitch - 6, 22, color=color)
                ax.plot((x + pitch / 2, middle), (top + 40, top + 68), color=MUTED, linewidth=1)
        words.append(f"{name}: {heads} query heads, {count}")
    return finished(picture, f"Query heads and the key/value heads that they share. {'; '.join(words)}.")


def draw_lines(models: Mapping[str, Sequence[Sequence[float]]], steps: Sequence[float], bound: tuple[str, float],
               xlabel: str, ylabel: str) -> Picture:  # fmt: skip
    """Draw the mean of each model's curves as a line, and the range of the seeds as a band.

    `models` has a curve for each seed, and `bound` is the name and the height of a horizontal line.
    """
    means = {name: [sum(seeds) / len(seeds) for seeds in zip(*curves, strict=True)] for name, curves in models.items()}
    name, height = bound
    picture = plot_curve(steps, {**means, name: [height] * len(steps)}, xlabel, ylabel)
    ax = picture.axes[0]
    for line, curves in zip(ax.get_lines(), models.values(), strict=False):
        low, high = ([pick(seeds) for seeds in zip(*curves, strict=True)] for pick in (min, max))
        ax.fill_between(list(steps), low, high, color=line.get_color(), alpha=0.25, linewidth=0)
    return picture
