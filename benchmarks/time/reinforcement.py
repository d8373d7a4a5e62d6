"""NeMo-RL's published steps of GRPO beside the sum of our estimates for their phases.

    python -m benchmarks.time.reinforcement                           # prints the table
    python -m benchmarks.time.reinforcement --out benchmarks/results  # and writes reinforcement.md

The rows are the synchronous ones of dense models in NVIDIA-NeMo/RL, docs/about/performance-summary.md (versions 0.4 and
0.5, commits cff17f83b and 108bffdab), each with its recipe in examples/configs/recipes/llm/performance. A step
generates 2,048 completions with vLLM on the GPUs that train (gpu_memory_utilization 0.6), computes the
log-probabilities of the policy and of the reference model, and trains with Megatron Core in four updates of 512.
Recomputation is full for Llama 8B, and there is none for Qwen3 32B.

What the source does not say is assumed: prompts of 128 tokens, and completions packed into rows of 4,096 tokens. All
completions have the mean length ("equal"), or lengths with this mean up to the maximum ("unequal", serving/rollout.py).
The transfer of weights to the engine, offloading, and rewards are not estimated.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import llmlab as lab
from benchmarks.provenance import provenance, table, write
from llmlab.serving.memory import Memory, divided_memory
from llmlab.serving.report import checked
from llmlab.serving.rollout import completion_lengths, generation_seconds

PROMPT, LONGEST, COMPLETIONS, BATCH, GROUP = 128, 4096, 2048, 512, 32
LLAMA_8B, QWEN3_32B = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B"


class Row(NamedTuple):
    """A published row: `length` tokens per sequence in the mean, and the `seconds` of a step; `engine` GPUs generate
    together."""

    version: str
    model: str
    gpu: str
    gpus: int
    length: int
    tp: int
    pp: int
    engine: int
    seconds: float


ROWS = (
    Row("0.4", "Llama 3.1 8B", "H100-80GB", 16, 1060, 1, 2, 1, 97.7),
    Row("0.5", "Llama 3.1 8B", "H100-80GB", 16, 1019, 1, 2, 1, 92.8),
    Row("0.5", "Llama 3.1 8B", "GB200", 8, 1066, 1, 1, 1, 91.0),
    Row("0.4", "Qwen3 32B", "H100-80GB", 32, 3206, 4, 4, 4, 393),
    Row("0.5", "Qwen3 32B", "H100-80GB", 32, 3251, 4, 4, 4, 376),
)


def phases(row: Row) -> tuple[float, float, float, float]:
    """Return the seconds of generation with equal and with unequal lengths, of log-probabilities, and of the
    updates."""
    model = LLAMA_8B if row.model.startswith("Llama") else QWEN3_32B
    dp, packed = row.gpus // row.tp // row.pp, LONGEST // row.length
    checkpointing = "full" if row.model.startswith("Llama") else None
    run = lab.Training(
        micro_batch=packed, seq_len=row.length, accumulation=round(BATCH / dp / packed), dp=dp, tp=row.tp, pp=row.pp,
        zero=1, sequence_parallel=row.tp > 1, precision="mixed-bf16", checkpointing=checkpointing, stack="megatron",
    )  # fmt: skip
    updates = COMPLETIONS // BATCH * (lab.estimate(model, run, row.gpu).step_seconds or 0.0)
    forward = updates / (4 if checkpointing else 3)  # of the passes: forward, recomputation, and two of backward

    spec, gpu, mean, longest = lab.model(model), lab.gpu(row.gpu), row.length - PROMPT, LONGEST - PROMPT
    service = checked(spec, lab.Service(
        tp=row.engine, gpu_memory_utilization=0.6, max_model_len=LONGEST, prompt_len=PROMPT, output_len=longest,
        prefix_hit=1 - 1 / GROUP,
    ), gpu)  # fmt: skip
    memory = divided_memory(spec, service, gpu)
    assert isinstance(memory, Memory)
    count = COMPLETIONS // (row.gpus // row.engine)
    equal, unequal = (generation_seconds(spec, service, gpu, memory, lengths)
                      for lengths in ([mean] * count, completion_lengths(count, mean, longest)))  # fmt: skip
    return equal, unequal, 2 * forward, updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for reinforcement.md")
    arguments = parser.parse_args()
    rows = []
    for row in ROWS:
        equal, unequal, scored, updates = phases(row)
        shown = (f"{seconds:.1f}" for seconds in (equal, unequal, scored, updates, row.seconds))
        low, high = (generation + scored + updates for generation in (equal, unequal))
        rows.append([f"{row.model}, {row.version}", f"{row.gpus} × {row.gpu}", f"{row.length:,}", *shown,
                     f"{low / row.seconds - 1:+.0%}", f"{high / row.seconds - 1:+.0%}"])  # fmt: skip
    header = ["model, version", "GPUs", "mean tokens", "generate equal, s", "unequal, s", "log-probabilities, s",
              "updates, s", "published step, s", "equal lengths", "unequal lengths"]  # fmt: skip
    text = "\n".join([*table(header, rows), "", provenance("llmlab")])
    print(text)
    if arguments.out:
        write(arguments.out / "reinforcement.md", text)


if __name__ == "__main__":
    main()
