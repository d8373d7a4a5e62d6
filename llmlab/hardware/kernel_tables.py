"""Published times of single kernels on a GPU: matmuls, attention, NCCL's collectives.

The folder kernels/ contains one file per GPU, which tools/import_kernels.py extracts from the tables in NVIDIA's
aiconfigurator-core (Apache-2.0). Times between measured points are interpolated. Times beyond them are extrapolated,
and marked with `inside=False`.

    >>> table = kernel_table("A100-80GB")
    >>> time = table.matmul(8192, 8192, 8192, "bf16")
    >>> 200e12 < 2 * 8192**3 / time.seconds < 312e12, time.inside
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
UNIT = 64  # a stored value is round(64 · log2(nanoseconds)), within 0.55 % of the measured time
SCHEMA = 1
GENERAL = ("matmuls", "attentions", "collectives")  # the families in kernels/; engine_kernels/ has further ones
# For each family, the powers of its axes with which a kernel's work grows. The axes are (m, n, k), (head size, length,
# heads), (ranks, bytes), (head size, sequences · kv heads, length), and for latent attention (heads, sequences, length)
# and (heads, length).
WORK = {"matmuls": (1, 1, 1), "attentions": (1, 2, 1), "collectives": (0, 1), "decode_attentions": (1, 1, 1),
        "latent_decode": (0, 1, 1), "latent_prefill": (1, 2)}  # fmt: skip


class KernelTime(NamedTuple):
    """Seconds of one kernel; `inside` says whether it lies between measured points."""

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
        """Return whether `point` lies between measured points."""
        return all([axis[0] <= x <= axis[-1] for axis, x in zip(self.axes, point, strict=True)])

    def nanoseconds(self, point: Sequence[float]) -> float:
        """Return the time at `point`, interpolated linearly in logarithms; beyond an axis, the time at its end."""
        corners = [(0, 1.0)]  # indices into `values`, and their weights
        for axis, logs, x in zip(self.axes, self._logs, point, strict=True):
            count = len(axis)
            if x <= axis[0]:
                low, upper = 0, 0.0
            elif x >= axis[-1]:
                low, upper = count - 1, 0.0
            else:
                low = bisect_right(axis, x) - 1
                upper = (log2(x) - logs[low]) / (logs[low + 1] - logs[low])
            next_corners = [(index * count + low, weight * (1 - upper)) for index, weight in corners]
            if upper:
                next_corners += [(index * count + low + 1, weight * upper) for index, weight in corners]
            corners = next_corners
        total = sum([weight * self.values[index] for index, weight in corners])
        return float(2 ** (total / UNIT))


@dataclass(frozen=True)
class Measured:
    """A grid of kernel times. `measured_by` lists frameworks and versions, and `kernel` names one of several kernels.

    `tile` is the (rows, columns) of a matmul's blocks if its time is proportional to whole waves of blocks. The grid
    then holds the time without that rounding. `left_out` describes the error of interpolation on `points` measured
    points that are not in the grid: the `median` and the 90th percentile, `p90`, as fractions of the time.
    """

    grid: Grid
    measured_by: tuple[str, ...]
    kernel: str = ""
    tile: tuple[int, int] | None = None
    left_out: Mapping[str, float] = field(default_factory=dict)


# FlashAttention 2 was measured at several head sizes on this GPU, and we assume the same ratios on others.
SIZED = "L40S"


@dataclass(frozen=True)
class KernelTable:
    """The measured kernels of one GPU: matmuls by dtype, causal attention in bf16, collectives by operation."""

    gpu: str
    device: str
    source: str
    sms: int
    matmuls: Mapping[str, Measured]
    attentions: Mapping[str, Measured]
    collectives: Mapping[str, Measured]

    def matmul(self, m: int, n: int, k: int, dtype: str = "bf16") -> KernelTime | None:
        """Return the time of (m, k) · (k, n); None if `dtype` was not measured. fp16 uses the times of bf16.

        In bf16, a shape that was measured only as (n, k) · (k, m) uses that time; where both were measured, they differ
        by a few percent. In fp8 they differ, because the time includes the cast of the first matrix.
        """
        kind = "bf16" if dtype == "fp16" else dtype
        measured = self.matmuls.get(kind)
        if measured is None:
            return None
        sizes = m, n, k
        if kind == "bf16" and not measured.grid.contains(sizes) and measured.grid.contains((n, m, k)):
            sizes = n, m, k
        time = timed(measured.grid, sizes, WORK["matmuls"])
        return time._replace(seconds=time.seconds * padding(sizes, measured.tile, self.sms))

    def attention(self, batch: int, heads: int, length: int, head_size: int) -> KernelTime | None:
        """Return the time of the forward pass of causal attention in bf16; None if it was not measured."""
        if (measured := self.attentions.get("bf16")) is None:
            return None
        sizes, batch_sizes = measured.grid.axes[0], (length, batch * heads)
        if len(sizes) == 1 and head_size != sizes[0] and (other := kernel_table(SIZED)):
            other_time, other_base = (other.attention(batch, heads, length, size) for size in (head_size, sizes[0]))
            assert other_time and other_base
            own = timed(measured.grid, (sizes[0], *batch_sizes), WORK["attentions"])
            return KernelTime(own.seconds * other_time.seconds / other_base.seconds, False)
        return timed(measured.grid, (head_size, *batch_sizes), WORK["attentions"])

    def collective(self, operation: str, size: int, ranks: int) -> KernelTime | None:
        """Return the time of "all-reduce", "all-gather", "reduce-scatter" or "all-to-all" inside a node.

        `size` is the bytes of the whole buffer, for all-gather those of the gathered buffer. None if the operation or
        the number of ranks was not measured.
        """
        measured = self.collectives.get(operation)
        if measured is None or ranks > measured.grid.axes[0][-1]:
            return None
        return timed(measured.grid, (ranks, size), WORK["collectives"])


def padding(point: Sequence[float], tile: Sequence[int] | None, sms: int) -> float:
    """Return the ratio of the tiles in whole waves over all multiprocessors to the matmul's size; 1 without tiles.

    A kernel with one block per tile needs ceil(blocks / multiprocessors) waves.
    """
    if tile is None:
        return 1.0
    blocks = ceil(point[0] / tile[0]) * ceil(point[1] / tile[1])
    return ceil(blocks / sms) * sms * tile[0] * tile[1] / (point[0] * point[1])


def timed(grid: Grid, point: tuple[int, ...], powers: tuple[int, ...]) -> KernelTime:
    """Return the time at `point`. Beyond the end of an axis it grows like the work, with that power of the axis."""
    sides = zip(point, grid.axes, powers, strict=True)
    growth = prod([(x / axis[-1]) ** power for x, axis, power in sides if x > axis[-1]])
    return KernelTime(1e-9 * grid.nanoseconds(point) * growth, grid.contains(point))


@cache
def kernel_table(gpu: str) -> KernelTable | None:
    """Return the measured kernels of `gpu`, a name in the GPU table; None if it was not measured.

    Raises SpecError for a file that tools/import_kernels.py did not write.
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
