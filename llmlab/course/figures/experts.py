"""The drawings of the page on experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...plots.canvas import PALETTE, WHITE, Picture
from ...plots.schematic import OWNERS, box, finished, grid, keys, label, link, rank, sketch
from .three_d import draw_parts

PARTS = {
    "compute": PALETTE[5], "all-to-all": PALETTE[3], "gradients": PALETTE[1], "update": PALETTE[2],
    "stragglers": PALETTE[4],
}  # fmt: skip


def draw_routing(chosen: Sequence[int], ranks: int = 2) -> Picture:
    """Draw the all-to-all of one choice per token: the tokens of each rank, sorted by their experts, and the same
    tokens on the ranks of these experts. `chosen` is the expert of each token, and each rank has equally many tokens
    and experts."""
    share, per_rank = len(chosen) // ranks, len(OWNERS) // ranks
    before = [sorted(range(share * r, share * (r + 1)), key=lambda token: chosen[token]) for r in range(ranks)]
    after = [[t for tokens in before for t in tokens if chosen[t] // per_rank == r] for r in range(ranks)]
    rows = max(len(tokens) for tokens in before + after)
    tall = 34 + 26 * rows
    picture, ax = sketch(56 + (tall + 8) * ranks)
    label(ax, 8, 14, "sorted by expert", weight="bold")
    label(ax, 392, 14, "at their experts", "right", weight="bold")
    end_points: dict[int, list[tuple[float, float]]] = {}
    for side, (x, tokens_by_rank) in enumerate(((8, before), (264, after))):
        for r, tokens in enumerate(tokens_by_rank):
            top = 28 + (tall + 8) * r
            rank(ax, x, top, 128, tall, f"rank {r}")
            for row, token in enumerate(tokens):
                y = top + 26 + 26 * row
                box(ax, x + 22, y, 84, 22, f"token {token}", OWNERS[chosen[token]])
                end_points.setdefault(token, []).append((x + 22 if side else x + 106, y + 11))
    for token, (start, end) in end_points.items():
        link(ax, start, end, color=OWNERS[chosen[token]])
    names = {f"expert {expert}": color for expert, color in enumerate(OWNERS)}
    keys(ax, names, (8, 106, 204, 302), 36 + (tall + 8) * ranks)
    words = [f"Rank {r} has tokens {before[r]}, and its experts receive {after[r]}." for r in range(ranks)]
    return finished(picture, f"All-to-all between {ranks} ranks with {share} tokens and {per_rank} experts each. "
                    f"{' '.join(words)}")  # fmt: skip


def draw_capacity(chosen: Sequence[int], served: Sequence[bool], most: int) -> Picture:
    """Draw the tokens that each expert serves, of `most` at most, and those that are dropped. `chosen` is the expert of
    each token, and `served` says whether it had room."""
    picture, ax = sketch(196)
    label(ax, 84, 14, f"capacity {most}", weight="bold")
    label(ax, 264, 14, "dropped", weight="bold")
    for expert, color in enumerate(OWNERS):
        tokens = [token for token, choice in enumerate(chosen) if choice == expert]
        served_tokens = [(f"token {token}", color) for token in tokens if served[token]]
        y = 30 + 40 * expert
        label(ax, 76, y + 15, f"expert {expert}", "right")
        grid(ax, 84, y, [served_tokens + [("", WHITE)] * (most - len(served_tokens))], 66, 30)
        for place, token in enumerate(token for token in tokens if not served[token]):
            box(ax, 264 + 66 * place, y, 62, 30, f"token {token}", WHITE)
    dropped = [token for token in range(len(chosen)) if not served[token]]
    return finished(picture, f"{len(chosen)} tokens, and {len(OWNERS)} experts that serve {most} each. The tokens "
                    f"choose experts {list(chosen)}. Dropped: tokens {dropped}.")  # fmt: skip


def draw_steps(steps: Mapping[str, Mapping[str, float]]) -> Picture:
    """Draw the whole step of each row as one bar: the milliseconds of each of PARTS."""
    return draw_parts(steps, PARTS, (14, 90, 172, 252, 318), "ms", 0)
