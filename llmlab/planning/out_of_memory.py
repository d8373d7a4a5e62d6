"""What torch's out-of-memory message says: its numbers one by one, and what would have helped.

The message is that of `torch.OutOfMemoryError` (c10/cuda/CUDACachingAllocator.cpp, 2.1 and newer), of the releases
before, or of backend:cudaMallocAsync (CUDAMallocAsyncAllocator.cpp); ROCm's differ by a word.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from ..base.errors import SpecError
from ..base.tables import Table, Tabular
from ..base.units import GiB, KiB, MiB, show_bytes

UNITS = {"bytes": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB}
SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
# What each number is called in the messages: from torch 2.1 on, then before, then of cudaMallocAsync.
NUMBERS = {
    "requested": (rf"[Tt]ried to allocate {SIZE}", rf"Requested : {SIZE}"),
    "capacity": (rf"total capaci?ty of {SIZE}", rf"{SIZE} total capacity", rf"Device limit : {SIZE}"),  # 2.1: "capacty"
    "free": (rf"of which {SIZE} is free", rf"{SIZE} free", rf"Free \(according to CUDA\) ?: {SIZE}"),
    "allowed": (rf"{SIZE} allowed",),
    "process": (rf"this process has {SIZE} memory in use",),
    "allocated": (rf"{SIZE} is allocated by PyTorch", rf"{SIZE} already allocated", rf"Currently allocated : {SIZE}"),
    "private": (rf"{SIZE} allocated in private pools",),
    "unallocated": (rf"{SIZE} is reserved by PyTorch but unallocated", rf"{SIZE} cached"),  # "cached": up to torch 1.3
    "reserved": (rf"{SIZE} reserved in total by PyTorch",),
}
STARTS = r"[Tt]ried to allocate|would exceed allowed memory"
VARIABLE = "PYTORCH_ALLOC_CONF"


@dataclass(frozen=True, repr=False)
class OutOfMemory(Tabular):
    """The bytes of one message. `unallocated`: reserved by PyTorch, and in no tensor; `process`: all that this process
    has; `allowed`: what set_per_process_memory_fraction leaves PyTorch; `private`: of `allocated`, in the pools of CUDA
    graphs; None where it is not said. `variable`: the one that sets the allocator, by the message's own release."""

    requested: int
    capacity: int
    free: int
    allocated: int
    unallocated: int
    process: int | None = None
    allowed: int | None = None
    private: int | None = None
    variable: str = VARIABLE

    @property
    def others(self) -> int:
        """Bytes of the card that are neither PyTorch's nor free: contexts, NCCL, other processes."""
        return max(0, self.capacity - self.free - self.allocated - self.unallocated)

    @property
    def short(self) -> int:
        """Bytes that were missing, had all that was free been in one piece; 0: fragmentation alone stood in the way."""
        return max(0, self.requested - self.room - self.unallocated)

    @property
    def room(self) -> int:
        """Bytes that PyTorch could still take from the driver, within what it is allowed."""
        if self.allowed is None:
            return self.free
        return max(0, min(self.free, self.allowed - self.allocated - self.unallocated))

    @property
    def advice(self) -> str:
        """What would have let this request through."""
        holes = f"{show_bytes(self.unallocated)} lay in holes of PyTorch's segments"
        if self.requested <= self.room:
            return "The driver said that it had enough: another process, or a limit of the driver's, was in the way."
        if self.requested <= self.free and self.short:
            return (
                f"A limit: set_per_process_memory_fraction allows {show_bytes(self.allowed)}, and with this request "
                f"PyTorch would have {show_bytes(self.short)} more; the card has enough."
            )
        if self.short == 0:
            return (
                f"Fragmentation: {holes}, and the request needed {show_bytes(self.requested)} in one piece. "
                f"{self.variable}=expandable_segments:True joins such holes (torch 2.1 and newer), and would probably "
                "have let it through."
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
            ("of it in private pools", self.private, "of CUDA graphs: their tensors stay where they are"),
            ("reserved, unallocated", self.unallocated, "PyTorch's, in no tensor: cached blocks and holes"),
            ("not PyTorch's", self.others, "CUDA contexts, NCCL's buffers, other processes"),
            ("this process", self.process, "all that it has: PyTorch's, its CUDA context, its libraries"),
            ("free", self.free, "what the driver could still give"),
            ("allowed", self.allowed, "the most that PyTorch may take, by set_per_process_memory_fraction"),
            ("requested", self.requested, "by the operator that failed, in one piece"),
        ]
        cells = [(name, show_bytes(size), words) for name, size, words in rows if size is not None]
        return Table(("", "", ""), cells, "What the message says", self.advice, (0, 2))

    def __repr__(self) -> str:
        return f"<OutOfMemory: {show_bytes(self.requested)} requested, {show_bytes(self.short)} short>"


def explained(message: str) -> OutOfMemory:
    """Return the numbers of torch's message, the first of a log; SpecError for a text that is none."""
    found: dict[str, int] = {}
    message = " ".join(message.split())  # as a terminal wraps it
    if len(starts := [match.start() for match in re.finditer(STARTS, message)]) > 1:
        message = message[: starts[1]]
    for name, patterns in NUMBERS.items():
        for pattern in patterns:
            if match := re.search(pattern, message):
                found[name] = round(float(match[1]) * UNITS[match[2]])
                break
    if "reserved" in found and "allocated" in found:
        found.setdefault("unallocated", found["reserved"] - found["allocated"])
    found.pop("reserved", None)
    if "would exceed allowed memory" in message:  # cudaMallocAsync: what is cached is the driver's
        found.setdefault("unallocated", 0)
    if missing := [name for name in ("requested", "capacity", "free", "allocated", "unallocated") if name not in found]:
        raise SpecError(
            f"this is not a message of torch.OutOfMemoryError: it lacks {', '.join(missing)}. Give the whole text, from "
            "'CUDA out of memory. Tried to allocate' on"
        )
    named = re.search(r"PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF", message)
    return OutOfMemory(**found, variable=named[0] if named else VARIABLE)
