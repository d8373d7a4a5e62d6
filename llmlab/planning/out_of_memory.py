"""Explains torch's out-of-memory message: its numbers one by one, and what would have prevented the error.

It reads the message of `torch.OutOfMemoryError` (c10/cuda/CUDACachingAllocator.cpp, 2.1 and newer), of earlier
releases, and of backend:cudaMallocAsync (CUDAMallocAsyncAllocator.cpp); the messages for ROCm and XPU differ by a word.
MPS has its own message (aten/src/ATen/mps/MPSAllocator.mm), whose GB are GiB. The driver's error has no numbers.

Messages are read without their white space, which is lost or added when they are copied by hand.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from ..base.errors import SpecError
from ..base.tables import Table, Tabular
from ..base.units import GiB, KiB, MiB, show_bytes

UNITS = {"bytes": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "KB": KiB, "MB": MiB, "GB": GiB}
SIZE = r"(\d+(?:\.\d+)?)(bytes|[KMG]i?B)"
# How the messages name each number: since torch 2.1, before, for cudaMallocAsync, and for MPS.
NUMBERS = {
    "requested": (rf"[Tt]riedtoallocate{SIZE}", rf"Requested:{SIZE}"),
    "capacity": (rf"totalcapaci?tyof{SIZE}", rf"{SIZE}totalcapacity", rf"Devicelimit:{SIZE}",
                 rf"maxallowed:{SIZE}"),  # 2.1: "capacty"
    "free": (rf"ofwhich{SIZE}isfree", rf"{SIZE}free", rf"Free\(accordingtoCUDA\):{SIZE}"),
    "allowed": (rf"{SIZE}allowed",),
    "process": (rf"thisprocesshas{SIZE}memoryinuse",),
    "allocated": (rf"{SIZE}isallocatedbyPyTorch", rf"{SIZE}alreadyallocated", rf"Currentlyallocated:{SIZE}",
                  rf"MPSallocated:{SIZE}"),
    "elsewhere": (rf"otherallocations:{SIZE}",),
    "private": (rf"{SIZE}allocatedinprivatepools",),
    "unallocated": (rf"{SIZE}isreservedbyPyTorchbutunallocated", rf"{SIZE}cached"),  # "cached": up to torch 1.3
    "reserved": (rf"{SIZE}reservedintotalbyPyTorch",),
}
STARTS = r"[Tt]riedtoallocate|wouldexceedallowedmemory"
VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"  # read by all releases; PYTORCH_ALLOC_CONF has no effect up to 2.9.1
# Of the drivers, and of libraries that allocate without PyTorch.
DRIVER = (
    r"(CUDA|HIP|XPU)(driver)?error:outofmemory|_ERROR_OUT_OF_(DEVICE_|HOST_)?MEMORY|TritonError\[\w+\]:outofmemory|"
    r"_STATUS_ALLOC_FAILED|failure2?'outofmemory'|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
)
HOST = "DefaultCPUAllocator"


@dataclass(frozen=True, repr=False)
class DriverError(Tabular):
    """An error of the GPU's driver, which has no numbers."""

    @property
    def advice(self) -> str:
        """The possible causes of such an error, and how to get numbers."""
        return (
            "The driver had no memory left. This is not the message of PyTorch's allocator, so the request was not for "
            "a tensor: it was for the CUDA context, for kernels that were loaded, for buffers of NCCL or cuBLAS, for a "
            "CUDA graph, or for pinned memory of the host. Another process may use the GPU (nvidia-smi lists them). If "
            "PyTorch's own tensors fill the GPU, torch.cuda.memory_summary() just before the failing line shows them."
        )

    def to_dict(self) -> dict[str, object]:
        """Return JSON-ready values."""
        return {"advice": self.advice}

    def _table(self) -> Table:
        return Table(("",), [], "What the message says", self.advice)

    def __repr__(self) -> str:
        return "<DriverError: out of memory, without numbers>"


@dataclass(frozen=True, repr=False)
class OutOfMemory(Tabular):
    """The sizes in one message, in bytes; the optional ones are None if the message does not state them.

    `unallocated`: reserved by PyTorch, but in no tensor. `process`: all GPU memory of this process. `allowed`: the
    limit of set_per_process_memory_fraction. `private`: the part of `allocated` in private pools of CUDA graphs.
    `free_at_most`: the message does not state the free memory, so `free` is everything that PyTorch has not reserved.
    `variable`: the environment variable that configures the allocator: the one that the message names, if any.
    """

    requested: int
    capacity: int
    free: int
    allocated: int
    unallocated: int
    process: int | None = None
    allowed: int | None = None
    private: int | None = None
    free_at_most: bool = False
    variable: str = VARIABLE

    @property
    def outside(self) -> int:
        """Bytes of GPU memory that are neither free nor reserved by PyTorch: contexts, NCCL, other processes."""
        return max(0, self.capacity - self.free - self.allocated - self.unallocated)

    @property
    def short(self) -> int:
        """Bytes that would be missing even if all free memory were in one piece; 0 if only fragmentation caused the
        error."""
        return max(0, self.requested - self.room - self.unallocated)

    @property
    def room(self) -> int:
        """Bytes that PyTorch could still allocate from the driver, within its limit."""
        if self.allowed is None:
            return self.free
        return max(0, min(self.free, self.allowed - self.allocated - self.unallocated))

    @property
    def advice(self) -> str:
        """What caused the error, and what would have prevented it."""
        holes = f"PyTorch had {show_bytes(self.unallocated)} reserved but unused, in pieces"
        if self.requested > self.unallocated:
            together = show_bytes(self.unallocated + self.room)
            holes += f", and {show_bytes(self.room)} of the GPU was free. Together this is {together}"
        if self.requested <= self.room and self.free_at_most:
            return (
                f"PyTorch itself left {show_bytes(self.room)}, which is enough, so at least "
                f"{show_bytes(self.room - self.requested)} were in use outside PyTorch: the GPU's context, libraries, "
                "other processes or the display."
            )
        if self.requested <= self.room:
            return "The driver reported enough free memory, so another process or a driver limit caused the error."
        if self.requested <= self.free and self.short:
            return (
                f"A limit caused the error: set_per_process_memory_fraction allows {show_bytes(self.allowed)}, and "
                f"this request would exceed it by {show_bytes(self.short)}. The GPU itself has enough."
            )
        if self.short == 0:
            return (
                f"Fragmentation caused the error: {holes}, and the request needed {show_bytes(self.requested)} in one "
                "piece. Expandable segments (torch 2.1 and newer) join such pieces and would probably have prevented "
                f"the error: set {self.variable}=expandable_segments:True."
            )
        if self.outside > max(self.short, self.capacity / 4):
            return (
                f"Something outside PyTorch uses {show_bytes(self.outside)} of the GPU: other processes (nvidia-smi "
                f"lists them), the CUDA context or NCCL. Without them, {show_bytes(self.requested)} would have fitted."
            )
        return (
            f"The GPU has too little memory: even without fragmentation {show_bytes(self.short)} would be missing, "
            "and later requests may be larger. expandable_segments would not have prevented the error; "
            "`llmlab fix MODEL --gpu NAME` lists changes that make a run smaller."
        )

    def to_dict(self) -> dict[str, object]:
        """Return JSON-ready values, sizes in bytes."""
        return {**asdict(self), "outside": self.outside, "short": self.short, "advice": self.advice}

    def _table(self) -> Table:
        rows = [
            ("GPU", self.capacity, "total memory"),
            ("allocated", self.allocated, "memory of tensors: weights, optimizer states, activations, temporaries"),
            ("of that in private pools", self.private, "memory of CUDA graphs"),
            ("reserved, unallocated", self.unallocated, "cached by PyTorch, in no tensor"),
            ("outside PyTorch", self.outside, "CUDA context, NCCL buffers, other processes"),
            ("this process", self.process, "PyTorch, CUDA context and libraries together"),
            ("free", self.free, "at most; the message does not say" if self.free_at_most else "free memory of the GPU"),
            ("allowed", self.allowed, "limit set by set_per_process_memory_fraction"),
            ("requested", self.requested, "size of the request that failed"),
        ]
        cells = [(name, show_bytes(size), words) for name, size, words in rows if size is not None]
        return Table(("", "", ""), cells, "What the message says", self.advice, (0, 2))

    def __repr__(self) -> str:
        return f"<OutOfMemory: {show_bytes(self.requested)} requested, {show_bytes(self.short)} short>"


def explained(message: str) -> OutOfMemory | DriverError:
    """Return the numbers of the first torch out-of-memory message in a text, or a DriverError if it has only the
    driver's error. Raises SpecError for any other text."""
    sizes: dict[str, int] = {}
    guessed = False
    message = "".join(message.split())
    if len(starts := [match.start() for match in re.finditer(STARTS, message)]) > 1:
        message = message[: starts[1]]
    for name, patterns in NUMBERS.items():
        for pattern in patterns:
            if match := re.search(pattern, message):
                sizes[name] = round(float(match[1]) * UNITS[match[2]])
                break
    if "reserved" in sizes and "allocated" in sizes:
        sizes.setdefault("unallocated", sizes["reserved"] - sizes["allocated"])
    sizes.pop("reserved", None)
    if "wouldexceedallowedmemory" in message:  # cudaMallocAsync: the driver caches
        sizes.setdefault("unallocated", 0)
    if "free" not in sizes and {"capacity", "allocated"} <= sizes.keys():  # XPU, MPS
        used = sizes["allocated"] + sizes.setdefault("unallocated", 0) + sizes.pop("elsewhere", 0)
        sizes["free"] = max(0, sizes["capacity"] - used)
        guessed = True
    if not sizes and re.search(DRIVER, message):
        return DriverError()
    if HOST in message:
        raise SpecError(f"{HOST} is PyTorch's allocator of host memory, so the machine's RAM was full, not a GPU. Load "
                        "weights in shards or in 16 bits, use fewer DataLoader workers, or offload less to the host")
    if missing := [name for name in ("requested", "capacity", "free", "allocated", "unallocated") if name not in sizes]:
        raise SpecError(
            f"this is not a message of torch.OutOfMemoryError: it lacks {', '.join(missing)}. Give a MODEL, or on "
            "stdin the whole message, which starts with 'CUDA out of memory. Tried to allocate'"
        )
    if sizes.get("process", 0) > sizes["capacity"]:  # torch writes 17179869184.00 GiB if it could not ask the driver
        del sizes["process"]
    setting = re.search(r"PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF", message)
    return OutOfMemory(**sizes, free_at_most=guessed, variable=setting[0] if setting else VARIABLE)
