"""Memory snapshots as torch.cuda.memory._dump_snapshot writes them: read as plain data, and divided into parts.

Format: the docstring of torch.cuda.memory._snapshot (2.13), and torch/csrc/cuda/Module.cpp back to 2.0. A snapshot has
no phases and no names of tensors, so both are inferred from the stack of each allocation:

    by the innermost frame that is known   the optimizer's, autograd's, a module's call, or one that loads weights
    by a missing stack                     backward: autograd's thread for a GPU runs no Python
    by survival                            what a phase leaves behind: activations, gradients, optimizer states

The rest is as in recording/parts.py, with one more that frames tell: what the loss function allocates is "logits".
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, NamedTuple

from ..base.errors import SpecError
from ..base.files import is_library
from ..base.units import MiB
from .parts import COMMUNICATION, CUBLAS_WORKSPACES, GATHERED, Division, Event, Mark, collapsed, divide

CUDA_BLOCK = 512  # bytes; every request is rounded up to it (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)
HOW = (
    "to make one, call torch.cuda.memory._record_memory_history() before the run, and "
    "torch.cuda.memory._dump_snapshot(FILE) after it"
)
RECORD_SIZES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
STATES = ("active_allocated", "active_awaiting_free", "active_pending_free", "inactive")
LEFT_BY = {"backward": "gradients", "optimizer": "optimizer"}  # the part of what lives when the phase ends
IN_BACKWARD = "(backward)"

# Frames by what they say: a piece of the file's path, and functions in it (any where there are none).
OPTIMIZER_FILES = ("torch/optim/", "bitsandbytes/optim/", "torchao/optim/", "apex/optimizers/", "deepspeed/ops/")
BACKWARD = {
    "torch/autograd/graph.py": ("_engine_run_backward",),
    "torch/autograd/function.py": ("apply",),
    "torch/utils/checkpoint.py": ("unpack_hook", "backward"),
    "torch/distributed/fsdp/": ("pre_backward", "_pre_backward", "post_backward", "_post_backward_hook"),
}
LOADING = {"torch/nn/modules/": ("__init__", "_apply", "to", "cuda", "to_empty", "load_state_dict")}
LOADERS = ("from_pretrained", "load_checkpoint_and_dispatch", "set_module_tensor_to_device")
LOSSES = ("cross_entropy", "nll_loss", "ForCausalLMLoss", "fixed_cross_entropy")


class _PlainData(pickle.Unpickler):
    """Builds dicts, lists, tuples, text, numbers, booleans and None, and nothing that has a class or runs code."""

    def find_class(self, module: str, name: str) -> Any:
        raise SpecError(f"this pickle asks for {module}.{name}. A memory snapshot holds plain data only, so the file "
                        f"is not one and was not loaded; {HOW}")  # fmt: skip


class Frame(NamedTuple):
    """What one function on a stack says: its `kind`, its `line` if it is Python outside torch, and whether that is the
    user's own code; `module`: its path, in a simulation's snapshot."""

    kind: str | None
    line: str
    is_own: bool
    module: str


@dataclass(frozen=True)
class Origin:
    """Where an allocation came from: the `phase` that its stack names (None: any), its `part` if that is certain.

    `place` is a module or the innermost line outside torch, `line` the innermost one of the user's own code.
    """

    phase: str | None
    place: str
    line: str = ""
    part: str | None = None
    recomputed: bool = False

    @property
    def called_from(self) -> str:
        return f"{self.place} ({self.line})" if self.line not in ("", self.place) else self.place


@dataclass(frozen=True)
class Snapshot:
    """The memory of one GPU: `segments` with their blocks when the file was written, and the events before, `trace`.

    Both are dictionaries as torch.cuda.memory._snapshot returns them. `devices` are those that have memory in the file.
    """

    segments: Sequence[Mapping[str, Any]]
    trace: Sequence[Mapping[str, Any]]
    device: int = 0
    devices: tuple[int, ...] = (0,)
    _frames: dict[int, Frame] = field(default_factory=dict, repr=False, compare=False)  # by the identity of each

    @property
    def reserved(self) -> int:
        """Bytes of all segments when the file was written."""
        return sum(segment["total_size"] for segment in self.segments)

    @property
    def allocated(self) -> int:
        """Bytes of blocks in use then."""
        return sum(block["size"] for block in self.blocks.values())

    @cached_property
    def blocks(self) -> dict[int, Mapping[str, Any]]:
        """The blocks in use when the file was written, by address."""
        return {address: block for segment in self.segments for address, block in addressed(segment)
                if block["state"] != "inactive"}  # fmt: skip

    @cached_property
    def history(self) -> History:
        """The trace as events, phases and steps."""
        return History(self)

    def origin(self, stack: Sequence[Mapping[str, Any]]) -> Origin:
        """Return what `stack`, innermost frame first, says about an allocation."""
        if not stack:
            return Origin("backward", IN_BACKWARD) if self.has_stacks else Origin(None, "(no stack recorded)")
        frames = [self._frame(frame) for frame in stack]
        kinds = [frame.kind for frame in frames if frame.kind]
        phase = next((kind for kind in kinds if kind in ("optimizer", "backward", "forward", "load")), None)
        recomputed = phase == "forward" and "backward" in kinds  # by checkpointing
        certain = [kind for kind in kinds if kind in ("logits", "workspace", GATHERED, COMMUNICATION)]
        part = "weights" if phase == "load" else certain[0] if certain else None
        nowhere = IN_BACKWARD if phase == "backward" else "(no Python frame)"
        place = frames[0].module or next((frame.line for frame in frames if frame.line), nowhere)
        own = next((frame.line for frame in frames if frame.line and frame.is_own), "")
        return Origin("backward" if recomputed else phase, place, own, part, recomputed)

    @cached_property
    def has_stacks(self) -> bool:
        """Whether the recording kept stacks, so that a missing one says something."""
        return any(entry.get("frames") for entry in self.trace)

    def _frame(self, frame: Mapping[str, Any]) -> Frame:
        if id(frame) not in self._frames:  # frames are shared between stacks
            self._frames[id(frame)] = _frame(frame)
        return self._frames[id(frame)]


class History:
    """What a snapshot's trace says: `events` and `marks` of phases, the `origins` of allocations by their time, and
    `boundaries`, the times at which an optimizer step had ended and the next forward pass began.

    Blocks that are older than the trace stand before its first event. `failure` is the last request that found no
    room: the bytes asked for, those free on the device, and those allocated and reserved at that moment.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.origins: dict[int, Origin] = {}
        self.boundaries: list[int] = []
        self.failure: tuple[int, int, int, int] | None = None
        self.events: list[Event] = []
        self.marks: list[Mark] = [Mark(-1, "load", {})]
        self._phase, self._stepped = "load", False
        self._survivors: dict[int, None] = {}  # addresses that the phase allocated and that live
        self._recomputing: int | None = None
        self._old_blocks()
        self._replay()

    @cached_property
    def division(self) -> Division:
        """The peak of the history, and its parts.

        A block counts as what was requested, in blocks of 512 B; if it was freed before the end, the allocator may have
        given up to 1 MiB more, which no trace has.
        """
        largest = max((event.size for event in self.events if self._is_logits(event)), default=0)
        sizes = (largest // 2, largest, 2 * largest) if largest >= MiB else ()  # in half precision and in fp32
        return divide(self.events, self.marks, sizes)

    def _is_logits(self, event: Event) -> bool:
        return event.size > 0 and self.origins[event.time].part == "logits"

    def growth(self) -> dict[str, int]:
        """Return the bytes that the last step left behind, by place and line of the user's code."""
        return growth(self.events, self.boundaries, lambda time: self.origins[time].called_from)

    def _old_blocks(self) -> None:
        """Put blocks that are older than the trace before it: those in use at its end, and those that it frees."""
        known: set[int] = set()
        freed: dict[int, int] = {}
        for entry in self.snapshot.trace:
            if entry["action"] == "alloc":
                known.add(entry["addr"])
            elif entry["action"] == "free_completed" and entry["addr"] not in known:
                freed.setdefault(entry["addr"], rounded(entry["size"]))
                known.add(entry["addr"])
        parts = {}
        old = {address: block["size"] for address, block in self.snapshot.blocks.items() if address not in known}
        for address, size in (old | freed).items():
            block = self.snapshot.blocks.get(address, {}) if address in old else {}
            stack = _stack(block)
            origin = self.snapshot.origin(stack) if stack else Origin(None, "(older than the recording)")
            time = -2 - len(self.origins)
            self.events.append(Event(time, address, size))
            self.origins[time] = origin
            if part := origin.part or LEFT_BY.get(origin.phase or "") or (origin.phase == "forward" and "activations"):
                parts[address] = part
        self.events.reverse()
        self.marks.append(Mark(-1, "load", parts))

    def _replay(self) -> None:
        trace = self.snapshot.trace
        allocated = sum(event.size for event in self.events)
        reserved = self.snapshot.reserved - sum(RECORD_SIZES.get(entry["action"], 0) * entry["size"] for entry in trace)
        last = {entry["addr"]: number for number, entry in enumerate(trace) if entry["action"] == "alloc"}
        live = {event.address: event for event in self.events}
        for number, entry in enumerate(trace):
            action, size, time = entry["action"], entry["size"], 2 * number + 1
            reserved += RECORD_SIZES.get(action, 0) * size
            if action == "alloc":
                address = entry["addr"]
                block = self.snapshot.blocks.get(address) if last[address] == number else None
                live[address] = Event(time, address, block["size"] if block else rounded(size))
                allocated += live[address].size
                self._allocate(live[address], self.snapshot.origin(_stack(entry)))
            elif action == "free_completed" and entry["addr"] in live:
                freed = live.pop(entry["addr"])
                self._survivors.pop(freed.address, None)
                self.events.append(Event(time, freed.address, -freed.size))
                allocated -= freed.size
            elif action == "oom":
                self.failure = size, entry["device_free"], allocated, reserved
        end = 2 * len(trace)
        self._enter(end, self._phase)
        if self._stepped and self.failure is None:
            self.boundaries.append(end)
        if len(self.boundaries) > 1:  # other blocks of that size that a step allocates are gone after the next
            once = (event for event in live.values() if 0 < event.time < self.boundaries[0])
            workspaces = {event.address: "workspace" for event in once if event.size in CUBLAS_WORKSPACES}
            self.marks.append(Mark(end, self._phase, workspaces, end))

    def _allocate(self, event: Event, origin: Origin) -> None:
        time, phase = event.time, origin.phase or self._phase
        if self._recomputing is not None and not origin.recomputed:
            self.marks.append(Mark(time - 1, self._phase, {}, self._recomputing))
            self._recomputing = None
        if phase != self._phase:
            self._enter(time - 1, phase)
        if phase == "forward" and self._stepped:
            self.boundaries.append(time - 1)
        self._stepped = phase == "optimizer" or (self._stepped and phase != "forward")
        self.events.append(event)
        self.origins[time] = origin
        if origin.recomputed:
            self._recomputing = time if self._recomputing is None else self._recomputing
        elif origin.part:
            self.marks.append(Mark(time + 1, phase, {event.address: origin.part}, time + 1))
        elif origin.phase:
            self._survivors[event.address] = None

    def _enter(self, time: int, phase: str) -> None:
        left = LEFT_BY.get(self._phase)
        self.marks.append(Mark(time, phase, dict.fromkeys(self._survivors, left) if left else {}))
        self._survivors.clear()
        self._phase = phase


def events_of_trace(trace: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Return the events of one device's trace in a snapshot (format: torch/cuda/memory.py, _snapshot's docstring).

    A block counts as used until `free_completed`: with several streams that is later than when it was asked for. A
    trace holds requested sizes; the allocator counts them rounded up to 512 B.
    """
    events = []
    for entry in trace:
        if entry["action"] in ("alloc", "free_completed"):
            sign = 1 if entry["action"] == "alloc" else -1
            events.append(Event(entry["time_us"] * 1000, entry["addr"], sign * rounded(entry["size"])))
    return events


def growth(events: Iterable[Event], boundaries: Sequence[int], key: Callable[[int], str]) -> dict[str, int]:
    """Return the bytes by which memory grows with each step, by key, the largest first.

    `boundaries` are the times at which steps end; `key` is called with the time of an allocation. Counted is what the
    last step but one allocated and the last one did not free, and at most by how much its key grew over the last step:
    neither gradients, which the next step replaces, nor what is allocated once, grow.
    """
    if len(boundaries) < 2:
        return {}
    first, before, now = ([float("-inf"), *boundaries])[-3:]
    live: dict[int, Event] = {}
    sizes: dict[str, int] = {}  # alive at the end of the last step, minus those before it
    left: dict[str, int] = {}

    def count(into: dict[str, int], event: Event, sign: int = 1) -> None:
        name = key(event.time)
        into[name] = into.get(name, 0) + sign * event.size

    counted = False
    for event in events:
        if event.time > before and not counted:
            counted = True
            for allocation in live.values():
                count(sizes, allocation, -1)
        if event.time > now:
            break
        if event.size > 0:
            live[event.address] = event
        else:
            live.pop(event.address, None)
    if not counted:  # nothing happened in the last step
        return {}
    for allocation in live.values():
        count(sizes, allocation)
        if first < allocation.time <= before:
            count(left, allocation)
    grown = {name: min(size, sizes[name]) for name, size in left.items() if sizes[name] > 0}
    return dict(sorted(grown.items(), key=lambda item: -item[1]))


# ---- reading


def is_snapshot(path: str | Path) -> bool:
    """Return whether `path` names a pickle: by its ending, or a file that begins as one."""
    text = str(path)
    if "\n" in text or len(text) > 4096:
        return False
    if text.endswith((".pickle", ".pkl")):
        return True
    try:
        with open(path, "rb") as file:
            return file.read(1) == pickle.PROTO
    except (OSError, ValueError):
        return False


def read_snapshot(path: str | Path) -> Snapshot:
    """Return the snapshot in the file `path`, of the GPU that has the most memory in it.

    Nothing in the file is run. Raises SpecError for a file that holds anything but plain data, and for one that is no
    snapshot, and OSError for a file that cannot be read.
    """
    with open(path, "rb") as file:
        try:
            content = _PlainData(file).load()
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from None
        except Exception as error:  # a broken pickle can raise nearly anything
            what = f"{type(error).__name__}: {error}"
            raise SpecError(f"{path} is not a pickle that can be read ({what}); {HOW}") from None
    content = {"segments": content} if isinstance(content, list) else content  # torch.cuda.memory_snapshot's
    try:
        segments, traces = content["segments"], content.get("device_traces", [])
        devices = sorted({segment.get("device", 0) for segment in segments}) or [0]
        sizes = {device: sum(s["total_size"] for s in segments if s.get("device", 0) == device) for device in devices}
        device = max(sizes, key=lambda number: sizes[number])
        snapshot = Snapshot(
            [segment for segment in segments if segment.get("device", 0) == device],
            [entry for entry in traces[device] if _checked(entry)] if device < len(traces) else [],
            device,
            tuple(devices),
        )
        for segment in snapshot.segments:
            _check_segment(segment)
        _ = snapshot.history  # reads every stack
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise SpecError(f"{path} is a pickle, but no memory snapshot of torch's ({what}); {HOW}") from None
    return snapshot


def addressed(segment: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield each block of `segment` with its address, which old snapshots do not have."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield address, block
        address += block["size"]


def _check_segment(segment: Mapping[str, Any]) -> None:
    _size(segment["address"])
    _size(segment["total_size"])
    for block in segment["blocks"]:
        _size(block["size"])
        if block["state"] not in STATES:
            raise ValueError(f"a block in the state {shortened(block['state'])}")


def _checked(entry: Mapping[str, Any]) -> bool:
    _size(entry["size"])
    _size(entry["device_free" if entry["action"] == "oom" else "addr"])
    return True


def _size(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**64:  # addresses have 64 bits
        raise ValueError(f"a size of {shortened(value)}")
    return value


def _stack(entry: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the frames of a block or an event; torch 2.0 and older put them into a block's history."""
    history = entry.get("history") or [{}]
    return entry.get("frames") or history[0].get("frames") or ()


def rounded(size: int) -> int:
    """Return the bytes of the block that the allocator gives for a request of `size`."""
    return -(-size // CUDA_BLOCK) * CUDA_BLOCK


# ---- frames


def _frame(frame: Mapping[str, Any]) -> Frame:
    file, name, line = frame.get("filename"), frame.get("name"), frame.get("line")
    if not (isinstance(file, str) and isinstance(name, str) and isinstance(line, int)):
        raise ValueError(f"a stack has {shortened(frame)} in place of a file, a line and a function")
    file, name = ("".join(filter(str.isprintable, text)) for text in (file.replace("\\", "/"), name))
    if line == 0 and not re.search(r"[/?():]", file):  # a module's path; C++ has files or "??"
        return Frame(None, "", False, collapsed(file))
    shown = ""
    if (file.endswith(".py") or "ipython" in file) and not re.search(r"(-packages|/pytorch)/torch/", file):
        shown = f"{file.rpartition('/')[2]}:{line} {name}"
    return Frame(_kind(file, name), shown, not is_library(file), "")


def _kind(file: str, name: str) -> str | None:
    if any(name_part in file for name_part in OPTIMIZER_FILES) or (name == "step" and "optim" in file):
        return "optimizer"
    if "autograd::Engine::" in name or _is_of(BACKWARD, file, name):
        return "backward"
    if "torch/distributed/fsdp/" in file and ("all_gather" in name or "unshard" in name):
        return GATHERED
    if "torch/distributed/fsdp/" in file and "reduce" in name:
        return COMMUNICATION
    if "CUDABlas" in name:  # getCurrentCUDABlasHandle, getCUDABlasLtWorkspace
        return "workspace"
    if name in LOSSES:
        return "logits"
    if name in LOADERS or _is_of(LOADING, file, name):
        return "load"
    return "forward" if name == "forward" or (name == "_call_impl" and "torch/nn/modules/" in file) else None


def _is_of(table: Mapping[str, Sequence[str]], file: str, name: str) -> bool:
    return any(piece in file and name in names for piece, names in table.items())
