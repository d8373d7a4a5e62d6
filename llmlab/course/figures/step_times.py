"""The seconds of an update as bars, for any chapter that changes them."""

from __future__ import annotations

from collections.abc import Mapping

from ...plots.canvas import PALETTE, Picture
from ...plots.schematic import finished, keys, label, sketch, strip
from ...report import Report

COLORS = {"matmuls": PALETTE[5], "other kernels": PALETTE[1], "optimizer": PALETTE[2]}


def draw_step_times(reports: Mapping[str, Report], digits: int = 1) -> Picture:
    """Draw the seconds of an update as one bar per report: matmuls and attention, other kernels, and the optimizer.

    `digits` is the number of decimal places.
    """
    picture, ax = sketch(34 + 56 * len(reports))
    scale = 376 / max(report.step_seconds or 0 for report in reports.values())
    keys(ax, COLORS, (12, 132, 252), 10, side=14)
    words = []
    for row, (name, report) in enumerate(reports.items()):
        y, total = 46 + 56 * row, report.step_seconds or 0
        matmuls, optimizer = report.time["products"] + report.time["attention"], report.time["optimizer"]
        seconds = matmuls, total - matmuls - optimizer, optimizer
        parts = " + ".join(f"{value:.{digits}f}" for value in seconds)
        words.append(f"{name}: {parts} = {total:.{digits}f} s")
        label(ax, 12, y, words[-1], weight="bold")
        pieces = [(size, "", color) for size, color in zip(seconds, COLORS.values(), strict=True)]
        strip(ax, 12, y + 10, pieces, scale, 22)
    return finished(picture, f"Seconds of an update: {' + '.join(COLORS)}. {'; '.join(words)}.")
