"""How far derived formulas are from a simulation, over families of transformers, options and sizes drawn at random.

    python -m benchmarks.agreement.traces --out benchmarks/results         # 56 families, six draws each: an hour
    python -m benchmarks.agreement.traces --family olmo2 --family gpt_oss  # these alone
    python -m benchmarks.agreement.traces --kept _build/traces.jsonl       # go on where an earlier run was interrupted

Each draw is a config of a family with the widths of its class and few layers, a batch, a length and options.
`lab.estimate` derives its formulas at other sizes than those of the draw; `lab.simulate` runs the draw itself. Peaks
and seconds are compared.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import click
import transformers
from rich.progress import track

import llmlab as lab
from benchmarks.provenance import provenance, table, write
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
WORST = 12  # draws that the page shows
SOURCES = "derived", "derived-memory", "plain-transformer", "written"  # notes; of the ten families none


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


def errors_of(cases: Sequence[Case], what: str) -> list[float]:
    """Return the absolute errors of the estimates, of "memory" or "time"."""
    return [abs(error) for case in cases if (error := getattr(case, what)) is not None]


def summary(cases: Sequence[Case], source: str) -> str:
    """Return a sentence on all draws whose estimates have one source."""
    chosen = [case for case in cases if case.source == source]
    errors = {name: errors_of(chosen, what) for name, what in (("peak", "memory"), ("time", "time"))}
    parts = [
        f"{name} {median(values):.2%} at the median, {max(values):.2%} at most, more than 1 % in "
        f"{sum(error > 0.01 for error in values)} of {len(values)}"
        for name, values in errors.items() if values
    ]  # fmt: skip
    return f"- {source}, {len(chosen)} draws: {'; '.join(parts)}."


def report(cases: Sequence[Case]) -> str:
    """Return the page: the errors by source and by family, the worst draws, and those that were not simulated."""
    simulated = [case for case in cases if case.memory is not None]
    lines = ["An error is |estimate / simulation − 1|. By where the formulas are from:", ""]
    lines += [summary(cases, source) for source in SOURCES if any(case.source == source for case in simulated)]
    rows = []
    for family, group in groupby(cases, key=lambda case: case.family):
        of_family = [*group]
        figures = [f"{figure(errors):.2%}" if (errors := errors_of(of_family, what)) else "–"
                   for what in ("memory", "time") for figure in (median, max)]  # fmt: skip
        sources = Counter(case.source for case in of_family)
        rows.append([family, ", ".join(f"{count} {source}" for source, count in sources.items()), *figures])
    header = ["family", "draws", "peak, median", "peak, worst", "time, median", "time, worst"]
    lines += ["", *table(header, rows, words=True), "", f"The {WORST} worst of the derived ones:", ""]
    derived = [case for case in simulated if case.source == "derived"]
    derived.sort(key=lambda case: -max(abs(case.memory or 0), abs(case.time or 0)))
    signed = [[case.family, case.words, f"{case.memory or 0:+.2%}", f"{case.time or 0:+.2%}"]
              for case in derived[:WORST]]  # fmt: skip
    lines += table(["family", "run", "peak", "time"], signed, words=True)
    if reasons := [f"- {case.family} ({case.words}): {case.reason} …" for case in cases if case.reason]:
        lines += ["", "Steps that were not simulated, with the beginning of the message:", "", *reasons]
    return "\n".join([*lines, "", provenance("llmlab", "torch", "transformers")])


@click.command(help="Compare derived formulas with simulations.")
@click.option("--family", "chosen", multiple=True, type=click.Choice(sorted(families())), help="Repeatable.")
@click.option("--draws", default=6, show_default=True)
@click.option("--kept", type=click.Path(dir_okay=False, path_type=Path), help="Keep finished draws here, and go on.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write traces.md into this folder.")
def main(chosen: tuple[str, ...], draws: int, kept: Path | None, out: Path | None) -> None:
    done = {}
    if kept and kept.exists():
        for line in kept.read_text(encoding="utf-8").splitlines():
            family, number, *values = json.loads(line)
            done[family, number] = Case(family, *values)
    wanted = list(product(chosen or FAMILIES, range(draws)))
    with TemporaryDirectory() as cache, mock.patch.dict("os.environ", LLMLAB_CACHE=cache):
        for family, number in track([key for key in wanted if key not in done], "draws"):
            done[family, number] = case(family, random.Random(f"{family} {number}"))
            if kept:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([family, number, *done[family, number][1:]]) + "\n")
    text = report([done[key] for key in wanted])
    print(text)
    if out:
        write(out / "traces.md", text)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
