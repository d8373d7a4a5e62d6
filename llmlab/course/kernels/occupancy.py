"""How many blocks of a kernel fit on a multiprocessor at the same time.

The limits are from the CUDA C++ Programming Guide, "Compute Capabilities" (technical specifications per compute
capability). Registers and shared memory are allocated in units as in cuda_occupancy.h; a test compares both.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from ...base.errors import SpecError
from ...hardware.gpu import GPU

WARP = 32  # threads
REGISTERS = 65536  # 32-bit registers per multiprocessor
REGISTER_UNIT = 256  # a warp gets registers in units of this size
SCHEDULERS = 4  # of a multiprocessor; each has a quarter of the registers, and runs its own warps


class Limits(NamedTuple):
    """Limits of a multiprocessor: threads, blocks, bytes of shared memory; `system` bytes of it per block are reserved,
    and `unit` is the unit in which it is allocated."""

    threads: int
    blocks: int
    shared: int
    system: int
    unit: int


LIMITS = {
    (7, 5): Limits(1024, 16, 64 << 10, 0, 256),
    (8, 0): Limits(2048, 32, 164 << 10, 1024, 128),
    (8, 6): Limits(1536, 16, 100 << 10, 1024, 128),
    (8, 9): Limits(1536, 24, 100 << 10, 1024, 128),
    (9, 0): Limits(2048, 32, 228 << 10, 1024, 128),
}


def limits_of(gpu: GPU) -> Limits:
    """Return the limits of a multiprocessor of `gpu`. Raises SpecError if the table does not have them."""
    if gpu.compute_capability not in LIMITS:
        known = ", ".join(f"{major}.{minor}" for major, minor in LIMITS)
        raise SpecError(f"{gpu.name} has compute capability {gpu.compute_capability}; limits are known for {known}")
    return LIMITS[gpu.compute_capability]


def blocks_by(threads: int, registers: int, shared: int, gpu: GPU) -> dict[str, int]:
    """Return how many blocks each limit of a multiprocessor allows. The smallest number fits.

    `threads` and bytes of `shared` memory are per block, `registers` are per thread.
    """
    limits = limits_of(gpu)
    warps = ceil(threads / WARP)
    per_warp = ceil(registers * WARP / REGISTER_UNIT) * REGISTER_UNIT
    per_block = ceil((shared + limits.system) / limits.unit) * limits.unit
    per_scheduler = REGISTERS // SCHEDULERS // per_warp if registers else 0  # warps
    return {
        "threads": limits.threads // (warps * WARP),
        "blocks": limits.blocks,
        "registers": per_scheduler * SCHEDULERS // warps if registers else limits.blocks,
        "shared memory": limits.shared // per_block if per_block else limits.blocks,
    }


def occupancy(threads: int, registers: int, shared: int, gpu: GPU) -> float:
    """Return the share of a multiprocessor's warps that blocks with these resources fill."""
    blocks = min(blocks_by(threads, registers, shared, gpu).values())
    return blocks * ceil(threads / WARP) * WARP / limits_of(gpu).threads
