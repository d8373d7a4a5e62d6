"""What torch's out-of-memory message says: its numbers one by one, and what would have helped.

The message is that of `torch.OutOfMemoryError` (c10/cuda/CUDACachingAllocator.cpp, 2.1 and newer) or of the releases
before.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from ..base.errors import SpecError
from ..base.tables import Table, Tabular
from ..base.units import GiB, KiB, MiB, show_bytes

UNITS = {"bytes": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB}
SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
# What each number is called in the messages: that of torch 2.1 and newer, then the older one.
NUMBERS = {
    "requested": (rf"[Tt]ried to allocate {SIZE}",),
    "capacity": (rf"total capacity of {SIZE}", rf"{SIZE} total capacity"),
    "free": (rf"of which {SIZE} is free", rf"{SIZE} free"),
    "process": (rf"this process has {SIZE} memory in use",),
    "allocated": (rf"{SIZE} is allocated by PyTorch", rf"{SIZE} already allocated"),
    "unallocated": (rf"{SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"{SIZE} reserved in total by PyTorch",),
}


@dataclass(frozen=True, repr=False)
class OutOfMemory(Tabular):
    """The bytes of one message. `unallocated`: reserved by PyTorch, and in no tensor."""

    requested: int
    capacity: int
    free: int
    allocated: int
    unallocated: int
    process: int | None = None

    @property
    def others(self) -> int:
        """Bytes of the card that are neither PyTorch's nor free: contexts, NCCL, other processes."""
        return max(0, self.capacity - self.free - self.allocated - self.unallocated)

    @property
    def short(self) -> int:
        """Bytes that were missing, had all that was free been in one piece; 0: fragmentation alone stood in the way."""
        return max(0, self.requested - self.free - self.unallocated)

    @property
    def advice(self) -> str:
        """What would have let this request through."""
        holes = f"{show_bytes(self.unallocated)} lay in holes of PyTorch's segments"
        if self.requested <= self.free:
            return "The driver had enough; another process or a limit (set_per_process_memory_fraction) was in the way."
        if self.short == 0:
            return (
                f"Fragmentation: {holes}, and the request needed {show_bytes(self.requested)} in one piece. "
                "PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF up to torch 2.9) joins such "
                "holes, and would probably have let it through."
            )
        return (
            f"Too little, whatever the allocator does: with every hole joined {show_bytes(self.short)} are missing for "
            f"this request, and later ones may be larger. expandable_segments would not have saved the run; "
            "`llmlab fix MODEL` lists what would."
        )

    def to_dict(self) -> dict[str, object]:
        """Return JSON-ready values, sizes in bytes."""
        return {**asdict(self), "others": self.others, "short": self.short, "advice": self.advice}

    def _table(self) -> Table:
        rows = [
            ("card", self.capacity, "what the driver has in all"),
            ("allocated", self.allocated, "in tensors: weights, states, activations, temporaries"),
            ("reserved, unallocated", self.unallocated, "PyTorch's, in no tensor: cached blocks and holes"),
            ("not PyTorch's", self.others, "CUDA contexts, NCCL's buffers, other processes"),
            ("free", self.free, "what the driver could still give"),
            ("requested", self.requested, "by the operator that failed, in one piece"),
        ]
        cells = [(name, show_bytes(size), words) for name, size, words in rows]
        return Table(("", "", ""), cells, "What the message says", self.advice, (0, 2))

    def __repr__(self) -> str:
        return f"<OutOfMemory: {show_bytes(self.requested)} requested, {show_bytes(self.short)} short>"


def explained(message: str) -> OutOfMemory:
    """Return the numbers of torch's message; SpecError for a text that is none."""
    found: dict[str, int] = {}
    message = " ".join(message.split())  # as a terminal wraps it
    for name, patterns in NUMBERS.items():
        for pattern in patterns:
            if match := re.search(pattern, message):
                found[name] = round(float(match[1]) * UNITS[match[2]])
                break
    if "reserved" in found and "allocated" in found:
        found.setdefault("unallocated", found["reserved"] - found["allocated"])
    found.pop("reserved", None)
    if missing := [name for name in ("requested", "capacity", "free", "allocated", "unallocated") if name not in found]:
        raise SpecError(
            f"this is no message of torch.OutOfMemoryError: it lacks {', '.join(missing)}. Give the whole text, from "
            "'CUDA out of memory. Tried to allocate' on"
        )
    return OutOfMemory(**found)
