"""Settings of the caching allocator (PYTORCH_CUDA_ALLOC_CONF), and how they round requests to blocks and segments.

Source: c10/core/AllocatorConfig.{h,cpp}, c10/cuda/CUDAAllocatorConfig.{h,cpp}, and round_size,
roundup_power2_next_division and get_allocation_size in c10/cuda/CUDACachingAllocator.cpp, torch 2.6 to 2.13.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ...base.errors import SpecError
from ...base.units import MiB, show_bytes

MIN_BLOCK = 512  # kMinBlockSize: sizes round up to a multiple of it
SMALL_SIZE = 1 * MiB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 * MiB  # kSmallBuffer: the segment, or the page of an expandable one, that small requests share
ROUND_LARGE = 2 * MiB  # kRoundLarge: the segment of one large request is a multiple of it
MIN_LARGE_ALLOC = 10 * MiB  # kMinLargeAlloc: a request below it shares a segment of large_segment_size
LARGE_SEGMENT = 20 * MiB  # kLargeBuffer, a constant until torch made it a setting
INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: below 2 MiB, from 2 MiB, from 4 MiB, ... from 32 GiB

# Options of host memory, locks and graph capture, which do not change the allocations of the device allocator.
WITHOUT_EFFECT = (
    "release_lock_on_cudamalloc",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_free_catch_all",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
    "graph_capture_record_stream_reuse",
)


@dataclass(frozen=True)
class AllocatorConfig:
    """The allocator's settings, with sizes in bytes. Raises SpecError for a value that torch refuses too.

    `roundup_power2_divisions` is one number for all sizes, or 16 numbers, one for each of INTERVALS.
    `garbage_collection_threshold` acts only together with a memory fraction below 1, as in torch.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None  # None: a block of any size may be split
    roundup_power2_divisions: int | tuple[int, ...] | None = None
    garbage_collection_threshold: float | None = None
    large_segment_size: int = LARGE_SEGMENT
    max_non_split_rounding: int = LARGE_SEGMENT  # by how much an unsplit oversize block may exceed the request
    per_process_memory_fraction: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what torch refuses."""
        segment, split, divisions = self.large_segment_size, self.max_split_size, self.roundup_power2_divisions
        if segment <= MIN_LARGE_ALLOC:
            raise SpecError(f"large_segment_size is {show_bytes(segment)}; it must be above 10 MiB.")
        if split is not None and split < segment:
            raise SpecError(f"max_split_size is {show_bytes(split)}; it must be at least {show_bytes(segment)}.")
        if self.max_non_split_rounding < (least := min(segment, LARGE_SEGMENT)):
            rounding = show_bytes(self.max_non_split_rounding)
            raise SpecError(f"max_non_split_rounding is {rounding}; it must be at least {show_bytes(least)}.")
        threshold = self.garbage_collection_threshold
        if threshold is not None and not 0 < threshold < 1:
            raise SpecError(f"garbage_collection_threshold is {threshold}; it must lie between 0 and 1.")
        if not 0 <= self.per_process_memory_fraction <= 1:
            raise SpecError(f"per_process_memory_fraction is {self.per_process_memory_fraction}; it must be in [0, 1].")
        if isinstance(divisions, int) and (divisions == 0 or not is_power_of_two(divisions)):
            raise SpecError(f"roundup_power2_divisions is {divisions}; it must be a power of two.")
        if isinstance(divisions, tuple) and (len(divisions) != INTERVALS or not all(map(is_power_of_two, divisions))):
            raise SpecError(f"roundup_power2_divisions is {divisions}; it must be {INTERVALS} powers of two or zeros.")

    @classmethod
    def from_environment(cls) -> AllocatorConfig:
        """Return the settings of PYTORCH_ALLOC_CONF, or of its older name; raises the errors of `parse`."""
        # torch 2.9 ignores the new name on CUDA (pytorch issue 183387), so runs of autumn 2025 with it had no settings.
        return cls.parse(os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Return the settings in `text`, which has the syntax of PYTORCH_CUDA_ALLOC_CONF: "key:value,key:value".

        Raises SpecError for a key torch does not know, for a value it refuses, and for backend:cudaMallocAsync and
        throw_on_cudamalloc_oom:True, which are not simulated.
        """
        settings: dict[str, Any] = {}
        for option in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text)):
            key, _, value = option.partition(":")
            if option in ("", "backend:native", "throw_on_cudamalloc_oom:False") or key in WITHOUT_EFFECT:
                continue
            if key in ("backend", "throw_on_cudamalloc_oom"):
                raise SpecError(f"{option} is not simulated; take it out of PYTORCH_CUDA_ALLOC_CONF.")
            if key not in OPTIONS:
                raise SpecError(f"PYTORCH_CUDA_ALLOC_CONF has no option {key!r}; it has {', '.join(OPTIONS)}.")
            name, read, example = OPTIONS[key]
            try:
                settings[name] = read(value)
            except ValueError:
                raise SpecError(f"{option!r} in PYTORCH_CUDA_ALLOC_CONF cannot be; write {key}:{example}.") from None
        return cls(**settings)


def is_power_of_two(number: int) -> bool:
    """Return whether `number` is 1, 2, 4, 8, ..., or 0, which turns rounding off."""
    return number >= 0 and number & (number - 1) == 0


def read_bool(value: str) -> bool:
    """Return True or False, in torch's spelling; raises ValueError."""
    return bool(("False", "True").index(value))


def read_mebibytes(value: str) -> int:
    """Return bytes from a whole number of MiB; raises ValueError."""
    if not value.isdecimal():
        raise ValueError(value)
    return int(value) * MiB


def read_divisions(value: str) -> int | tuple[int, ...]:
    """Return divisions from "4", or from "[256:1,512:2,>:8]", which means 1 below 512 MiB, 2 up to 1 GiB, and 8 above.

    Source: parseRoundUpPower2Divisions. In older releases ">" also overwrites the interval before it.
    """
    if not value.startswith("["):
        return int(value)
    divisions, last = [0] * INTERVALS, None
    for interval in value.strip("[]").split(","):
        start, number = interval.split(":")
        if start == ">":
            first = 1 if last is None else last + 1
            divisions[first:] = [int(number)] * (INTERVALS - first)
            continue
        if int(start) < 1 or not is_power_of_two(int(start)):
            raise ValueError(value)
        index = min(int(start).bit_length() - 1, INTERVALS - 1)
        if last is None:
            divisions[:index] = [int(number)] * index
        divisions[index] = int(number)
        last = index
    return tuple(divisions)


# For each option: the field, the function that reads its value, and an example.
OPTIONS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "expandable_segments": ("expandable_segments", read_bool, "True"),
    "max_split_size_mb": ("max_split_size", read_mebibytes, "128"),
    "roundup_power2_divisions": ("roundup_power2_divisions", read_divisions, "4"),
    "garbage_collection_threshold": ("garbage_collection_threshold", float, "0.8"),
    "large_segment_size_mb": ("large_segment_size", read_mebibytes, "20"),
    "max_non_split_rounding_mb": ("max_non_split_rounding", read_mebibytes, "20"),
    "per_process_memory_fraction": ("per_process_memory_fraction", float, "0.9"),
}


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
    """Return the bytes that a request of `rounded` bytes asks the driver for (get_allocation_size)."""
    if rounded <= SMALL_SIZE:
        return SMALL_SEGMENT
    if rounded < MIN_LARGE_ALLOC:
        return config.large_segment_size
    return -(-rounded // ROUND_LARGE) * ROUND_LARGE


def blocks_of(sizes: Iterable[int]) -> set[int]:
    """Return the sizes of the blocks that large requests of `sizes` bytes can get.

    Each block has the size of the rounded request, or of its whole segment if the remainder is too small to be split.
    """
    rounded = {-(-size // MIN_BLOCK) * MIN_BLOCK for size in sizes}
    whole = {size: -(-size // ROUND_LARGE) * ROUND_LARGE for size in rounded}
    return rounded | {segment for size, segment in whole.items() if segment - size <= SMALL_SIZE}
