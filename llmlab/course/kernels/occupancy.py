"""How many blocks of a kernel one multiprocessor holds at once, and in how many waves a grid runs.

Limits are those of the CUDA C++ Programming Guide, "Compute Capabilities" (technical specifications per compute
capability); how registers and shared memory are handed out is that of cuda_occupancy.h, to which a test holds this.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from ...base.errors import SpecError
from ...hardware.gpu import GPU

WARP = 32  # threads
REGISTERS = 65536  # 32-bit registers per multiprocessor
REGISTER_UNIT = 256  # registers are handed to a warp in this many
SCHEDULERS = 4  # of a multiprocessor; each has a quarter of the registers, and runs its own warps


class Limits(NamedTuple):
    """Of one multiprocessor: threads, blocks, bytes of shared memory; of these the system's per block, and the unit."""

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


def limits_of(card: GPU) -> Limits:
    """Return the limits of one of `card`'s multiprocessors; SpecError where the table lacks them."""
    if card.compute_capability not in LIMITS:
        known = ", ".join(f"{major}.{minor}" for major, minor in LIMITS)
        raise SpecError(f"{card.name} has compute capability {card.compute_capability}; limits are known for {known}")
    return LIMITS[card.compute_capability]


def blocks_by(threads: int, registers: int, shared: int, card: GPU) -> dict[str, int]:
    """Return how many blocks each limit of a multiprocessor lets in.

    The smallest is how many it holds. threads: per block; registers: per thread;
    shared: bytes per block.
    """
    has = limits_of(card)
    warps = ceil(threads / WARP)
    per_warp = ceil(registers * WARP / REGISTER_UNIT) * REGISTER_UNIT
    per_block = ceil((shared + has.system) / has.unit) * has.unit
    per_scheduler = REGISTERS // SCHEDULERS // per_warp if registers else 0
    return {
        "threads": has.threads // (warps * WARP),
        "blocks": has.blocks,
        "registers": per_scheduler * SCHEDULERS // warps if registers else has.blocks,
        "shared memory": has.shared // per_block if per_block else has.blocks,
    }


def occupancy(threads: int, registers: int, shared: int, card: GPU) -> float:
    """Return the share of a multiprocessor's warps that such blocks can fill: active ones over the most it can hold."""
    blocks = min(blocks_by(threads, registers, shared, card).values())
    return blocks * ceil(threads / WARP) * WARP / limits_of(card).threads
