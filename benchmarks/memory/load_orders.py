"""One simulated step, its quantized weights loaded in other orders.

The order in which tensors are read decides which holes are left in memory after loading, but changes none of the step's
later requests. So a step is simulated once, and its requests are sent to the allocator again in each order, which takes
a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from llmlab.hardware.gpu import GPU
from llmlab.hardware.gpu import gpu as find_gpu
from llmlab.simulation import report
from llmlab.simulation.allocator.caching import Allocator, AllocatorOutOfMemory
from llmlab.simulation.allocator.config import AllocatorConfig
from llmlab.specs.model import ModelLike
from llmlab.specs.run import Run
from llmlab.step.quantized import LoadOrder, one_at_a_time

Request = tuple[str, Any]  # its kind, and the bytes, the number of an earlier request, or a phase


class Peaks(NamedTuple):
    """The peaks of a step in bytes, as in its Report; for phase "load" the bytes allocated at its end."""

    allocated: int
    reserved: int
    phases: dict[str, int]


class Requests(NamedTuple):
    """A step's requests to the allocator of a card with `room` bytes, in order.

    `sizes` are the elements of the tensors that were loaded; `read` and `taken` are, by the number of the tensor, the
    requests while it was read and while it was taken into the model.
    """

    room: int | None
    sizes: list[int]
    before: list[Request]
    read: dict[int, list[Request]]
    taken: dict[int, list[Request]]
    after: list[Request]
    config: AllocatorConfig = AllocatorConfig()

    def in_order(self, order: Iterable[tuple[int, bool]]) -> Peaks | None:
        """Return the peaks with tensors loaded in `order`, as `one_at_a_time` yields one; None if memory runs out."""
        memory, phase = Allocator(self.room, self.config), None
        addresses: dict[int, int] = {}
        phases: dict[str, int] = {}
        parts = (self.before, *((self.taken if done else self.read)[index] for index, done in order), self.after)
        for what, value in (request for part in parts for request in part):
            if what == "malloc":
                number, size, stream = value
                try:
                    addresses[number] = memory.malloc(size, stream)
                except AllocatorOutOfMemory:
                    return None
            elif what == "free":
                memory.free(addresses.pop(value))
            elif what == "phase":
                phase = value
                if phase is None:
                    phases.setdefault("load", memory.allocated)
            else:
                getattr(memory, what)()
            if phase and phase != "load":
                phases[phase] = max(phases.get(phase, 0), memory.allocated)
        return Peaks(memory.peak_allocated, memory.peak_reserved, phases)


def requests_of(model: ModelLike, run: Run, gpu: GPU | str, load_order: LoadOrder = one_at_a_time) -> Requests:
    """Simulate a step whose base model is quantized, and return its requests. Raises as `lab.simulate` does."""
    card = find_gpu(gpu)
    # ROOMY: so that even a step that does not fit makes all its requests
    log = _log(model, run, replace(card, memory=report.ROOMY), load_order)
    before: list[Request] = []
    after: list[Request] = []
    read: dict[int, list[Request]] = {}
    taken: dict[int, list[Request]] = {}
    part, sizes = before, []
    for what, value in log:
        if what == "read":
            part = read[value] = []
        elif what == "take in":
            part = taken[value] = []
        elif what == "loaded":
            part, sizes = after, value
        else:
            part.append((what, value))
    return Requests(card.room(run.world_size), sizes, before, read, taken, after)


def _log(model: ModelLike, run: Run, card: GPU, load_order: LoadOrder) -> list[Request]:
    """Simulate, and return the requests, and between them when each tensor was loaded and when each phase began."""

    class Logged(Allocator):
        def malloc(self, size: int, stream: int = 0) -> int:
            address = super().malloc(size, stream)
            numbers[address] = len(log)
            log.append(("malloc", (len(log), size, stream)))
            return address

        def free(self, address: int) -> None:
            super().free(address)
            log.append(("free", numbers.pop(address)))

        def empty_cache(self) -> None:
            super().empty_cache()
            log.append(("empty_cache", None))

        def reset_peak(self) -> None:
            super().reset_peak()
            log.append(("reset_peak", None))

    def marked(sizes: list[int]) -> Iterator[tuple[int, bool]]:
        for index, done in load_order(sizes):
            log.append(("take in" if done else "read", index))
            yield index, done
        log.append(("loaded", sizes))

    log: list[Request] = []
    numbers: dict[int, int] = {}
    report.recorded(model, run, card, Logged, lambda phase: log.append(("phase", phase)), marked)
    return log
