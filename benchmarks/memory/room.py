"""How much more room a step needs than the sum of its tensors: the margins in lab.estimate's verdict.

    python -m benchmarks.memory.room                           # prints; seconds
    python -m benchmarks.memory.room --out benchmarks/results  # and writes room.md

The first table describes the steps of room_draws.csv by the kinds of formulas/verdict.py. The second one counts what
`lab.estimate` says of published steps, with these margins and with one margin for all. The third one lists what ranks
of Megatron-LM reserved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click

import llmlab as lab
from benchmarks.memory import room_draws
from benchmarks.plans import plans
from benchmarks.provenance import provenance, table, titled_table, write
from llmlab.formulas.memory.moments import training_moments
from llmlab.formulas.report import assessed, estimated
from llmlab.formulas.verdict import DRAWN, GENERATION, MEGATRON, OTHER, Kind, kind, verdict
from llmlab.hardware.gpu import GPU
from llmlab.specs.model import ModelSpec
from llmlab.specs.run import Inference, Run, stack_of

SHARE = 0.95  # of a kind's draws, which its factor covers
OF_DRAWS = ["steps drawn at random", "steps", "median", "95 %", "most", "below the 95th percentile of the other half",
            "steps on several GPUs", "share of these below the kind's 95 %", "reserved / allocated, 95 %",
            "expandable segments / allocated, 95 %", "loaded by threads, 95 %"]  # fmt: skip

# What ranks of Megatron-LM printed of themselves, in MB: the most allocated, and the most reserved. Dense models since
# 2024 (megatron-core with Transformer Engine), none short of memory; equal lines of a log count once.
RANKS: tuple[tuple[str, float, float], ...] = (
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
    """The least room of a draw over its estimate, also after threads loaded its weights, and over what it allocates the
    room that it needs with expandable segments, and that it reserves with room for everything."""

    number: int
    least: float
    threads: float | None
    expandable: float
    reserved: float


def quantile(values: Iterable[float], share: float = SHARE) -> float:
    """Return the smallest of `values` that at least `share` of them do not exceed.

    >>> quantile(range(1, 101)), quantile([3.0, 1.0, 2.0])
    (95, 3.0)
    """
    ordered = sorted(values)
    return ordered[ceil(share * len(ordered)) - 1]


def kind_of(spec: ModelSpec, run: Run, card: GPU) -> Kind:
    """Return the kind of a run at the peak of its first pipeline stage."""
    if isinstance(run, Inference):
        return GENERATION
    return kind(spec, run, max(training_moments(spec, run, card), key=lambda moment: moment.total))


def by_kind() -> dict[Kind, list[Ratios]]:
    """Return the ratios of all draws by kind."""
    ratios_of: dict[Kind, list[Ratios]] = {sort: [] for sort in DRAWN}
    for row in room_draws.rows():
        spec, run, card = lab.model(row.draw.model), row.draw.run, lab.gpu(row.draw.gpu)
        estimate = estimated(spec, run, card).peak_allocated
        assert estimate is not None
        threads = row.threads / estimate if row.threads else None
        ratios = Ratios(row.number, row.least / estimate, threads, row.expandable / row.allocated,
                        row.reserved / row.allocated)  # fmt: skip
        ratios_of[kind_of(spec, run, card)].append(ratios)
    return ratios_of


def covered(ratios: Sequence[Ratios]) -> float:
    """Return the share of draws that need no more than the 95th percentile of the half that they are not in."""
    halves = [[each.least for each in ratios if each.number // 2 % 2 == half] for half in (0, 1)]
    within = [value <= quantile(other) for half, other in (halves, halves[::-1]) for value in half]
    return sum(within) / len(within)


def of_draws() -> Iterator[str]:
    """Return the table of the draws by kind."""
    ratios_of, lines = by_kind(), []
    every = [each for ratios in ratios_of.values() for each in ratios]
    for what, ratios in [*((sort.what, ratios_of[sort]) for sort in DRAWN), ("all", every)]:
        least = [each.least for each in ratios]
        most = quantile(least)
        several = [each.least <= most for each in ratios if each.number >= room_draws.SEVERAL]
        threads = [each.threads for each in ratios if each.threads]
        lines.append([what, str(len(ratios)), f"{median(least):.3f}", f"{most:.3f}", f"{max(least):.3f}",
                      f"{covered(ratios):.1%}", str(len(several)),
                      f"{sum(several) / len(several):.1%}" if several else "–",
                      f"{quantile(each.reserved for each in ratios):.3f}",
                      f"{quantile(each.expandable for each in ratios):.3f}",
                      f"{quantile(threads):.3f}" if threads else "–"])  # fmt: skip
    yield from titled_table("Least room over lab.estimate's peak", OF_DRAWS, lines)


def of_published() -> Iterator[str]:
    """Return the table of verdicts on published steps: with one margin for all, and with a margin for each kind."""
    counts: dict[tuple[bool, str], tuple[Counter[str], Counter[str]]] = {}
    for case in plans.cases():
        if case.uncertain:
            continue
        spec, run, card = lab.model(case.model), case.run, lab.gpu(case.card)
        where = "on several GPUs" if run.world_size > 1 else "on one GPU"
        if stack_of(run).own_program:
            where = "with another stack"
        report, fit = assessed(spec, run, card)
        before = fit
        if kind_of(spec, run, card) in DRAWN:
            before = verdict(report.peak_allocated or 0, card, run.world_size)
        for place in (where, "all"):
            by_all, by_each = counts.setdefault((case.ran, place), (Counter(), Counter()))
            by_all[before.outcome] += 1
            by_each[fit.outcome] += 1
    lines = []
    for (ran, where), (by_all, by_each) in sorted(counts.items(), key=lambda each: (not each[0][0], each[0][1])):
        cells = [f"{by_all[said]} → {by_each[said]}" for said in ("fits", "out of memory", "unknown")]
        lines.append([f"{'ran' if ran else 'ran out of memory'}, {where}", str(by_each.total()), *cells])
    title = f"What lab.estimate says of published steps: with a margin of {OTHER.holes:.2f} for all → by kind"
    yield from titled_table(title, ["published steps", "", "fits", "out of memory", "unknown"], lines)


@click.command(help="Compare the sum of a step's tensors with the least room it runs in.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write room.md into this folder.")
def main(out: Path | None) -> None:
    lines = [[what, f"{most:,.0f}", f"{reserved:,.0f}", f"{reserved / most:.3f}"] for what, most, reserved in RANKS]
    shares = [reserved / most for _, most, reserved in RANKS]
    own = (
        f"- Megatron-LM's ranks reserved {min(shares):.3f} to {max(shares):.3f} times their peak, with a median "
        f"of {median(shares):.3f}. We therefore allow its steps {MEGATRON.holes:.2f} times their peak."
    )
    header = ["Megatron-LM, as ranks printed it", "max allocated, MB", "max reserved, MB", "reserved / allocated"]
    text = "\n".join([*of_draws(), *of_published(), *table(header, lines), "", own, "", provenance("llmlab")])
    print(text)
    if out:
        write(out / "room.md", text)


if __name__ == "__main__":
    main()
