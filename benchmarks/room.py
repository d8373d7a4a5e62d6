"""How much more room a step needs than the sum of its tensors: the margin in lab.estimate's verdict.

    python benchmarks/room.py                              # prints
    python benchmarks/room.py --out benchmarks/results     # and writes room.md

A step is simulated once. Its requests are then sent to allocators with less and less room, until one runs out. A step
runs in less room than it reserves on a large GPU, because an allocator that is short of memory frees its cached
segments. NF4 bases are loaded in order, and by threads as transformers 5.0 to 5.3 did. The first tables describe the
steps of room_draws.csv, by the kinds of formulas/verdict.py, and published steps. Then follow steps chosen by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click
import plans
import room_draws
from load_orders import requests_of
from past_releases import read_ahead
from provenance import provenance, table, titled_table, write
from rich.progress import track
from room_draws import EXPANDABLE, least_room

import llmlab as lab
from llmlab.base.units import show_bytes
from llmlab.formulas.memory.moments import training_moments
from llmlab.formulas.report import assessed
from llmlab.formulas.verdict import HOLES, KINDS, MEGATRON_EXPANDABLE_HOLES, MEGATRON_HOLES, Kind, kind, verdict
from llmlab.specs.run import Run, Training, stack_of
from llmlab.step.quantized import one_at_a_time

SHARE = 0.95  # of a kind's draws, which its factor covers
HEADER = ["step", "card", "lab.estimate", "reserved with room for all", "least room", "least room / estimate",
          "with expandable segments / allocated"]  # fmt: skip
OF_DRAWS = ["steps drawn at random", "steps", "median", "90 %", "95 %", "most", "covered by the other half's 95 %",
            "reserved / allocated, 95 %", "expandable segments, 95 %", "loaded by threads, 95 %"]  # fmt: skip
FOUR = lab.LoRA(rank=16, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
ADAPTERS = {"lora": FOUR, "precision": "fp16"}
QLORA = {**ADAPTERS, "quantization": "nf4"}
STEPS: list[tuple[str, str, Run]] = [
    ("gpt2", "T4", lab.Training(8, 1024)),
    ("gpt2", "A100-80GB", lab.Training(24, 1024, "autocast-bf16")),
    ("gpt2", "H100", lab.Training(16, 1024, "mixed-bf16", "sgd", "full", "eager", 2)),
    ("gpt2-xl", "A100-80GB", lab.Training(3, 512, "autocast-fp16", checkpointing="selective")),
    ("SmolLM2-360M", "A100-80GB", lab.Training(8, 2048, "autocast-bf16")),
    ("SmolLM2-360M", "A100-80GB", lab.Training(8, 2048, "mixed-bf16", "adamw", "selective", "eager")),
    ("SmolLM2-360M", "T4", lab.Training(1, 4096, attention="eager", checkpointing="full", **ADAPTERS)),
    ("TinyLlama-1.1B", "T4", lab.Training(4, 256, optimizer="adamw-8bit", checkpointing="full")),
    ("TinyLlama-1.1B", "T4", lab.Training(8, 1024, attention="eager", checkpointing="full", **QLORA)),
    ("TinyLlama-1.1B", "H100", lab.Training(3, 2048, "autocast-fp16", checkpointing="full", accumulation=2)),
    ("Llama-3.2-1B", "H100", lab.Training(3, 2048, "fp16", "adamw", "full", "eager")),
    ("Llama-3.2-1B", "A100-80GB", lab.Inference(32, 1024, 64)),
    ("SmolLM2-1.7B", "A100-80GB", lab.Training(8, 256, "fp16", "adamw-8bit", attention="eager")),
    ("SmolLM2-1.7B", "A100-80GB", lab.Training(3, 512, attention="eager", checkpointing="selective", **QLORA)),
    ("SmolLM2-1.7B", "H100", lab.Training(6, 4096, checkpointing="full", **QLORA)),
    ("Qwen2.5-1.5B", "T4", lab.Training(3, 2048, "autocast-fp16", "adamw", "selective", "eager", 2)),
    ("Qwen3-4B", "H100", lab.Training(1, 2048, checkpointing="full", **QLORA)),
    ("Qwen3-4B", "H100", lab.Training(2, 2048, "bf16", "adamw", "full", "eager")),
    ("Mistral-7B-v0.3", "H100", lab.Inference(4, 512, 16)),
    ("Qwen2.5-7B", "T4", lab.Training(1, 1024, checkpointing="full", **QLORA)),
    ("Llama-3.1-8B", "A100-80GB", lab.Training(1, 256, "fp16", attention="eager", accumulation=2)),
]

# What ranks of Megatron-LM printed of themselves, in MB: the most allocated, and the most reserved. Dense models since
# 2024 (megatron-core with Transformer Engine), none short of memory; equal lines of a log count once.
MEGATRON: tuple[tuple[str, float, float], ...] = (
    ("Llama 2 7B in 4 stages, RTX 4090 of 48 GB, core 0.10, rank 0", 30_227.6, 31_086),
    ("the same, rank 2", 25_079.3, 25_890),
    ("the same, rank 4", 20_931.0, 21_534),
    ("the same, rank 6", 20_115.1, 20_258),
    ("GPT 6.4B on 8 H100, core 0.8", 75_078.4, 75_682),
    ("the same on 16", 70_522.6, 71_202),
    ("1.7B, 2025-03", 50_277.2, 53_386),
    ("0.63B, of a course, 2024-07", 7_960.0, 8_266),
    ("0.35B on 4 ranks, 2024-09", 2_589.1, 2_608),
    ("0.05B, 2024-08", 623.6, 648),
    ("4 ranks of a script's header", 44_819.1, 45_930),
    ("with a multi-token head, 2025-09", 63_359.8, 66_802),
    ("Qwen3, one H200", 69_454.8, 73_472),
    ("a script that reads logs, its example", 85_667.8, 89_304),
    ("NVIDIA/Megatron-LM, pull request 5662", 5_670.4, 6_406),
)


class Ratios(NamedTuple):
    """The least room of a draw over its estimate, in three ways, and what it reserves with room for everything over
    what it allocates."""

    number: int
    least: float
    expandable: float
    threads: float | None
    reserved: float


def quantile(values: Iterable[float], share: float = SHARE) -> float:
    """Return the smallest of `values` that at least `share` of them do not exceed.

    >>> quantile(range(1, 101)), quantile([3.0, 1.0, 2.0])
    (95, 3.0)
    """
    found = sorted(values)
    return found[ceil(share * len(found)) - 1]


def by_kind() -> dict[Kind | None, list[Ratios]]:
    """Return the ratios of all draws by kind; those of generations under None."""
    found: dict[Kind | None, list[Ratios]] = {}
    for row in room_draws.rows():
        spec, run = lab.model(row.draw.model), row.draw.run
        estimate = lab.estimate(spec, run, row.draw.gpu).peak_allocated
        assert estimate is not None
        sort = None
        if isinstance(run, Training):
            moments = training_moments(spec, run, lab.gpu(row.draw.gpu))
            sort = kind(spec, run, max(moments, key=lambda moment: moment.total))
        threads = row.threads / estimate if row.threads else None
        ratios = Ratios(row.number, row.least / estimate, row.expandable / estimate, threads,
                        row.reserved / row.allocated)  # fmt: skip
        found.setdefault(sort, []).append(ratios)
    return found


def covered(ratios: Sequence[Ratios]) -> float:
    """Return the share of draws that need no more than the 95th percentile of the half that they are not in."""
    halves = [[each.least for each in ratios if each.number // 2 % 2 == half] for half in (0, 1)]
    within = [value <= quantile(other) for half, other in (halves, halves[::-1]) for value in half]
    return sum(within) / len(within)


def of_draws() -> Iterator[str]:
    """Return the table of the draws by kind."""
    found, lines = by_kind(), []
    for sort in (*KINDS, None):
        ratios = found[sort]
        least = [each.least for each in ratios]
        threads = [each.threads for each in ratios if each.threads]
        figures = [median(least), quantile(least, 0.9), quantile(least), max(least)]
        others = [quantile(each.reserved for each in ratios), quantile(each.expandable for each in ratios)]
        lines.append([sort.what if sort else "generation", str(len(ratios)), *(f"{each:.3f}" for each in figures),
                      f"{covered(ratios):.1%}", *(f"{each:.3f}" for each in others),
                      f"{quantile(threads):.3f}" if threads else "–"])  # fmt: skip
    every = [each for ratios in found.values() for each in ratios]
    least = [each.least for each in every]
    yield from titled_table("Least room over lab.estimate's peak", OF_DRAWS, lines)
    yield (
        f"- All {len(every)} draws: median {median(least):.3f}, 95th percentile {quantile(least):.3f}; "
        f"{sum(each > HOLES for each in least)} need more than {HOLES:.2f} times the estimate."
    )
    yield ""


def of_published() -> Iterator[str]:
    """Return the table of what estimates say of published steps on one GPU, of families with formulas."""
    before, now = Counter[tuple[bool, str]](), Counter[tuple[bool, str]]()
    for case in plans.cases():
        spec, run = lab.model(case.model), case.run
        if case.uncertain or run.world_size > 1 or not spec.has_formulas or stack_of(run) or run.compile:
            continue
        card = lab.gpu(case.card)
        report, fit = assessed(spec, run, card)
        now[case.ran, fit.outcome] += 1
        before[case.ran, verdict(report.peak_allocated or 0, card).outcome] += 1
    said = ("fits", "out of memory", "unknown")
    ways = (f"{HOLES:.2f} for all", before), ("by kind", now)
    lines = [[f"{'ran' if ran else 'ran out of memory'}, {how}", *(str(counts[ran, word]) for word in said)]
             for ran in (True, False) for how, counts in ways]  # fmt: skip
    title = "What lab.estimate says of published steps on one GPU"
    yield from titled_table(title, ["published steps", *said], lines)


def rows(name: str, card: str, run: Run) -> Iterable[tuple[list[str], float, float]]:
    """Yield the text of a step's row for each way of loading it, the ratio of its room to the estimate, and that of its
    room with expandable segments to what it allocates."""
    estimated = lab.estimate(name, run, card).peak_allocated
    assert estimated is not None
    asked = requests_of(name, run, card)
    orders = {"": list(one_at_a_time(asked.sizes))}
    if asked.sizes:
        orders = {", loaded in order": orders[""], ", by threads": list(read_ahead(asked.sizes, seed=0))}
    for said, order in orders.items():
        _, reserved, room = least_room(asked, order)
        allocated, _, expandable = least_room(asked._replace(config=EXPANDABLE), order)
        sizes = [show_bytes(size) for size in (estimated, reserved, room)]
        ratios = room / estimated, expandable / allocated
        yield [f"{name}, `{run!r}`{said}", card, *sizes, *(f"{ratio:.3f}" for ratio in ratios)], *ratios


@click.command(help="Compare the sum of a step's tensors with the least room it runs in.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write room.md into this folder.")
def main(out: Path | None) -> None:
    found = [row for step in track(STEPS, "steps") for row in rows(*step)]
    ratios = sorted(ratio for _, ratio, _ in found)
    narrow = max(ratio for *_, ratio in found)
    said = (
        f"- Least room over the estimate: {ratios[0]:.3f} to {ratios[-1]:.3f}, the median {median(ratios):.3f}. With "
        f"{HOLES:.2f} times its sum of tensors on the GPU `lab.estimate` says that a run of no measured kind fits, "
        "with less than the sum that it does not, and between both that it cannot tell. With expandable segments a "
        "step needs at most "
        f"{narrow:.3f} times what it allocates; for Megatron-LM's, whose formula errs too, the bound is "
        f"{MEGATRON_EXPANDABLE_HOLES:.2f}."
    )
    lines = [[what, f"{most:,.0f}", f"{reserved:,.0f}", f"{reserved / most:.3f}"] for what, most, reserved in MEGATRON]
    shares = [reserved / most for _, most, reserved in MEGATRON]
    own = (
        f"- Megatron-LM's ranks reserved {min(shares):.3f} to {max(shares):.3f} times their peak, the median "
        f"{median(shares):.3f}: {MEGATRON_HOLES:.2f} is the bound of its steps."
    )
    header = ["Megatron-LM, as ranks printed it", "max allocated, MB", "max reserved, MB", "reserved / allocated"]
    drawn = [*of_draws(), *of_published()]
    by_hand = table(HEADER, [cells for cells, *_ in found])
    text = "\n".join([*drawn, *by_hand, "", said, "", *table(header, lines), "", own, "",
                      provenance("llmlab", "torch")])  # fmt: skip
    print(text)
    if out:
        write(out / "room.md", text)


if __name__ == "__main__":
    main()
