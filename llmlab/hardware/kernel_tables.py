"""How long single kernels take on a card, as measured by others: matrix products, attention, NCCL's collectives.

One file per card lies in kernels/, distilled by tools/import_kernels.py from the tables in NVIDIA's aiconfigurator-core
(Apache-2.0). A figure between measured points is interpolated; one beyond them is not measured, and the answer says so.

    >>> table = kernel_table("A100-80GB")
    >>> found = table.matmul(8192, 8192, 8192, "bf16")
    >>> 200e12 < 2 * 8192**3 / found.seconds < 312e12, found.inside
    (True, True)
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import ceil, log2, prod
from pathlib import Path
from typing import Any, NamedTuple

from ..base.errors import SpecError

FOLDER = Path(__file__).with_name("kernels")
UNIT = 64  # a stored value is round(64 · log2(nanoseconds)): within 0.55 % of the figure
SCHEMA = 1
GENERAL = ("matmuls", "attentions", "collectives")  # the families of kernels/; those of engine_kernels/ come after
# The power of each axis with which a kernel's work grows: of (m, n, k), (head size, length, heads), (ranks, bytes),
# (head size, sequences · kv heads, length), and for latents (heads, sequences, length) and (heads, length).
WORK = {"matmuls": (1, 1, 1), "attentions": (1, 2, 1), "collectives": (0, 1), "decode_attentions": (1, 1, 1),
        "latent_decode": (0, 1, 1), "latent_prefill": (1, 2)}  # fmt: skip


class KernelTime(NamedTuple):
    """Seconds of one kernel; `inside` says whether all measured points around it exist."""

    seconds: float
    inside: bool


@dataclass(frozen=True)
class Grid:
    """Measured times on a grid: ascending `axes`, and `values` in row-major order, round(UNIT · log2(nanoseconds))."""

    axes: tuple[tuple[int, ...], ...]
    values: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(list(axis) != sorted(set(axis)) or axis[0] < 1 for axis in self.axes):
            raise SpecError("the axes of a grid of kernel times must ascend from 1 or more")
        if len(self.values) != prod(map(len, self.axes)):
            raise SpecError(
                f"a grid of {'×'.join(str(len(a)) for a in self.axes)} points has {len(self.values)} values"
            )

    @cached_property
    def _logs(self) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(map(log2, axis)) for axis in self.axes)

    def contains(self, point: Sequence[float]) -> bool:
        """Return whether `point` lies between measured ones."""
        return all([axis[0] <= x <= axis[-1] for axis, x in zip(self.axes, point, strict=True)])

    def nanoseconds(self, point: Sequence[float]) -> float:
        """Return the time at `point`, linear in the logarithms; beyond an axis that of its end."""
        spots = [(0, 1.0)]  # places in `values`, and their weights
        for axis, logs, x in zip(self.axes, self._logs, point, strict=True):
            count = len(axis)
            if x <= axis[0]:
                low, upper = 0, 0.0
            elif x >= axis[-1]:
                low, upper = count - 1, 0.0
            else:
                low = bisect_right(axis, x) - 1
                upper = (log2(x) - logs[low]) / (logs[low + 1] - logs[low])
            found = [(place * count + low, weight * (1 - upper)) for place, weight in spots]
            if upper:
                found += [(place * count + low + 1, weight * upper) for place, weight in spots]
            spots = found
        total = sum([weight * self.values[place] for place, weight in spots])
        return float(2 ** (total / UNIT))


@dataclass(frozen=True)
class Measured:
    """A grid of kernel times. `measured_by`: frameworks and versions; `kernel`: its name, where there are several.

    `tile`: (rows, columns) of a product's blocks, where its time follows whole waves of them; the grid is then of the
    time per wave. `left_out`: what interpolation was off by on `points` measured points that the grid leaves out, as
    fractions of the time, the `median` and the 90th percentile, `p90`.
    """

    grid: Grid
    measured_by: tuple[str, ...]
    kernel: str = ""
    tile: tuple[int, int] | None = None
    left_out: Mapping[str, float] = field(default_factory=dict)


# A card whose FlashAttention 2 was measured at several head sizes: others are as much faster or slower at them.
SIZED = "L40S"


@dataclass(frozen=True)
class KernelTable:
    """The measured kernels of one card: products by dtype, causal attention in bf16, collectives by operation."""

    gpu: str
    device: str
    source: str
    sms: int
    matmuls: Mapping[str, Measured]
    attentions: Mapping[str, Measured]
    collectives: Mapping[str, Measured]

    def matmul(self, m: int, n: int, k: int, dtype: str = "bf16") -> KernelTime | None:
        """Return the time of (m, k) · (k, n); None where `dtype` was not measured. fp16 takes bf16's time.

        In bf16 what was measured only transposed, (n, k) · (k, m), takes as long: a few percent apart where both were.
        In fp8 it does not: the first matrix is cast within the time.
        """
        kind = "bf16" if dtype == "fp16" else dtype
        measured = self.matmuls.get(kind)
        if measured is None:
            return None
        sizes = m, n, k
        if kind == "bf16" and not measured.grid.contains(sizes) and measured.grid.contains((n, m, k)):
            sizes = n, m, k
        found = timed(measured.grid, sizes, WORK["matmuls"])
        return found._replace(seconds=found.seconds * padding(sizes, measured.tile, self.sms))

    def attention(self, batch: int, heads: int, length: int, head_size: int) -> KernelTime | None:
        """Return the time of the forward pass of causal attention in bf16; None where none was measured."""
        if (measured := self.attentions.get("bf16")) is None:
            return None
        sizes, rest = measured.grid.axes[0], (length, batch * heads)
        if len(sizes) == 1 and head_size != sizes[0] and (other := kernel_table(SIZED)):
            at, like = (other.attention(batch, heads, length, size) for size in (head_size, sizes[0]))
            assert at and like
            there = timed(measured.grid, (sizes[0], *rest), WORK["attentions"])
            return KernelTime(there.seconds * at.seconds / like.seconds, False)
        return timed(measured.grid, (head_size, *rest), WORK["attentions"])

    def collective(self, operation: str, size: int, ranks: int) -> KernelTime | None:
        """Return the time of "all-reduce", "all-gather", "reduce-scatter" or "all-to-all" inside a node.

        `size` is the bytes of the whole buffer: for all-gather the gathered one. None where the operation or so many
        ranks were not measured.
        """
        measured = self.collectives.get(operation)
        if measured is None or ranks > measured.grid.axes[0][-1]:
            return None
        return timed(measured.grid, (ranks, size), WORK["collectives"])


def padding(point: Sequence[float], tile: Sequence[int] | None, sms: int) -> float:
    """Return by how much a product's tiles, in whole waves over the multiprocessors, exceed its size; 1 without tiles.

    A kernel with one block per tile needs as many waves as there are blocks over multiprocessors, rounded up.
    """
    if tile is None:
        return 1.0
    blocks = ceil(point[0] / tile[0]) * ceil(point[1] / tile[1])
    return ceil(blocks / sms) * sms * tile[0] * tile[1] / (point[0] * point[1])


def timed(grid: Grid, point: tuple[int, ...], powers: tuple[int, ...]) -> KernelTime:
    """Return the time at `point`: beyond an axis' end it grows as the work does, by that power of the axis."""
    sides = zip(point, grid.axes, powers, strict=True)
    grown = prod([(x / axis[-1]) ** power for x, axis, power in sides if x > axis[-1]])
    return KernelTime(1e-9 * grid.nanoseconds(point) * grown, grid.contains(point))


@cache
def kernel_table(gpu: str) -> KernelTable | None:
    """Return the measured kernels of the card that the GPU table calls `gpu`; None where nobody measured it.

    Raises SpecError for a file that is not what `tools/import_kernels.py` writes.
    """
    path = FOLDER / f"{gpu}.json"
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise SpecError(f"this version of llmlab reads schema {SCHEMA}")
        families = ({key: _measured(entry) for key, entry in data[family].items()} for family in GENERAL)
        return KernelTable(data["gpu"], data["device"], data["source"], data["sms"], *families)
    except (ValueError, KeyError, TypeError, SpecError) as error:
        raise SpecError(f"{path} is no table of kernel times ({error}); tools/import_kernels.py writes them") from None


def _measured(entry: dict[str, Any]) -> Measured:
    return Measured(
        Grid(tuple(map(tuple, entry["axes"])), tuple(entry["values"])),
        tuple(entry["measured_by"]),
        entry.get("kernel", ""),
        tuple(entry["tile"]) if "tile" in entry else None,
        entry.get("left_out", {}),
    )
