"""Make the pictures of the README and of the first page: `python tools/figures.py`.

Predictions beside measurements, from the tables of benchmarks/results; `llmlab run` in a terminal, which it runs; and
the map of the techniques, each one's price and gain estimated on the same run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

import llmlab as lab
from llmlab.base.units import GiB, MiB
from llmlab.plots.canvas import FAINT, MUTED, PALETTE, SMALL, Picture, styled

MODEL, CARD = "meta-llama/Llama-3.1-8B", "A100-80GB"
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
STATIC = ROOT / "book" / "_static"
SVG = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # without a font from elsewhere
COMMAND = "llmlab run --gpu T4 --steps 2 train.py --batch-size 8"
SCRIPT = '''\
import argparse, torch
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int)
rows = parser.parse_args().batch_size
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("gpt2")).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step in range(1000):
    ids = torch.randint(50257, (rows, 1024), device="cuda")
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
'''


class Prediction(NamedTuple):
    """Bytes, simulated and measured by others on the card itself."""

    simulated: float
    measured: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


def held_out() -> list[Prediction]:
    """Return the peaks of the steps that were predicted before anybody here had seen them: a table in MiB."""
    text = (RESULTS / "held_out.md").read_text(encoding="utf-8")
    found = []
    for row in text.splitlines():
        cells = [cell.strip().replace(",", "") for cell in row.split("|")[1:-1]]
        if len(cells) == 7 and " × " in cells[0] and re.match(r"[\d.]", cells[1]):
            found += [Prediction(float(cells[2]) * MiB, float(size) * MiB) for size in cells[1].split(" / ")]
    return found


def scripts() -> list[Prediction]:
    """Return the peaks of other people's scripts, reserved or allocated as their authors printed them."""
    ran = json.loads((RESULTS / "scripts.json").read_text(encoding="utf-8"))["scripts"]
    return [Prediction(r[f"peak_{r['published_is']}"], r["published"] * GiB) for r in ran if r.get("published")]


def predicted(steps: list[Prediction], others: list[Prediction]) -> Picture:
    """Draw simulated against measured peaks: what is predicted exactly lies on the line."""
    with styled():
        picture = Picture(figsize=(7.0, 3.6), layout="constrained")
        axes = picture.subplots()
        most = 1.08 * max(each.measured for each in (*steps, *others)) / GiB
        axes.plot((0, most), (0, most), color=FAINT, zorder=0)
        labelled = (
            (steps, PALETTE[0], "o", f"{len(steps)} training steps on a T4, allocated"),
            (others, PALETTE[3], "D", f"{len(others)} scripts of other people on A100, H100 and H200, as printed"),
        )
        for group, color, mark, words in labelled:
            errors = [abs(each.error) for each in group]
            words += f"\nmedian error {median(errors):.2%}, worst {max(errors):.2%}"
            x, y = ([getattr(each, name) / GiB for each in group] for name in ("measured", "simulated"))
            axes.plot(x, y, mark, color=color, markersize=5, alpha=0.8, label=words)
        axes.set(xlim=(0, most), ylim=(0, most))
        axes.set(xlabel="peak memory measured on the GPU, GiB", ylabel="simulated without it, GiB")
        axes.legend(loc="upper left", fontsize=SMALL)
        axes.annotate("on the line: exact", (most / 2, most / 2.25), color=MUTED, fontsize=SMALL)
    return picture


def terminal() -> str:
    """Run the command on a script of its own and return what a terminal shows, as SVG."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT, encoding="utf-8")
        command = [sys.executable, "-m", "llmlab", *COMMAND.split()[1:]]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        raise SystemExit(done.stderr)
    console = Console(record=True, width=86, file=StringIO(), color_system="truecolor", force_terminal=True)
    console.print(Text(f"$ {COMMAND}", style="bold"))
    console.print(Text.from_ansi(done.stdout.rstrip()))
    return console.export_svg(title="a laptop without a GPU", theme=SVG_EXPORT_THEME, code_format=SVG, unique_id="run")


class Technique(NamedTuple):
    """One change: what it is called, its page, the run before and after, and the card after."""

    name: str
    page: str
    before: lab.Training | lab.Inference
    after: lab.Training | lab.Inference
    card: str = CARD


def questions() -> dict[str, list[Technique]]:
    """Return the techniques by the question that brings a reader to them."""
    run = lab.Training(micro_batch=4, seq_len=2048, precision="mixed-bf16", dp=8)
    shared = replace(run, zero=3)
    served = lab.Inference(batch=16, prompt_len=4096)

    def change(name: str, page: str, before: lab.Training | lab.Inference = run, **fields: Any) -> Technique:
        return Technique(name, page, before, replace(before, **fields))

    split = {"dp": 1, "micro_batch": 32, "tp": 8, "sequence_parallel": True}
    eager, fp32 = replace(run, attention="eager"), replace(run, precision="fp32")
    return {
        "It does not fit": [
            change("ZeRO-3 over 8 GPUs", "12-zero", zero=3),
            change("activation checkpointing, with ZeRO-3", "08-checkpointing", shared, checkpointing="full"),
            change("micro-batches of 1, with ZeRO-3", "06-accumulation", shared, micro_batch=1, accumulation=4),
            change("8-bit AdamW", "07-optimizers", optimizer="adamw-8bit"),
            change("LoRA", "18-peft", lora=lab.LoRA(16)),
            change("tensor and sequence parallelism", "14-tensor-and-sequence-parallel", **split),
            change("8 pipeline stages", "15-pipeline", dp=1, pp=8, accumulation=8),
        ],
        "It is slow": [
            change("bf16 instead of fp32", "04-precision", fp32, precision="mixed-bf16"),
            change("fused attention", "10-flash-attention", eager, attention="sdpa"),
            change("fused kernels", "09-kernels", kernels="liger"),
            change("8 GPUs instead of 1", "11-data-parallel", replace(run, dp=1), dp=8),
        ],
        "It is too expensive": [
            Technique("H100s instead of A100s", "gpu-table", shared, shared, "H100-80GB"),
            change("no recomputation", "05-flops-and-time", replace(shared, checkpointing="full"), checkpointing=None),
        ],
        "I must serve it": [
            change("weights in NF4", "19-quantization", served, weights="nf4"),
            change("a KV cache in 8 bits", "21-kv-cache", served, kv="int8"),
        ],
    }


def effect(technique: Technique, priced: bool) -> tuple[float, str]:
    """Return the memory of a GPU after the change as a share of that before, and what it does, in words."""
    old = lab.estimate(MODEL, technique.before, CARD)
    new = lab.estimate(MODEL, technique.after, technique.card)
    share = new.peak_allocated / old.peak_allocated
    words = f"memory × {share:.2f}"
    if isinstance(technique.after, lab.Training):
        speed = new.tokens_per_second / old.tokens_per_second
        words += f", tokens per second × {speed:.2f}"
        if priced:
            rent = lab.gpu(technique.card).usd_per_hour / lab.gpu(CARD).usd_per_hour
            words += f", dollars per token × {rent / speed:.2f}"
    return share, words


def technique_map() -> str:
    """Return the first page's map as HTML: what each technique does to memory per GPU, speed and price."""
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
    predicted(held_out(), scripts()).savefig(STATIC / "predicted.png", dpi=150, metadata={"Software": None})
    (STATIC / "run.svg").write_text(terminal() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
