"""The T4 rows as their sessions loaded them: how the order of loading an NF4 base model changes the reserved bytes.

transformers 5.0 to 5.3 read tensors in threads, ahead of the one thread that quantizes, so that each load has an order
of its own; from 5.4 on a tensor is read once the one before is quantized (core_model_loading.py). Allocated bytes tell
which of the two a session did, since the allocator does not split a large block if less than 1 MiB would be left;
reserved bytes are not used for that. For threads `DRAWS` orders are drawn, and each figure is the median.
"""

from __future__ import annotations

from functools import cache
from statistics import median
from typing import NamedTuple

import llmlab as lab
from benchmarks.memory import configurations, peers
from benchmarks.memory.configurations import BAR, mebibytes
from benchmarks.memory.load_orders import Peaks, requests_of
from benchmarks.memory.past_releases import cache_kept_by_peft, read_ahead, rotary_products
from llmlab import Report, Training
from llmlab.base.units import MiB
from llmlab.step.quantized import one_at_a_time

# Chosen after the rows were known: with 9 to 15 draws the median load of SmolLM2-360M is up to 1.3 % off a row, with 25
# to 201 draws 0.9 to 1.0 %. It was loaded twice in that session, and any number is at least 0.86 % off one of the two.
DRAWS = 25
NEAR = MiB  # the older rows are published in whole MiB
PHASE_BAR = 0.01

SESSIONS = "How each session loaded its NF4 bases, as the allocated bytes reveal"
SESSIONS_HEADER = ["session", "rows", "peak as loaded in order, to 1 MiB", "peak as in one of the draws, to 1 MiB",
                   "conclusion"]  # fmt: skip
HELD = f"MiB allocated when an NF4 model was loaded: measured, and simulated in order and in {DRAWS} draws of threads"
HELD_HEADER = ["model", "measured", "in order", "threads: least – median – most"]


class Loaded(NamedTuple):
    """A step simulated with its base loaded in order and, if it is quantized, by threads; None: out of memory."""

    in_order: Peaks | None
    drawn: list[Peaks | None]

    @property
    def typical(self) -> Peaks | None:
        """The median of each figure over the draws; None if more than half of them run out of memory."""
        ran = [peaks for peaks in self.drawn if peaks]
        if 2 * len(ran) < len(self.drawn):
            return None
        return Peaks(
            int(median(peaks.allocated for peaks in ran)),
            int(median(peaks.reserved for peaks in ran)),
            {phase: int(median(peaks.phases[phase] for peaks in ran)) for phase in ran[0].phases},
        )


@cache
def loaded(model: str, run: Training) -> Loaded:
    """Simulate a row with the libraries of its time: rotary angles by a product, and a peft that keeps its cache."""
    with rotary_products():
        if not run.quantization:
            step = lab.simulate(model, run, "T4")
            assert step.peak_allocated is not None and step.peak_reserved is not None
            return Loaded(Peaks(step.peak_allocated, step.peak_reserved, dict(step.phases)), [])
        with cache_kept_by_peft():
            requests = requests_of(model, run, "T4")
    in_order = requests.in_order(one_at_a_time(requests.sizes))
    return Loaded(in_order, [requests.in_order(read_ahead(requests.sizes, seed)) for seed in range(DRAWS)])


def of(row: Report) -> Loaded:
    """Return the simulations of a row."""
    return loaded(row.model, row.run)


def session(row: Report) -> str:
    return str(row.environment.get("session"))


def by_threads(rows: list[Report]) -> set[str]:
    """Return the sessions that cannot have loaded in order, because one of their rows has another peak."""
    return {session(row) for row in rows if row.run.quantization and not _peaks_as(row, of(row).in_order)}


def _peaks_as(row: Report, peaks: Peaks | None) -> bool:
    return peaks is not None and abs(peaks.allocated - (row.peak_allocated or 0)) < NEAR


def predicted(row: Report, threaded: set[str]) -> Peaks | None:
    """Return the peaks of a row as its session loaded."""
    found = of(row)
    return found.typical if found.drawn and session(row) in threaded else found.in_order


def error(row: Report, threaded: set[str]) -> float | None:
    """Return (predicted − measured) / measured of the reserved bytes; None if the step is predicted not to fit."""
    peaks = predicted(row, threaded)
    return peaks.reserved / row.peak_reserved - 1 if peaks and row.peak_reserved else None


# ---- tables


def sessions(rows: list[Report]) -> list[list[str]]:
    """Return a text row per session with NF4 bases: which way of loading explains its peaks."""
    threaded, groups = by_threads(rows), {}
    for row in rows:
        if row.run.quantization:
            groups.setdefault(session(row), []).append(row)
    return [
        [
            name, str(len(group)), str(sum(_peaks_as(row, of(row).in_order) for row in group)),
            str(sum(any(_peaks_as(row, peaks) for peaks in of(row).drawn) for row in group)),
            "by threads" if name in threaded else "in order",
        ]
        for name, group in groups.items()
    ]  # fmt: skip


def held(rows: list[Report]) -> list[list[str]]:
    """Return a text row per NF4 model whose bytes after loading were measured: each different figure, and simulated."""
    groups: dict[str, list[Report]] = {}
    for row in rows:
        if row.run.quantization and row.phases.get("load"):
            groups.setdefault(row.model.rpartition("/")[2], []).append(row)
    found = []
    for name, group in groups.items():
        measured = sorted({row.phases["load"] for row in group})
        first = of(group[0])
        drawn = sorted(peaks.phases["load"] for peaks in first.drawn if peaks)
        found.append([
            name, " / ".join(mebibytes(size) for size in measured),
            mebibytes(first.in_order.phases["load"]) if first.in_order else "–", spread(drawn),
        ])  # fmt: skip
    return found


def spread(sizes: list[int]) -> str:
    """Return the least, the median and the largest size in MiB, or one number if all are the same."""
    shown = [mebibytes(size) for size in (min(sizes), int(median(sizes)), max(sizes))] if sizes else ["–"]
    return " – ".join(shown) if len(set(shown)) > 1 else shown[0]


def reserved(found: Loaded) -> str:
    """Return the least, the median and the most that the draws reserve, and how many of them run out of memory."""
    sizes = sorted(peaks.reserved for peaks in found.drawn if peaks)
    missing = len(found.drawn) - len(sizes)
    return (spread(sizes) if sizes else "") + (f" (out of memory in {missing})" if missing else "")


# ---- notes


def notes(rows: list[Report]) -> list[str]:
    """Return the errors of reserved bytes, allocated bytes and phases, each row loaded as its session loaded it."""
    if not rows:
        return []
    threaded = by_threads(rows)
    ran = [(row, peaks) for row in rows if (peaks := predicted(row, threaded))]
    errors = [peaks.reserved / row.peak_reserved - 1 for row, peaks in ran if row.peak_reserved]
    missed = [(row, off) for row in rows if (off := error(row, threaded)) is None or abs(off) > BAR]
    outside = "; ".join(f"{named(row)} ({'does not fit' if off is None else f'{off:+.1%}'})" for row, off in missed)
    exact = sum(round(off, 6) == 0 for off in errors)
    said = [
        f"Reserved bytes, each row as its session loaded: {median_and_worst(errors)}; "
        f"{len(rows) - len(missed)} of {len(rows)} rows within {BAR:.0%}, {exact} exact."
        + (f" Not {outside}." if missed else "")
    ]
    allocated = [peaks.allocated / row.peak_allocated - 1 for row, peaks in ran if row.peak_allocated]
    said.append(f"Allocated bytes: {median_and_worst(allocated)}.")
    phases = [
        (peaks.phases[phase] / size - 1, f"{phase} of {named(row)}")
        for row, peaks in ran
        for phase, size in row.phases.items()
    ]
    if phases:
        inside = sum(abs(off) <= PHASE_BAR for off, _ in phases)
        farthest, where = max(phases, key=lambda phase: abs(phase[0]))
        count = f"{inside} of {len(phases)} within {PHASE_BAR:.0%}"
        said.append(f"Phases: {count}; the largest error is at {where}, {farthest:+.2%}.")
    drawn = [(row, [peaks.reserved for peaks in of(row).drawn if peaks]) for row in rows if session(row) in threaded]
    ranges = [(min(sizes), row.peak_reserved, max(sizes)) for row, sizes in drawn if sizes]
    if ranges:
        between = sum(least <= size <= most for least, size, most in ranges)
        text = f"Loaded by threads: {between} of {len(ranges)} measured figures lie between the least and the most of "
        said.append(f"{text}the {DRAWS} draws.")
    return said


def median_and_worst(errors: list[float]) -> str:
    return f"median {median(map(abs, errors)):.2%}, worst {max(errors, key=abs):+.2%}"


def named(row: Report) -> str:
    """Return the name of a row's configuration."""
    return configurations.name(peers.as_row(row))
