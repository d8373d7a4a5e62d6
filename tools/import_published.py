"""Import published measurements into llmlab/archive/, so that anybody can see how each record follows from its source.

    python tools/import_published.py --finetuning t4_finetuning.csv --operators liger_a100.csv

t4_finetuning.csv: the measurement archive of fitcheck-llm 0.3.1 (its source distribution), one training step per row,
sizes in MiB. liger_a100.csv: the A100 rows of linkedin/Liger-Kernel's benchmark/data/all_benchmark_data.csv. The single
figures in llmlab/archive/published-figures.json come from prose and tables and are written by hand.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

from llmlab.archive.store import PACKAGE, SCHEMA, slug, to_text, write_whole
from llmlab.base.units import MiB
from llmlab.report import Report
from llmlab.specs.run import LoRA, Training

T4_VISIBLE = 14_912 * MiB
FITCHECK = "fitcheck-llm 0.3.1, measurement archive (source distribution on PyPI, MIT licence)"
LIGER = (
    "linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv (BSD-2-Clause, © LinkedIn): median of the "
    "benchmark's repeats; memory is max_memory_allocated"
)

HOW = (
    "Base weights in fp16, LoRA adapters with their gradients and optimizer states in fp32; no autocast, no gradient "
    "scaler.",
    "alpha = 2·rank, no dropout; use_cache=False; random ids as batch and labels; non-reentrant checkpointing with "
    "enable_input_require_grads().",
    "Second of three steps; the peaks by phase are from the third.",
)
HOW_NF4 = (
    "bitsandbytes NF4 without double quantization, computed in fp16; LoRA adapters with their gradients and optimizer "
    "states in fp32; peft's prepare_model_for_kbit_training put every weight that is not quantized in fp32; no "
    "autocast, no gradient scaler.",
    *HOW[1:],
)
HOW_SDPA = "SDPA pinned to the memory-efficient backend, grouped key and value heads expanded to all heads first."
ROUNDED = "Sizes rounded to whole MiB in the source; no phases, parts or time given."
PARTIAL = (
    "Parts are those known to be alive at the peak; of the gradients only the total is known, and not how much of it "
    "had been made by then."
)


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def mib(text: str) -> int | None:
    """Return the bytes of a decimal number of MiB; exit if they are not a whole number: an error in the source."""
    if not text:
        return None
    size = Decimal(text) * MiB
    if size != int(size):
        raise SystemExit(f"{text} MiB is not a whole number of bytes")
    return int(size)


# ---- T4: one fine-tuning step per row


def finetuning(rows: list[dict[str, str]]) -> list[Report]:
    def what(row: dict[str, str]) -> tuple[str, ...]:
        return tuple(row[name] for name in ("model", "quantization", "attention", "batch", "seq", "session"))

    repeats, seen = Counter(map(what, rows)), Counter()
    reports = []
    for row in rows:
        seen[what(row)] += 1
        report = finetuning_report(row)
        if repeats[what(row)] > 1:
            repeat = f"{seen[what(row)]} of {repeats[what(row)]}"
            report = Report.from_dict({**report.to_dict(), "environment": {**report.environment, "repeat": repeat}})
        reports.append(report)
    return reports


def finetuning_report(row: dict[str, str]) -> Report:
    quantization = None if row["quantization"] == "none" else row["quantization"]
    run = Training(
        micro_batch=int(row["batch"]),
        seq_len=int(row["seq"]),
        precision=row["precision"],
        optimizer=row["optimizer"],
        checkpointing=row["checkpointing"],
        attention="efficient" if row["attention"] == "sdpa" else row["attention"],  # HOW_SDPA
        lora=LoRA(rank=int(row["lora_rank"]), targets=tuple(row["lora_targets"].split())),
        quantization=quantization,
    )
    seconds = float(row["step_seconds"]) if row["step_seconds"] else None
    phases = {
        phase: size
        for phase, column in (
            ("load", "after_load_mib"),
            ("forward", "peak_forward_mib"),
            ("backward", "peak_backward_mib"),
            ("optimizer", "peak_optimizer_mib"),
        )
        if (size := mib(row[column])) is not None
    }
    notes = HOW_NF4 if quantization else HOW
    if row["attention"] == "sdpa":
        notes += (HOW_SDPA,)
    if phases:
        total, trained = int(row["total_params"]), int(row["trainable_params"])
        notes += (PARTIAL, f"{total:,} parameters, {trained:,} of them trained.")
    else:
        notes += (ROUNDED,)
    parts, detail = finetuning_parts(row) if phases else ({}, {})
    return Report(
        source="published",
        model=row["model"],
        run=run,
        gpu="T4",
        outcome="fits",
        peak_allocated=mib(row["peak_allocated_mib"]),
        peak_reserved=mib(row["peak_reserved_mib"]),
        process=mib(row["process_mib"]),
        capacity=T4_VISIBLE,
        phases=phases,
        parts=parts,
        detail=detail,
        step_seconds=seconds,
        tokens_per_second=run.tokens / seconds if seconds else None,
        environment={
            "date": row["session"][-len("2026-09-15"):],
            "torch": row["torch"],
            "transformers": row["transformers"],
            "peft": row["peft"],
            "session": row["session"],
        },
        citation=FITCHECK,
        notes=notes,
    )


def finetuning_parts(row: dict[str, str]) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    weights = {
        name: size
        for name, column in (
            ("NF4", "nf4_packed_mib"),
            ("NF4 scales", "quant_scales_mib"),
            ("fp32, adapters included", "unquantized_fp32_mib"),
            ("fp16", "other_weights_mib"),
        )
        if (size := mib(row[column]))
    }
    parts = {"weights": sum(weights.values()), "optimizer": mib(row["optimizer_state_mib"])}
    return parts, {"weights": weights, "gradients": {"fp32, all adapters": mib(row["gradient_mib"])}}


# ---- A100: single operators, one sweep over a size per record


def operators(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    series: dict[str, dict[str, Any]] = {}
    for row in rows:
        setup = json.loads(row["extra_benchmark_config_str"])
        dtype = setup.pop("dtype", None)
        in_time = {"speed": True, "memory": False}[row["metric_name"]]
        assert row["metric_unit"] == ("ms" if in_time else "MB"), row
        head = {
            "operator": row["kernel_name"],
            "provider": row["kernel_provider"],
            "mode": row["kernel_operation_mode"],
            "metric": "time" if in_time else "memory",
            "unit": "s" if in_time else "bytes",
            "dtype": dtype and {"torch.float32": "fp32", "torch.bfloat16": "bf16"}[dtype],
            "sizes": {name: value for name, value in setup.items() if isinstance(value, int)},
            "options": {name: value for name, value in setup.items() if not isinstance(value, int)},
            "environment": {"date": row["timestamp"][: len("2024-09-03")], "liger-kernel": row["liger_version"]},
            "varied": row["x_name"],
        }
        line = series.setdefault(json.dumps(head), {**head, "at": [], "values": []})
        line["at"].append(int(row["x_value"]))
        # The benchmark's "MB" is 2^20 bytes: only then is every value a multiple of the allocator's 512.
        value = row["y_value_50"]
        line["values"].append(float(Decimal(value).scaleb(-3)) if in_time else mib(value))
    return list(series.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--finetuning", type=Path, help="t4_finetuning.csv")
    parser.add_argument("--operators", type=Path, help="liger_a100.csv")
    parser.add_argument("--out", type=Path, default=PACKAGE, help="the folder of records")
    asked = parser.parse_args()
    if asked.finetuning:
        reports = [report.to_dict() for report in finetuning(read_csv(asked.finetuning))]
        content = {"schema": SCHEMA, "kind": "reports", "records": reports}
        write_whole(asked.out / slug("T4") / "published-finetuning.json", to_text(content))
    if asked.operators:
        rows = read_csv(asked.operators)
        assert {row["gpu_name"] for row in rows} == {"NVIDIA A100-SXM4-80GB"}
        content = {"schema": SCHEMA, "kind": "operators", "gpu": "A100-80GB", "citation": LIGER}
        content["records"] = operators(rows)
        write_whole(asked.out / slug("A100-80GB") / "published-operators.json", to_text(content))


if __name__ == "__main__":
    main()
