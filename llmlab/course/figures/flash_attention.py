"""The drawings of the chapter on FlashAttention: online softmax, the loop over tiles, the causal mask, and the backward
pass."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.colors import ListedColormap

from ...plots.canvas import INK, MUTED, PALETTE, SMALL, WHITE, Picture, legend, new_picture, styled
from ...plots.schematic import box, finished, grid, keys, label, link, sketch

IN_MEMORY, IN_THE_LOOP, KEPT = PALETTE[1], PALETTE[2], PALETTE[5]
TILES = {"skipped": WHITE, "computed, then masked": PALETTE[1], "computed": PALETTE[5]}


@styled()
def draw_online_softmax(scores: Sequence[float], states: Sequence[tuple[float, float]]) -> Picture:
    """Draw the scores as bars, cut into tiles of equal length, with the maximum m and the sum l after each tile.

    `states`: (m, l) after each tile.
    """
    width = len(scores) // len(states)
    picture, (ax,) = new_picture(3.2)
    ax.bar(range(len(scores)), scores, width=0.7, color=PALETTE[0], edgecolor=INK, linewidth=0.5)
    edges = [width * tile - 0.5 for tile in range(len(states) + 1)]
    ax.stairs([m for m, _ in states], edges, baseline=None, color=PALETTE[3], linewidth=2.4)
    top = max(scores) + 1.4
    for tile, (m, total) in enumerate(states):
        if tile % 2 == 0:
            ax.axvspan(edges[tile], edges[tile + 1], color="#EDEDE6", zorder=0)
        text = f"m = {m:.1f}\nl = {total:.2f}"
        ax.text(edges[tile] + width / 2, top, text, ha="center", va="top", size=SMALL)
    ax.axhline(0, color=INK, linewidth=0.8)
    limits = (-0.6, len(scores) - 0.4), (min(scores) - 0.1, top + 0.2)
    ax.set(xlim=limits[0], ylim=limits[1], xlabel="position", ylabel="score")
    legend(picture, {"score": PALETTE[0], "maximum so far, m": PALETTE[3]})
    pairs = ", ".join(f"{m:.2f} and {total:.3f}" for m, total in states)
    picture.alt = f"Online softmax over {len(scores)} scores in tiles of {width}. Maximum and sum so far: {pairs}."
    return picture


def draw_tile_loop() -> Picture:
    """Draw one program of the forward pass: the tensors that it keeps, and its computation for each tile of keys."""
    picture, ax = sketch(326)
    label(ax, 12, 14, "in the memory of the GPU: k and v, S rows each")
    for y, name in ((26, "k"), (50, "v")):
        grid(ax, 12, y, [[(f"{name}{i}", IN_MEMORY if i == 2 else WHITE) for i in range(6)]], 40, 24)
    link(ax, (12, 86), (250, 86), color=MUTED)
    label(ax, 258, 86, "the loop", color=MUTED)
    label(ax, 258, 50, "each program\nreads them once", color=MUTED)
    box(ax, 12, 104, 376, 172, "", WHITE)
    label(ax, 124, 116, "one program", weight="bold")
    box(ax, 20, 132, 60, 34, "q\nM rows", KEPT)
    box(ax, 92, 132, 90, 34, "s = q·kᵀ\nM × M", IN_THE_LOOP)
    box(ax, 206, 132, 172, 34, "m′ = max(m, s)\np = exp(s − m′)", IN_THE_LOOP)
    box(ax, 20, 196, 120, 34, "l ← l·exp(m − m′)\n+ Σp", KEPT)
    box(ax, 152, 196, 148, 34, "o ← o·exp(m − m′)\n+ p·v", KEPT)
    box(ax, 312, 196, 66, 34, "m ← m′", KEPT)
    for start, end in (((112, 74), (112, 128)), ((80, 149), (92, 149)), ((182, 149), (206, 149))):
        link(ax, start, end)
    for x in (80, 226, 345):
        link(ax, (292, 166), (x, 196), color=MUTED)
    keys(ax, {"kept during the loop": KEPT, "replaced by each tile": IN_THE_LOOP}, (20, 204), 248)
    link(ax, (200, 276), (200, 294))
    label(ax, 200, 308, "after the last tile: o / l, and lse = m + log l", "center")
    return finished(
        picture,
        "One program of the forward pass. It keeps M queries and, for each of them, the maximum m, the sum l and the "
        "output o. For each tile of keys and values it computes M by M scores s, the new maximum m', and "
        "p = exp(s - m'), and corrects l and o by exp(m - m'). After the last tile it writes o / l and "
        "lse = m + log l. The tiles s and p never reach the memory of the GPU.",
    )


@styled()
def draw_causal_tiles(rows: int, tile: int) -> Picture:
    """Draw `rows` × `rows` tiles of `tile` × `tile` scores, and which of them a kernel with a causal mask skips."""
    picture, (ax,) = new_picture(3.7, width=4.6)
    kind = [[(i > j) + (i >= j) for j in range(rows)] for i in range(rows)]  # the place in TILES
    ax.pcolormesh(kind, cmap=ListedColormap(list(TILES.values())), edgecolors=INK, linewidth=0.6)
    y = rows - 1.5
    ax.annotate("", (y + 0.4, y), (0.15, y), arrowprops={"arrowstyle": "->", "lw": 2, "color": INK})
    firsts = range(0, rows, 2)
    ax.set_xticks([place + 0.5 for place in firsts], [str(tile * place) for place in firsts])
    ax.set_yticks([place + 0.5 for place in firsts], [str(tile * place) for place in firsts])
    ax.set(xlabel=f"first key of {tile}", ylabel=f"first query of {tile}", ylim=(rows, 0), aspect="equal")
    legend(picture, TILES)
    counts = [sum(row.count(place) for row in kind) for place in range(3)]
    tiles = ", ".join(f"{count} {name}" for count, name in zip(counts, TILES, strict=True))
    picture.alt = f"Scores of {rows * tile} tokens in tiles of {tile} × {tile}: {tiles}. A program works on one row."
    return picture


def draw_backward() -> Picture:
    """Draw the tensors of the backward pass: those that the forward pass saves, and those that tiles recompute."""
    picture, ax = sketch(248)
    label(ax, 12, 14, "saved by the forward pass", weight="bold")
    tensors = (("q", "S × d"), ("k", "S × d"), ("v", "S × d"), ("out", "S × d"), ("lse", "S"))
    for number, (name, size) in enumerate(tensors):
        box(ax, 12 + 76 * number, 28, 66, 38, f"{name}\n{size}", KEPT)
    label(ax, 12, 95, "never in\nmemory", weight="bold")
    for number, name in enumerate(("scores s", "probabilities p")):
        box(ax, 112 + 142 * number, 76, 132, 38, f"{name}\nS × S", WHITE, MUTED)
    label(ax, 12, 142, "computed once,\nper row", weight="bold")
    box(ax, 170, 124, 96, 38, "δ = dO·out", IN_THE_LOOP)
    label(ax, 12, 186, "recomputed, tile by tile", weight="bold")
    for x, width, words in ((12, 132, "p = exp(q·kᵀ − lse)"), (156, 124, "ds = p·(dp − δ)"), (292, 96, "dp = dO·vᵀ")):
        box(ax, x, 200, width, 38, words, IN_THE_LOOP)
    for start, end in (((144, 219), (156, 219)), ((292, 219), (280, 219)), ((218, 162), (218, 200))):
        link(ax, start, end, color=MUTED)
    return finished(
        picture,
        "The forward pass saves q, k, v and the output, S by d each, and lse, one number per row. Scores and "
        "probabilities, S by S, are never in memory. The backward pass computes delta from out and its gradient, "
        "recomputes tiles of p from q, k and lse, computes tiles of dp from dO and v, and ds from all three.",
    )
