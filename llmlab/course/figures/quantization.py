"""Drawings of the chapter on quantization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...base.units import GiB
from ...plots.canvas import (
    FAINT,
    INK,
    MUTED,
    PALETTE,
    SMALL,
    WHITE,
    Picture,
    name_rows,
    new_picture,
    number_axes,
    styled,
)
from ...plots.curve import DASHES, LINES, MARKERS
from ...plots.schematic import box, finished, grid, keys, label, link, sketch, strip


def draw_memory(needs: Mapping[str, tuple[int, int]], rooms: Mapping[str, float]) -> Picture:
    """Draw the bytes of weights and cache in each format as a bar, and the memory of each device as a line."""
    top = 30 + 18 * len(rooms)
    picture, ax = sketch(top + 44 * len(needs) + 6)
    scale = 372 / max(*(sum(need) for need in needs.values()), *rooms.values())
    keys(ax, {"weights": PALETTE[5], "KV cache": PALETTE[1]}, (12, 112), 6, side=14)
    bottom = top + 44 * len(needs)
    for place, (name, room) in enumerate(rooms.items()):
        x, y = 12 + room * scale, 34 + 18 * place
        ax.plot((x, x), (y + 8, bottom), color=PALETTE[0], linewidth=1.6, linestyle="--")
        label(ax, x - 3 if x > 200 else x + 3, y + 1, f"{name}: {room / GiB:.1f} GiB", "right" if x > 200 else "left",
              color=PALETTE[0])  # fmt: skip
    words = []
    for row, (name, (weights, cache)) in enumerate(needs.items()):
        y = top + 8 + 44 * row
        words.append(f"{name}: {(weights + cache) / GiB:.1f} GiB")
        label(ax, 14, y, words[-1], weight="bold", bbox={"facecolor": WHITE, "edgecolor": "none", "pad": 0.5})
        strip(ax, 12, y + 10, [(weights, "", PALETTE[5]), (cache, "", PALETTE[1])], scale, 18)
    lines = ", ".join(f"{name} {room / GiB:.1f} GiB" for name, room in rooms.items())
    return finished(picture, f"Weights and KV cache: {'; '.join(words)}. Lines: {lines}.")


def draw_outlier(steps: Mapping[str, float], weights: Sequence[float], view: float) -> Picture:
    """Draw some weights between -view and view, and the values to which steps of each size round them."""
    rows = {"weights": [w for w in weights if abs(w) < view]}
    for name, step in steps.items():
        most = int(view / step)
        rows[name] = [step * i for i in range(-most, most + 1)]
    with styled():
        picture, (ax,) = new_picture(0.55 * len(rows) + 0.6)
        colors = [PALETTE[3], *[PALETTE[0]] * len(steps)]
        ax.eventplot(list(rows.values()), colors=colors, linelengths=0.6, linewidths=1.1)
        name_rows(ax, list(rows), axis=False)
        ax.set(ylim=(len(rows) - 0.4, -0.6), xlim=(-view, view), xlabel="weight")
    picture.alt = "Weights, and the values to which they are rounded: " + ", ".join(
        f"{name} {len(values)}" for name, values in rows.items()
    )
    return picture


def draw_groups(
    weights: Sequence[Sequence[float]], codes: Sequence[Sequence[int]], restored: Sequence[Sequence[float]],
    scales: Sequence[tuple[float, int]], bits: int, size: int,
) -> Picture:  # fmt: skip
    """Draw the first weights of two groups of `size`, their codes, scale and zero, and the bits of a group."""
    picture, ax = sketch(314)
    columns = len(weights[0])
    for number, color in enumerate((PALETTE[5], PALETTE[6])):
        x, first = 10 + 193 * number, number * size
        label(ax, x, 14, f"weights {first} to {first + size - 1}", weight="bold")
        lines = {
            "w, in hundredths": [f"{100 * w:.1f}" for w in weights[number]],
            "code q": [str(code) for code in codes[number]],
            "s (q − z)": [f"{100 * w:.1f}" for w in restored[number]],
        }
        for line, (name, cells) in enumerate(lines.items()):
            label(ax, x, 38 + 52 * line, name, color=MUTED)
            grid(ax, x, 50 + 52 * line, [[(words, color if line == 1 else WHITE) for words in cells]], 33, 26)
            label(ax, x + 33 * columns + 3, 63 + 52 * line, "…")
        s, z = scales[number]
        box(ax, x, 198, 33 * columns, 28, f"s = {100 * s:.3f}, z = {z}", color)
    share = size * bits, 16, bits
    label(ax, 10, 246, f"a group: {size} codes of {bits} bits, 16 for s, {bits} for z")
    pieces = zip(share, (f"{share[0]}", "", ""), PALETTE[:3], strict=True)
    strip(ax, 10, 258, pieces, 376 / sum(share), 22)
    total = f"{sum(share)} / {size} = {sum(share) / size:g} bits per weight"
    label(ax, 10, 300, total, weight="bold")
    return finished(picture, f"Two groups of {size} weights, each with a scale s and a zero z for its codes. {total}.")


def draw_formats(weights: Sequence[float], values: Mapping[str, Sequence[float]]) -> Picture:
    """Draw a histogram of weights divided by the largest of their block, and the values of each format below it."""
    with styled():
        heights = (1.2, 0.36 * len(values))
        picture, (top, rows) = new_picture(0.2 + sum(heights), 2, sharex=True, height_ratios=heights)
        top.hist(weights, 81, histtype="stepfilled", color=PALETTE[5], edgecolor=INK, lw=0.6)
        top.set(yticks=(), ylabel="weights")
        top.spines["left"].set_visible(False)
        rows.hlines(range(len(values)), -1, 1, color=MUTED, linewidth=0.5)
        rows.eventplot(list(values.values()), color=PALETTE[0], linelengths=0.64, linewidths=1.4)
        name_rows(rows, list(values), axis=False)
        rows.set(ylim=(len(values) - 0.4, -0.6), xlabel="weight / largest of its block")
    counts = ", ".join(f"{name} {len(grid_values)}" for name, grid_values in values.items())
    picture.alt = f"A histogram of {len(weights)} weights, and the values of each format: {counts}."
    return picture


def draw_bits(formats: Mapping[str, tuple[float, float, str]]) -> Picture:
    """Draw the bits per weight of each format, of its codes and of its scales, and how the scales are shared."""
    picture, ax = sketch(32 + 44 * len(formats))
    keys(ax, {"codes": PALETTE[5], "scales and zeros": PALETTE[1]}, (12, 102), 6, side=14)
    scale = 376 / max(codes + scales for codes, scales, _ in formats.values())
    words = []
    for row, (name, (codes, scales, sharing)) in enumerate(formats.items()):
        y = 40 + 44 * row
        words.append(f"{name}: {codes + scales:.4g} bits")
        label(ax, 12, y, words[-1], weight="bold")
        label(ax, 388, y, sharing, "right", color=MUTED)
        strip(ax, 12, y + 10, [(codes, "", PALETTE[5]), (scales, "", PALETTE[1])], scale, 14)
    return finished(picture, f"Bits per weight: {'; '.join(words)}.")


def draw_llm_int8() -> Picture:
    """Draw how LLM.int8() splits a matmul: columns with an outlier in 16 bits, all others in int8, and their sum."""
    picture, ax = sketch(252)
    label(ax, 12, 14, "X: 2 tokens, 6 channels", weight="bold")
    label(ax, 222, 14, "Wᵀ, by channel", weight="bold")
    outliers = (2, 5)
    numbers = (("0.3", "-0.9", "61", "0.1", "0.7", "-28"), ("1.1", "0.2", "58", "-0.4", "0.5", "-31"))
    for row, line in enumerate(numbers):
        for column, number in enumerate(line):
            box(ax, 12 + 32 * column, 26 + 24 * row, 32, 24, number, PALETTE[1] if column in outliers else PALETTE[5])
    for channel in range(6):
        box(ax, 222, 26 + 14 * channel, 120, 14, color=PALETTE[1] if channel in outliers else PALETTE[5])
    lanes = (("4 channels: int8 × int8", PALETTE[5]), ("2 channels: in 16 bits", PALETTE[1]))
    for lane, (words, color) in enumerate(lanes):
        x = 12 + 194 * lane
        box(ax, x, 142, 182, 30, words, color)
        link(ax, (x + 91, 172), (170 + 60 * lane, 212))
    for x, y in ((60, 76), (240, 112)):
        link(ax, (x, y), (103, 142))
    for x, y in ((160, 76), (320, 112)):
        link(ax, (x, y), (297, 142), color=MUTED)
    box(ax, 140, 212, 120, 26, "sum = X Wᵀ")
    return finished(
        picture, "A matmul is split by channels: the two channels with outliers are multiplied in 16 bits, the other "
        "four in int8, and the two results are added."
    )  # fmt: skip


def draw_smoothquant(
    before: tuple[Sequence[float], Sequence[float]], after: tuple[Sequence[float], Sequence[float]]
) -> Picture:
    """Draw the largest number of each channel, of the inputs and of the weights, before and after SmoothQuant.

    Each line is divided by its median, so that only the shape counts.
    """
    ratios = []
    with styled():
        picture, axes = new_picture(3.6, 2, sharex=True, height_ratios=(1, 1))
        for ax, name, pair in zip(axes, ("inputs", "weights"), zip(before, after, strict=True), strict=True):
            for values, color, look, words in zip(pair, (LINES[1], LINES[0]), "so", ("before", "after"), strict=True):
                middle = sorted(values)[len(values) // 2]
                line = [value / middle for value in values]
                ax.plot(line, look + "-", color=color, linewidth=1.2, markersize=4, label=words)
                ratios.append(max(values) / middle)
            ax.set(ylabel=f"{name},\nmax / median", yscale="log")
        axes[1].set(xlabel="channel")
        axes[0].legend(loc="upper right")
    picture.alt = (
        "The largest of the channels over the median: inputs {:.1f} before and {:.1f} after, weights {:.1f} before "
        "and {:.1f} after.".format(*ratios)
    )
    return picture


def draw_hqq(weights: Sequence[float], grids: Mapping[str, Sequence[float]]) -> Picture:
    """Draw the weights of a group, and the values that their codes stand for with each choice of the zero."""
    with styled():
        picture, (ax,) = new_picture(0.5 * (1 + len(grids)) + 0.7)
        colors = [PALETTE[3], *[PALETTE[0]] * len(grids)]
        ax.eventplot([list(weights), *map(list, grids.values())], colors=colors, linelengths=0.6, linewidths=1.6)
        name_rows(ax, ["weights", *grids], axis=False)
        ax.set(ylim=(len(grids) + 0.6, -0.6), xlabel="weight")
    grids_text = "; ".join(f"{name}: " + ", ".join(f"{v:.3f}" for v in values) for name, values in grids.items())
    picture.alt = f"{len(weights)} weights of a group, and the values to which they are rounded. {grids_text}."
    return picture


def draw_gptq(
    before: Sequence[Sequence[float]], after: Sequence[Sequence[float]], column: int, shares: Sequence[float]
) -> Picture:
    """Draw four rows of weights before and after `column` is rounded; `shares` of its error go to later columns."""
    picture, ax = sketch(322)
    columns = len(before[0])
    for number, (words, rows) in enumerate((("is next", before), ("is rounded", after))):
        y, final = 16 + 170 * number, column + number
        label(ax, 12, y, f"column {column} {words}", weight="bold")
        left = [PALETTE[5]] * (columns - final) if number else [PALETTE[1], *[WHITE] * (columns - final - 1)]
        colors = [FAINT] * final + left
        cells = [[f"{round(100 * w, 2) + 0:.2f}" for w in row] for row in rows]
        grid(ax, 12, y + 14, [list(zip(row, colors, strict=True)) for row in cells], 62, 24)
    box(ax, 12 + 62 * column, 134, 62, 22, "error e", PALETTE[1])
    for target, share in zip(range(column + 1, columns), shares, strict=True):
        x = 43 + 62 * target
        label(ax, x, 145, f"{'−' if share > 0 else '+'} {abs(share):.2f} e", "center")
        link(ax, (x, 156), (x, 200))
    label(ax, 12, 310, "in hundredths; grey: rounded, and final", color=MUTED)
    return finished(
        picture, f"Four rows of {columns} weights. Column {column} is rounded, and shares of its error are subtracted "
        "from the columns that are not rounded yet."
    )  # fmt: skip


def draw_awq(lanes: Mapping[str, tuple[float, float]]) -> Picture:
    """Draw, for each way to round a column, its input, the rounding error, and their product."""
    picture, ax = sketch(8 + 98 * len(lanes))
    for row, (name, (size, error)) in enumerate(lanes.items()):
        y = 16 + 98 * row
        label(ax, 12, y, name, weight="bold")
        box(ax, 12, y + 14, 104, 48, f"input\n{size:.2f}", PALETTE[5])
        label(ax, 126, y + 38, "×", "center")
        box(ax, 136, y + 14, 104, 48, f"error\n{error:.3f}", PALETTE[1])
        link(ax, (240, y + 38), (278, y + 38))
        box(ax, 278, y + 14, 112, 48, f"error of output\n{size * error:.3f}")
    words = "; ".join(f"{name}: {size:.2f} × {error:.3f} = {size * error:.3f}" for name, (size, error) in lanes.items())
    return finished(picture, f"Input times rounding error of one column. {words}.")


def plot_costs(lines: Mapping[str, Sequence[tuple[float, float, float, float]]], ylabel: str) -> Picture:
    """Plot the cost of quantization: for each method, points (bits per weight, lowest, mean, highest) on a log axis."""
    with styled():
        picture, (ax,) = new_picture(4.4)
        for (name, points), color, dash, marker in zip(lines.items(), LINES, DASHES, MARKERS, strict=False):
            bits, _, mean, _ = zip(*points, strict=True)
            errors = [[m - lo for _, lo, m, _ in points], [hi - m for _, _, m, hi in points]]
            ax.errorbar(bits, mean, errors, color=color, linestyle=dash, marker=marker, markeredgecolor=INK, capsize=3,
                        linewidth=2, label=name)  # fmt: skip
        number_axes(ax, "bits per weight, scales included", ylabel)
        ax.set_yscale("log")
        picture.legend(loc="outside lower center", ncols=3, handlelength=2.6, fontsize=SMALL)
    words = (f"{name}: " + ", ".join(f"{p[2]:.3g} at {p[0]:.3g}" for p in points) for name, points in lines.items())
    picture.alt = f"{ylabel} against bits per weight. {'; '.join(words)}."
    return picture
