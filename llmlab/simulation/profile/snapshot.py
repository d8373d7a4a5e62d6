"""A memory snapshot as torch.cuda.memory._dump_snapshot writes it, which PyTorch's memory_viz opens.

Format: the docstring of torch.cuda.memory._snapshot and _snapshot's conversion in torch/csrc/cuda/Module.cpp (2.13).
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from typing import Any, NamedTuple

from ...base.files import write_whole
from .. import FOLDER
from ..allocator.caching import Allocator
from .recording import OUTSIDE, Place

FRAMES = 64  # of a stack that are kept, innermost first


class Frame(NamedTuple):
    """One Python function on the stack."""

    filename: str
    line: int
    name: str


class Entry(NamedTuple):
    """One event of the allocator."""

    action: str
    address: int
    size: int
    stream: int
    frames: tuple[Frame, ...]


class History:
    """The allocator's events with the stacks of those that allocate, in order."""

    def __init__(self, place: Callable[[], Place] | None = None) -> None:
        self.entries: list[Entry] = []
        self.place = place  # says which operator of which module asks; its answer is the innermost frame

    def record(self, action: str, address: int, size: int, stream: int) -> None:
        """Take an event: Allocator.on_event."""
        frames: tuple[Frame, ...] = ()
        if action in ("alloc", "segment_alloc", "oom"):
            asks = self.place() if self.place else None
            frames = (*((Frame(asks.module or OUTSIDE, 0, asks.operator),) if asks else ()), *stack())
        self.entries.append(Entry(action, address, size, stream, frames))


def stack() -> tuple[Frame, ...]:
    """Return the Python stack, innermost first, without the simulator's own frames."""
    running = ((frame.f_code, line) for frame, line in walk_stack(sys._getframe(1)))
    frames = (Frame(code.co_filename, line, code.co_name) for code, line in running)
    return tuple(islice((frame for frame in frames if not frame.filename.startswith(FOLDER)), FRAMES))


def snapshot(memory: Allocator, history: History) -> dict[str, Any]:
    """Return what torch.cuda.memory._snapshot returns. `time_us` counts events: simulated code takes no time."""
    born = {entry.address: entry.frames for entry in history.entries if entry.action == "alloc"}
    segments = memory.segments()
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                block["frames"] = _frames(born.get(block["address"], ()))
    trace = [
        {
            "action": entry.action,
            "device_free" if entry.action == "oom" else "addr": entry.address,
            "size": entry.size,
            "stream": entry.stream,
            "time_us": time,
            "frames": _frames(entry.frames),
        }
        for time, entry in enumerate(history.entries)
    ]
    config = memory.config
    settings = {
        "expandable_segments": config.expandable_segments,
        "max_split_size": -1 if config.max_split_size is None else config.max_split_size,
        "garbage_collection_threshold": config.garbage_collection_threshold or 0.0,
    }
    return {"segments": segments, "device_traces": [trace], "allocator_settings": settings, "external_annotations": []}


def _frames(frames: tuple[Frame, ...]) -> list[dict[str, Any]]:
    return [frame._asdict() for frame in frames]


def write_snapshot(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write the pickle `content` so that a reader, or a crash, sees the old file or the new one."""
    write_whole(Path(path), pickle.dumps(content))
