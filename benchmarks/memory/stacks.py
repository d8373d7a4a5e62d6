"""What published runs of other stacks took, beside `lab.simulate` and `lab.estimate` with the same stack.

    PYTHONPATH=_build/stacks python -m benchmarks.memory.stacks                           # prints; after `make stacks`
    PYTHONPATH=_build/stacks python -m benchmarks.memory.stacks --out benchmarks/results  # and writes stacks.md

Published are peaks of what torch.cuda.memory_stats counts, reserved by torchtitan's users and active by torchtune's;
DeepSpeed's row is of the whole process. `SOURCES` names where they are from. All rows here were in view as the
descriptions were written. Rows of certain configuration are held to `MEDIAN_BAR` and `WORST_BAR`, "fits" to what
happened, and each estimate to its simulation's peak of allocated memory. Where a stack's kernels do
not run here the estimate stands alone. The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click

import llmlab as lab
from benchmarks.provenance import provenance, titled_table, write
from llmlab.base.units import GiB
from llmlab.hardware.gpu import GPU

MEDIAN_BAR, WORST_BAR, ESTIMATE_BAR = 0.05, 0.15, 0.02
H100 = replace(lab.gpu("H100-80GB"), memory=round(95.0396 * GiB))  # with 96 GB, as these runs report it
LLAMA, QWEN = "meta-llama/Meta-Llama-3-8B", "Qwen/Qwen3-32B"
SOURCES = {
    "#1881": "https://github.com/pytorch/torchtitan/pull/1881 (commit d9bdfbb20, 2025-11-15)",
    "#1690": "https://github.com/pytorch/torchtitan/pull/1690 (commit d66b72a6a, 2025-09)",
    "#2377": "https://github.com/pytorch/torchtitan/pull/2377 (2026-02-26)",
    "#2003": "https://github.com/pytorch/torchtune/pull/2003 (README, 2024-11-18: release 0.4, torch 2.5, packed data)",
    "#1664": "https://github.com/pytorch/torchtune/pull/1664 (README, 2024-09-24, packed data)",
    "Qwen": "https://github.com/QwenLM/Qwen (README, 2023-11-30: 162 GB on two GPUs, with memory outside PyTorch)",
    "ao": "https://github.com/pytorch/ao, docs/source/training.md (2025-03-12, with torchtitan of that day)",
    "H100s": "https://github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (commit 9dec370)",
    "#2570": "https://github.com/pytorch/torchtitan/pull/2570 (2026-03-13)",
}
# Before March 2025 the loss was not compiled (and what the root's unit holds was not as in 0.2.2, which runs here).
EAGER_LOSS = lab.Torchtitan(keeps_attention=False, compile_loss=False)
NEWER, NONE = lab.Torchtitan(), lab.Torchtitan(ac="none")
OLDER = lab.Torchtitan(keeps_attention=False)  # these commits' list of what selective checkpointing keeps


@dataclass(frozen=True)
class Row:
    """A published run: GiB (None: it ran out of memory), and whether its configuration is certain."""

    source: str
    what: str
    model: str | dict[str, Any]
    run: lab.Training
    published: float | None
    certain: bool = True
    card: GPU = H100


def qwen(**given: Any) -> lab.Training:
    """Return a run of the Qwen3-32B rows."""
    return lab.Training(seq_len=4096, checkpointing="full", stack="torchtitan", **given)


def llama(stack: lab.Torchtitan, **given: Any) -> lab.Training:
    """Return a run of the Llama 3 8B rows."""
    return lab.Training(seq_len=8192, stack=stack, **given)


B200 = lab.gpu("B200")
TITAN = (
    Row("#1881", "Llama 3 8B, FSDP 64, selective op", LLAMA, llama(OLDER, dp=64), 31.41),
    Row("#1881", "Llama 3 8B, FSDP 4 × TP 2, selective op", LLAMA, llama(OLDER, dp=4, tp=2), 35.33),
    Row("#1690", "Qwen3-32B, FSDP 8, batch 2, full", QWEN, qwen(dp=8, micro_batch=2), 89.33),
    # Without expandable segments it reserves 82.1 GiB; benchmarks/scripts/scripts.toml says why these were off.
    Row("#1690", "Qwen3-32B, FSDP 8, batch 2, full, compiled", QWEN, qwen(dp=8, micro_batch=2, compile=True), 81.85,
        False),
    Row("#1690", "Qwen3-32B, FSDP 16, batch 4, full", QWEN, qwen(dp=16, micro_batch=4), 78.48),
    Row("#1690", "Qwen3-32B, FSDP 16, batch 8, full", QWEN, qwen(dp=16, micro_batch=8), None),
    Row("#1690", "Qwen3-32B, FSDP 4 × TP 8, batch 32, full", QWEN, qwen(dp=4, tp=8, micro_batch=32), 70.79),
    Row("#1690", "Qwen3-32B, FSDP 8 × TP 4, batch 16, full", QWEN, qwen(dp=8, tp=4, micro_batch=16), 70.20),
    Row("#1690", "Qwen3-32B, FSDP 8 × TP 4, batch 32, full", QWEN, qwen(dp=8, tp=4, micro_batch=32), None),
    Row("#2377", "Llama 3 8B, FSDP 2 × TP 2, none", LLAMA, llama(NONE, dp=2, tp=2), 67.19, False, B200),
    Row("#2377", "Llama 3 8B, FSDP 2 × TP 2, selective", LLAMA, llama(NEWER, dp=2, tp=2), 45.88, False, B200),
    Row("ao", "Llama 3 8B, FSDP 8, selective op, compiled", LLAMA, llama(EAGER_LOSS, dp=8, compile=True), 47.65, False),
    Row("ao", "the same, float8 per tensor", LLAMA, llama(EAGER_LOSS, dp=8, compile=True, fp8="tensorwise"), 47.77,
        False),
    Row("H100s", "Llama 3.1 8B, FSDP 8, batch 2, selective op, compiled", LLAMA,
        llama(EAGER_LOSS, dp=8, micro_batch=2, compile=True), 77.0, False),
    Row("#2570", "Llama 3 8B, FSDP 4 × TP 2, selective", LLAMA, llama(NEWER, dp=4, tp=2), 28.54, False),
)  # fmt: skip
LLAMA_3B, LLAMA_31 = "meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.1-8B"
A100, RTX_4090 = lab.gpu("A100-80GB"), lab.gpu("RTX 4090")
LINEARS = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def tune(options: str = "", lora: int = 0, **given: Any) -> lab.Training:
    """Return a run of torchtune's README: batches of 2."""
    stack = f"torchtune:{options}" if options else "torchtune"
    adapters = lab.LoRA(rank=lora, targets=LINEARS) if lora else None
    own = {"seq_len": 4096, "micro_batch": 2, "stack": stack, "lora": adapters, "compile": True}
    return lab.Training(**{**own, **given})


ADAMW, OFFLOADED = "optimizer=AdamW", "enable_activation_offloading=True"
AFTER, WHOLE = f"{ADAMW},optimizer_in_bwd=False", "enable_activation_checkpointing=False,num_output_chunks=0"
NARROW = f"optimizer=AdamW8bit,{OFFLOADED}"
LADDER = (
    Row("#2003", "Llama 3.2 3B, batch 2", LLAMA_3B, tune(f"{AFTER},{WHOLE}", compile=False), 60.0, card=A100),
    Row("#2003", "+ compile", LLAMA_3B, tune(f"{AFTER},{WHOLE}"), 51.0, card=A100),
    Row("#2003", "+ chunked loss, checkpointing", LLAMA_3B, tune(AFTER), 24.9, card=A100),
    Row("#2003", "+ optimizer in backward", LLAMA_3B, tune(ADAMW), 23.1, card=A100),
    Row("#2003", "+ activation offloading", LLAMA_3B, tune(f"{ADAMW},{OFFLOADED}"), 21.8, card=A100),
    Row("#2003", "+ 8-bit AdamW", LLAMA_3B, tune(NARROW), 17.6, False, A100),  # whose is not said
    Row("#2003", "as above, LoRA of rank 64", LLAMA_3B, tune(OFFLOADED, lora=64), 8.5, False, A100),
    Row("#2003", "as above, QLoRA of rank 64", LLAMA_3B, tune(OFFLOADED, lora=64, quantization="nf4"), 4.6, False,
        A100),
    Row("#1664", "Llama 3.1 8B, batch 2 of 2048", LLAMA_31, tune(seq_len=2048), 18.9, False, RTX_4090),
    Row("#1664", "Llama 3.1 8B, LoRA of rank 8", LLAMA_31, tune(lora=8, seq_len=2048), 16.2, False, RTX_4090),
    Row("#1664", "Llama 3.1 8B, QLoRA of rank 8", LLAMA_31, tune(lora=8, seq_len=2048, quantization="nf4"), 7.4, False,
        RTX_4090),
)  # fmt: skip
# Qwen-7B in Llama's shape: its own class has biases beside queries, keys and values, and another norm.
QWEN_7B = {
    "model_type": "llama", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
# finetune/ds_config_zero3.json; "auto" is what transformers' HfTrainerDeepSpeedConfig fills in for this width.
# They accumulated 8 micro-batches, which take what 2 do.
AUTO = lab.DeepSpeed(
    reduce_bucket_size=4096**2, stage3_prefetch_bucket_size=int(0.9 * 4096**2),
    stage3_param_persistence_threshold=10 * 4096,
)  # fmt: skip
ZERO = (
    Row("Qwen", "Qwen-7B, ZeRO-3 on 2, full", QWEN_7B,
        lab.Training(dp=2, zero=3, seq_len=1024, accumulation=2, checkpointing="full", stack=AUTO), 75.44, False, A100),
)  # fmt: skip
ROWS = {"torchtitan": TITAN, "torchtune": LADDER, "deepspeed": ZERO}
HEADER = ["run", "published", "simulated, reserved", "simulated, allocated", "estimated",
          "outcome: simulated; estimated", "configuration"]  # fmt: skip


@dataclass(frozen=True)
class Result:
    """A row's cells, and its errors: of the prediction to what was published, of the estimate to the simulation."""

    cells: list[str]
    published: float | None
    apart: float | None
    fits: bool


def simulated(row: Row) -> lab.Report | None:
    """Return the simulation of a row; None where the stack's kernels do not run here."""
    try:
        return lab.simulate(row.model, row.run, row.card)
    except lab.NotAvailable as refusal:
        print(refusal, flush=True)
        return None


def result(stack: str, row: Row) -> Result:
    """Return what `row` gives."""
    estimate, simulation = lab.estimate(row.model, row.run, row.card), simulated(row)
    assert estimate.peak_allocated
    size = estimate.peak_allocated
    allocated = reserved = "not simulated"
    apart, error, outcome = None, None, estimate.outcome
    if simulation:
        assert simulation.peak_allocated and simulation.peak_reserved
        apart = estimate.peak_allocated / simulation.peak_allocated - 1
        size = simulation.peak_allocated if stack == "torchtune" else simulation.peak_reserved
        if stack == "deepspeed" and simulation.process:
            size = simulation.process
        outcome = simulation.outcome
        both = simulation.peak_allocated, simulation.peak_reserved
        allocated, reserved = (f"{each / GiB:.2f} GiB" for each in both)
    if row.published:
        error = size / GiB / row.published - 1
    beside = f" ({error:+.1%})" if error is not None else ""
    if simulation and stack == "deepspeed":
        reserved += f", process {size / GiB:.2f} GiB"
    if simulation and stack != "torchtune":
        reserved += beside
    elif simulation:
        allocated += beside
    estimated = f"{estimate.peak_allocated / GiB:.2f} GiB" + (f" ({apart:+.1%})" if apart is not None else beside)
    wanted = "fits" if row.published else "out of memory"
    cells = [
        f"{row.what} ({row.source})",
        f"{row.published:.2f} GiB" if row.published else "out of memory",
        reserved,
        allocated,
        estimated,
        f"{outcome}; {estimate.outcome}",
        "known" if row.certain else "partly unknown",
    ]
    said = outcome in (wanted, "unknown") and estimate.outcome in (wanted, "unknown")
    return Result(cells, error if row.certain else None, apart, said or not row.certain)


def sentence(results: list[Result]) -> tuple[str, bool]:
    """Return what the rows of a stack say together, and whether its bars are met."""
    errors = [abs(each.published) for each in results if each.published is not None]
    if not errors:
        return "The configuration of this run is partly unknown.", True
    apart = max(abs(each.apart) for each in results if each.apart is not None)
    fits = sum(each.fits for each in results)
    said = (
        f"In the {len(errors)} rows with a known configuration and a published number, the simulation is off by "
        f"{median(errors):.1%} at the median (limit {MEDIAN_BAR:.0%}) and by {max(errors):.1%} at most (limit "
        f"{WORST_BAR:.0%}). Estimates differ from simulations by at most {apart:.1%} (limit {ESTIMATE_BAR:.0%}). No "
        f"predicted outcome contradicts the published run in {fits} of {len(results)} rows."
    )
    met = median(errors) <= MEDIAN_BAR and max(errors) <= WORST_BAR and apart <= ESTIMATE_BAR
    return said, met and fits == len(results)


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder to write stacks.md into.")
@click.option("--only", help="One stack's rows; nothing is written.")
def main(out: Path | None, only: str | None) -> None:
    lines, met = [], True
    for stack, rows in ROWS.items():
        if only not in (None, stack):
            continue
        results = []
        for row in rows:
            results.append(result(stack, row))
            print(*results[-1].cells, sep=" | ", flush=True)
        said, kept = sentence(results)
        lines += [*titled_table(stack, HEADER, [each.cells for each in results]), "", said, ""]
        met = met and kept
    lines += [f"{name}: {source}." for name, source in SOURCES.items()]
    text = "\n".join([*lines, "", provenance("llmlab", "torch", "torchtitan", "torchtune", "deepspeed"), ""])
    print(text)
    if out and not only:
        write(out / "stacks.md", text)
    sys.exit(not met)


if __name__ == "__main__":
    main()
