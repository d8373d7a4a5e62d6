"""Statistics of the caching allocator: torch.cuda.memory_stats.

Source: DeviceStats in c10/core/CachingDeviceAllocator.h, and torch/csrc/cuda/Module.cpp, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator

# In torch, active blocks include those that another stream still uses, which are not simulated.
ACTIVE = {"active": "allocation", "active_bytes": "allocated_bytes"}


class Stat:
    """The current value of a count, its peak, and the totals of its increases and decreases."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def change(self, amount: int) -> None:
        """Add `amount`, which may be negative."""
        self.current += amount
        if amount < 0:
            self.freed -= amount
        else:
            self.allocated += amount
            if self.current > self.peak:
                self.peak = self.current


class Stats:
    """The counts for one size class, or for both; `clock` counts searches (get_free_blocks_call_count)."""

    def __init__(self) -> None:
        self.clock = 0
        self.allocation, self.segment, self.inactive_split = Stat(), Stat(), Stat()
        self.allocated_bytes, self.requested_bytes = Stat(), Stat()
        self.reserved_bytes, self.inactive_split_bytes = Stat(), Stat()


class Statistics:
    """The counts of one allocator, named as in torch."""

    COUNTERS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")

    def __init__(self) -> None:
        self.max_split_size = -1
        self.all, self.large_pool, self.small_pool = Stats(), Stats(), Stats()
        self.oversize_allocations, self.oversize_segments = Stat(), Stat()
        self.reset_accumulated()

    def reset_peak(self) -> None:
        """Reset the peaks to the current values."""
        for _, stat in self._named():
            stat.peak = stat.current

    def reset_accumulated(self) -> None:
        """Reset the totals and the counters to 0."""
        for _, stat in self._named():
            stat.allocated = stat.freed = 0
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = 0

    def as_dict(self) -> dict[str, int]:
        """Return the statistics under the keys of torch.cuda.memory_stats."""
        stats = {f"{name}.{part}": getattr(stat, part) for name, stat in self._named() for part in Stat.__slots__}
        stats |= {name: getattr(self, name) for name in (*self.COUNTERS, "max_split_size")}
        stats["num_oom_rejections"] = 0  # by throw_on_cudamalloc_oom, which is not simulated
        return dict(sorted(stats.items()))

    def _named(self) -> Iterator[tuple[str, Stat]]:
        for pool in ("all", "large_pool", "small_pool"):
            stats = {name: stat for name, stat in vars(getattr(self, pool)).items() if name != "clock"}
            stats |= {metric: stats[name] for metric, name in ACTIVE.items()}
            yield from ((f"{metric}.{pool}", stat) for metric, stat in stats.items())
        yield from ((name, getattr(self, name)) for name in ("oversize_allocations", "oversize_segments"))
