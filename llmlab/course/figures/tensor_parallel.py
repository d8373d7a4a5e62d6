"""The drawings of the chapter on tensor and sequence parallelism."""

from __future__ import annotations

from collections.abc import Mapping

from ...base.units import GiB, MiB
from ...plots.canvas import PALETTE, WHITE, Picture
from ...plots.schematic import OWNERS, box, finished, grid, keys, label, link, sketch, strip, tensor

PARTS = {
    "compute": PALETTE[5], "tensor-parallel messages": PALETTE[3], "data parallelism": PALETTE[1],
    "update": PALETTE[2], "waiting": PALETTE[4],
}  # fmt: skip
KINDS = [PALETTE[i] for i in (3, 1, 5)]


def draw_pair(heads: int, width: int) -> Picture:
    """Draw the two matmuls of a pair on four ranks: the first by columns, the second by rows, then the all-reduce.

    `heads` are the attention heads and `width` the columns of the MLP that each rank has.
    """
    picture, ax = sketch(356)
    keys(ax, {f"rank {rank}": color for rank, color in enumerate(OWNERS)}, (12, 108, 204, 300), 8)
    tensor(ax, 30, 66, 56, 56, "T", "h", "x")
    for x, y, rows in ((136, 66, "h"), (292, 66, "T"), (30, 200, "T")):  # split by columns
        grid(ax, x, y, [[("", color) for color in OWNERS]], 24, 56)
        label(ax, x - 5, y + 28, rows, "right")
    grid(ax, 152, 186, [[("", color)] for color in OWNERS], 56, 21)
    for rank, color in enumerate(OWNERS):
        box(ax, 236 + 10 * rank, 186 + 10 * rank, 46, 46, "", color)
    for x, y, sign in ((104, 94, "·"), (256, 94, "="), (138, 228, "·"), (224, 228, "=")):
        label(ax, x, y, sign, "center", weight="bold")
    for x, y, words in (
        (58, 138, "whole"), (184, 40, "$W_1[h, f_{tp}]$"), (184, 138, "by columns"), (340, 40, "$u[T, f_{tp}]$"),
        (340, 138, "no messages"), (78, 272, "act(u)"), (180, 168, "$W_2[f_{tp}, h]$"), (180, 290, "by rows"),
        (262, 168, "partial sums"),
    ):  # fmt: skip
        label(ax, x, y, words, "center")
    link(ax, (312, 226), (344, 226))
    tensor(ax, 344, 203, 46, 46, "", "", "y")
    label(ax, 392, 272, "all-reduce: y[T, h]", "right", weight="bold")
    mlp = f"MLP: {width:,} of the f columns on each rank"
    attention = f"attention: q, k, v and output, {heads} heads on each rank"
    label(ax, 8, 320, mlp)
    label(ax, 8, 342, attention)
    return finished(
        picture,
        "A pair of matmuls on 4 ranks. Each rank has all of x, T × h, and a quarter of the columns of W1, so it "
        "computes a quarter of the columns of u. They meet the same quarter of the rows of W2 and result in a partial "
        f"sum of y, T × h. One all-reduce adds the partial sums. {mlp}; {attention}.",
    )


def draw_sequence_parallel(stream: float, tp: int) -> Picture:
    """Draw which tokens a rank has in each part of a layer, forward, under tensor and under sequence parallelism.

    `stream` are the bytes of a tensor T × h.
    """
    whole = [(1.0, f"{stream / MiB:.0f} MiB", PALETTE[5])]
    share = [(1 / tp, "", PALETTE[5]), (1 - 1 / tp, f"{stream / tp / MiB:.0f} MiB", WHITE)]
    rows = [
        ("norm", whole, share, "", "all-gather"),
        ("q, k, v to output", whole, whole, "all-reduce", "reduce-scatter"),
        ("norm", whole, share, "", "all-gather"),
        ("gate, up, down", whole, whole, "all-reduce", "reduce-scatter"),
        ("next layer", whole, share, "", ""),
    ]
    picture, ax = sketch(366)
    label(ax, 68, 14, "tensor parallel", "center", weight="bold")
    label(ax, 332, 14, "and sequence", "center", weight="bold")
    for row, (name, tensor_only, sequence, *messages) in enumerate(rows):
        y = 30 + 70 * row
        label(ax, 200, y + 14, name, "center")
        for x, pieces, message in zip((12, 276), (tensor_only, sequence), messages, strict=True):
            strip(ax, x, y, pieces, 112, 28)
            if row + 1 < len(rows):
                link(ax, (x + 56, y + 28), (x + 56, y + 70), message)
    return finished(
        picture,
        f"A layer on one of {tp} ranks, forward. Tensor parallelism: each part has all tokens of its input, "
        f"{stream / MiB:.0f} MiB, and an all-reduce follows attention and the MLP. With sequence parallelism, an "
        "all-gather stands before attention and before the MLP, a reduce-scatter after each, and the norms have "
        f"{stream / tp / MiB:.0f} MiB.",
    )


def draw_activations(rows: Mapping[str, Mapping[str, float]]) -> Picture:
    """Draw one bar per row: the bytes of activations that a GPU stores, by kind."""
    kinds = list(next(iter(rows.values())))
    picture, ax = sketch(38 + 48 * len(rows))
    keys(ax, dict(zip(kinds, KINDS, strict=True)), (12, 86, 212), 8)
    longest = max(sum(parts.values()) for parts in rows.values())
    texts = []
    for row, (name, parts) in enumerate(rows.items()):
        y = 44 + 48 * row
        text = f"{name}: {sum(parts.values()) / GiB:.1f} GiB"
        label(ax, 12, y, text)
        pieces = [(parts[kind], "", color) for kind, color in zip(kinds, KINDS, strict=True)]
        strip(ax, 12, y + 10, pieces, 376 / longest, 18)
        texts.append(f"{text} ({', '.join(f'{kind} {size / GiB:.1f}' for kind, size in parts.items())})")
    return finished(picture, f"Activations of a GPU. {'; '.join(texts)}.")


def draw_steps(steps: Mapping[str, Mapping[str, float]]) -> Picture:
    """Draw the whole step of each row as one bar: seconds of compute, of the messages of tensor and of data
    parallelism that compute does not hide, of the update, and of the wait for the slowest rank."""
    picture, ax = sketch(58 + 54 * len(steps))
    places = ((12, 10), (12, 30), (205, 30), (112, 10), (205, 10))
    for (name, color), (x, y) in zip(PARTS.items(), places, strict=True):
        box(ax, x, y, 12, 12, "", color)
        label(ax, x + 18, y + 6, name)
    longest = max(sum(parts.values()) for parts in steps.values())
    texts = []
    for row, (name, parts) in enumerate(steps.items()):
        y = 66 + 54 * row
        values = [parts[part] for part in PARTS]
        label(ax, 12, y, f"{name}: {sum(values):.1f} s")
        pieces = [(size, "", color) for size, color in zip(values, PARTS.values(), strict=True)]
        strip(ax, 12, y + 10, pieces, 376 / longest, 20)
        texts.append(f"{name}: {' + '.join(f'{value:.2f}' for value in values)} = {sum(values):.1f} s")
    return finished(picture, f"Seconds of a step: {' + '.join(PARTS)}. {'; '.join(texts)}.")
