"""The drawings of the chapter on 3D parallelism and context parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...plots.canvas import FAINT, PALETTE, WHITE, Picture
from ...plots.schematic import OWNERS, box, finished, grid, keys, label, link, rank, sketch, strip

AXES = {"tp": PALETTE[5], "dp": PALETTE[1], "pp": PALETTE[4]}
PARTS = {
    "compute": PALETTE[5], "tensor": PALETTE[3], "bubble": PALETTE[0], "data": PALETTE[1], "stragglers": PALETTE[4],
    "rest": PALETTE[2],
}  # fmt: skip
GPUS_PER_NODE = 8


def draw_mesh(sizes: Mapping[str, int], groups: Mapping[str, Sequence[int]], notes: Mapping[str, str]) -> Picture:
    """Draw the first, the second and the last node of each stage of a mesh, and mark the groups of rank 0.

    `sizes` are the degrees of "tp", "dp" and "pp", `groups` the ranks of the group of rank 0 along each axis, and
    `notes` a line of text about each axis.
    """
    pp, nodes = sizes["pp"], sizes["tp"] * sizes["dp"] // GPUS_PER_NODE
    rows = [0, 1, nodes - 1]
    colors = {number: AXES[axis] for axis in ("pp", "dp", "tp") for number in groups[axis]}
    picture, ax = sketch(366 + 20 * len(notes))
    wide = 392 // pp
    for stage in range(pp):
        x = 6 + wide * stage
        label(ax, x + wide / 2 - 4, 12, f"stage {stage}", "center", weight="bold")
        for row, node in enumerate(rows):
            y, number = 26 + 106 * row + 14 * (row == 2), stage * nodes + node
            rank(ax, x, y, wide - 8, 100, f"node {number}")
            ranks = range(GPUS_PER_NODE * number, GPUS_PER_NODE * (number + 1))
            cells = [(str(number) if number in colors else "", colors.get(number, WHITE)) for number in ranks]
            pairs = [cells[n : n + 2] for n in range(0, GPUS_PER_NODE, 2)]
            grid(ax, x + 4, y + 25, pairs, (wide - 16) / 2, 18)
        label(ax, x + wide / 2 - 4, 242, "...", "center", weight="bold")
    keys(ax, {text: AXES[axis] for axis, text in notes.items()}, (8,), 364, line=20)
    members = "; ".join(f"{axis}: {_shortened(group)}" for axis, group in groups.items())
    return finished(picture, f"{pp} stages of {nodes} nodes with {GPUS_PER_NODE} GPUs. The groups of rank 0: {members}."
                    f" {'; '.join(notes.values())}.")  # fmt: skip


def _shortened(ranks: Sequence[int]) -> str:
    texts = [str(number) for number in ranks]
    return " ".join(texts if len(texts) < 9 else [*texts[:3], "...", texts[-1]])


class Choice(NamedTuple):
    """A mesh of the grid: the memory of its fullest GPU, its tokens per second per GPU, and whether it fits: "fits",
    "unknown" or "out of memory"."""

    gib: float
    tokens: float
    outcome: str


def draw_choices(choices: Mapping[tuple[int, int], Choice]) -> Picture:
    """Draw a grid of `choices`, by (tp, pp): a row for each tp, and a column for each pp. The fastest that fits is
    framed."""
    colors = {"fits": PALETTE[2], "unknown": PALETTE[6], "out of memory": FAINT}
    degrees = [sorted({key[axis] for key in choices}) for axis in (0, 1)]
    fitting = {key: choice.tokens for key, choice in choices.items() if choice.outcome == "fits"}
    best = max(fitting, key=lambda key: fitting[key])
    picture, ax = sketch(70 + 52 * len(degrees[0]))
    wide = 338 / len(degrees[1])
    words = []
    for column, pp in enumerate(degrees[1]):
        label(ax, 54 + wide * (column + 0.5), 12, f"pp = {pp}", "center", weight="bold")
    for row, tp in enumerate(degrees[0]):
        y = 24 + 52 * row
        label(ax, 48, y + 24, f"tp = {tp}", "right", weight="bold")
        for column, pp in enumerate(degrees[1]):
            choice, x = choices[tp, pp], 54 + wide * column
            box(ax, x, y, wide - 4, 48, "", colors[choice.outcome])
            weight = "bold" if (tp, pp) == best else "normal"
            label(ax, x + wide / 2 - 2, y + 15, f"{choice.gib:.0f} GiB", "center", weight=weight)
            label(ax, x + wide / 2 - 2, y + 33, f"{choice.tokens:.0f}", "center", weight=weight)
            words.append(f"tp = {tp}, pp = {pp}: {choice.gib:.0f} GiB, {choice.tokens:.0f} tokens/s, {choice.outcome}")
            if (tp, pp) == best:
                ax.plot((x, x + wide - 4, x + wide - 4, x, x), (y, y, y + 48, y + 48, y), color="black", linewidth=2.5)
    keys(ax, colors, (54, 114, 204), 36 + 52 * len(degrees[0]))
    return finished(picture, f"Memory of the fullest GPU, and tokens per second per GPU. {'; '.join(words)}.")


def draw_steps(steps: Mapping[str, Mapping[str, float]]) -> Picture:
    """Draw the whole step of each row as one bar: the seconds of each of PARTS. "tensor" and "data" are the seconds
    that these kinds of parallelism add to the step, and "rest" is the messages between stages and the update."""
    return draw_parts(steps, PARTS, (14, 90, 150, 218, 270, 356), "s", 2)


def draw_parts(
    steps: Mapping[str, Mapping[str, float]], colors: Mapping[str, str], places: Sequence[int], unit: str, digits: int
) -> Picture:
    """Draw each row of `steps` as one bar of parts in `colors`, with all numbers below it. The words of the legend
    begin at `places`."""
    picture, ax = sketch(46 + 64 * len(steps))
    for name, x in zip(colors, places, strict=True):
        box(ax, x - 10, 8, 12, 12, "", colors[name])
        label(ax, x + 6, 14, name)
    longest = max(sum(parts.values()) for parts in steps.values())
    texts = []
    for row, (name, parts) in enumerate(steps.items()):
        y, values = 40 + 64 * row, [parts[part] for part in colors]
        numbers = " + ".join(f"{value:.{digits}f}" for value in values)
        texts.append(f"{name}: {numbers} = {sum(values):.{digits}f} {unit}")
        label(ax, 12, y, name, weight="bold")
        label(ax, 12, y + 37, f"{numbers} = {sum(values):.{digits}f} {unit}")
        pieces = [(size, "", color) for size, color in zip(values, colors.values(), strict=True)]
        strip(ax, 12, y + 9, pieces, 376 / longest, 18)
    return finished(picture, f"A step in {unit}: {' + '.join(colors)}. {'; '.join(texts)}.")


def draw_tokens_and_heads(ranks: int = 4) -> Picture:
    """Draw Ulysses: before the all-to-all, a rank has some tokens with all heads, and after it all tokens of some
    heads."""
    side = 132
    picture, ax = sketch(200)
    for x, name in ((44, "projections: all heads"), (250, "attention: all tokens")):
        label(ax, x + side / 2, 14, name, "center", weight="bold")
        label(ax, x + side / 2, 32, "heads", "center")
    grid(ax, 44, 42, [[("", OWNERS[row])] for row in range(ranks)], side, side / ranks)
    grid(ax, 250, 42, [[("", color) for color in OWNERS]], side / ranks, side)
    label(ax, 38, 42 + side / 2, "tokens", "right", rotation=90)
    link(ax, (182, 42 + side / 2 - 8), (244, 42 + side / 2 - 8))
    link(ax, (244, 42 + side / 2 + 8), (182, 42 + side / 2 + 8))
    label(ax, 213, 42 + side / 2 - 24, "q, k, v", "center")
    label(ax, 213, 42 + side / 2 + 26, "output", "center")
    keys(ax, {f"rank {number}": color for number, color in enumerate(OWNERS)}, (44, 134, 224, 314), 184)
    return finished(picture, f"Tokens by heads on {ranks} ranks. In the projections, a rank has a part of the tokens "
                    "with all heads. An all-to-all of q, k and v gives it all tokens of a part of the heads for "
                    "attention, and a second one returns the output.")  # fmt: skip


def draw_ring_attention(shares: Mapping[str, Sequence[float]], owners: Mapping[str, Sequence[int]]) -> Picture:
    """Draw whose keys and values each of four ranks uses in each step of ring attention, and which rank computes which
    causal scores.

    `owners` are the ranks of the chunks of a sequence, in their order, for each way to cut it. `shares` are the
    fractions of the scores that the ranks compute.
    """
    ranks, side = len(OWNERS), 168
    picture, ax = sketch(400)
    label(ax, 8, 14, "keys and values that a rank uses", weight="bold")
    for step in range(ranks):
        label(ax, 100 + 84 * step, 36, f"step {step}", "center")
    for number in range(ranks):
        label(ax, 52, 60 + 26 * number, f"rank {number}", "right")
        sources = [(number - step) % ranks for step in range(ranks)]  # they move on by one rank in each step
        grid(ax, 58, 47 + 26 * number, [[(f"k, v of {source}", OWNERS[source]) for source in sources]], 84, 26)
    words = []
    for x, (name, owner) in zip((8, 216), owners.items(), strict=True):
        label(ax, x, 178, name, weight="bold")
        small = side / len(owner)
        scores = [[("", OWNERS[owner[q]] if k <= q else WHITE) for k in range(len(owner))] for q in range(len(owner))]
        grid(ax, x, 192, scores, small, small)
        percent = " ".join(f"{share:.0%}" for share in shares[name])
        label(ax, x + side / 2, 376, percent, "center")
        words.append(f"{name}: ranks 0 to {ranks - 1} compute {percent} of the scores")
    return finished(picture, f"Ring attention on {ranks} ranks. In step s, rank r uses the keys and values of rank "
                    "r − s, counted around the ring. Causal scores, with a row for each chunk of queries and a column "
                    "for each chunk of keys, in the color of the rank that computes them. "
                    f"{'; '.join(words)}.")  # fmt: skip
