"""Make the pictures of the README and of who-predicts-best, and the map of the first page: `python tools/figures.py`.

The pictures compare predictions with measurements, which they read from benchmarks. The map shows the effect of each
technique on memory and speed, estimated for the same run.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import llmlab as lab
from llmlab.base.units import GiB, MiB
from llmlab.plots.canvas import FAINT, MUTED, PALETTE, SMALL, Picture, styled

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.time.throughput import PREDICTIONS  # noqa: E402
from benchmarks.time.throughput_rows import rows  # noqa: E402
from benchmarks.time.ultrascale import CLASSES, condition, jobs  # noqa: E402
from benchmarks.time.ultrascale import ROWS as SWEEP  # noqa: E402

MODEL, CARD = "meta-llama/Llama-3.1-8B", "A100-80GB"
RESULTS = ROOT / "benchmarks" / "results"
STATIC = ROOT / "book" / "_static"


class Prediction(NamedTuple):
    """Peak bytes of a run: simulated here, and measured by others on the GPU."""

    simulated: float
    measured: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


def held_out() -> list[Prediction]:
    """Return the peaks of the held-out steps; their table is in MiB."""
    text = (RESULTS / "held_out.md").read_text(encoding="utf-8")
    steps = []
    for row in text.splitlines():
        cells = [cell.strip().replace(",", "") for cell in row.split("|")[1:-1]]
        if len(cells) == 7 and " × " in cells[0] and re.match(r"[\d.]", cells[1]):
            steps += [Prediction(float(cells[2]) * MiB, float(size) * MiB) for size in cells[1].split(" / ")]
    return steps


def scripts() -> list[Prediction]:
    """Return the peaks of published scripts, allocated or reserved, whichever their authors printed. One of them was
    known when the simulator was written, and is left out."""
    ran = json.loads((RESULTS / "scripts.json").read_text(encoding="utf-8"))["scripts"]
    ran = [script for script in ran if script["name"] != "rasbt_ch05_orig"]
    return [Prediction(r[f"peak_{r['published_is']}"], r["published"] * GiB) for r in ran if r.get("published")]


def predicted(steps: list[Prediction], others: list[Prediction]) -> Picture:
    """Draw simulated against measured peaks; an exact prediction lies on the diagonal."""
    with styled():
        picture = Picture(figsize=(7.0, 3.6), layout="constrained")
        axes = picture.subplots()
        most = 1.08 * max(each.measured for each in (*steps, *others)) / GiB
        axes.plot((0, most), (0, most), color=FAINT, zorder=0)
        labelled = (
            (steps, PALETTE[0], "o", f"{len(steps)} fine-tuning steps on a T4, allocated"),
            (others, PALETTE[3], "D", f"{len(others)} published scripts on A100, H100 and H200"),
        )
        for group, color, mark, words in labelled:
            errors = [abs(each.error) for each in group]
            words += f"\nmedian error {median(errors):.2%}, worst {max(errors):.2%}"
            x, y = ([getattr(each, name) / GiB for each in group] for name in ("measured", "simulated"))
            axes.plot(x, y, mark, color=color, markersize=5, alpha=0.8, label=words)
        axes.set(xlim=(0, most), ylim=(0, most))
        axes.set(xlabel="peak memory measured on the GPU (GiB)", ylabel="peak memory simulated (GiB)")
        axes.legend(loc="upper left", fontsize=SMALL)
        axes.annotate("exact predictions lie on this line", (0.53 * most, 0.46 * most), color=MUTED, fontsize=SMALL)
    return picture


def published_speeds() -> list[tuple[float, float]]:
    """Return predicted and measured tokens/s per GPU of the rows that nobody had compared when they were predicted."""
    measured = {row.id: row.measured for row in rows()}
    rounds = json.loads(PREDICTIONS.read_text(encoding="utf-8"))["rounds"]
    predictions = {id: rates for each in rounds for id, rates in each["predicted"].items() if rates}
    return [(rates[0], measured[id]) for id, rates in predictions.items()]


def timed(speeds: list[tuple[float, float]]) -> Picture:
    """Draw predicted against measured speeds; the band is a factor of 1.3."""
    with styled():
        picture = Picture(figsize=(7.0, 3.6), layout="constrained")
        axes = picture.subplots()
        low, high = min(measured for _, measured in speeds) / 1.5, 1.5 * max(measured for _, measured in speeds)
        ends = low, high
        axes.fill_between(ends, [x / 1.3 for x in ends], [1.3 * x for x in ends], color=FAINT, alpha=0.5, zorder=0)
        errors = [abs(rate / measured - 1) for rate, measured in speeds]
        within = sum(error <= 0.3 for error in errors) / len(errors)
        words = f"{len(speeds):,} published rates\nmedian error {median(errors):.1%}, {within:.0%} within 30 % (grey)"
        rates, measured = zip(*speeds, strict=True)
        axes.plot(measured, rates, "o", color=PALETTE[0], markersize=3, alpha=0.5, label=words)
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        axes.set(xlabel="tokens per second and GPU, published", ylabel="tokens per second and GPU, predicted")
        axes.legend(loc="upper left", fontsize=SMALL)
    return picture


def sweep() -> Picture:
    """Draw the Playbook's map of all configurations that ran, speed against memory, and beside it the estimated one."""
    done = [job for job in jobs(SWEEP) if job.ran and job.report]
    colors = dict(zip(CLASSES, (PALETTE[0], PALETTE[5], PALETTE[1], PALETTE[7], PALETTE[3]), strict=True))
    with styled():
        picture = Picture(figsize=(7.0, 4.0), layout="constrained")
        both = picture.subplots(1, 2, sharex=True, sharey=True)
        for kind in reversed(CLASSES):
            group = [job for job in done if condition(job.row) == kind]
            speed = [float(job.row["tok_s_gpu"]) for job in group]
            reserved = [float(job.row["mem_reserved_gib"]) for job in group]
            both[0].plot(reserved, speed, "o", color=colors[kind], markersize=3, alpha=0.6, label=kind)
            speed = [(job.report.tokens_per_second or 0) / job.run.world_size for job in group if job.report]
            both[1].plot([job.reserved / GiB for job in group], speed, "o", color=colors[kind], markersize=3, alpha=0.6)
        for axes, title in zip(both, ("measured", "estimated"), strict=True):
            axes.set(title=title, yscale="log", xlabel="reserved memory (GiB)")
        both[0].set_ylabel("tokens per second and GPU")
        picture.legend(loc="outside lower center", ncols=3, fontsize=SMALL)
    return picture


class Technique(NamedTuple):
    """One change: its name, its page, the runs before and after it, and the GPU after it."""

    name: str
    page: str
    before: lab.Training | lab.Inference
    after: lab.Training | lab.Inference
    card: str = CARD


def questions() -> dict[str, list[Technique]]:
    """Return the techniques, grouped by the problem that they solve."""
    run = lab.Training(micro_batch=4, seq_len=2048, precision="mixed-bf16", dp=8)
    shared = replace(run, zero=3)
    served = lab.Inference(batch=16, prompt_len=4096)

    def change(name: str, page: str, before: lab.Training | lab.Inference = run, **fields: Any) -> Technique:
        return Technique(name, page, before, replace(before, **fields))

    recomputed = replace(shared, checkpointing="full")
    split = {"dp": 1, "micro_batch": 32, "tp": 8, "sequence_parallel": True}
    eager, fp32 = replace(run, attention="eager"), replace(run, precision="fp32")
    return {
        "It does not fit": [
            change("ZeRO-3 over 8 GPUs", "12-zero", zero=3),
            change("full activation checkpointing*", "08-checkpointing", shared, checkpointing="full"),
            change("micro-batch of 1 instead of 4*", "06-accumulation", shared, micro_batch=1, accumulation=4),
            change("8-bit AdamW", "07-optimizers", optimizer="adamw-8bit"),
            change("LoRA of rank 16", "18-peft", lora=lab.LoRA(16)),
            change("tensor and sequence parallelism", "14-tensor-and-sequence-parallel", **split),
            change("pipeline of 8 stages", "15-pipeline", dp=1, pp=8, accumulation=8),
        ],
        "It is slow": [
            change("bf16 instead of fp32", "04-precision", fp32, precision="mixed-bf16"),
            change("fused instead of eager attention", "10-flash-attention", eager, attention="sdpa"),
            change("fused kernels (Liger)", "09-kernels", kernels="liger"),
            change("8 GPUs instead of 1", "11-data-parallel", replace(run, dp=1), dp=8),
        ],
        "It is too expensive": [
            Technique("H100s instead of A100s*", "gpu-table", shared, shared, "H100-80GB"),
            change("no activation checkpointing*", "05-flops-and-time", recomputed, checkpointing=None),
        ],
        "I must serve it": [
            change("weights in NF4 instead of bf16", "19-quantization", served, weights="nf4"),
            change("KV cache in int8 instead of bf16", "21-kv-cache", served, kv="int8"),
        ],
    }


def effect(technique: Technique, priced: bool) -> tuple[float, str]:
    """Return the peak memory per GPU after the change divided by the peak before, and what the line says."""
    old = lab.estimate(MODEL, technique.before, CARD)
    new = lab.estimate(MODEL, technique.after, technique.card)
    share = new.peak_allocated / old.peak_allocated
    words = f"needs {share:.2f} times the memory"
    if isinstance(technique.after, lab.Training):
        speed = new.tokens_per_second / old.tokens_per_second
        words += f", trains {speed:.2f} times as fast"
        if priced:
            rent = lab.gpu(technique.card).usd_per_hour / lab.gpu(CARD).usd_per_hour
            words += f", costs {rent / speed:.2f} times as much"
    return share, words


def technique_map() -> str:
    """Return the first page's map as HTML: the effect of each technique on memory per GPU, speed and price."""
    lines = []
    for question, techniques in questions().items():
        lines.append(f'<p class="question">{question}</p>\n<ul class="map">')
        for technique in techniques:
            share, words = effect(technique, priced=question == "It is too expensive")
            bar = f'<span class="bar"><span style="width:{min(share, 1):.0%}"></span></span>'
            link = f'<a href="{technique.page}.html">{technique.name}</a>'
            lines.append(f'<li>{link}{bar}<span class="says">{words}</span></li>')
        lines.append("</ul>")
    return "\n".join(lines) + "\n"


def main() -> None:
    (ROOT / "book" / "_map.html").write_text(technique_map(), encoding="utf-8")
    pictures = {
        "predicted": predicted(held_out(), scripts()), "timed": timed(published_speeds()), "ultrascale": sweep(),
    }  # fmt: skip
    for name, picture in pictures.items():
        picture.savefig(STATIC / f"{name}.png", dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
