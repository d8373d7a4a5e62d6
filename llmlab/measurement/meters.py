"""Memory around code of your own: `with lab.meter() as m`.

All three meters have the same attributes, in bytes, readable inside the block and after it: `allocated` and `reserved`
now, `peak_allocated` and `peak_reserved` since the block began or `reset_peak()` was last called, and `timeline`, what
was allocated after each allocation and each free, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..recording.events import CPUEvents, CUDAEvents, exclusive
from .devices import pick_device


class CPUMeter:
    """Counts what the block itself allocates: it starts at 0, and tensors older than the block are not in it.

    Only the calling thread is counted. The CPU's allocator keeps nothing back, so `reserved` and `peak_reserved` are
    None; scratch that MKL and oneDNN take for themselves is not seen.
    """

    reserved = peak_reserved = None

    def __init__(self) -> None:
        self._live: dict[int, int] = {}
        self._allocated = self._peak = 0
        self._timeline: list[int] = []
        self._source = CPUEvents()
        self._source.start()
        self._open = True

    @property
    def allocated(self) -> int:
        self._read()
        return self._allocated

    @property
    def peak_allocated(self) -> int:
        self._read()
        return self._peak

    @property
    def timeline(self) -> tuple[int, ...]:
        self._read()
        return tuple(self._timeline)

    def reset_peak(self) -> None:
        """Let the peak start again from what is allocated now."""
        self._read()
        self._peak = self._allocated

    def close(self) -> None:
        """Stop counting; the figures stay."""
        self._read(last=True)

    def _read(self, last: bool = False) -> None:
        if not self._open:
            return
        for _, address, size in self._source.stop():
            if size < 0:
                size = -self._live.pop(address, 0)  # 0: older than the block
            else:
                size -= self._live.get(address, 0)  # freed by another thread meanwhile
                self._live[address] = self._live.get(address, 0) + size
            self._allocated += size
            self._peak = max(self._peak, self._allocated)
            self._timeline.append(self._allocated)
        if last:
            self._open = False
        else:
            self._source.start()


class CUDAMeter:
    """The caching allocator's own statistics: everything this process holds on the GPU, older tensors too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._source = CUDAEvents(device)
        self._before = torch.cuda.memory_allocated(device)
        self._final: dict[str, int] = {}
        self._timeline: tuple[int, ...] = ()
        torch.cuda.reset_peak_memory_stats(device)
        self._source.start()

    @property
    def allocated(self) -> int:
        return self._final["allocated"] if self._final else torch.cuda.memory_allocated(self._device)

    @property
    def reserved(self) -> int:
        return self._final["reserved"] if self._final else torch.cuda.memory_reserved(self._device)

    @property
    def peak_allocated(self) -> int:
        return self._final["peak_allocated"] if self._final else torch.cuda.max_memory_allocated(self._device)

    @property
    def peak_reserved(self) -> int:
        return self._final["peak_reserved"] if self._final else torch.cuda.max_memory_reserved(self._device)

    @property
    def timeline(self) -> tuple[int, ...]:
        """Bytes after each event, as requests rounded up to 512 B; a block not split holds up to 1 MiB more."""
        return self._timeline if self._final else self._running(self._source.events())

    def reset_peak(self) -> None:
        """Let the peaks start again from what is allocated and reserved now."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def close(self) -> None:
        """Stop counting; the figures stay."""
        self._timeline = self._running(self._source.stop())
        names = ("allocated", "reserved", "peak_allocated", "peak_reserved")
        self._final = {name: getattr(self, name) for name in names}

    def _running(self, events: list) -> tuple[int, ...]:
        now, sizes = self._before, []
        for event in events:
            now += event.size
            sizes.append(now)
        return tuple(sizes)


class MPSMeter:
    """What torch.mps tells when asked. It keeps no peaks: the peak is the highest of the moments somebody looked at."""

    def __init__(self) -> None:
        self._looks: list[int] = []
        self._peaks = (0, 0)
        self._now = (0, 0)
        self._open = True
        self._look()

    @property
    def allocated(self) -> int:
        return self._look()[0]

    @property
    def reserved(self) -> int:
        return self._look()[1]

    @property
    def peak_allocated(self) -> int:
        self._look()
        return self._peaks[0]

    @property
    def peak_reserved(self) -> int:
        self._look()
        return self._peaks[1]

    @property
    def timeline(self) -> tuple[int, ...]:
        return tuple(self._looks)

    def reset_peak(self) -> None:
        """Let the peaks start again from what is allocated and reserved now."""
        self._peaks = self._look()

    def close(self) -> None:
        """Stop looking; the figures stay."""
        self._look()
        self._open = False

    def _look(self) -> tuple[int, int]:
        if self._open:
            torch.mps.synchronize()
            self._now = (torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory())
            self._peaks = (max(self._peaks[0], self._now[0]), max(self._peaks[1], self._now[1]))
            self._looks.append(self._now[0])
        return self._now


@contextmanager
def metered(device: str | torch.device | None = None) -> Iterator[CPUMeter | CUDAMeter | MPSMeter]:
    """Count the bytes that the block allocates on `device`: CUDA's GPU, else Apple's, else the CPU.

    Raises NotAvailable for a device this machine lacks, inside another meter, and on a CPU inside a torch profiler.

        >>> import torch
        >>> with metered("cpu") as m:
        ...     a = torch.empty(1000)                # 4000 B
        ...     b = torch.empty(250)                 # 1000 B
        ...     del a
        >>> m.allocated, m.peak_allocated, m.timeline
        (1000, 5000, (4000, 5000, 1000))
    """
    picked = pick_device(device)
    with exclusive("meter()"):
        running = CUDAMeter(picked) if picked.type == "cuda" else MPSMeter() if picked.type == "mps" else CPUMeter()
        try:
            yield running
        finally:
            running.close()
