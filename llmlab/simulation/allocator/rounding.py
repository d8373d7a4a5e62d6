"""Rounding of the caching allocator: a request up to a block, a block up to the segment asked of the driver.

Source: round_size, roundup_power2_next_division and get_allocation_size in c10/cuda/CUDACachingAllocator.cpp, torch 2.6
to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...base.units import MiB
from .config import INTERVALS, MIN_LARGE_ALLOC, AllocatorConfig

MIN_BLOCK = 512  # kMinBlockSize: sizes round up to a multiple of it
SMALL_SIZE = 1 * MiB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 * MiB  # kSmallBuffer: the segment, or the page of an expandable one, that small requests share
ROUND_LARGE = 2 * MiB  # kRoundLarge: the segment of one large request is a multiple of it


def round_size(size: int, config: AllocatorConfig) -> int:
    """Return `size` rounded up to 512 bytes, or to a division of a power of two (round_size)."""
    divisions = config.roundup_power2_divisions
    if divisions is not None and size >= MIN_BLOCK:
        if isinstance(divisions, tuple):
            divisions = divisions[min(max(size.bit_length() - MiB.bit_length(), 0), INTERVALS - 1)]
        if divisions > 1 and size > MIN_BLOCK * divisions:
            step = (1 << (size.bit_length() - 1)) // divisions  # roundup_power2_next_division
            return -(-size // step) * step
    return -(-size // MIN_BLOCK) * MIN_BLOCK


def segment_size(rounded: int, config: AllocatorConfig) -> int:
    """Return the bytes that a request of `rounded` asks of the driver (get_allocation_size)."""
    if rounded <= SMALL_SIZE:
        return SMALL_SEGMENT
    if rounded < MIN_LARGE_ALLOC:
        return config.large_segment_size
    return -(-rounded // ROUND_LARGE) * ROUND_LARGE


def blocks_of(sizes: Iterable[int]) -> set[int]:
    """Return the sizes of the blocks that requests of `sizes` bytes, large ones, can get.

    Each is the request rounded up, or the whole segment made for it where too little is left to be cut off.
    """
    rounded = {-(-size // MIN_BLOCK) * MIN_BLOCK for size in sizes}
    whole = {size: -(-size // ROUND_LARGE) * ROUND_LARGE for size in rounded}
    return rounded | {segment for size, segment in whole.items() if segment - size <= SMALL_SIZE}
