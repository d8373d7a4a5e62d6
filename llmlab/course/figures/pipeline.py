"""The drawings of the chapter on pipeline parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...base.units import GiB, MiB
from ...plots.canvas import PALETTE, PANEL, PHONE, WHITE, Picture, cell, legend, name_rows, new_picture, styled, write
from ...plots.schematic import box, finished, keys, label, link, rank, sketch, strip
from ..techniques.pipeline_schedules import Span, bubble

KINDS = {"F": "forward", "B": "backward", "W": "gradients of weights"}
COLORS = dict(zip(KINDS.values(), PALETTE, strict=False))
STEP = {
    "compute": PALETTE[5], "recomputation": PALETTE[1], "bubble": PALETTE[7],
    "messages": PALETTE[3], "gradients, update": PALETTE[2], "stragglers": PALETTE[4],
}  # fmt: skip
MEMORY = {"states": PALETTE[5], "activations": PALETTE[1], "other": PALETTE[7]}


def draw_stages(stages: Mapping[str, tuple[str, float]], message: float) -> Picture:
    """Draw the first two and the last of the `stages` of a pipeline, GPU: (layers, bytes of weights), and the
    `message` bytes that pass between neighbours, as hidden states and as their gradients."""
    names = list(stages)
    drawn, passed = [*names[:2], names[-1]], f"{message / MiB:.0f} MiB"
    picture, ax = sketch(258)
    for place, name in enumerate(drawn):
        y, (layers, weights) = 6 + 98 * place, stages[name]
        rank(ax, 8, y, 384, 50, name)
        box(ax, 74, y + 10, 206, 30, layers, WHITE)
        label(ax, 336, y + 25, f"{weights / GiB:.1f} GiB", "center")
        if place < 2:
            link(ax, (110, y + 50), (110, y + 98), passed)
            link(ax, (244, y + 98), (244, y + 50), passed)
    label(ax, 78, 79, "forward", "right")
    label(ax, 276, 79, "backward")
    label(ax, 177, 177, "...", "center", weight="bold")
    texts = [f"{name} has {layers}, {weights / GiB:.1f} GiB of weights" for name, (layers, weights) in stages.items()]
    return finished(picture, f"A pipeline of {len(stages)} stages. {'; '.join(texts)}. For each micro-batch, a hidden "
                    f"state of {passed} passes from each stage to the next, and its gradient passes back.")  # fmt: skip


@styled()
def draw_schedules(
    plans: Mapping[str, Sequence[Span]], xlabel: str = "time (forward passes of a stage)", runner: str = "GPU"
) -> Picture:
    """Draw when each rank runs which operation, one chart per schedule (name: spans), all on one time scale. The number
    in a bar is its micro-batch. The title gives the share of the time in which ranks wait. `runner` names a rank."""
    end = max(span.end for spans in plans.values() for span in spans)
    rows = [1 + max(span.rank for span in spans) for spans in plans.values()]
    height, shares = 0.9 + sum(0.55 + 0.26 * n for n in rows), [n + 1.5 for n in rows]
    picture, axes = new_picture(height, len(plans), width=PHONE, height_ratios=shares)
    texts = []
    for ax, (name, spans), ranks in zip(axes, plans.items(), rows, strict=True):
        for span in spans:
            color, length = COLORS[KINDS[span.op.kind]], span.end - span.start
            cell(ax, span.start, span.rank - 0.45, color, PANEL, length, 0.9, line=0.8)
            number = str(span.op.micro_batch)
            if length > 0.027 * end * len(number):  # else it is wider than its bar
                write(ax, span.start + length / 2, span.rank, number, color)
        ax.set(xlim=(0, end), ylim=(ranks - 0.5, -0.5))
        ax.set_title(f"{name}: {bubble(list(spans)):.0%} waiting", loc="left", weight="bold")
        name_rows(ax, [f"{runner} {number}" for number in range(ranks)], axis=False)
        ax.spines["bottom"].set_visible(False)
        ax.tick_params(length=0, labelbottom=ax is axes[-1])
        end_of_plan = max(span.end for span in spans)
        texts.append(f"{name}: done at {end_of_plan:.4g}, {bubble(list(spans)):.1%} of the time waiting")
    axes[-1].set_xlabel(xlabel)
    used = {KINDS[span.op.kind] for spans in plans.values() for span in spans}
    legend(picture, {kind: color for kind, color in COLORS.items() if kind in used})
    picture.alt = f"When each {runner} runs which pass. {'; '.join(texts)}."
    return picture


def draw_in_flight(plans: Mapping[str, Sequence[Span]]) -> Picture:
    """Draw for each schedule (name: spans) how long GPU 0 stores the activations of each micro-batch, from its forward
    to its backward pass."""
    colors = {"forward": COLORS["forward"], "stored": PALETTE[3], "backward": COLORS["backward"]}
    counts = {name: 1 + max(span.op.micro_batch for span in spans) for name, spans in plans.items()}
    picture, ax = sketch(32 + sum(30 + 15 * count for count in counts.values()))
    keys(ax, colors, (40, 150, 260), 8)
    scale = 346 / max(span.end for spans in plans.values() for span in spans)
    y, texts = 42.0, []
    for name, spans in plans.items():
        own = {(span.op.kind, span.op.micro_batch): span for span in spans if span.rank == 0}
        micro_batches = range(counts[name])
        starts = [own["F", number].start for number in micro_batches]
        most = max(sum(own["F", n].start <= moment < own["B", n].end for n in micro_batches) for moment in starts)
        texts.append(f"{name}: at most {most}")
        label(ax, 40, y, texts[-1], weight="bold")
        for number in micro_batches:
            f, b = own["F", number], own["B", number]
            label(ax, 34, y + 21 + 15 * number, str(number), "right")
            for start, end, kind in ((f.start, f.end, "forward"), (f.end, b.start, "stored"),
                                     (b.start, b.end, "backward")):  # fmt: skip
                strip(ax, 40 + scale * start, y + 14 + 15 * number, [(end - start, "", colors[kind])], scale, 13)
        y += 30 + 15 * counts[name]
    return finished(picture, f"How long GPU 0 stores the activations of each micro-batch. {'; '.join(texts)}.")


def draw_stage_memory(peaks: Mapping[str, Sequence[Mapping[str, float]]], room: float) -> Picture:
    """Draw the peak of each stage as a bar, in one chart per run (name: bytes by part and stage). The blue line is the
    memory of a GPU, `room` bytes."""
    rows = sum(len(stages) for stages in peaks.values())
    picture, ax = sketch(36 + 30 * len(peaks) + 20 * rows)
    keys(ax, MEMORY, (60, 146, 254), 8)
    scale = 270 / max(room, *(sum(stage.values()) for stages in peaks.values() for stage in stages))
    y, texts = 44.0, []
    for name, stages in peaks.items():
        label(ax, 12, y, name, weight="bold")
        top = y + 12
        for number, stage in enumerate(stages):
            label(ax, 54, top + 8 + 20 * number, f"GPU {number}", "right")
            end = strip(ax, 60, top + 20 * number, [(stage[part], "", MEMORY[part]) for part in MEMORY], scale, 16)
            total = sum(stage.values()) / GiB
            label(ax, max(end, 60 + room * scale) + 6, top + 8 + 20 * number, f"{total:.1f} GiB")
            texts.append(f"{name}, GPU {number}: {total:.1f} GiB")
        x = 60 + room * scale
        ax.plot((x, x), (top - 2, top + 20 * len(stages) - 2), color=PALETTE[0], linewidth=2)
        y += 30 + 20 * len(stages)
    return finished(picture, f"Peak memory of each stage; a GPU has {room / GiB:.1f} GiB. {'; '.join(texts)}.")


def draw_steps(steps: Mapping[str, Mapping[str, float]]) -> Picture:
    """Draw the whole step of each run as one bar: seconds of compute, recomputation, bubble, messages, of gradients and
    update, and of the wait for the slowest node. Parts that are long enough contain their number."""
    picture, ax = sketch(54 + 54 * len(steps))
    keys(ax, STEP, (12, 116, 272), 10)
    scale, texts = 376 / max(sum(parts.values()) for parts in steps.values()), []
    for row, (name, parts) in enumerate(steps.items()):
        y, total = 64 + 54 * row, sum(parts.values())
        label(ax, 12, y, f"{name}: {total:.1f} s")
        pieces = [(parts[part], f"{parts[part]:.1f}" if parts[part] * scale > 24 else "", STEP[part]) for part in STEP]
        strip(ax, 12, y + 10, pieces, scale, 20)
        texts.append(f"{name}: {' + '.join(f'{parts[part]:.1f}' for part in STEP)} = {total:.1f} s")
    return finished(picture, f"Seconds of a step: {' + '.join(STEP)}. {'; '.join(texts)}.")
