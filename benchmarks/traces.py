"""How far derived formulas are from a simulation, over families of transformers, options and sizes drawn at random.

    python benchmarks/traces.py --out benchmarks/results           # 57 families, two draws each: half an hour
    python benchmarks/traces.py --family olmo2 --family gpt_oss    # these alone

Each draw is a config of a family with the widths of its class and few layers, a batch, a length and options.
`lab.estimate` derives its formulas at other sizes than those of the draw; `lab.simulate` runs the draw itself. Peaks
and seconds are compared.
"""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import click
import transformers
from provenance import provenance, table, write
from rich.progress import track

import llmlab as lab
from llmlab.simulation.depth import depth_of, with_layers
from llmlab.specs.generic import families

FAMILIES = (
    "afmoe", "apertus", "arcee", "bart", "bert", "bloom", "codegen", "cohere", "cohere2", "deepseek_v3", "ernie4_5",
    "ernie4_5_moe", "exaone4", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2",
    "gpt_neox", "gpt_oss", "granite", "granitemoe", "helium", "llama", "llama4_text", "llava", "minimax_m2", "mistral",
    "mixtral", "modernbert", "mt5", "nemotron_h", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2",
    "qwen2_5_vl", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "roberta", "seed_oss", "smollm3", "stablelm",
    "starcoder2", "t5", "whisper",
)  # fmt: skip
GPU = "B200"
MOST = 6  # layers
SOURCES = "derived", "derived-memory", "plain-transformer"  # notes


def config_of(family: str) -> dict[str, Any]:
    """Return the default config of a family with at most `MOST` layers, or as many in an encoder and in a decoder."""
    spec = lab.model(transformers.AutoConfig.for_model(family))
    return with_layers(spec, MOST).config if depth_of(spec).layers > MOST else spec.config


def drawn(draw: random.Random, positions: int) -> lab.Training:
    """Return a run with random options and sizes."""
    tokens = draw.randrange(4, min(64, positions // 64) + 1) * 64
    ranks = draw.choice(({}, {}, {"dp": 8}, {"dp": 8, "zero": 2}, {"dp": 8, "zero": 3}))
    precisions = ("fp32", "mixed-bf16") if "zero" in ranks else ("fp32", "bf16", "autocast-bf16", "mixed-bf16")
    return lab.Training(
        micro_batch=draw.choice((1, 2, 3, 4, 6, 8)), seq_len=tokens, precision=draw.choice(precisions),
        optimizer=draw.choice(("adamw", "adamw-fused", "sgd")), checkpointing=draw.choice((None, "full")), **ranks,
    )  # fmt: skip


def case(family: str, draw: random.Random) -> tuple[list[str], tuple[float, float] | None]:
    """Return the cells of a draw, and the errors of its derived peak and time; None where these are not derived, or
    cannot be simulated."""
    config = config_of(family)
    run = drawn(draw, lab.model(config).max_positions)
    words = f"{run.micro_batch} × {run.seq_len}, {run.precision}, {run.optimizer}, {run.checkpointing or 'none'}"
    words += {0: "", 2: ", ZeRO-2", 3: ", ZeRO-3"}[run.zero] or ", DDP" * (run.dp > 1)
    try:
        simulation, estimate = lab.simulate(config, run, GPU), lab.estimate(config, run, GPU)
    except (lab.NotAvailable, lab.SpecError, RuntimeError, ValueError, TypeError) as error:
        return [family, words, " ".join(str(error).split())[:120], "–", "–"], None
    codes = [note.code for note in estimate.notes]
    source = next((code for code in codes if code in SOURCES), "written formulas")
    assert simulation.peak_allocated and estimate.peak_allocated
    memory = estimate.peak_allocated / simulation.peak_allocated - 1
    if not (estimate.step_seconds and simulation.step_seconds):
        return [family, words, source, f"{memory:+.2%}", "–"], None
    time = estimate.step_seconds / simulation.step_seconds - 1
    errors = (memory, time) if source == "derived" else None
    return [family, words, source, f"{memory:+.2%}", f"{time:+.2%}"], errors


@click.command(help="Compare derived formulas with simulations.")
@click.option("--family", "chosen", multiple=True, type=click.Choice(sorted(families())), help="Repeatable.")
@click.option("--draws", default=2, show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write traces.md into this folder.")
def main(chosen: tuple[str, ...], draws: int, out: Path | None) -> None:
    rows: list[list[str]] = []
    errors: list[tuple[float, ...]] = []
    with TemporaryDirectory() as cache, mock.patch.dict("os.environ", LLMLAB_CACHE=cache):
        for family, number in track(list(product(chosen or FAMILIES, range(draws))), "draws"):
            cells, both = case(family, random.Random(f"{family} {number}"))
            rows.append(cells)
            errors += [tuple(map(abs, both))] if both else []
    header = ["family", "run", "source of the estimate", "peak: estimate − simulation", "seconds"]
    said = f"Of {len(rows)} draws {len(errors)} have derived formulas"
    if errors:
        memory, time = zip(*errors, strict=True)
        said += f": their peak is off by {median(memory):.2%} at the median, by {max(memory):.2%} at most"
        said += f", their time by {median(time):.2%} and {max(time):.2%}"
    made = provenance("llmlab", "torch", "transformers")
    text = "\n".join([f"{said}.", "", *table(header, rows, words=True), "", made])
    print(text)
    if out:
        write(out / "traces.md", text)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
