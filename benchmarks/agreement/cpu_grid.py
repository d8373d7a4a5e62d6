"""lab.simulate against lab.measure on the CPU: combinations of the fields of Training and Inference, on tiny models.

    python -m benchmarks.agreement.cpu_grid                           # prints
    python -m benchmarks.agreement.cpu_grid --out benchmarks/results  # and writes cpu_grid.md, which the book includes

tests/simulation/test_cpu_grid.py compares a few of these at every change.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import torch
from rich.console import Console
from rich.progress import track

import llmlab as lab
from benchmarks.provenance import provenance, table, write
from llmlab.specs.run import CHECKPOINTING, OPTIMIZERS, PRECISIONS, QUANTIZATIONS, WEIGHTS, Run

BAR = 0.001
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 128, "n_head": 4, "n_layer": 3, "n_positions": 256, "vocab_size": 2000},
    "llama": {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2,
              "num_hidden_layers": 3, "intermediate_size": 384, "vocab_size": 2000,
              "max_position_embeddings": 256},
}  # fmt: skip
ADAPTERS = {
    "gpt2": lab.LoRA(rank=8, targets=("c_attn",), dropout=0.1),
    "llama": lab.LoRA(rank=8, targets=("q_proj", "v_proj"), dropout=0.1),
}
ATTENTIONS = ("sdpa", "eager")  # flash needs a GPU
BATCH, TOKENS = 2, 64
PROMPTS, NEW_TOKENS = (8, 64), (4, 24)
HEADER = ["what", "steps", f"within {BAR:.1%}", "median |error|", "worst error"]


# Of `OPTIMIZERS`; two are younger than the table, and muon takes no adapters.
STEPPED = tuple(name for name in OPTIMIZERS if name not in ("muon", "adamw-fused"))


class Compared(NamedTuple):
    """A step, and the relative error of its simulated peak."""

    what: str
    name: str
    run: Run
    error: float


def grid() -> Iterator[tuple[str, str, Run]]:
    """Yield what is compared: its line of the table, the model's name, the run."""
    for name, precision, optimizer, checkpointing, attention, accumulation in product(
        SHAPES, PRECISIONS, STEPPED, CHECKPOINTING, ATTENTIONS, (1, 2)
    ):
        given = (BATCH, TOKENS, precision, optimizer, checkpointing, attention, accumulation)
        yield f"training, {precision}", name, lab.Training(*given)
    for name, precision, optimizer, checkpointing in product(SHAPES, PRECISIONS, STEPPED, CHECKPOINTING):
        yield "LoRA", name, lab.Training(BATCH, TOKENS, precision, optimizer, checkpointing, lora=ADAPTERS[name])
    for name, kind, optimizer, checkpointing in product(SHAPES, QUANTIZATIONS[1:], STEPPED, CHECKPOINTING):
        given = (BATCH, TOKENS, "bf16", optimizer, checkpointing)
        yield f"QLoRA, {kind}", name, lab.Training(*given, lora=ADAPTERS[name], quantization=kind)
    for name, weights, prompt, new in product(SHAPES, WEIGHTS, PROMPTS, NEW_TOKENS):
        cache = "bf16" if weights in QUANTIZATIONS else weights
        yield f"generation, {weights}", name, lab.Inference(BATCH, prompt, new, weights, kv=cache)


def error(name: str, run: Run) -> float:
    """Return (simulated − measured) / measured of a step's peak of allocated bytes."""
    simulated = lab.simulate(SHAPES[name], run, "cpu").peak_allocated
    measured = lab.measure(SHAPES[name], run, "cpu", repeats=1).peak_allocated
    assert simulated is not None and measured is not None
    return simulated / measured - 1


def body(found: list[Compared]) -> list[list[str]]:
    """Return the text of each line: the number of its steps, and their errors."""
    groups: dict[str, list[Compared]] = {}
    for each in found:
        groups.setdefault(each.what, []).append(each)
    said = []
    for what, group in groups.items():
        worst = max(group, key=lambda each: abs(each.error))
        said.append([
            what, str(len(group)), str(sum(abs(each.error) <= BAR for each in group)),
            f"{median(abs(each.error) for each in group):.4%}", f"{worst.error:+.4%}",
        ])  # fmt: skip
    return said


def to_markdown(found: list[Compared], made: str) -> str:
    """Return the table and its notes."""
    outside = [each for each in found if abs(each.error) > BAR]
    text = [
        *table(HEADER, body(found)), "",
        f"- Peak of allocated bytes, simulated against measured, of {len(found)} steps of two models of three blocks: "
        f"{len(found) - len(outside)} within {BAR:.1%}.",
    ]  # fmt: skip
    text += [f"- Outside: {each.name}, `{each.run!r}`: {each.error:+.2%}." for each in outside]
    return "\n".join([*text, "", made])


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write cpu_grid.md here.")
def main(out: Path | None) -> None:
    """Compare simulated peaks on the CPU with measured ones."""
    steps = list(grid())
    _, names, runs = zip(*steps, strict=True)
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        errors = track(pool.map(error, names, runs), "steps", total=len(steps), console=Console(stderr=True))
        found = [Compared(*step, each) for step, each in zip(steps, errors, strict=True)]
    text = to_markdown(found, provenance("llmlab", "torch", "transformers", "peft", "bitsandbytes"))
    print(text)
    if out:
        write(out / "cpu_grid.md", text)


if __name__ == "__main__":
    main()
