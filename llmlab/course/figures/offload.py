"""The drawings of the chapter on offloading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.patches import Rectangle

from ...plots.canvas import COLORS, PALETTE, WHITE, Picture
from ...plots.schematic import box, finished, keys, label, link, rank, sketch, strip

KINDS = {
    "forward": PALETTE[0], "backward": PALETTE[1], "gradients": PALETTE[5], "Adam": PALETTE[3], "weights": PALETTE[2],
}  # fmt: skip
PARTS = {"compute": PALETTE[5], "messages": PALETTE[4], "exposed copies": PALETTE[1], "update": PALETTE[2]}
Work = tuple[str, float, float, str]  # the lane, when it starts and ends in seconds, and the kind of work


def draw_traffic(parameters: int) -> Picture:
    """Draw the tensors of `parameters` parameters on the GPU and on the host, and the bytes that an update moves
    between them and in the host's memory, with AdamW in mixed precision."""

    def size(per_parameter: int) -> str:
        return f"{per_parameter * parameters / 1e9:.0f} GB"

    picture, ax = sketch(408)
    rank(ax, 8, 8, 384, 74, "GPU")
    box(ax, 20, 36, 150, 36, f"weights {size(2)}", COLORS["weights"])
    box(ax, 180, 36, 90, 36, "activations", COLORS["activations"])
    box(ax, 280, 36, 100, 36, "a gradient", COLORS["gradients"])
    label(ax, 200, 121, "PCIe", "center", weight="bold")
    rank(ax, 8, 160, 384, 240, "host")
    box(ax, 20, 188, 360, 30, f"pinned buffer {size(2)}", WHITE)
    box(ax, 20, 252, 360, 40, f"AdamW on the CPU moves 30N: {size(30)}", WHITE)
    for x, start, end, words in (
        (330, 82, 160, f"2N: {size(2)}"), (70, 160, 82, f"2N: {size(2)}"), (330, 218, 252, f"4N, in fp32: {size(4)}"),
        (70, 252, 218, f"2N: {size(2)}"), (330, 340, 292, f"12N: {size(12)}"), (70, 292, 340, f"12N: {size(12)}"),
    ):  # fmt: skip
        link(ax, (x, start), (x, end), words)
    for x, name in ((20, "master weights"), (142, "1st moment"), (264, "2nd moment")):
        box(ax, x, 340, 116, 52, f"{name}\n{size(4)}", COLORS["optimizer"])
    return finished(picture, f"{size(2)} of gradients cross PCIe to a pinned buffer of the host, and {size(2)} of "
                    f"weights return. On the host, AdamW reads {size(4)} of gradients in fp32 and {size(12)} of master "
                    f"weights and moments. It writes {size(12)} of them, and {size(2)} of new weights. Altogether it "
                    f"moves {size(30)}.")  # fmt: skip


def _merged(works: Sequence[Work], gap: float) -> list[Work]:
    """Return the works of one lane. Those of the same kind that are less than `gap` seconds apart become one."""
    merged: list[Work] = []
    for lane, begin, end, kind in works:
        if merged and merged[-1][3] == kind and begin - merged[-1][2] < gap:
            merged[-1] = (lane, merged[-1][1], end, kind)
        else:
            merged.append((lane, begin, end, kind))
    return merged


def draw_timelines(rows: Mapping[str, Sequence[Work]]) -> Picture:
    """Draw the works of each lane over time, one panel for each row, as `formulas.time.offload.schedule` returns them.
    All panels have the same scale."""
    lanes = list(dict.fromkeys(lane for works in rows.values() for lane, *_ in works))
    kinds = [kind for kind in KINDS if any(kind == work[3] for works in rows.values() for work in works)]
    high = 40 + 26 * len(lanes)
    picture, ax = sketch(44 + high * len(rows))
    keys(ax, {kind: KINDS[kind] for kind in kinds}, (12, 112, 212, 312), 8)
    scale = 300 / max(end for works in rows.values() for _, _, end, _ in works)
    texts = []
    for number, (name, works) in enumerate(rows.items()):
        top = 58 + high * number
        end = max(work[2] for work in works)
        label(ax, 12, top, f"{name}: {end:.1f} s", weight="bold")
        for row, lane in enumerate(lanes):
            y, mine = top + 14 + 26 * row, [work for work in works if work[0] == lane]
            label(ax, 84, y + 11, lane, "right")
            last = 0.0  # where the latest narrow box is: very narrow ones closer than 4 pixels would fill the lane
            for _, begin, finish, kind in _merged(mine, 0.3 / scale):
                left, width = 90 + scale * begin, scale * (finish - begin)
                if width > 6:
                    box(ax, left, y, width, 22, "", KINDS[kind])
                elif width > 1 or left >= last + 4:
                    last = left
                    ax.add_patch(Rectangle((left, y), max(width, 1.2), 22, color=KINDS[kind], linewidth=0))
        busy = {lane: sum(work[2] - work[1] for work in works if work[0] == lane) for lane in lanes}
        texts.append(f"{name}, {end:.1f} s: " + ", ".join(f"{lane} busy for {busy[lane]:.2f} s" for lane in lanes))
    return finished(picture, f"{'. '.join(texts)}.")


def draw_whole_steps(steps: Mapping[str, Mapping[str, float]]) -> Picture:
    """Draw the whole step of each row as a bar of equal length: seconds of compute, of messages between GPUs, of
    copies that nothing hides, and of the update on the host."""
    picture, ax = sketch(30 + 66 * len(steps))
    keys(ax, PARTS, (12, 96, 188, 310), 8)
    texts = []
    for row, (name, parts) in enumerate(steps.items()):
        y, total = 42 + 66 * row, sum(parts.values())
        numbers = f"{' + '.join(f'{parts[part]:.2f}' for part in PARTS)} = {total:.2f} s"
        texts.append(f"{name}: {numbers}")
        label(ax, 12, y, name, weight="bold")
        label(ax, 12, y + 18, numbers)
        strip(ax, 12, y + 29, [(parts[part], "", color) for part, color in PARTS.items()], 376 / total, 18)
    return finished(picture, f"Seconds of a step: {' + '.join(PARTS)}. {'; '.join(texts)}.")


def activation_schedule(copied: float, backward: float, blocks: int = 4) -> list[tuple[Work, int]]:
    """Return the works, each with its block, if the activations of all blocks but the last are offloaded.

    The forward pass of a block takes 1, its backward pass `backward`, and a copy of its activations `copied`. The GPU's
    memory has room for the activations of one block that waits for PCIe, so a block starts only after the activations
    of the block two places before it have left.
    """
    works: list[tuple[Work, int]] = []
    gpu, sent = 0.0, [0.0]  # when the GPU is free, and when the activations of each block have left
    for block in range(blocks):
        start = max(gpu, sent[max(0, block - 1)])
        gpu = start + 1
        works.append((("GPU", start, gpu, "forward"), block))
        if block < blocks - 1:
            sent.append(max(gpu, sent[-1]) + copied)
            works.append((("PCIe", sent[-1] - copied, sent[-1], "activations"), block))
    arrived = max(gpu, sent[-1])
    for block in reversed(range(blocks)):
        if block < blocks - 1:
            works.append((("PCIe", arrived, arrived + copied, "activations"), block))
            arrived += copied
            gpu = max(gpu, arrived)
        works.append((("GPU", gpu, gpu + backward, "backward"), block))
        gpu += backward
    return works


def draw_activations(rows: Mapping[str, tuple[float, float]]) -> Picture:
    """Draw four blocks, of which all but the last offload their activations, one panel for each row: (time of a copy,
    of the backward pass) of a block, in units of its forward pass."""
    colors = {"forward": PALETTE[0], "backward": PALETTE[1], "activations": PALETTE[5]}
    schedules = {name: activation_schedule(*times) for name, times in rows.items()}
    picture, ax = sketch(34 + 88 * len(rows))
    keys(ax, colors, (50, 150, 250), 8)
    scale = 340 / max(work[2] for works in schedules.values() for work, _ in works)
    texts = []
    for number, (name, works) in enumerate(schedules.items()):
        y, end = 46 + 88 * number, max(work[2] for work, _ in works)
        texts.append(f"{name}: {end:.1f} forwards")
        label(ax, 12, y, texts[-1], weight="bold")
        for row, lane in enumerate(("GPU", "PCIe")):
            label(ax, 44, y + 24 + 26 * row, lane, "right")
            for (work_lane, begin, finish, kind), block in works:
                if work_lane == lane:
                    words = str(block) if (finish - begin) * scale > 10 else ""
                    width = scale * (finish - begin)
                    box(ax, 50 + scale * begin, y + 13 + 26 * row, width, 22, words, colors[kind])
    return finished(picture, f"Four blocks until the end of the backward pass. The activations of all but the last are "
                    f"offloaded. {'; '.join(texts)}. A forward is the time of one block.")  # fmt: skip
