"""The drawings of the chapter on data parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...base.units import GiB
from ...plots.canvas import PALETTE, PANEL, WHITE, Picture
from ...plots.schematic import OWNERS, box, finished, grid, keys, label, link, rank, sketch, strip

SUMS = (WHITE, PALETTE[6], PALETTE[1], PALETTE[2])  # of chunks that sum 1 to 4 ranks
PASSES = {"forward": PALETTE[0], "backward": PALETTE[1], "all-reduce": PALETTE[5]}
PARTS = {
    "compute": PALETTE[5], "exposed messages": PALETTE[3], "slowdown": PALETTE[1],
    "update": PALETTE[2], "stragglers": PALETTE[4],
}  # fmt: skip


def draw_replicas(parts: Mapping[str, float], sent: float, ranks: int = 8) -> Picture:
    """Draw the first three of `ranks` GPUs, each with its own sequence and the same `parts` (name: bytes), and the
    ring in which each sends `sent` bytes per step."""
    picture, ax = sketch(308)
    scale = 170 / sum(parts.values())
    for number in range(3):
        x = 8 + 98 * number
        rank(ax, x, 6, 90, 254, f"GPU {number}")
        label(ax, x + 45, 40, f"sequence {number}", "center")
        y = 54.0
        for (name, size), color in zip(parts.items(), OWNERS, strict=True):
            box(ax, x + 6, y, 78, size * scale, name, color)
            y += size * scale
        link(ax, (x + 84, 250), (x + 104, 250))
    label(ax, 350, 140, "...", "center", weight="bold")
    label(ax, 350, 160, f"GPU {ranks - 1}", "center")
    total, message = sum(parts.values()) / GiB, sent / GiB
    label(ax, 8, 276, f"The same {total:.1f} GiB on all {ranks} GPUs", weight="bold")
    label(ax, 8, 296, f"In each step, each sends {message:.1f} GiB of gradients to the next")
    sizes = ", ".join(f"{name} {size / GiB:.1f} GiB" for name, size in parts.items())
    return finished(picture, f"{ranks} GPUs, each with its own sequence and the same {total:.1f} GiB: {sizes}. In each "
                    f"step, each GPU sends {message:.1f} GiB of gradients to the next.")  # fmt: skip


def draw_collectives(collectives: Mapping[str, tuple[Sequence, Sequence]]) -> Picture:
    """Draw the numbers of four ranks before and after each collective, as `techniques.collectives.run_all` returns
    them: numbers that one rank contributed have its color, and sums over all ranks are white."""
    ranks = len(OWNERS)

    def boxes(numbers: Sequence[float] | None) -> list[tuple[str, str]]:
        texts = [f"{number:.0f}" for number in numbers or []]
        colors = [WHITE if len(set(n)) == 1 and len(n) == ranks else OWNERS[len(n) - 1] for n in texts]
        return list(zip(texts, colors, strict=True)) + [("", PANEL)] * (ranks - len(texts))

    def words(numbers: Sequence[float] | None) -> str:
        return "nothing" if numbers is None else f"[{' '.join(f'{n:.0f}' for n in numbers)}]"

    picture, ax = sketch(30 + 104 * len(collectives))
    keys = {**{f"rank {number}": color for number, color in enumerate(OWNERS)}, "sum": WHITE}
    for place, (name, color) in enumerate(keys.items()):
        box(ax, 30 + 74 * place, 8, 12, 12, "", color)
        label(ax, 46 + 74 * place, 14, name)
    texts = []
    for place, (name, (before, after)) in enumerate(collectives.items()):
        y = 46 + 104 * place
        label(ax, 200, y, name, "center", weight="bold")
        grid(ax, 30, y + 12, [boxes(numbers) for numbers in before], 38, 19)
        grid(ax, 224, y + 12, [boxes(numbers) for numbers in after], 38, 19)
        link(ax, (186, y + 50), (220, y + 50))
        for number in range(ranks):
            label(ax, 24, y + 21.5 + 19 * number, str(number), "right")
        rows = [f"rank {n} {words(b)} -> {words(a)}" for n, (b, a) in enumerate(zip(before, after, strict=True))]
        texts.append(f"{name}: {'; '.join(rows)}.")
    return finished(picture, " ".join(texts))


def ring_states(ranks: int) -> list[list[list[int]]]:
    """Return, before and after each step of a ring all-reduce, how many ranks the chunks of each rank sum.

    In step s of the reduce-scatter, rank r sends chunk r - 1 - s; in the all-gather that follows, chunk r - s.
    """
    states = [[[1] * ranks for _ in range(ranks)]]
    for step in range(2 * (ranks - 1)):
        gathers, before = step >= ranks - 1, states[-1]
        after = [list(chunks) for chunks in before]
        for sender in range(ranks):
            chunk = (sender - step + (ranks - 1 if gathers else -1)) % ranks
            receiver = (sender + 1) % ranks
            after[receiver][chunk] = before[sender][chunk] + (0 if gathers else before[receiver][chunk])
        states.append(after)
    return states


def draw_ring() -> Picture:
    """Draw a ring all-reduce of four ranks and four chunks, step by step; the number in a chunk counts the ranks whose
    values it sums."""
    ranks, side, wide = 4, 19, 88
    states = ring_states(ranks)
    names = ["start", *(f"step {step}" for step in range(1, len(states)))]
    picture, ax = sketch(288)
    for place, (name, state) in enumerate(zip(names, states, strict=True)):
        gathers = place >= ranks
        x, y = 52 + wide * (place - (ranks - 1) * gathers), 44 + 140 * gathers
        label(ax, x + 2 * side, y - 10, name, "center")
        grid(ax, x, y, [[(str(parts), SUMS[parts - 1]) for parts in row] for row in state], side, side)
    for y, name in ((44, "reduce-scatter"), (184, "all-gather")):
        label(ax, 8, y - 32, name, weight="bold")
        for number in range(ranks):
            label(ax, 46, y + side * (number + 0.5), f"rank {number}", "right")
    return finished(picture, "Ring all-reduce on 4 ranks, in 4 chunks: how many ranks each chunk sums. In each step, "
                    "each rank receives one chunk. After 3 steps, the reduce-scatter, rank r has the complete chunk r. "
                    "After 3 more, the all-gather, each rank has all chunks.")  # fmt: skip


def draw_overlap(forward: float, backward: float, message: float, buckets: int) -> Picture:
    """Draw two micro-batches, whose gradients are sent after backward, during backward, or only for the second one.

    `forward` and `backward` are seconds of a micro-batch, `message` the seconds that one of `buckets` messages takes.
    """
    sends_by_case = {
        "after backward": ("after", "after"), "during backward, in buckets": ("during", "during"),
        "no_sync in the first micro-batch": ("", "during"),
    }  # fmt: skip
    picture, ax = sketch(30 + 86 * len(sends_by_case))
    keys(ax, PASSES, (50, 160, 270), 8)
    scale, titles = 340 / (2 * (forward + backward + buckets * message)), []
    for place, (name, sends) in enumerate(sends_by_case.items()):
        y, clock = 46 + 86 * place, 0.0
        for row, lane in enumerate(("GPU", "link")):
            label(ax, 44, y + 23 + 24 * row, lane, "right")
        for kind in sends:
            start = clock + forward
            passes = [(forward, "", PASSES["forward"]), (backward, "", PASSES["backward"])]
            strip(ax, 50 + scale * clock, y + 12, passes, scale, 22)
            clock, free = start + backward, 0.0
            for bucket in range(buckets if kind else 0):
                ready = clock if kind == "after" else start + backward * (bucket + 1) / buckets
                begin = max(free, ready)
                free = begin + message
                box(ax, 50 + scale * begin, y + 36, scale * message, 22, "", PASSES["all-reduce"])
            clock = max(clock, free)
        titles.append(f"{name}: {1e3 * clock:.0f} ms")
        label(ax, 50, y, titles[-1], weight="bold")
    return finished(picture, f"Two micro-batches, with gradients in {buckets} buckets of {1e3 * message:.0f} ms each. "
                    f"The gradients are averaged at the end: {'; '.join(titles)}.")  # fmt: skip


def draw_steps(
    steps: Mapping[str, Mapping[str, float]], shares: bool = False, colors: Mapping[str, str] = PARTS
) -> Picture:
    """Draw the whole step of each row as one bar: seconds of compute, of exposed messages, of the slowdown by hidden
    messages, of the update, and of the wait for the slowest rank, or those parts that `colors` has. With `shares`, all
    bars are equally long."""
    picture, ax = sketch(54 + 54 * len(steps))
    keys(ax, colors, (12, 112, 270), 10)
    longest = max(sum(parts.values()) for parts in steps.values())
    texts = []
    for row, (name, parts) in enumerate(steps.items()):
        y, scale = 64 + 54 * row, 376 / (sum(parts.values()) if shares else longest)
        values = [parts[part] for part in colors]
        numbers = " + ".join(f"{1e3 * value:.0f}" for value in values)
        label(ax, 12, y, f"{name}: {numbers} = {1e3 * sum(values):.0f} ms")
        pieces = [(size, "", color) for size, color in zip(values, colors.values(), strict=True)]
        strip(ax, 12, y + 10, pieces, scale, 20)
        texts.append(f"{name}: {numbers} = {1e3 * sum(values):.0f} ms")
    return finished(picture, f"Milliseconds of a step: {' + '.join(colors)}. {'; '.join(texts)}.")
