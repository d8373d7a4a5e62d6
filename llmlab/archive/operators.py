"""Measurements of single operators: ours and published, a value for one operator, provider, mode and size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..base.errors import SpecError
from .lookup import gpu_name, load

METRICS = {"time": "s", "memory": "bytes"}
MODES = ("forward", "backward", "full")


@dataclass(frozen=True, kw_only=True)
class OperatorRecord:
    """One operator, measured once: `value` in `unit`, seconds for metric "time", bytes for metric "memory".

    `provider` is whose implementation ran: "huggingface" is plain PyTorch, "torch_compile" the same compiled, "liger"
    the Triton kernel; of benchmarks/kernels/kernel_times.py "naive", "pytorch" and "llmlab" are our rungs, "sdpa" is
    PyTorch's fused attention, "llmlab-sweep" ours with the tiles, warps and stages in `options` (none: what it chooses
    itself). `mode`: "forward", "backward", or "full", both. `sizes` carries the names of the benchmark it
    comes from (B or bsz, T, V, H, ...), `options` what else it stated; `dtype` is None where it stated none.
    """

    operator: str
    provider: str
    mode: str
    metric: str
    unit: str
    value: float
    sizes: Mapping[str, int]
    options: Mapping[str, str | float]
    dtype: str | None
    gpu: str
    environment: Mapping[str, str]
    citation: str

    def __post_init__(self) -> None:
        if METRICS.get(self.metric) != self.unit:
            allowed = ", ".join(f"{metric} in {unit}" for metric, unit in METRICS.items())
            raise SpecError(f"metric {self.metric!r} in {self.unit!r} is not one of {allowed}")
        if self.mode not in MODES:
            raise SpecError(f"mode {self.mode!r} is not one of {', '.join(MODES)}")
        if not self.citation:
            raise SpecError(f"{self.operator} record has no citation")


def operator_records(
    operator: str | None = None,
    provider: str | None = None,
    mode: str | None = None,
    metric: str | None = None,
    gpu: str | None = None,
    **sizes: int,
) -> list[OperatorRecord]:
    """Return the operator records that agree with everything given, in the order they were published.

    >>> [r.value for r in operator_records("cross_entropy", "liger", "full", "memory", V=4096)]
    [268780032]
    """
    wanted = {"operator": operator, "provider": provider, "mode": mode, "metric": metric}
    name = None if gpu is None else gpu_name(gpu)
    return [
        record
        for series in load("operators", sweep)
        for record in series
        if all(value is None or getattr(record, field) == value for field, value in wanted.items())
        and (name is None or record.gpu == name)
        and all(record.sizes.get(size) == value for size, value in sizes.items())
    ]


def swept(records: Iterable[OperatorRecord]) -> list[tuple[OperatorRecord, OperatorRecord]]:
    """Return (with what the kernel chooses, with the fastest setting) for each kernel, pass, size and GPU swept."""
    groups: dict[tuple, list[OperatorRecord]] = {}
    for one in records:
        groups.setdefault((one.gpu, one.operator, one.mode, one.dtype, *sorted(one.sizes.items())), []).append(one)
    chosen = {key: next((one for one in group if not one.options), None) for key, group in groups.items()}
    return [(own, min(groups[key], key=lambda one: one.value)) for key, own in chosen.items() if own]


def sweep(data: Mapping[str, Any]) -> tuple[OperatorRecord, ...]:
    """Return the records of one line of a file: the size that varied, its values, and what was measured at each."""
    values = dict(data)
    varied, at, measured = values.pop("varied"), values.pop("at"), values.pop("values")
    if len(at) != len(measured):
        raise SpecError(f"{values.get('operator')}: {len(at)} sizes of {varied} but {len(measured)} values")
    fixed = values.pop("sizes")
    return tuple(
        OperatorRecord(value=value, sizes={varied: size, **fixed}, **values)
        for size, value in zip(at, measured, strict=True)
    )
