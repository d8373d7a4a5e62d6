"""Streams, events and CUDA graphs of the simulated GPU, where nothing takes time.

A block that was freed on a stream is only used again on that stream (c10/cuda/CUDACachingAllocator.cpp): the allocator
follows that. Everything a stream was asked to do is done at once, so record_stream delays nothing; backward runs on the
stream that is current when it is called, and not on those of forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

from torch.autograd import profiler

from ..base.errors import NotAvailable
from .devices import Shown
from .values.placeholders import PLACEHOLDER, Unknown, located


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, as there is nothing to wait for, to seed or to initialize."""


class Event:
    """torch.cuda.Event: the time between two of them is not known; `between` stands for it."""

    between: float = Unknown(PLACEHOLDER)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return self.between


class Stream:
    """torch.cuda.Stream, by its number; 0 is the default stream."""

    device_type = 1
    _numbers = count(1)

    def __init__(self, device: Any = None, priority: int = 0, **known: Any) -> None:
        self.priority = priority
        self.stream_id = self.cuda_stream = known["stream_id"] if "stream_id" in known else next(self._numbers)

    synchronize = wait_stream = wait_event = nothing
    device = property(lambda self: Shown.device)
    device_index = property(lambda self: Shown.device.index)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the least and the greatest priority (cudaDeviceGetStreamPriorityRange, from Volta on)."""
        return 0, -5

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


DEFAULT_STREAM = Stream(stream_id=0)


class CUDAGraph:
    """torch.cuda.CUDAGraph: what it records has a memory pool of its own, which is not simulated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise located(NotAvailable("torch.cuda.CUDAGraph: CUDA graphs are not simulated; run the step without one"))


@contextmanager
def profiled_as_host() -> Iterator[None]:
    """Let torch.profiler record the host where it is told to record CUDA too, whose events a CPU build cannot make, and
    emit_nvtx emit nothing."""
    real = profiler.profile.__init__

    def init(self: Any, enabled: bool = True, **options: Any) -> None:
        options = {name: value for name, value in options.items() if name not in ("use_device", "use_cuda")}
        real(self, enabled, **options)

    without_nvtx = mock.patch.multiple(profiler.emit_nvtx, __enter__=lambda self: self, __exit__=nothing)
    with mock.patch.object(profiler.profile, "__init__", init), without_nvtx:
        yield
