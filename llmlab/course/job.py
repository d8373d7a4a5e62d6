"""The job of part one: Llama-3.2-1B on one GPU, and what each chapter changes about it.

    tokens per update: 4,096, as 4 sequences of 1,024 at first
    the GPU: a T4 (14.6 GiB), on which the first version needs three times the memory that there is
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from ..base.errors import unknown_name
from ..base.units import show_bytes
from ..formulas.report import estimated
from ..hardware.gpu import gpu as find_gpu
from ..plots.canvas import FAINT, PALETTE, Picture
from ..plots.schematic import box, finished, label, sketch
from ..report import Report
from ..specs.run import Training

MODEL = "meta-llama/Llama-3.2-1B"
GPU = "T4"
START = Training(micro_batch=4, seq_len=1024, precision="fp32", attention="eager")


class Rung(NamedTuple):
    """What a chapter changes: the fields of Training with their new values, and the change in words."""

    chapter: str
    change: str
    fields: dict[str, Any]


RUNGS = (
    Rung("02-memory-anatomy", "the start: fp32, AdamW, 4 × 1,024 tokens", {}),
    Rung("04-precision", "matmuls in fp16 (autocast)", {"precision": "autocast-fp16"}),
    Rung("06-accumulation", "4 micro-batches of 1 sequence", {"micro_batch": 1, "accumulation": 4}),
    Rung("07-optimizers", "Adafactor instead of AdamW", {"optimizer": "adafactor"}),
    Rung("08-checkpointing", "activation checkpointing", {"checkpointing": "full"}),
    # With whole logits, four sequences together do not fit: a segment for fp32 logits takes 1.96 GiB.
    Rung("09-kernels", "fused kernels (Liger), 4 sequences together",
         {"kernels": "liger", "micro_batch": 4, "accumulation": 1}),
    # Up to torch 2.13, SDPA alone would leave grouped heads on a T4 to "math", which writes the scores to memory.
    Rung("10-flash-attention", "fused attention (SDPA, heads repeated)", {"attention": "efficient"}),
)


@cache
def jobs() -> dict[str, Training]:
    """Return the job at the end of each chapter that changes it, by the chapter's file name."""
    run, by_chapter = START, {}
    for rung in RUNGS:
        run = replace(run, **rung.fields)
        by_chapter[rung.chapter] = run
    return by_chapter


def job(chapter: str) -> Training:
    """Return the job as `chapter` leaves it. Raises UnknownName for a chapter that does not change it.

    >>> job("06-accumulation").micro_batch, job("06-accumulation").accumulation
    (1, 4)
    """
    if chapter not in jobs():
        raise unknown_name("chapter", chapter, list(jobs()), f"The job changes in {', '.join(jobs())}.")
    return jobs()[chapter]


def reports(gpu: str = GPU) -> dict[str, Report]:
    """Return the estimate of the job after each chapter, by the chapter's file name."""
    return {chapter: estimated(MODEL, run, gpu) for chapter, run in jobs().items()}


def plot_ladder(chapter: str, gpu: str = GPU) -> Picture:
    """Return a drawing of the job up to `chapter`: peak memory against the memory of the GPU, and seconds per step."""
    known, card = reports(gpu), find_gpu(gpu)
    shown = RUNGS[: list(known).index(chapter) + 1]
    room = card.room(1)
    peaks = {name: report.peak_allocated or 0 for name, report in known.items()}
    scale = 240 / max(peaks.values())
    limit = 12 + room * scale
    picture, ax = sketch(44 + 42 * len(shown))
    label(ax, 12, 14, f"Peak memory, time per update. Blue: the {show_bytes(room)} of a {card.name}", color=PALETTE[0])
    words = []
    for number, rung in enumerate(shown):
        peak, y = peaks[rung.chapter], 42 + 42 * number
        last, end = number == len(shown) - 1, 12 + peak * scale
        label(ax, 12, y, rung.change, weight="bold" if last else "normal")
        box(ax, 12, y + 10, end - 12, 16, color=PALETTE[2 if end <= limit else 3] if last else FAINT)
        ax.plot((limit, limit), (y + 8, y + 28), color=PALETTE[0], linewidth=2)
        figures = f"{show_bytes(peak)}, {known[rung.chapter].step_seconds or 0:.1f} s"
        label(ax, max(end, limit) + 8, y + 18, figures)
        words.append(f"{rung.change}: {figures}")
    alt = f"Peak memory and time of Llama-3.2-1B on a {card.name}, where tensors can use {show_bytes(room)}"
    return finished(picture, f"{alt}. {'; '.join(words)}.")
