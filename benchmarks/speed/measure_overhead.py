"""What the meter costs: a training step with and without it, in pairs, on this machine's device.

    python -m benchmarks.speed.measure_overhead --model gpt2 --seq-len 256 --pairs 15
    python -m benchmarks.speed.measure_overhead --out benchmarks/results  # and write overhead.md

Each pair is two consecutive steps, one inside `with lab.meter()`, in alternating order, so that drifts (clock rates,
other work on the machine) affect both alike. It prints both medians, the median and the quartiles of the pairs' ratios,
and the same for pairs of plain steps, which show the machine's noise; then the cost of the recording alone: as many
bare allocations as the step makes, with and without it. The bar, 2 %, is for the step while it is recorded. To begin
the recording and to read it out takes time before and after the step, which is printed too. `measure` takes its times
without a meter. The exit code is 1 if the bare allocations, or three quarters of the pairs, exceed the bar.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import torch

import llmlab as lab
from benchmarks.provenance import provenance, table, write
from llmlab.measurement.devices import pick_device
from llmlab.step.step import Step, build_step, texts

BAR = 0.02
HEADER = ["pairs of steps", "first", "second", "ratio", "quartiles"]


def plain(step: Step) -> tuple[float, float]:
    """Return the seconds of a step, twice: there is no recording to begin or to read out."""
    start = time.perf_counter()
    run_once(step)
    took = time.perf_counter() - start
    return took, took


def metered(step: Step) -> tuple[float, float]:
    """Return the seconds of a step while it is recorded, and with the time to begin and to read out the recording."""
    start = time.perf_counter()
    with lab.meter(step.device) as m:
        begun = time.perf_counter()
        run_once(step)
        inside = time.perf_counter() - begun
    assert m.peak_allocated
    return inside, time.perf_counter() - start


def run_once(step: Step) -> None:
    step()
    if step.device.type == "cuda":
        torch.cuda.synchronize()


Timer = Callable[[Step], tuple[float, float]]


def pairs(step: Step, first: Timer, second: Timer, count: int) -> list[tuple[float, float, float]]:
    """Return, for `count` pairs in alternating order, the seconds of `first`, of `second` and of all of `second`."""
    found = []
    for i in range(count):
        if i % 2:
            inside, whole = second(step)
            found.append((first(step)[0], inside, whole))
        else:
            found.append((first(step)[0], *second(step)))
    return found


def recording_alone(device: torch.device, events: int) -> float:
    """Return the seconds that recording adds to `events` / 2 bare allocations and their frees."""

    def allocate() -> float:
        start = time.perf_counter()
        for _ in range(events // 2):
            torch.empty(1000, device=device)
        return time.perf_counter() - start

    added = []
    for _ in range(25):
        without = allocate()
        with lab.meter(device):
            added.append(allocate() - without)
    return median(added)


@dataclass(frozen=True)
class Summary:
    """Of pairs of steps: the median seconds of the first and of the second, and quartiles of second / first."""

    label: str
    first: float
    second: float
    low: float
    middle: float
    high: float

    def cells(self) -> list[str]:
        quartiles = f"{self.low:.4f} to {self.high:.4f}"
        times = [f"{self.first * 1e3:.1f} ms", f"{self.second * 1e3:.1f} ms"]
        return [self.label, *times, f"{self.middle:.4f}", quartiles]


def summary(label: str, found: list[tuple[float, float, float]]) -> Summary:
    """Return the summary of what `pairs` found."""
    low, middle, high = quantiles([second / first for first, second, _ in found], n=4)
    first, second, _ = (median(column) for column in zip(*found, strict=True))
    return Summary(label, first, second, low, middle, high)


def to_markdown(title: str, rows: list[Summary], said: list[str], made: str) -> str:
    """Return the table with its title, the sentences under it, and the line that says what made it."""
    lines = [f"**{title}**", "", *table(HEADER, [row.cells() for row in rows]), ""]
    return "\n".join([*lines, *(f"- {sentence}" for sentence in said), "", made])


def main() -> int:
    parser = argparse.ArgumentParser(description="What the meter costs on a training step.")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, default=None, help="folder to write overhead.md to")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("--pairs must be at least 2")
    spec, run, device = lab.model(options.model), lab.Training(seq_len=options.seq_len), pick_device(options.device)
    step = build_step(spec, run, device, texts(spec, run))
    for _ in range(2):
        step()
    with lab.meter(device) as m:
        step()
    title = f"{spec.name}, micro_batch 1, seq_len {options.seq_len}, {device}: "
    title += f"{len(m.timeline):,} allocations and frees a step, {options.pairs} pairs of steps"
    print(title)
    rows = [summary("plain, plain", pairs(step, plain, plain, options.pairs))]
    found = pairs(step, plain, metered, options.pairs)
    rows.append(summary("plain, metered", found))
    for row in rows:
        print("   ".join(row.cells()))
    alone = recording_alone(device, len(m.timeline))
    share = alone / rows[1].first
    around = median(whole - inside for _, inside, whole in found)
    too_slow = share > BAR or rows[1].low > 1 + BAR
    said = [
        f"Recording that many bare allocations adds {alone * 1e3:.2f} ms, {share:.3%} of a step (bar {BAR:.0%}): "
        + ("too much." if too_slow else "within the bar."),
        f"Beginning and reading out a recording take {around * 1e3:.1f} ms, before and after the step.",
    ]
    print("\n".join(said))
    if options.out:
        made = provenance("llmlab", "torch", "transformers")
        write(options.out / "overhead.md", to_markdown(title, rows, said, made))
    return int(too_slow)


if __name__ == "__main__":
    sys.exit(main())
