"""A memory snapshot as torch.cuda.memory._dump_snapshot writes it, which PyTorch's memory_viz opens.

Format: the docstring of torch.cuda.memory._snapshot and _snapshot's conversion in torch/csrc/cuda/Module.cpp (2.13).
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ...base.files import is_library, write_whole
from ...recording.parts import Event, collapsed
from ...recording.snapshot import growth, rounded
from .. import FOLDER
from ..allocator.caching import Allocator
from .recording import OUTSIDE, Place

FRAMES = 64  # the most frames stored of a stack, innermost first


class Frame(NamedTuple):
    """One Python function on the stack: its file, its line, its name."""

    filename: str
    line: int
    name: str


Stack = tuple[tuple[CodeType, int], ...]  # code and an instruction in it; only a snapshot looks up the line


class Entry(NamedTuple):
    """One event of the allocator."""

    action: str
    address: int
    size: int
    stream: int
    asks: Place | None
    stack: Stack


class History:
    """The allocator's events in order, with the stacks of allocations."""

    def __init__(self, place: Callable[[], Place] | None = None) -> None:
        self.entries: list[Entry] = []
        self.place = place  # returns the operator and module of a request, which become its innermost frame
        self.steps: list[int] = []  # the number of entries at the end of each step

    def record(self, action: str, address: int, size: int, stream: int) -> None:
        """Append an event, as Allocator.on_event."""
        if action in ("alloc", "segment_alloc", "oom"):
            entry = Entry(action, address, size, stream, self.place() if self.place else None, stack())
        else:
            entry = Entry(action, address, size, stream, None, ())
        self.entries.append(entry)


    def growth(self) -> dict[str, int]:
        """Return the bytes by which memory grows with each step, by module and line of the user's code."""
        sign = {"alloc": 1, "free_completed": -1}
        events = (
            Event(number, entry.address, sign[entry.action] * rounded(entry.size))
            for number, entry in enumerate(self.entries, 1)
            if entry.action in sign
        )
        return growth(events, self.steps, lambda number: _called_from(self.entries[number - 1]))


def _called_from(entry: Entry) -> str:
    place = collapsed(entry.asks.module or OUTSIDE) if entry.asks else OUTSIDE
    own = next(((code, at) for code, at in entry.stack if not is_library(code.co_filename)), None)
    line = f"{os.path.basename(own[0].co_filename)}:{_line(*own)}" if own else ""
    return f"{place} ({line})" if line and place != OUTSIDE else line or place


def stack() -> Stack:
    """Return the Python stack, innermost first, without the simulator's own frames."""
    frames: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < FRAMES:
        if not _is_own(frame.f_code.co_filename):
            frames.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(frames)


@cache
def _is_own(file: str) -> bool:
    return file.startswith(FOLDER)


@cache
def _line(code: CodeType, instruction: int) -> int:
    lines = (line for begin, end, line in code.co_lines() if begin <= instruction < end)
    return next(lines, None) or code.co_firstlineno


def snapshot(memory: Allocator, history: History) -> dict[str, Any]:
    """Return the dict that torch.cuda.memory._snapshot would. `time_us` counts events: simulated code takes no time."""
    born = {entry.address: entry for entry in history.entries if entry.action == "alloc"}
    segments = memory.segments()
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                block["frames"] = _frames(born.get(block["address"]))
    trace = [
        {
            "action": entry.action,
            "device_free" if entry.action == "oom" else "addr": entry.address,
            "size": entry.size,
            "stream": entry.stream,
            "time_us": time,
            "frames": _frames(entry),
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


def _frames(entry: Entry | None) -> list[dict[str, Any]]:
    """Return the frames of an allocation, innermost first: the operator in its module, then the Python stack."""
    if entry is None:
        return []
    frames = [Frame(code.co_filename, _line(code, instruction), code.co_name) for code, instruction in entry.stack]
    if entry.asks is not None:
        frames.insert(0, Frame(entry.asks.module or OUTSIDE, 0, entry.asks.operator))
    return [frame._asdict() for frame in frames]


def write_snapshot(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Pickle `content` to `path`. A reader, even after a crash, sees the old file or the whole new one."""
    write_whole(Path(path), pickle.dumps(content, protocol=4))  # the newest that memory_viz reads
