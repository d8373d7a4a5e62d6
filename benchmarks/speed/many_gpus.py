"""One rank of many, simulated: what that costs here, and how far it is from real ranks and from published runs.

    python -m benchmarks.speed.many_gpus                           # prints
    python -m benchmarks.speed.many_gpus --out benchmarks/results  # and writes many_gpus.md

Real ranks are processes on this machine that gloo connects. Published figures come from the records, and the simulated
runs beside them from torchtitan_script.py, litgpt_script.py and accelerate_script.py. The exit code is 1 if a bar is
missed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click

import llmlab as lab
from benchmarks.memory import torchtitan_script
from benchmarks.provenance import provenance, titled_table, write
from benchmarks.speed import accelerate_script, litgpt_script
from benchmarks.speed.speed import ROOT, Row
from llmlab.base.units import show_bytes

SECONDS_BAR = 60.0  # of CPU time, after imports: one thread works, and other programs may use the machine
MEMORY_BAR = 1.5  # GB (10^9 bytes) of the process, torch and transformers included
RANKS_BAR, PUBLISHED_BAR = 0.005, 0.05
SHOWN = {"active": "allocated"}  # published runs say active, simulated ones allocated: the same without record_stream
HEADER = ["what", "simulated", "limit or measured", ""]
TAKES, REAL = "Cost of simulating one rank of many", "Ranks that communicate through gloo on a CPU"
PUBLISHED = "Published peaks of FSDP2"
BLOCKS = {"precision": "mixed-bf16", "checkpointing": "full", "seq_len": 8192}
SIMULATED = {
    "meta-llama/Llama-3.1-8B": [{"zero": 3, "dp": 8}],
    "meta-llama/Llama-3.1-70B": [{"zero": 3, "dp": 64}],
    "meta-llama/Llama-3.1-405B": [
        {"zero": 3, "dp": 512}, {"zero": 3, "dp": 64, "tp": 8, "sequence_parallel": True},
    ],
}  # fmt: skip
SIMULATE = """
import json, resource, sys, time
import llmlab as lab
lab.simulate("gpt2", lab.Training(seq_len=64, zero=3, dp=2), "H200")  # imports
import transformers.models.llama.modeling_llama
run = lab.Training(**json.loads(sys.argv[2]))
cpu, wall = time.process_time(), time.perf_counter()
report = lab.simulate(sys.argv[1], run, "H200")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
taken = [time.process_time() - cpu, time.perf_counter() - wall, peak]
print(json.dumps([*taken, report.outcome, report.peak_allocated, report.peak_reserved]))
"""
GPT = {"model_type": "gpt2", "n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 256, "vocab_size": 2000}
LLAMA = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 2, "intermediate_size": 352, "vocab_size": 2000,
         "max_position_embeddings": 256}  # fmt: skip
TWO_RANKS = {
    "DDP": (GPT, {"dp": 2}),
    "DDP, mixed bf16, accumulation 2": (GPT, {"dp": 2, "precision": "mixed-bf16", "accumulation": 2}),
    "DDP, ZeroRedundancyOptimizer": (GPT, {"zero": 1, "dp": 2}),
    "FSDP2, kept until backward": (GPT, {"zero": 2, "dp": 2}),
    "FSDP2": (GPT, {"zero": 3, "dp": 2}),
    "FSDP2, mixed bf16, checkpointing": (
        LLAMA, {"zero": 3, "dp": 2, "precision": "mixed-bf16", "checkpointing": "full"},
    ),
    "FSDP2, autocast bf16, accumulation 2": (
        LLAMA, {"zero": 3, "dp": 2, "precision": "autocast-bf16", "accumulation": 2},
    ),
    "FSDP2, LoRA": (LLAMA, {"zero": 3, "dp": 2, "lora": lab.LoRA(8)}),
    "tensor parallel": (LLAMA, {"tp": 2}),
    "tensor and sequence parallel": (LLAMA, {"tp": 2, "sequence_parallel": True}),
}  # fmt: skip
FOUR_RANKS = {
    "FSDP2 on 4 ranks": (GPT, {"zero": 3, "dp": 4}),
    "FSDP2 and tensor parallel, 2 × 2": (LLAMA, {"zero": 3, "dp": 2, "tp": 2, "sequence_parallel": True}),
}


def simulations() -> list[Row]:
    """Return what the simulation of each large model costs, and the rank's peaks."""
    rows = []
    for name, layouts in SIMULATED.items():
        for layout in layouts:
            run = lab.Training(**BLOCKS, **layout)
            command = [sys.executable, "-c", SIMULATE, name, json.dumps({**BLOCKS, **layout})]
            ran = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
            cpu, wall, peak, outcome, allocated, reserved = json.loads(ran.stdout.splitlines()[-1])
            axes = ", ".join(f"{axis} {layout[axis]}" for axis in ("zero", "dp", "tp") if axis in layout)
            what = f"{name.rpartition('/')[2]} on {run.world_size} H200 ({axes})"
            rows.append(Row(f"{what}: CPU time ({wall:.0f} s wall)", f"{cpu:.1f} s", f"< {SECONDS_BAR:g} s",
                            cpu < SECONDS_BAR))  # fmt: skip
            rows.append(Row(f"{what}: RAM", f"{peak / 1e9:.2f} GB", f"< {MEMORY_BAR:g} GB", peak < MEMORY_BAR * 1e9))
            held = f"{show_bytes(allocated)}, {show_bytes(reserved)} reserved" if allocated else outcome
            rows.append(Row(f"{what}: peak", held))
    return rows


def real_ranks() -> list[Row]:
    """Return simulated peaks beside those of processes on this machine; weights and optimizer states must be equal."""
    from llmlab.measurement.ranks import measure_ranks

    rows = []
    for cases in (TWO_RANKS, FOUR_RANKS):
        asked = [(model, lab.Training(micro_batch=2, seq_len=128, **given)) for model, given in cases.values()]
        for name, (model, run), measured in zip(cases, asked, measure_ranks(*asked), strict=True):
            # Tensor-parallel ranks have equal peaks; one reads higher if a thread of gloo frees memory unseen.
            real = measured[0] if run.tp == 1 else min(measured, key=lambda report: report.peak_allocated)
            simulated = lab.simulate(model, run, "cpu")
            off = simulated.peak_allocated / real.peak_allocated - 1
            parts = [simulated.parts.get(part, 0) - real.parts.get(part, 0) for part in ("weights", "optimizer")]
            within = abs(off) < RANKS_BAR and not any(parts)
            rows.append(Row(f"{name}: peak of a rank", f"{simulated.peak_allocated:,} B ({off:+.3%})",
                            f"{real.peak_allocated:,} B", within))  # fmt: skip
    return rows


def published() -> list[Row]:
    """Return simulated peaks beside published ones of eager FSDP2."""
    runs = [(f"TorchTitan, Llama {run.name}", torchtitan_script.simulated(run), torchtitan_script.published(run))
            for run in torchtitan_script.RUNS]  # fmt: skip
    runs += [("LitGPT, Llama 7B in bf16, zero2", litgpt_script.simulated(), litgpt_script.published())]
    name, read = f"Accelerate, {accelerate_script.MODEL}", accelerate_script.published()
    runs += [(name, accelerate_script.simulated(), read), (f"{name}, lab.simulate", accelerate_script.by_verb(), read)]
    rows = []
    for name, simulated, measured in runs:
        for kind, size in measured.items():
            off = simulated[kind] / size - 1
            rows.append(Row(f"{name}: {SHOWN.get(kind, kind)}", f"{show_bytes(simulated[kind])} ({off:+.1%})",
                            show_bytes(size), abs(off) < PUBLISHED_BAR))  # fmt: skip
    return rows


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder to write many_gpus.md to.")
def main(out: Path | None) -> None:
    """Simulate ranks of up to 512 GPUs, and compare smaller ones with real and with published runs."""
    found = {TAKES: simulations(), REAL: real_ranks(), PUBLISHED: published()}
    lines = [line for title, rows in found.items() for line in titled_table(title, HEADER, [r.cells() for r in rows])]
    text = "\n".join([*lines, provenance("llmlab", "torch", "transformers")])
    print(text)
    if out:
        write(out / "many_gpus.md", text)
    raise SystemExit(any(row.within is False for rows in found.values() for row in rows))


if __name__ == "__main__":
    main()
