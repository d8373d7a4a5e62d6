"""An allocator's segments, cut into blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..base.errors import SpecError
from ..base.units import show_bytes, unit_of
from .canvas import COLORS, PALETTE, PANEL, Picture, bar, name_rows, new_picture, styled

RESERVED = PALETTE[5]  # allocated, and nothing in it yet


@styled()
def plot_segments(moments: Mapping[str, Sequence[Mapping[str, Any]]]) -> Picture:
    """Return an allocator's segments as bars, cut into blocks: blocks in use filled, free ones white.

    Of a block that says how many of its bytes are `written`, only these are dark, and the rest is light.

    `moments` maps a title to segments in the shape of torch.cuda.memory._snapshot()["segments"], of which `total_size`
    and each block's `size` and `state` are read; the moments stand one under the other on one scale of bytes.
    """
    rows = [(title if number == 0 else "", s) for title, sizes in moments.items() for number, s in enumerate(sizes)]
    if not rows:
        raise SpecError("plot_segments got no segments; give {'title': allocator.segments()}")
    largest = max(segment["total_size"] for _, segment in rows)
    unit, unit_name = unit_of(largest)
    picture, (ax,) = new_picture(0.9 + 0.3 * len(rows))
    ax.set(xlim=(0, 1.02 * largest / unit), ylim=(len(rows) - 0.45, -0.6))
    for row, (_, segment) in enumerate(rows):
        left = 0.0
        for block in segment["blocks"]:
            used = block["state"] != "inactive"
            written = block.get("written", block["size"]) if used else 0
            bar(ax, row, left, block["size"] / unit, RESERVED if used else PANEL)
            if written:
                bar(ax, row, left, written / unit, COLORS["weights"])
            left += block["size"] / unit
    name_rows(ax, [title for title, _ in rows])
    partly = any("written" in block for _, segment in rows for block in segment["blocks"])
    blue = "dark is written, light reserved" if partly else "blue is allocated"
    ax.set_xlabel(f"address in the segment ({unit_name}); {blue}, white is free")

    def size(segments: Sequence[Mapping[str, Any]]) -> str:
        used = sum(b["size"] for s in segments for b in s["blocks"] if b["state"] != "inactive")
        reserved = sum(s["total_size"] for s in segments)
        written = [b["written"] for s in segments for b in s["blocks"] if "written" in b]
        filled = f" and {show_bytes(sum(written))} written" if written else ""
        return f"{show_bytes(used)} allocated{filled} in {len(segments)} segments of {show_bytes(reserved)}"

    picture.alt = "Segments of an allocator. " + "; ".join(f"{title}: {size(s)}" for title, s in moments.items()) + "."
    return picture
