"""The drawings of the chapter on ZeRO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...plots.canvas import COLORS, PALETTE, WHITE, Picture
from ...plots.schematic import box, finished, keys, label, sketch, strip
from .data_parallel import PARTS, draw_steps

STATES = {name: COLORS[name] for name in ("weights", "gradients", "optimizer")}
MESSAGES = {"gather": PALETTE[5], "forward": PALETTE[2], "backward": PALETTE[1], "reduce": PALETTE[6]}
SHARDED_PARTS = {**PARTS, "copies": PALETTE[6]}


def draw_shards(stages: Mapping[str, Mapping[str, float]], ranks: int = 4) -> Picture:
    """Draw the bytes that each of `ranks` ranks stores at each stage in color, and the bytes of other ranks in white.

    `stages` has the bytes per parameter on one rank by kind of tensor; at the first one, a rank stores everything.
    """
    picture, ax = sketch(36 + 92 * len(stages))
    keys(ax, STATES, (60, 148, 246), 8)
    everything, texts = next(iter(stages.values())), []
    scale = 328 / sum(everything.values())
    for place, (name, stored) in enumerate(stages.items()):
        y, total = 40 + 92 * place, f"{name}: {sum(stored.values()):.4g} bytes per parameter"
        label(ax, 60, y, total, weight="bold")
        for rank in range(ranks):
            label(ax, 54, y + 19 + 15 * rank, f"rank {rank}", "right")
            x = 60.0
            for kind, whole in everything.items():
                before = rank * whole / ranks if stored[kind] < whole else 0
                pieces = (before, WHITE), (stored[kind], STATES[kind]), (whole - before - stored[kind], WHITE)
                strips = [(size, "", color) for size, color in pieces if size > 0.01]
                x = strip(ax, x, y + 13 + 15 * rank, strips, scale, 12)
        texts.append(f"{total}, {', '.join(f'{kind} {size:.4g}' for kind, size in stored.items())}")
    return finished(picture, f"What each of {ranks} ranks stores; white is stored by other ranks. {'; '.join(texts)}.")


def draw_prefetch(milliseconds: Mapping[str, float], block_bytes: float) -> Picture:
    """Draw three blocks under ZeRO-3 on the link and on the GPU, and how long their weights of `block_bytes` are whole.

    `milliseconds` of a block: gather, forward, backward (with recomputation, if there is any) and reduce.
    """
    panels = {  # blocks in the order of their computation, their pass, and whether the next block is prefetched
        "forward, without prefetching": ((0, 1, 2), "forward", False),
        "forward, the next block is prefetched": ((0, 1, 2), "forward", True),
        "backward, the next block is prefetched": ((2, 1), "backward", True),
    }
    ms, (picture, ax), left, texts = milliseconds, sketch(424), 60, []
    keys(ax, {f"{kind} {ms[kind]:.1f} ms": color for kind, color in MESSAGES.items()}, (60, 230), 8, line=20)
    scale = 330 / (ms["gather"] + 2 * ms["backward"] + ms["reduce"])
    for place, (title, (blocks, work, ahead)) in enumerate(panels.items()):
        y, start, computed = 66 + 112 * place, 0.0, 0.0
        label(ax, left, y, title, weight="bold")
        for row, lane in enumerate(("link", "GPU", "whole")):
            label(ax, left - 6, y + 22 + 22 * row + 9 * (row == 2), lane, "right")
        for number, block in enumerate(blocks):
            begins = max(start + ms["gather"], computed)
            computed = begins + ms[work]
            box(ax, left + scale * start, y + 13, scale * ms["gather"], 18, str(block), MESSAGES["gather"])
            box(ax, left + scale * begins, y + 35, scale * ms[work], 18, str(block), MESSAGES[work])
            height = y + 57 + 18 * (number % 2)
            box(ax, left + scale * start, height, scale * (computed - start), 18, str(block), COLORS["weights"])
            if work == "backward":
                box(ax, left + scale * computed, y + 13, scale * ms["reduce"], 18, str(block), MESSAGES["reduce"])
            start = begins if ahead else computed
        texts.append(f"{title}: {len(blocks)} blocks in {computed:.1f} ms")
    label(ax, left, 408, f"whole: {block_bytes / 2**20:.0f} MiB of weights, then freed")
    return finished(picture, f"Blocks on one rank under ZeRO-3. {'; '.join(texts)}.")


def draw_weights(moments: Sequence[tuple[str, int]], whole: int) -> Picture:
    """Draw the bytes of weights on a rank at the moments of a step, with a line at the `whole` weights of the model."""
    picture, ax = sketch(34 + 22 * len(moments))
    scale = 180 / max(whole, *(size for _, size in moments))
    label(ax, 90 + scale * whole, 10, "whole model", "center", color=PALETTE[0])
    for row, (moment, size) in enumerate(moments):
        label(ax, 84, 38 + 22 * row, moment, "right")
        strip(ax, 90, 29 + 22 * row, [(size, "", COLORS["weights"])], scale, 18)
        label(ax, 396, 38 + 22 * row, f"{size:,} bytes", "right")
    ax.plot([90 + scale * whole] * 2, (20, 30 + 22 * len(moments)), color=PALETTE[0], linewidth=2)
    texts = "; ".join(f"{moment}: {size:,}" for moment, size in moments)
    return finished(picture, f"Bytes of weights on a rank, of {whole:,} of the model. {texts}.")


def draw_sharded_steps(steps: Mapping[str, Mapping[str, float]], shares: bool = False) -> Picture:
    """Draw the whole step of each row as `draw_steps` does, with the seconds in which weights and gradients are copied
    between parameters and the buffers of messages."""
    return draw_steps(steps, shares, SHARDED_PARTS)
