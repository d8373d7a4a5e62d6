"""The running job of the book, and what each chapter changes about it.

    part one: Llama-3.2-1B on one GPU, with 4,096 tokens per update, as 4 sequences of 1,024 at first.
              The GPU is a T4 (14.6 GiB), on which the first version needs three times the memory that there is.
    part two: Llama-3.1-8B with sequences of 4,096 tokens on 8 H100-80GB. Each GPU has one sequence at a time.
              Eight whole copies need twice the memory that there is. From chapter 14 on it is Llama-3.1-70B on 512
              H100-80GB, with 1,024 sequences (4,194,304 tokens) per update.
"""

from __future__ import annotations

from collections.abc import Callable
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

MODEL_8B = "meta-llama/Llama-3.1-8B"
H100 = "H100-80GB"
START_8B = Training(micro_batch=1, seq_len=4096, precision="mixed-bf16", checkpointing="full", dp=8)

MODEL_70B = "meta-llama/Llama-3.1-70B"
START_70B = replace(START_8B, micro_batch=2, dp=512, zero=3)


class Rung(NamedTuple):
    """What a chapter changes: the fields of Training with their new values, and the change in words.

    `model` and `gpu` are named where they change, and otherwise remain those of the rung before. A chapter may have
    several rungs; the last one is the state in which it leaves the job.
    """

    chapter: str
    change: str
    fields: dict[str, Any]
    model: str = ""
    gpu: str = ""


class State(NamedTuple):
    """The job at one rung."""

    rung: Rung
    model: str
    gpu: str
    run: Training


RUNGS = (
    Rung("02-memory-anatomy", "the start: fp32, AdamW, 4 × 1,024 tokens", {}, MODEL, GPU),
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

RUNGS_8B = (
    Rung("11-data-parallel", "8 copies of the 8B model, AdamW (DDP)", {}, MODEL_8B, H100),
    Rung("12-zero", "optimizer states divided (ZeRO-1)", {"zero": 1}),
    Rung("12-zero", "and gradients (ZeRO-2)", {"zero": 2}),
    Rung("12-zero", "and weights (ZeRO-3)", {"zero": 3}),
    Rung("12-zero", "ZeRO-3 without checkpointing", {"checkpointing": None}),
)

RUNGS_70B = (
    Rung("14-tensor-and-sequence-parallel", "ZeRO-3 on 512 GPUs, checkpointed", {}, MODEL_70B, H100),
    Rung("14-tensor-and-sequence-parallel", "1 sequence at a time, no checkpointing",
         {"micro_batch": 1, "accumulation": 2, "checkpointing": None}),
    Rung("14-tensor-and-sequence-parallel", "tp = 8, sequence-parallel, ZeRO-1",
         {"tp": 8, "dp": 64, "zero": 1, "accumulation": 16, "sequence_parallel": True}),
    Rung("15-pipeline", "pp = 8 instead of tp = 8, checkpointed",
         {"tp": 1, "pp": 8, "sequence_parallel": False, "checkpointing": "full"}),
    Rung("15-pipeline", "interleaved, 10 virtual stages per GPU", {"virtual_stages": 10}),
    Rung("16-three-d", "tp = 4 and pp = 4, no checkpointing",
         {"tp": 4, "pp": 4, "dp": 32, "accumulation": 32, "sequence_parallel": True, "checkpointing": None,
          "virtual_stages": 1}),
)

PARTS = ((START, RUNGS), (START_8B, RUNGS_8B), (START_70B, RUNGS_70B))


@cache
def states(chapter: str = RUNGS[0].chapter) -> tuple[State, ...]:
    """Return the job at all rungs of the part to which `chapter` belongs. Raises UnknownName if none changes there."""
    for run, rungs in PARTS:
        if chapter not in [rung.chapter for rung in rungs]:
            continue
        job_states, model, gpu = [], "", ""
        for rung in rungs:
            run, model, gpu = replace(run, **rung.fields), rung.model or model, rung.gpu or gpu
            job_states.append(State(rung, model, gpu, run))
        return tuple(job_states)
    known = list(dict.fromkeys(rung.chapter for _, rungs in PARTS for rung in rungs))
    raise unknown_name("chapter", chapter, known, f"The job changes in {', '.join(known)}.")


def jobs(chapter: str = RUNGS[0].chapter) -> dict[str, Training]:
    """Return the job at the end of each chapter of a part, part one by default, by the chapter's file name."""
    return {state.rung.chapter: state.run for state in states(chapter)}


def job(chapter: str) -> Training:
    """Return the job as `chapter` leaves it. Raises UnknownName for a chapter that does not change it.

    >>> job("06-accumulation").micro_batch, job("06-accumulation").accumulation
    (1, 4)
    >>> job("11-data-parallel").dp
    8
    """
    return jobs(chapter)[chapter]


def reports(gpu: str = GPU) -> dict[str, Report]:
    """Return the estimate of the job of part one after each chapter, by the chapter's file name."""
    return {chapter: estimated(MODEL, run, gpu) for chapter, run in jobs().items()}


def plot_ladder(chapter: str) -> Picture:
    """Return a drawing of the job up to `chapter`: the peak memory of a GPU against the memory that it has, and the
    speed. In part one this is the time per update, in part two the tokens per second per GPU."""
    every = states(chapter)
    drawn = [(state, estimated(state.model, state.run, state.gpu)) for state in every]
    last = max(place for place, state in enumerate(every) if state.rung.chapter == chapter)
    models, gpus = (list(dict.fromkeys(names)) for names in zip(
        *[(state.model.rpartition("/")[2], report.gpu or "") for state, report in drawn[: last + 1]], strict=True
    ))  # fmt: skip
    room = show_bytes(find_gpu(gpus[0]).room(1))
    if every[0].rung in RUNGS:
        title = f"Peak memory, time per update. Blue: the {room} of a {gpus[0]}"
        alt = f"Peak memory and time of {models[0]} on a {gpus[0]}, where tensors can use {room}"
        return _ladder(drawn, last, title, alt, 240, lambda report: f"{report.step_seconds or 0:.1f} s")
    known = f"{gpus[0]}. Blue: its {room}" if len(gpus) == 1 else "GPU. Blue: its memory"
    title = f"Memory, tokens/s per {known}"
    alt = f"Memory and tokens per second of each GPU that trains {' and '.join(models)}, on {' and '.join(gpus)}"
    return _ladder(drawn, last, title, f"{alt}, where tensors can use {room}", 190, _tokens_per_gpu)


def _tokens_per_gpu(report: Report) -> str:
    return f"{(report.tokens_per_second or 0) / report.run.world_size:,.0f} tokens/s"


def _ladder(
    drawn: list[tuple[State, Report]], last: int, title: str, alt: str, longest: int, speed: Callable[[Report], str]
) -> Picture:
    """Draw the rungs up to number `last`. The bar of the rung with the most memory of all is `longest` pixels long."""
    scale = longest / max(report.peak_allocated or 0 for _, report in drawn)
    picture, ax = sketch(44 + 42 * (last + 1))
    label(ax, 12, 14, title, color=PALETTE[0])
    words = []
    for number, (state, report) in enumerate(drawn[: last + 1]):
        peak, room = report.peak_allocated or 0, find_gpu(report.gpu or "").room(1)
        y, end, limit = 42 + 42 * number, 12 + peak * scale, 12 + room * scale
        label(ax, 12, y, state.rung.change, weight="bold" if number == last else "normal")
        box(ax, 12, y + 10, end - 12, 16, color=PALETTE[2 if end <= limit else 3] if number == last else FAINT)
        ax.plot((limit, limit), (y + 8, y + 28), color=PALETTE[0], linewidth=2)
        figures = f"{show_bytes(peak)}, {speed(report)}"
        label(ax, max(end, limit) + 8, y + 18, figures)
        words.append(f"{state.rung.change}: {figures}")
    return finished(picture, f"{alt}. {'; '.join(words)}.")
