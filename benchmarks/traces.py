"""How far derived formulas are from a simulation, over families of transformers, options and sizes drawn at random.

    python benchmarks/traces.py --out benchmarks/results           # 57 families, two draws each: half an hour
    python benchmarks/traces.py --family olmo2 --family gpt_oss    # these alone

Each draw is a config of a family with the widths of its class and few layers, a batch, a length and options.
`lab.estimate` derives its formulas at other sizes than those of the draw; `lab.simulate` runs the draw itself. Peaks
and seconds are compared.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
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


class Case(NamedTuple):
    """A draw in words, the source of its estimate, the errors of its peak and time (None: not known), and why it was
    not simulated."""

    family: str
    words: str
    source: str
    memory: float | None = None
    time: float | None = None
    reason: str = ""

    def row(self) -> list[str]:
        errors = ("–" if error is None else f"{error:+.2%}" for error in (self.memory, self.time))
        return [self.family, self.words, self.source, *errors]


def case(family: str, draw: random.Random) -> Case:
    """Return a draw with its errors."""
    config = config_of(family)
    run = drawn(draw, lab.model(config).max_positions)
    words = f"{run.micro_batch} × {run.seq_len}, {run.precision}, {run.optimizer}, {run.checkpointing or 'none'}"
    words += {0: "", 2: ", ZeRO-2", 3: ", ZeRO-3"}[run.zero] or ", DDP" * (run.dp > 1)
    try:
        simulation, estimate = lab.simulate(config, run, GPU), lab.estimate(config, run, GPU)
    except (lab.NotAvailable, lab.SpecError, RuntimeError, ValueError, TypeError) as error:
        return Case(family, words, "not simulated", reason=" ".join(str(error).split())[:160])
    codes = [note.code for note in estimate.notes]
    source = next((code for code in codes if code in SOURCES), "written")
    assert simulation.peak_allocated and estimate.peak_allocated
    memory, time = estimate.peak_allocated / simulation.peak_allocated - 1, None
    if estimate.step_seconds and simulation.step_seconds:
        time = estimate.step_seconds / simulation.step_seconds - 1
    return Case(family, words, source, memory, time)


def report(cases: Sequence[Case]) -> str:
    """Return the page."""
    derived = [case for case in cases if case.source == "derived"]
    said = f"Of {len(cases)} draws {len(derived)} have derived formulas"
    for what in ("memory", "time"):
        errors = [abs(error) for case in derived if (error := getattr(case, what)) is not None]
        if errors:
            name = {"memory": "peak", "time": "time"}[what]
            said += f"; their {name} is off by {median(errors):.2%} at the median and {max(errors):.2%} at most"
            said += f" ({len(errors)} draws)"
    header = ["family", "run", "formulas", "peak", "time"]
    shown = table(header, [case.row() for case in cases], words=True)
    lines = [f"{said}. The last two columns are estimate / simulation − 1.", "", *shown]
    if reasons := [f"- {case.family}: {case.reason} …" for case in cases if case.reason]:
        lines += ["", "Steps that were not simulated, with the beginning of the message:", "", *reasons]
    return "\n".join([*lines, "", provenance("llmlab", "torch", "transformers")])


@click.command(help="Compare derived formulas with simulations.")
@click.option("--family", "chosen", multiple=True, type=click.Choice(sorted(families())), help="Repeatable.")
@click.option("--draws", default=2, show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write traces.md into this folder.")
def main(chosen: tuple[str, ...], draws: int, out: Path | None) -> None:
    cases = []
    with TemporaryDirectory() as cache, mock.patch.dict("os.environ", LLMLAB_CACHE=cache):
        for family, number in track(list(product(chosen or FAMILIES, range(draws))), "draws"):
            cases.append(case(family, random.Random(f"{family} {number}")))
    text = report(cases)
    print(text)
    if out:
        write(out / "traces.md", text)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
