"""Drawings of the chapter on evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...plots.canvas import FAINT, MUTED, PALETTE, WHITE, Picture
from ...plots.schematic import box, finished, grid, label, sketch

TOKEN = 23  # pixels per token


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
    """Draw the outcomes of two models on the same questions: for each pair a bar, divided into four counts.

    `counts`: by the name of the second model, the questions for each (first is right, second is right).
    """
    kinds = {
        (True, True): ("both right", FAINT),
        (True, False): ("only the first", PALETTE[1]),
        (False, True): ("only the second", PALETTE[2]),
        (False, False): ("both wrong", WHITE),
    }
    picture, ax = sketch(62 + 58 * len(counts))
    for place, (words, color) in enumerate(kinds.values()):
        x, y = 12 + 190 * (place % 2), 8 + 22 * (place // 2)
        box(ax, x, y, 14, 14, color=color)
        label(ax, x + 20, y + 7, words)
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
    return finished(picture, f"Two models on the same questions. {'; '.join(facts)}.")
