"""Memory around code of your own: `with lab.meter() as m`.

All three meters have the same attributes, in bytes, readable inside the block and after it: `allocated` and `reserved`
now, `peak_allocated` and `peak_reserved` since the block began or `reset_peak()` was last called, and `timeline`, what
was allocated after each allocation and each free, in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch

from ..recording.events import CPUEvents, CUDAEvents, exclusive
from .devices import Counters, counters, pick_device, reset_peaks


class _Meter(ABC):
    """The attributes of all meters, which stay after `close`."""

    _source: CPUEvents | CUDAEvents | None = None
    _final: Counters | None = None
    _sizes: tuple[int, ...] = ()  # the final timeline

    @abstractmethod
    def _read(self) -> Counters: ...

    @abstractmethod
    def _read_timeline(self) -> tuple[int, ...]: ...

    @property
    def allocated(self) -> int:
        return (self._final or self._read()).allocated

    @property
    def reserved(self) -> int | None:
        return (self._final or self._read()).reserved

    @property
    def peak_allocated(self) -> int:
        return (self._final or self._read()).peak_allocated

    @property
    def peak_reserved(self) -> int | None:
        return (self._final or self._read()).peak_reserved

    @property
    def timeline(self) -> tuple[int, ...]:
        return self._sizes if self._final else self._read_timeline()

    def close(self) -> None:
        """Stop counting; the figures stay."""
        self._final, self._sizes = self._read(), self._read_timeline()
        if self._source:
            self._source.stop()


class CPUMeter(_Meter):
    """Counts what the block itself allocates: it starts at 0, and tensors older than the block are not in it.

    Only the calling thread is counted. The CPU's allocator keeps nothing back, so `reserved` and `peak_reserved` are
    None; scratch that MKL and oneDNN take for themselves is not seen.
    """

    def __init__(self) -> None:
        self._live: dict[int, int] = {}
        self._allocated = self._peak = 0
        self._timeline: list[int] = []
        self._source: CPUEvents = CPUEvents()
        self._source.start()

    def reset_peak(self) -> None:
        """Let the peak start again from what is allocated now."""
        self._peak = self.allocated

    def _read(self) -> Counters:
        for _, address, size in self._source.stop():
            if size < 0:
                size = -self._live.pop(address, 0)  # 0: older than the block
            else:
                size -= self._live.get(address, 0)  # freed by another thread meanwhile
                self._live[address] = self._live.get(address, 0) + size
            self._allocated += size
            self._peak = max(self._peak, self._allocated)
            self._timeline.append(self._allocated)
        self._source.start()
        return Counters(self._allocated, None, self._peak, None)

    def _read_timeline(self) -> tuple[int, ...]:
        self._read()
        return tuple(self._timeline)


class CUDAMeter(_Meter):
    """The caching allocator's own statistics: everything this process has on the GPU, older tensors too.

    The timeline is of requests rounded up to 512 B; a block not split holds up to 1 MiB more.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._source: CUDAEvents = CUDAEvents(device)
        self._before = torch.cuda.memory_allocated(device)
        reset_peaks(device)
        self._source.start()

    def reset_peak(self) -> None:
        """Let the peaks start again from what is allocated and reserved now."""
        reset_peaks(self._device)

    def _read(self) -> Counters:
        return counters(self._device)

    def _read_timeline(self) -> tuple[int, ...]:
        return tuple(accumulate((event.size for event in self._source.events()), initial=self._before))[1:]


class MPSMeter(_Meter):
    """What torch.mps tells when asked. It keeps no peaks: the peak is the highest of the moments somebody looked at."""

    def __init__(self) -> None:
        self._looks: list[int] = []
        self._peaks = (0, 0)
        self._read()

    def reset_peak(self) -> None:
        """Let the peaks start again from what is allocated and reserved now."""
        self._peaks = self.allocated, self.reserved or 0

    def _read(self) -> Counters:
        allocated, reserved, *_ = counters(torch.device("mps"))
        self._peaks = max(self._peaks[0], allocated), max(self._peaks[1], reserved or 0)
        self._looks.append(allocated)
        return Counters(allocated, reserved, *self._peaks)

    def _read_timeline(self) -> tuple[int, ...]:
        return tuple(self._looks)


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
