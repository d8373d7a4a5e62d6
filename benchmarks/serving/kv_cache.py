"""The KV cache of one GPU that vLLM logged at its start, beside what lab.serve leaves for it.

    python -m benchmarks.serving.kv_cache --out benchmarks/results

kv_cache.csv has the logs. "llm-d": github.com/llm-d/llm-d-benchmark, config_explorer/empirical-vllm-memory-results.md,
and its continuation in llm-d-planner, docs/. Where a log says neither requests nor tokens of a step, they are the
defaults. gpt-oss-120b is listed under the default share of 0.9, but its own lines (64.38 + 7.38 + 0.13 + 3.33 GiB) are
0.95 of the GPU. Llama-3.1's config stands for Llama-3.3, Mistral-Small-24B's first release for 3.2 without its encoder
of images. memory.py's constants come from four of the first eight logs.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import click

import llmlab as lab
from benchmarks.provenance import provenance, write
from llmlab.serving.memory import divided_memory

FILE = Path(__file__).with_suffix(".csv")
WHY = {
    "gpt-oss-120b": "0.11 kept the experts' scales twice on Hopper, 3.6 GiB; later versions drop them",
    "Qwen3-235B-A22B": "started with LMCache",
    "Qwen2.5-14B": "0.7's profiled step left sampling out",
    "Llama-3.1-70B": "neither GPU nor requests of a step are said",
    "Meta-Llama-3-8B": "its profiled step took 9.4 GiB, which we cannot explain",
    "Llama-2-70b-hf": "it counted all that was allocated outside of torch",
}
NOW = ("0.11.0", "0.19.0", "2026")  # versions whose profiled step is the one that memory.py describes


def logs() -> Iterator[tuple[dict[str, str], float]]:
    """Yield each log and the GiB that lab.serve leaves for the cache."""
    with FILE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        gpu = lab.gpu(row["gpu"])
        if row["gib"]:
            gpu = replace(gpu, memory=int(float(row["gib"]) * 2**30))
        service = lab.Service(
            weights=row["weights"], tp=int(row["tp"]), gpu_memory_utilization=float(row["utilization"]),
            max_num_seqs=int(row["seqs"]) if row["seqs"] else None,
            max_num_batched_tokens=int(row["tokens"]) if row["tokens"] else None,
        )  # fmt: skip
        memory = divided_memory(lab.model(row["model"]), service, gpu)
        assert not hasattr(memory, "offloaded")  # of llama.cpp
        yield row, memory.cache / 2**30


def off(row: dict[str, str], predicted: float) -> float:
    """Return predicted / logged − 1."""
    return predicted / float(row["cache_gib"]) - 1


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write kv_cache.md into this folder.")
def main(out: Path | None) -> None:
    """Compare the KV cache with what vLLM logged."""
    lines = ["| vLLM | model | GPUs | logged, GiB | predicted | off | cause, if off by more than 12 % |",
             "| --- | --- | --- | ---: | ---: | ---: | --- |"]  # fmt: skip
    errors: list[tuple[bool, float]] = []
    for row, found in logs():
        name, error = row["model"].split("/")[1], off(row, found)
        errors.append((row["vllm"] in NOW, abs(error)))
        gpus = f"{row['tp']} × {row['gpu']}, {row['weights']}"
        why = WHY[name] if abs(error) > 0.12 else ""
        lines.append(f"| {row['vllm']} | {name} | {gpus} | {row['cache_gib']} | {found:.2f} | {error:+.1%} | {why} |")
    lines.append("")
    for words, some in (("all logs", [x for _, x in errors]), ("vLLM from 0.11 on", [x for now, x in errors if now])):
        lines.append(f"- {words}: {len(some)}, off by {median(some):.1%} at the median, {max(some):.1%} at the worst.")
    title = "**The KV cache of one GPU, as vLLM logged it at its start**"
    text = "\n".join([title, "", *lines, "", provenance("llmlab")])
    print(text)
    if out:
        write(out / "kv_cache.md", text)


if __name__ == "__main__":
    main()
