"""Sequences of several lengths: batches padded to their longest sequence, the worst batch, and when it comes."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, lgamma
from pathlib import Path
from typing import Any

from ..base.errors import SpecError
from ..base.tables import Table, Tabular
from ..base.units import show_bytes
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu
from ..hardware.links import Cluster
from ..report import Report
from ..specs.model import ModelLike
from ..specs.model import model as find_model
from ..specs.run import Training
from .levers import derived

SHARES = {"median": 0.5, "90th percentile": 0.9, "99th percentile": 0.99}  # of batches; each has a row
TRIAL = 100  # updates that people try before they start a long run


@dataclass(frozen=True)
class PaddedBatch:
    """A batch padded to `length` tokens, with its estimate; `shorter` is the share of batches that are at most as
    long."""

    name: str
    length: int
    shorter: float
    report: Report


@dataclass(frozen=True, repr=False)
class Lengths(Tabular):
    """The memory of training on sequences of several lengths: estimates of `batches` from the median to the worst.

    `longest_fitting` is the longest length whose batches are sure to fit; None if there is none or no GPU was given.
    Of the `sequences`, `longer` are longer than that. In random order, the first of them comes in update `first_update`
    on average, and within the first 100 updates with probability `within_trial`. Every epoch contains all of them.
    """

    batches: tuple[PaddedBatch, ...]
    sequences: int
    micro_batch: int
    longest_fitting: int | None
    longer: int
    first_update: int
    within_trial: float

    @property
    def worst(self) -> Report:
        """The estimate of the batch that has the longest sequence."""
        return self.batches[-1].report

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values, sizes in bytes."""
        batches = [{"name": batch.name, "length": batch.length, "shorter": batch.shorter,
                    "report": batch.report.to_dict()} for batch in self.batches]  # fmt: skip
        names = ("sequences", "micro_batch", "longest_fitting", "longer", "first_update", "within_trial")
        return {"batches": batches, **{name: getattr(self, name) for name in names}}

    def _table(self) -> Table:
        rows = [
            (batch.name, f"{batch.length:,}", f"{batch.shorter:.1%}", show_bytes(batch.report.peak_allocated),
             show_bytes(batch.report.needed), batch.report.outcome) for batch in self.batches
        ]  # fmt: skip
        header = ("batch", "tokens per sequence", "batches up to it", "peak allocated", "memory needed", "outcome")
        title = f"{self.worst.title}: {self.sequences:,} sequences in batches of {self.micro_batch}, padded"
        return Table(header, rows, title, "\n".join(self._sentences()), (0, 5))

    def _sentences(self) -> list[str]:
        longest = f"The longest sequence has {self.batches[-1].length:,} tokens, and every epoch has its batch once."
        if self.longest_fitting is None or not self.longer:
            return [longest]
        return [
            longest,
            f"{self.longer:,} of {self.sequences:,} sequences are longer than {self.longest_fitting:,} tokens, the "
            "longest that are sure to fit. In random order, the first of them comes in update "
            f"{self.first_update:,} on average. A trial of {TRIAL} updates meets one with a probability of "
            f"{self.within_trial:.0%}.",
        ]

    def __repr__(self) -> str:
        return f"<Lengths: {self.sequences:,} sequences, up to {self.batches[-1].length:,} tokens>"


def read_lengths(path: str | Path) -> list[int]:
    """Return the lengths in a file: one whole number per line, or a JSON list of them."""
    text = Path(path).read_text("utf-8-sig", errors="replace").strip()
    try:
        lengths = json.loads(text) if text.startswith("[") else [int(line) for line in text.split()]
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} holds no lengths ({error}); give one whole number per line, or a JSON list") from None
    if not lengths or any(isinstance(length, bool) or not isinstance(length, int) or length < 1 for length in lengths):
        raise SpecError(f"{path} must hold whole numbers of tokens from 1 on, one per line or as a JSON list")
    return lengths


def padded(
    model: ModelLike, run: Training, gpu: GPU | str | None, lengths: Sequence[int], cluster: Cluster | None = None
) -> Lengths:
    """Return the memory of batches of `run.micro_batch` sequences, each padded to its longest sequence.

    `lengths` are the tokens of every sequence and replace `run.seq_len`. The sequences are drawn in random order
    without replacement, as by a DataLoader with shuffle=True. Raises SpecError if the sequences do not fill one batch,
    and as `estimate` does.
    """
    spec, device = find_model(model), gpu if gpu is None or gpu == "cpu" else find_gpu(gpu)
    ordered = sorted(lengths)
    total, size = len(ordered), run.micro_batch
    if total < size:
        raise SpecError(f"{total} sequences do not fill a batch of {size}; give more lengths or a smaller micro_batch")
    reports: dict[int, Report] = {}

    def report(length: int) -> Report:
        if length not in reports:
            reports[length] = derived(spec, replace(run, seq_len=length), device, cluster)[0]
        return reports[length]

    def up_to(length: int) -> float:
        return _share_without(total, total - bisect_right(ordered, length), size)

    distinct = sorted(set(ordered))
    rows = [(name, next(length for length in distinct if up_to(length) >= share)) for name, share in SHARES.items()]
    fitting = None
    if device is not None:
        count = bisect_right(distinct, 0, key=lambda length: report(length).outcome != "fits")
        fitting = distinct[count - 1] if count else None
    if fitting is not None and fitting < distinct[-1]:
        rows.append(("longest that fits", fitting))
    batches = [PaddedBatch(name, length, up_to(length), report(length))
               for name, length in [*sorted(rows, key=lambda item: item[1]), ("worst", distinct[-1])]]  # fmt: skip
    longer = total - bisect_right(ordered, fitting or 0)
    per_update = size * run.accumulation * run.dp
    trial = min(total, TRIAL * per_update)
    return Lengths(tuple(batches), total, size, fitting, longer, ceil((total + 1) / (longer + 1) / per_update),
                   1 - _share_without(total, longer, trial))  # fmt: skip


def _share_without(total: int, some: int, drawn: int) -> float:
    """Return the probability that `drawn` of `total` items, drawn without replacement, contain none of `some` items."""
    if some + drawn > total:
        return 0.0

    def log_ways(n: int, k: int) -> float:
        return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)

    return min(1.0, exp(log_ways(total - some, drawn) - log_ways(total, drawn)))
