"""The rows of peers.py one by one: each configuration with all its measurements, and what the repeats show.

A configuration is a model and a training step; several rows of one are repeats of its measurement.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from llmlab.base.units import MiB

KEY = ("model", "quantization", "attention", "micro_batch", "seq_len")
ALLOCATED, RESERVED, TRACKED = "llmlab simulate", "llmlab simulate, reserved", "MemTracker"
BAR = 0.05  # what the worst error of reserved bytes should stay within
TITLE = "Peaks of each configuration in MiB; repeated measurements are listed if they differ"
HEADER = [
    "model, base, attention, batch × tokens", "allocated", "simulated", "error", "reserved", "simulated", "error",
    "MemTracker's error",
]  # fmt: skip

Row = dict[str, Any]


def configurations(rows: list[Row]) -> list[list[Row]]:
    """Return the rows that were simulated, grouped by configuration, in their order."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["predicted"].get(ALLOCATED) is None:  # torch is not installed
            continue
        groups.setdefault(tuple(row[key] for key in KEY), []).append(row)
    return list(groups.values())


def name(row: Row) -> str:
    base = "" if row["quantization"] == "none" else f"{row['quantization']}, "
    return f"{row['model'].rpartition('/')[2]}, {base}{row['attention']}, {row['micro_batch']} × {row['seq_len']}"


def mebibytes(size: int) -> str:
    return f"{size / MiB:,.1f}".removesuffix(".0")


def percent(error: float) -> str:
    return f"{round(error, 3) + 0.0:+.1%}"  # without + 0.0 a small negative error would be shown as −0.0 %


def errors(row: Row, tool: str, truth: str) -> float:
    """Return (predicted − measured) / measured of one row."""
    return row["predicted"][tool] / row[truth] - 1


def body(rows: list[Row]) -> list[list[str]]:
    """Return a text row per configuration; if it was measured more than once, with every different figure."""
    found = []
    for group in configurations(rows):
        cells = [name(group[0])]
        for tool, truth in ((ALLOCATED, "peak_allocated"), (RESERVED, "peak_reserved")):
            measured = {row[truth]: errors(row, tool, truth) for row in group}
            cells.append(" / ".join(mebibytes(size) for size in measured))
            cells.append(mebibytes(group[0]["predicted"][tool]))
            cells.append(" / ".join(percent(error) for error in measured.values()))
        tracked = group[0]["predicted"].get(TRACKED) is not None
        found.append([*cells, percent(errors(group[0], TRACKED, "peak_allocated")) if tracked else "–"])
    return found


def notes(rows: list[Row]) -> list[str]:
    """Return what the repeats say about the rows that the simulation misses; nothing if nothing was simulated."""
    rows = [row for group in configurations(rows) for row in group]
    if not rows:
        return []
    error = {id(row): errors(row, RESERVED, "peak_reserved") for row in rows}
    missed = [row for row in rows if abs(error[id(row)]) > BAR]
    found = [f"Reserved bytes are simulated within {BAR:.0%} in {len(rows) - len(missed)} of {len(rows)} rows."]
    if missed:
        found[0] += " Not in " + "; ".join(f"{name(row)} ({error[id(row)]:+.1%})" for row in missed) + "."
    widest = max(configurations(rows), key=lambda group: spread([row["peak_reserved"] for row in group]))
    sizes = [row["peak_reserved"] for row in widest]
    if len(set(sizes)) > 1:
        found.append(
            f"Repeats differ: {name(widest[0])}, reserved {' and '.join(map(mebibytes, sizes))} MiB, "
            f"{spread(sizes):.0%} apart."
        )
    for base in dict.fromkeys(row["quantization"] for row in rows):
        found += loads(base, [row for row in rows if row["quantization"] == base])
    return found


def spread(values: list[float]) -> float:
    """Return how far the largest is above the smallest, as a fraction."""
    return max(values) / min(values) - 1


def loads(base: str, rows: list[Row]) -> list[str]:
    """Return what the rows of a base show: whether repeated loads agree, and each session's errors."""
    loaded: dict[str, set[int]] = {}
    for row in rows:
        if row["after_load"]:
            loaded.setdefault(row["model"].rpartition("/")[2], set()).add(row["after_load"])
    said = f"Bases in {base}" if base != "none" else "Bases not quantized"
    differ = {model: sizes for model, sizes in loaded.items() if len(sizes) > 1}
    if differ:
        model, sizes = max(differ.items(), key=lambda item: spread(list(item[1])))
        text = f"{said}: {len(differ)} of {len(loaded)} models allocate a different number of bytes each time they "
        text += f"are loaded; {model} allocated {' or '.join(map(mebibytes, sorted(sizes, reverse=True)))} MiB."
    else:
        text = f"{said}: each model allocates the same bytes every time it is loaded."
    sessions: dict[str, list[float]] = {}
    for row in rows:
        sessions.setdefault(row["session"], []).append(abs(errors(row, RESERVED, "peak_reserved")))
    parts = [
        f"{sum(size < 0.00005 for size in sizes)} of {len(sizes)} rows exact, median {median(sizes):.1%}, in {session}"
        for session, sizes in sessions.items()
    ]
    return [f"{text} Reserved: {'; '.join(parts)}."]
