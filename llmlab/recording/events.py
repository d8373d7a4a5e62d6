"""Allocation events: what the allocator gave out and took back, with address and bytes, on any device.

On a CPU they come from PyTorch's profiler, which its CPU allocator reports to. Only the memory reports are on:
operators are not traced (the profiler's observers are limited to a scope that no operator has), so a step pays for its
10^3 to 10^4 allocations and for nothing else. On a GPU they come from the caching allocator's own history, without
stacks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..base.compat import symbol
from ..base.errors import NotAvailable
from .parts import Event
from .snapshot import events_of_trace

_running: list[str] = []


@contextmanager
def exclusive(what: str) -> Iterator[None]:
    """Raise NotAvailable where a meter or a measurement is running already: there is one recording per device."""
    if _running:
        raise NotAvailable(f"{what} inside {_running[0]}: only one recording can run at a time; end the outer one "
                           "first")  # fmt: skip
    _running.append(what)
    try:
        yield
    finally:
        _running.clear()


class CPUEvents:
    """The CPU allocator's events of the calling thread, which on a CPU also runs the backward pass.

    Raises NotAvailable where another profiler is on: there is one per thread.
    """

    def start(self) -> None:
        profiler = symbol("torch._C._profiler")
        cpu = {profiler.ProfilerActivity.CPU}
        if symbol("torch._C._autograd._profiler_enabled")():
            raise NotAvailable("a torch profiler is already running in this thread; end it first")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes two lines to stderr every time
        # state, shapes, memory, stack, flops, modules: memory and nothing else
        options = symbol("torch._C._profiler._ExperimentalConfig")()
        config = profiler.ProfilerConfig(profiler.ProfilerState.KINETO, False, True, False, False, False, options)
        symbol("torch._C._autograd._prepare_profiler")(config, cpu)
        # torch's stub leaves the third argument out (torch/csrc/autograd/init.cpp: scopes)
        symbol("torch._C._autograd._enable_profiler")(config, cpu, {profiler.RecordScope.LITE_INTERPRETER})

    def stop(self) -> list[Event]:
        allocation = symbol("torch._C._profiler._ExtraFields_Allocation")
        events = []
        for node in symbol("torch._C._autograd._disable_profiler")().experimental_event_tree():
            fields = node.extra_fields
            if isinstance(fields, allocation):  # of the CPU: no other activity is on
                events.append(Event(node.start_time_ns, fields.ptr, fields.alloc_size))
        return sorted(events, key=lambda event: event.time)


class CUDAEvents:
    """The caching allocator's history of one GPU. It replaces a recording of the user's own, and ends it."""

    def __init__(self, device: torch.device) -> None:
        self.index = device.index if device.index is not None else torch.cuda.current_device()
        self.before = 0

    def start(self) -> None:
        symbol("torch.cuda.memory._record_memory_history")(enabled="all", context=None)
        # Entries of an earlier recording stay in the history: ours begin after them.
        self.before = len(self._trace())

    def events(self) -> list[Event]:
        """Return the events so far, without ending the recording."""
        return events_of_trace(self._trace()[self.before :])

    def stop(self) -> list[Event]:
        events = self.events()
        symbol("torch.cuda.memory._record_memory_history")(enabled=None)
        return events

    def _trace(self) -> list[dict[str, Any]]:
        return symbol("torch.cuda.memory._snapshot")()["device_traces"][self.index]
