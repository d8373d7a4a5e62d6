"""Derive llmlab/hardware/training.toml: what training steps reach, beside what single kernels do.

    python -m benchmarks.time.training_rates          # derives and prints
    python -m benchmarks.time.training_rates --write  # and writes the table

Shares are those of measured kernels and published figures. What power limits leave, what communication costs that
computation hides, and what many nodes lose, are fitted to the throughputs of throughputs.toml that are "in sample";
the spread, from which intervals follow, is that of the sources that are "left out". After --write run
`python -m benchmarks.time.efficiencies --write`, because the H100's rates there follow from this table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import date
from functools import cache
from itertools import accumulate, product
from math import log, log2, nan, sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click

import llmlab as lab
from benchmarks.time import throughput
from llmlab.archive import figure, held_out, records
from llmlab.formulas.time import kernels as times
from llmlab.formulas.time.efficiency import efficiencies
from llmlab.hardware.kernel_tables import FOLDER, UNIT, WORK, Grid, kernel_table, timed
from llmlab.hardware.links import cluster
from llmlab.specs.run import stack_of

TABLE = Path(lab.__file__).parent / "hardware" / "training.toml"
TOLERATED = 0.1  # logarithm of a ratio up to which it counts as a square, beyond linearly
FITTED = {  # where each search starts, and its first steps
    "sustained": {"8.0": (0.85, 0.04), "9.0": (0.65, 0.04), "10.0": (0.5, 0.04), "10.3": (0.5, 0.04)},
    "fp8": {"9": (1.0, 0.08), "10": (1.0, 0.08), "mxfp8": (1.0, 0.08)},
    "scale": {"contention": (0.5, 0.2), "share_per_doubling": (0.01, 0.005)},
}
WEAK = "dgxc-15b-16", "dgxc-15b-2048"  # the same run on more nodes, in sample
MOST = {"contention": 1.0}  # what is hidden cannot cost more than what is not
FINEST = 1 / 16  # of the first steps
HELD = 0.8  # the share of rows that an interval is to hold
QUARTER, SMALLEST = 4, 256  # of an axis is left to extrapolate from; rows and columns of a product in training
HEAD_SIZES = (64, 128)
FLASH_STEPS = {  # figures of FlashAttention 2's forward and backward pass, by compute capability and head size
    "8.0": dict(zip(HEAD_SIZES, ("flash-attention-2-step", "flash-attention-2-step-128"), strict=True)),
    "9.0": dict(zip(HEAD_SIZES, ("flash-attention-2-step-h100", "flash-attention-2-step-h100-128"), strict=True)),
}
# On a B200 nobody published its passes with a mask: an H100's, times what a B200 does more without one, heads of 64.
# A B300 has a B200's older instructions, which it uses: FlashAttention 4 is 2.7 times as fast on one with sequences of
# 4,096 (Dao-AILab/flash-attention, issue 2317), where what was measured is 2.9 times as fast as this.
UNMASKED = {"9.0": "flash-attention-2-step-h100-unmasked", "10.0": "flash-attention-2-step-b200-unmasked"}
LENGTHS = {"512": 512, "1k": 1024, "2k": 2048, "4k": 4096, "8k": 8192, "16k": 16384}
SHORT = 0.1  # seconds of a step that engines may take longer with themselves than with the model


def measured_cards() -> list[str]:
    """Return the cards that have grids of kernel times, in the GPU table's order."""
    return [card.name for card in lab.gpus() if (FOLDER / f"{card.name}.json").is_file()]


def product_shares() -> dict[str, float]:
    """Return, by card, the share of its bf16 peak that a product of two 8192 × 8192 matrices reaches."""
    return {name: 2 * 8192**3 / _table(name).matmul(8192, 8192, 8192).seconds / lab.gpu(name).peak("bf16")
            for name in measured_cards()}  # fmt: skip


def _table(name: str) -> Any:
    found = kernel_table(name)
    assert found
    return found


def shares() -> dict[str, float]:
    """Return the shares of data sheets, and how much longer one attention kernel takes than another."""
    attention = [2 * 8 * 32 * 4096**2 * 128 / _table(name).attention(8, 32, 4096, 128).seconds
                 / lab.gpu(name).peak("bf16") for name in measured_cards()]  # fmt: skip
    steps = [figure(FLASH_STEPS["8.0"][size]).values for size in HEAD_SIZES]
    # Of cards whose kernels, and hosts, records of single operators or whole steps gave.
    moved = {lab.gpu(name): each.bandwidth / lab.gpu(name).bandwidth for name, each in efficiencies().items()
             if each.dispatch}  # fmt: skip
    return {
        "products": median(product_shares().values()),
        "attention": median(attention),
        "bandwidth": fmean(moved.values()),
        "copied": fmean(share / copied for card, share in moved.items() if (copied := times.copy_share(card))),
        "efficient": fmean(_ratio(step, "FlashAttention-2", "xformers") for step in steps),
    }  # fmt: skip


def flash_attention_2() -> dict[str, dict[str, list[float]]]:
    """Return 10^12 FLOP/s of FlashAttention 2's forward and backward pass by chip, head size and `LENGTHS`."""

    def rates(key: str) -> list[float]:
        return [figure(key)[f"FlashAttention-2, {n}"] / 1e12 for n in LENGTHS]

    found = {chip: {str(size): rates(key) for size, key in sizes.items()} for chip, sizes in FLASH_STEPS.items()}
    h100, b200 = (rates(key) for key in UNMASKED.values())
    faster = [new / old for new, old in zip(b200, h100, strict=True)]
    newest = {size: [r * f for r, f in zip(each, faster, strict=True)] for size, each in found["9.0"].items()}
    return {**found, "10.0": newest, "10.3": newest}


def _ratio(rates: dict[str, float], fast: str, slow: str) -> float:
    """Return the mean ratio of two kernels' rates over the lengths that both have."""
    lengths = [name.split(", ")[1] for name in rates if name.startswith(f"{fast}, ")]
    return fmean(rates[f"{fast}, {n}"] / rates[f"{slow}, {n}"] for n in lengths if f"{slow}, {n}" in rates)


def seconds_per_doubling(rows: list[throughput.Row]) -> float:
    """Return the seconds by which each doubling of the nodes made a step longer whose ranks meet once: what the same
    run took longer on more nodes, less what is predicted of that without it. A fit to all rows would take it for their
    other errors."""
    times.training_rates()["scale"]["seconds_per_doubling"] = 0.0
    few, many = (next(row for row in rows if row.id == id) for id in WEAK)
    (less, was), (more, now) = seconds(few), seconds(many)
    return (now - was - (more - less)) / log2(many.run.world_size / few.run.world_size)


def use(values: dict[str, float]) -> None:
    """Let all estimates reckon with these fitted values."""
    for part, names in FITTED.items():
        times.training_rates()[part].update({name: values[name] for name in names})
    times.kernels.cache_clear()


def off(rows: Iterable[throughput.Row]) -> list[float]:
    """Return the logarithms of predicted over measured rates."""
    return [log(found.rate / row.measured) for row in rows if (found := throughput.predict(row)).rate]


def cost(errors: list[float]) -> float:
    squares = (e * e / 2 if abs(e) < TOLERATED else TOLERATED * (abs(e) - TOLERATED / 2) for e in errors)
    return sum(squares)


def fit(rows: list[throughput.Row]) -> dict[str, float]:
    """Return the values with which the rows are off least: one at a time, in ever smaller steps."""

    def at(values: dict[str, float]) -> float:
        use(values)
        return cost(off(rows))

    starts = {name: start for names in FITTED.values() for name, start in names.items()}
    best, scale = {name: first for name, (first, _) in starts.items()}, 1.0
    use(best)
    times.training_rates()["scale"]["seconds_per_doubling"] = seconds_per_doubling(rows)
    least = at(best)
    while scale >= FINEST:
        before = least
        for name, (_, step) in starts.items():
            for move in (step * scale, -step * scale):
                tried = {**best, name: min(MOST.get(name, 2.0), max(0.0, best[name] + move))}
                if (found := at(tried)) < least:
                    best, least = tried, found
        if least == before:
            scale /= 2
    use(best)
    return best


def spreads(rows: list[throughput.Row], widened: float = 1.0) -> dict[str, float]:
    """Return how far off a prediction is that 80 % of rows are nearer than, as a logarithm, by where rates are from.

    Rows of one source are off alike, by whatever is not known of it: each source counts as much as another.
    Cards differ in the share of their data sheet that they reach: a rate that is transferred may be off by that
    too, one from the data sheet, of another architecture, by twice that; of another vendor, by what its own rows
    are, and no less than that: they are of one source. Steps that are short are left to `engine`. How engines cut a
    model, by tensor or pipeline parallelism, differs more than how they share its states; most of all pipelines,
    whose engine no field names unless it is Megatron-LM's. Formulas were written in view of all these rows: what
    they say is `widened`, as `unforeseen` has it.
    """
    amd, nvidia = ([row for row in rows if (lab.gpu(row.card).vendor == "AMD") is amd] for amd in (True, False))
    long = [row for row in nvidia if seconds(row)[0] >= SHORT]
    whole, cut = ([row for row in long if (row.run.tp * row.run.pp > 1) is cut] for cut in (False, True))
    piped = [row for row in cut if row.run.pp > 1 and not stack_of(row.run).timed_pipelines]
    cut = [row for row in cut if row not in piped]
    measured, middle = widened * _held_by_sources(whole), median(product_shares().values())
    differ = _held([log(share / middle) for share in product_shares().values()])
    fitted = [log(lab.estimate(r.model, r.run, "T4").step_seconds / r.step_seconds) for r in records(gpu="T4")
              if r.source == "published" and r.step_seconds and not held_out(r)]  # fmt: skip
    data_sheet = sqrt(measured**2 + (2 * differ) ** 2)
    return {
        "measured": measured,
        "fitted": _held(fitted),
        "transferred": sqrt(measured**2 + differ**2),
        '"data sheet"': data_sheet,
        "AMD": max(data_sheet, widened * _held_by_sources(amd)),
        "cut": widened * _held_by_sources(cut),
        "pipeline": widened * _held_by_sources(piped),
        "beyond": beyond(),
    }


def unforeseen(but: str = "") -> float:
    """Return by how much wider the intervals had to be, on the side of the error, that were written down before anybody
    had looked, to hold 80 % of the rows of all sources, or of all `but` one, where each source counts 1; at least 1."""
    predicted = [pair for _, pairs in throughput.rounds(throughput.rows()) for pair in pairs if pair[0].source != but]
    needed = []
    for row, it in predicted:
        if it.rate and it.low and it.high:
            end = it.low if it.rate > row.measured else it.high
            needed.append((row.source, log(row.measured / it.rate) / log(end / it.rate)))
    return max(1.0, _quantile_by_sources(needed))


def seconds(row: throughput.Row) -> tuple[float, float]:
    """Return a row's seconds of a step, predicted and measured."""
    tokens, found = row.run.global_batch * row.run.seq_len / row.run.world_size, throughput.predict(row)
    assert found.rate
    return tokens / found.rate, tokens / row.measured


@cache
def beyond() -> float:
    """Return how far off an extrapolated product is that 80 % are nearer than, as a logarithm: each card's grids
    without the last three quarters of every axis, against what was measured there, of sizes that training has."""
    errors = []
    for grid in (measured.grid for name in measured_cards() for measured in _table(name).matmuls.values()):
        axes = [tuple(size for size in axis if size <= axis[-1] / QUARTER) for axis in grid.axes]
        kept = Grid(tuple(axes), tuple(round(UNIT * log2(grid.nanoseconds(sizes))) for sizes in product(*axes)))
        errors += [
            log(timed(kept, sizes, WORK["matmuls"]).seconds / timed(grid, sizes, WORK["matmuls"]).seconds)
            for sizes in product(*grid.axes)
            if min(sizes) >= SMALLEST and not kept.contains(sizes)
        ]
    return _held(errors)


def engine(rows: list[throughput.Row]) -> float:
    """Return the seconds that short steps on several GPUs of a node took longer than predicted, at most: what engines
    do in each step beside computing. Short steps on many nodes wait for their network."""
    several = [row for row in rows if 1 < row.run.world_size <= cluster(row.card, **(row.nodes or {})).gpus]
    short = [found for row in several if (found := seconds(row))[0] < SHORT]
    return max(measured - predicted for predicted, measured in short)


def loop(rows: list[throughput.Row]) -> float:
    """Return the seconds that 80 % of the sources' short steps on one GPU took longer than predicted, at most: the time
    in which the GPU waits for the training loop."""
    short = [(row.source, *seconds(row)) for row in rows if row.run.world_size == 1]
    return _quantile_by_sources([(source, ran - said) for source, said, ran in short if said < SHORT])


def _held(errors: list[float]) -> float:
    return sorted(map(abs, errors))[int(HELD * len(errors))]


def _held_by_sources(rows: list[throughput.Row]) -> float:
    """Return how far off the rows are that make up 80 %, where each source counts 1, however many rows it has; nan of
    no rows, with which no interval holds anything."""
    return _quantile_by_sources([(row.source, abs(error)) for row in rows for error in off([row])])


def _quantile_by_sources(found: list[tuple[str, float]]) -> float:
    """Return the value that 80 % are below, where each source's values count 1 together; nan of none."""
    counts = Counter(source for source, _ in found)
    nearest = sorted((value, 1 / counts[source]) for source, value in found)
    sums = accumulate(weight for _, weight in nearest)
    return next((value for (value, _), total in zip(nearest, sums, strict=True) if total > HELD * len(counts)), nan)


def inside_unseen(rows: list[throughput.Row]) -> float:
    """Return the share of rows inside of intervals that follow from the other sources' rows alone."""
    kept, inside = dict(times.training_rates()["spread"]), 0
    for source in {row.source for row in rows}:
        found = spreads([row for row in rows if row.source != source], unforeseen(but=source))
        times.training_rates()["spread"].update({name.strip('"'): value for name, value in found.items()})
        times.kernels.cache_clear()
        predicted = ((row.measured, throughput.predict(row)) for row in rows if row.source == source)
        inside += sum(it.low <= measured <= it.high for measured, it in predicted if it.low and it.high)
    times.training_rates()["spread"].update(kept)
    times.kernels.cache_clear()
    return inside / len(rows)


HEAD = """\
# What training steps reach, beside what single kernels do (hardware/kernels); derived on {date} by
# benchmarks/time/training_rates.py, don't edit by hand.
#
# measured   the GPUs with kernels that were measured
# share      of the data sheet, medians over those GPUs: of the peak by a matmul of 8192 x 8192 matrices, and by
#            causal attention (batch 8, 32 heads of 128, 4096 tokens); of the bandwidth by element-wise operators, the
#            mean of the GPUs in efficiencies.toml whose operators were measured, and of the rate of a copy there
#            (copied: of GPUs with timed copies, measured_rates.toml). How much longer the memory-efficient kernel
#            takes than FlashAttention 2 (arXiv 2307.08691, figure 4 c and d)
# flash_attention_2    10^12 FLOP/s of its forward and backward pass, by compute capability and head size, of so many
#            sequences of `lengths` that they have 16,384 tokens, with heads of 2,048 in all (figures 4 and 7, c and d);
#            a B200's and B300's: an H100's, times what a B200 does more without a mask (Dao-AILab/flash-attention,
#            issue 1589)
# sustained  share of the peak that no kernel exceeds in a step that lasts, where the power limit holds clocks back, by
#            compute capability: A100, H100, B200, B300 and their like; of other chips nobody published enough for it
# fp8        what that share is times in fp8, by its major part. mxfp8: how much longer products with a scale per 32
#            elements take
# scale      contention: the share of hidden communication that a step loses all the same, of the time that it takes
#            inside a node; what each doubling of the nodes costs: seconds, by which one run took longer on 2,048 GPUs
#            than on 16, and a share of the step where ranks wait for one another in each layer, for sharded parameters
# spread     logarithm by which 80 % of predictions are off at most, by where the rates are from; AMD: of its cards,
#            and of a data sheet at least; cut: at least, with tensor or pipeline parallelism; pipeline: at least, of
#            engines that are not named; beyond: of products that are extrapolated, beside the rest: measured grids cut
#            to a quarter of each axis, against what was measured beyond
# engine     seconds that a step on several GPUs may take longer, whatever the model: logging, clipping, norms, and
#            other things of an engine that wait for the GPU. Megatron-LM's functional tests of tiny models took so much
# loop       seconds that a step on one GPU may take longer, whatever the model: 80 % of published steps of less than a
#            tenth of a second took at most so much longer than predicted. The loop reads the loss, so nothing hides the
#            time for the next batch, for clearing gradients, for clipping and for logging
#
# sustained, fp8 and the rest of scale are fitted to {rows} published throughputs ({after}).
# spread is that of {other} others ({left_out}), each source counting the same, times {widened:.2f}:
# so much wider the intervals of rows that nobody had looked at (benchmarks/time/predictions.json) had to be, to hold 80
# % of them. Intervals that follow from all sources but one hold {unseen:.0%} of the rows of that one.
"""


@click.command()
@click.option("--write", "written", is_flag=True, help="Write the table.")
def main(written: bool) -> None:
    """Derive the table and say how well it holds."""
    rows = throughput.rows()
    chosen, others = ([row for row in rows if row.group == group] for group in ("in sample", "left out"))
    times.training_rates()["share"].update(shares())
    found = fit(chosen)
    after, left_out = (throughput.errors([(row, throughput.predict(row)) for row in some]) for some in (chosen, others))
    head = HEAD.format(
        date=date.today(), rows=len(chosen), other=len(others), after=_said(after), left_out=_said(left_out),
        unseen=inside_unseen(others), widened=unforeseen(),
    )
    fitted = {part: {name if name.isidentifier() else f'"{name}"': found[name] for name in names}
              for part, names in FITTED.items()}  # fmt: skip
    fitted["scale"]["seconds_per_doubling"] = times.training_rates()["scale"]["seconds_per_doubling"]
    parts = {
        "share": shares(),
        **fitted,
        "spread": spreads(others, unforeseen()),
        "engine": {"seconds": engine(others)},
        "loop": {"seconds": loop(others)},
    }  # fmt: skip
    names = ", ".join(f'"{name}"' for name in measured_cards())
    text = head + f"measured = [{names}]\n\n[flash_attention_2]\nlengths = {list(LENGTHS.values())}\n"
    for chip, sizes in flash_attention_2().items():
        rates = ", ".join(f"{size} = [{', '.join(f'{rate:.0f}' for rate in each)}]" for size, each in sizes.items())
        text += f'"{chip}" = {{ {rates} }}\n'
    for part, values in parts.items():
        text += f"\n[{part}]\n" + "".join(f"{name} = {value:.3g}\n" for name, value in values.items())
    print(text)
    if written:
        TABLE.write_text(text, encoding="utf-8")


def _said(errors: throughput.Errors) -> str:
    return f"median {errors.median:.1%}, worst {errors.worst:.0%}"


if __name__ == "__main__":
    main()
