"""Drawings of the chapter on serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ...plots.canvas import FAINT, INK, MUTED, PALETTE, WHITE, Picture
from ...plots.schematic import box, finished, grid, label, link, sketch, strip

LEFT, RIGHT = 12, 388  # pixels
PROMPT, TOKEN = PALETTE[1], PALETTE[5]


def plot_request(wait: float, prefill: float, gaps: Sequence[float], late: int) -> Picture:
    """Return a drawing of one request: its wait, the prefill, and its tokens, with the three times that users see.

    Seconds; the step before token `late` (counted from 0) also computes a prompt of another request.
    """
    scale = (RIGHT - LEFT) / (wait + prefill + sum(gaps))
    picture, ax = sketch(196)
    label(ax, LEFT, 14, "arrives")
    x = float(LEFT)
    link(ax, (x + 1, 26), (x + 1, 48))
    for size, words, color in ((wait, "waits", WHITE), (prefill, "prefill", PROMPT)):
        box(ax, x, 50, size * scale, 30, words, color)
        x += size * scale
    first = x
    edges = [first]
    for number, gap in enumerate(gaps):
        box(ax, x, 50, gap * scale, 30, "", PROMPT if number == late else TOKEN)
        x += gap * scale
        edges.append(x)
    for number, edge in enumerate(edges):
        label(ax, min(edge, RIGHT - 5), 92, f"{number + 1}", "center", color=MUTED)
    label(ax, first, 32, f"tokens 1 to {len(edges)}")
    whole = 1e3 * sum(gaps)
    spans = (
        (118, LEFT, first, f"TTFT {1e3 * (wait + prefill):.0f} ms", "left"),
        (118, edges[late], edges[late + 1], f"ITL {1e3 * gaps[late]:.0f} ms", "center"),
        (164, first, x, f"TPOT {whole / len(gaps):.0f} ms = {whole:.0f} ms / {len(gaps)}", "center"),
    )
    for y, begin, end, words, align in spans:
        ax.plot((begin, end), (y, y), color=INK, linewidth=1.5)
        for edge in (begin, end):
            ax.plot((edge, edge), (y - 5, y + 5), color=INK, linewidth=1.5)
        label(ax, begin if align == "left" else (begin + end) / 2, y + 16, words, align)
    return finished(picture, f"A request waits {1e3 * wait:.0f} ms. {'. '.join(words for *_, words, _ in spans)}.")


def plot_slots(
    rules: Mapping[str, Mapping[str, Sequence[float]]], arrivals: Mapping[str, float], slots: int
) -> Picture:
    """Return a drawing of the batch over time, a row per slot and a column per step, for each rule of batching.

    A rule has the times of every request's tokens, by its name; each step takes 1.
    """
    picture, ax = sketch(166 * len(rules) + 6)
    wide, words = 28, []
    colors = dict(zip(arrivals, PALETTE, strict=False))
    for number, (rule, requests) in enumerate(rules.items()):
        last, y = max(tokens[-1] for tokens in requests.values()), 16 + 166 * number
        idle = 1 - sum(map(len, requests.values())) / slots / last
        words.append(f"{rule}: {last:.0f} steps, {idle:.0%} of the slots empty")
        label(ax, LEFT, y, words[-1], weight="bold")
        grid(ax, 58, y + 18, [[("", WHITE)] * int(last)] * slots, wide, 28)
        for slot in range(slots):
            label(ax, LEFT, y + 32 + 28 * slot, f"slot {slot + 1}")
        free = [0.0] * slots
        for name, tokens in sorted(requests.items(), key=lambda pair: pair[1][0]):
            begin = tokens[0] - 1
            slot = next(place for place in range(slots) if free[place] <= begin)
            free[slot] = tokens[-1]
            box(ax, 58 + wide * begin, y + 18 + 28 * slot, wide * len(tokens), 28, name, colors[name])
        for name, arrival in arrivals.items():
            if arrival:
                link(ax, (58 + wide * arrival, y + 132), (58 + wide * arrival, y + 104))
                label(ax, 65 + wide * arrival, y + 126, name)
        label(ax, LEFT, y + 126, "arrives")
    return finished(picture, f"{len(arrivals)} requests in {slots} slots. {'. '.join(words)}.")


class Late(NamedTuple):
    """The effect of a late prompt: the times of a running request's tokens, and of the late request's first token."""

    name: str
    tokens: Sequence[float]
    first_token: float


def plot_late_prompt(runs: Sequence[Late], prompt: int, arrival: float, around: tuple[float, float]) -> Picture:
    """Return a drawing of an engine's steps when a prompt of `prompt` tokens arrives, a row for each way to read it.

    Times are in seconds. The drawing begins `around[0]` before the arrival, and ends `around[1]` after it. A step that
    takes more than 1.5 times as long as the first one also reads the prompt.
    """
    scale = (RIGHT - LEFT) / sum(around)
    picture, ax = sketch(24 + 96 * len(runs))
    words = []
    for number, run in enumerate(runs):
        y = 16 + 96 * number
        token_times = [end for end in run.tokens if arrival - around[0] < end < arrival + around[1]]
        steps = [after - before for before, after in pairwise(token_times)]
        words.append(f"{run.name}: steps of up to {1e3 * max(steps):.0f} ms")
        label(ax, LEFT, y, words[-1], weight="bold")
        pieces = []
        for seconds in steps:
            reads = seconds > 1.5 * steps[0]
            figure = f"{1e3 * seconds:.0f}" if reads and seconds * scale > 22 else ""
            pieces.append((seconds, figure, PROMPT if reads else TOKEN))
        strip(ax, LEFT, y + 14, pieces, scale)
        x = LEFT + (arrival - token_times[0]) * scale
        link(ax, (x, y + 60), (x, y + 41))
        label(ax, x + 6, y + 58, f"{prompt:,} tokens arrive, first token after {1e3 * run.first_token:.0f} ms")
    label(ax, LEFT, 12 + 96 * len(runs), "orange: steps that also read the prompt", color=MUTED)
    return finished(picture, f"A prompt of {prompt:,} tokens arrives while others decode. {'; '.join(words)}.")


def plot_guesses(context: str, guesses: Sequence[str], chances: Sequence[tuple[float, float]], accepted: int,
                 own: str) -> Picture:  # fmt: skip
    """Return a drawing of one round of speculative decoding.

    The `chances` (q, p) of each guess are its probabilities under the draft and under the model. The first `accepted`
    guesses are accepted, and `own` is the token that the model adds.
    """
    picture, ax = sketch(276)
    label(ax, LEFT, 14, "the draft guesses four tokens, one after the other", weight="bold")
    box(ax, LEFT, 28, 72, 28, context, FAINT)
    for place, (word, pair) in enumerate(zip(guesses, chances, strict=True)):
        x = 96 + 74 * place
        box(ax, x, 28, 66, 28, word, TOKEN)
        link(ax, (x - 12, 42), (x, 42))
        for y, (name, chance) in zip((70, 124), zip("qp", pair, strict=True), strict=True):
            label(ax, x + 33, y, f"{name} {chance:.3f}", "center", color=MUTED)
        color = PALETTE[2] if place < accepted else PALETTE[1] if place == accepted else WHITE
        words = f"{min(1, pair[1] / pair[0]):.2f}" if place <= accepted else "dropped"
        box(ax, x, 168, 66, 44, f"{word}\n{words}", color)
    box(ax, LEFT, 86, 376, 24, "one pass of the model over all of them", FAINT)
    label(ax, LEFT, 154, "accepted with probability min(1, p / q)", weight="bold")
    label(ax, LEFT, 232, f"{accepted} accepted, then one token of the model", weight="bold")
    box(ax, LEFT, 244, 200, 26, " ".join([context, *guesses[:accepted], own]), PALETTE[2])
    guess_texts = ", ".join(map(repr, guesses))
    result = f"{accepted} are accepted, and the model adds {own!r}"
    return finished(picture, f"After {context!r} the draft guesses {guess_texts}; {result}.")
