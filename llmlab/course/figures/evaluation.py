"""Drawings of the chapter on evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.ticker import FixedLocator, NullLocator

from ...plots.canvas import FAINT, MUTED, PALETTE, SMALL, WHITE, Picture, new_picture, number_axes, styled
from ...plots.curve import LINES, MARKERS
from ...plots.schematic import box, finished, grid, keys, label, sketch

TOKEN = 23  # pixels per token


@styled()
def plot_questions(
    points: Sequence[float], curves: Mapping[str, Sequence[float]], benchmarks: Mapping[str, int]
) -> Picture:
    """Return a picture of the questions needed against the difference, with the sizes of benchmarks as dashed lines.

    `points`: differences in points of accuracy; `curves`: by name the questions needed for each of them.
    """
    picture, (ax,) = new_picture(4.2, width=4.0)
    for number, (name, questions) in enumerate(curves.items()):
        ax.plot(points, questions, color=LINES[number], marker=MARKERS[number], markersize=5, linewidth=2, label=name)
    for name, size in benchmarks.items():
        ax.axhline(size, color=MUTED, linewidth=1, linestyle="--")
        words = f"{name}, {size:,}"
        ax.annotate(words, (points[-1], size), xytext=(6, 3), textcoords="offset points", size=SMALL, color=MUTED,
                    ha="right")  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.xaxis.set_major_locator(FixedLocator(list(points)))
    ax.xaxis.set_minor_locator(NullLocator())
    number_axes(ax, "difference (points of accuracy)", "questions needed")
    picture.legend(loc="outside lower center", ncols=2)
    lines = [
        f"{name}: {questions[0]:,.0f} at {points[0]:g}, {questions[-1]:,.0f} at {points[-1]:g}"
        for name, questions in curves.items()
    ]
    sizes = ", ".join(f"{name} {size:,}" for name, size in benchmarks.items())
    picture.alt = f"Questions needed against the difference in points. {'; '.join(lines)}. Sizes: {sizes}."
    return picture


@styled()
def plot_positions(edges: Sequence[int], losses: Sequence[float]) -> Picture:
    """Return a picture of the mean loss of the positions edges[i] to edges[i + 1] of a window."""
    picture, (ax,) = new_picture(3.0, width=4.0)
    middles = [(begin + end) / 2 for begin, end in pairwise(edges)]
    ax.plot(middles, losses, color=LINES[0], marker=MARKERS[0], markersize=5, linewidth=2)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator([4, 8, 16, 32, 64, 128, 256, 512]))
    ax.xaxis.set_minor_locator(NullLocator())
    number_axes(ax, "position in the window", "loss")
    parts = [f"{loss:.2f} around {middle:g}" for middle, loss in zip(middles, losses, strict=True)]
    picture.alt = f"Loss against the position in the window: {', '.join(parts)}."
    return picture


def draw_windows(tokens: int, window: int, passes: Mapping[int, Sequence[tuple[int, int, int]]]) -> Picture:
    """Draw a text that is read in windows: a row per pass, with the tokens that it scores in colour.

    `passes`: by stride, (begin, scored, end) of each pass, as `evaluate.perplexity.windows` returns them.
    """
    picture, ax = sketch(26 + sum(44 + 28 * len(rows) for rows in passes.values()))
    facts, y = [], 16
    for stride, rows in passes.items():
        least = min(scored - begin for begin, scored, _ in rows[1:])
        facts.append(f"stride {stride}: {len(rows)} passes, at least {least} token{'s' * (least > 1)} of context")
        label(ax, 12, y, facts[-1], weight="bold")
        for row, (begin, scored, end) in enumerate(rows):
            cells = [(f"{token}", FAINT if token < scored else PALETTE[2]) for token in range(begin, end)]
            grid(ax, 16 + TOKEN * begin, y + 18 + 28 * row, [cells], TOKEN, 24)
        y += 44 + 28 * len(rows)
    label(ax, 12, y - 4, "green: scored; grey: only read as context", color=MUTED)
    facts_in_words = "; ".join(facts)
    return finished(picture, f"A text of {tokens} tokens in windows of {window}. {facts_in_words}.")


def draw_outcomes(counts: Mapping[str, Mapping[tuple[bool, bool], int]]) -> Picture:
    """Draw the outcomes of a model and its versions on the same questions: a bar for each version, in four parts.

    `counts`: by the name of the version, the number of questions for each (original is right, version is right).
    """
    kinds = {
        (True, True): ("both right", FAINT),
        (True, False): ("only the original", PALETTE[1]),
        (False, True): ("only the version", PALETTE[2]),
        (False, False): ("both wrong", WHITE),
    }
    picture, ax = sketch(62 + 58 * len(counts))
    keys(ax, dict(kinds.values()), (12, 202), 8, side=14, line=22)
    facts = []
    for row, (name, outcomes) in enumerate(counts.items()):
        y, x, total = 68 + 58 * row, 12.0, sum(outcomes.values())
        changed = outcomes[True, False] + outcomes[False, True]
        facts.append(f"{name}: {outcomes[True, False]} lost, {outcomes[False, True]} won, of {total}")
        label(ax, 12, y, f"{name}: {changed} of {total} answers flip", weight="bold")
        for kind, (_, color) in kinds.items():
            width = 376 * outcomes[kind] / total
            box(ax, x, y + 11, width, 26, f"{outcomes[kind]}" if width > 16 else "", color)
            x += width
    return finished(picture, f"A model and its versions on the same questions. {'; '.join(facts)}.")
