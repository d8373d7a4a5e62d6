"""Drawings of the chapter on inference."""

from __future__ import annotations

from ...plots.canvas import FAINT, MUTED, PALETTE, Picture
from ...plots.schematic import box, finished, grid, label, link, sketch, strip

SHOWN = 6  # decode passes on the timeline


def draw_request(hidden: int, prompt: int, weights: float, prefill: float, decode: float, gpu: str) -> Picture:
    """Draw one request: the shape of its matmuls in prefill and in decode, and both on a timeline.

    `weights` are bytes, `prefill` and `decode` the seconds of a pass.
    """
    picture, ax = sketch(356)
    lanes = {f"prefill: {prompt:,} tokens in one pass": (prompt, 80), "decode: one token per pass": (1, 6)}
    for number, (name, (tokens, tall)) in enumerate(lanes.items()):
        y = 16 + 138 * number
        middle = y + 62
        label(ax, 12, y, name, weight="bold")
        box(ax, 12, middle - tall / 2, 84, tall, "x" * (tokens > 1), PALETTE[5])
        label(ax, 108, middle, "·", "center", size=16)
        box(ax, 120, y + 22, 100, 80, f"weights\n{weights / 1e9:.1f} GB", FAINT)
        link(ax, (220, middle), (242, middle))
        box(ax, 242, middle - tall / 2, 84, tall, "x W" * (tokens > 1), PALETTE[5])
        label(ax, 12, y + 113, f"{tokens:,} × {hidden:,}", color=MUTED)
    label(ax, 12, 298, f"{gpu}: {1e3 * prefill:.0f} ms, then {1e3 * decode:.0f} ms per token", weight="bold")
    scale = 376 / (prefill + SHOWN * decode)
    pieces = [(prefill, "prefill", PALETTE[0]), *((decode, "1", PALETTE[1]) for _ in range(SHOWN))]
    strip(ax, 12, 314, pieces, scale)
    return finished(
        picture,
        f"Prefill multiplies {prompt:,} rows of {hidden:,} numbers by the weights, {weights / 1e9:.1f} GB; decode "
        f"multiplies one row by the same weights. On one {gpu} prefill takes {1e3 * prefill:.0f} ms, and each token "
        f"after it {1e3 * decode:.0f} ms.",
    )


def draw_scores(tokens: int = 7) -> Picture:
    """Draw the attention scores of `tokens` tokens: a row per query, a column per key, the newest query in color."""
    picture, ax = sketch(84 + 24 * tokens)
    for place in range(tokens):
        newest = PALETTE[5] if place == tokens - 1 else FAINT
        box(ax, 90 + 38 * place, 34, 38, 24, f"k{place}", PALETTE[1])
        box(ax, 42, 62 + 24 * place, 44, 24, f"q{place}", newest)
        grid(ax, 90, 62 + 24 * place, [[("", newest)] * (place + 1)], 38, 24)
    label(ax, 42, 18, "keys (and values): used by every row below", weight="bold")
    label(ax, 36, 50 + 24 * tokens, "new", "right", color=MUTED)
    all_scores = tokens * (tokens + 1) // 2
    label(ax, 42, 72 + 24 * tokens, f"new token: {tokens} scores with a cache, {all_scores} without")
    return finished(
        picture,
        f"Scores of {tokens} tokens under a causal mask. Row t uses query t and the keys up to t. The new token needs "
        f"{tokens} scores; without a cache all {all_scores} are computed again.",
    )
