"""If nothing fits, or nothing finishes in time: the nearest question that has an answer, in each direction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from ..hardware.gpu import GPU, gpus
from ..specs.model import model as find_model
from ..specs.model import models
from .machines import Machines, joined, of_total
from .result import Nearest
from .search import Estimate, Search
from .space import METHODS, Question

MOST_GPUS = 1024
LEAST_SEQ_LEN = 128
LOOKED_AT = 200  # candidates of a question, the fastest first, until one is sure to fit


def nearest(question: Question, machines: Machines) -> tuple[Nearest, ...]:
    """Return, in each direction, the first run that fits by its estimate with room to spare (and finishes in time)."""
    directions = (_more(question, machines), _larger(question, machines), _shorter(question, machines),
                  _smaller(question, machines), _other(question, machines))  # fmt: skip
    return tuple(answer for answers in directions if (answer := next(answers, None)))


def fitting(question: Question, machines: Machines) -> Estimate | None:
    """Return the fastest run that is sure to fit; the batch is rounded up to a multiple of the number of GPUs."""
    batch = question.global_batch + -question.global_batch % machines.total
    search = Search(replace(question, global_batch=batch, goal="fastest"), [machines])
    return next((candidate for candidate in islice(search, LOOKED_AT) if candidate.certain and candidate.seconds), None)


def _answer(direction: str, description: str, question: Question, machines: Machines) -> Iterator[Nearest]:
    from ..formulas.report import estimated

    if candidate := fitting(question, machines):
        report = estimated(question.spec, candidate.run, machines.gpu, machines.cluster)
        yield Nearest(direction, description, question.spec.name, machines, candidate.run, report, question.tokens)


def _more(question: Question, machines: Machines) -> Iterator[Nearest]:
    total = 1
    while (total := 2 * total) <= MOST_GPUS:
        larger = of_total(machines.gpu, total)
        if total > machines.total and joined(larger):
            yield from _answer("More GPUs", str(larger), question, larger)


def _larger(question: Question, machines: Machines) -> Iterator[Nearest]:
    """Try GPUs of the same vendor with more memory, the smallest first, then more of them. With a deadline, try any
    other GPU of the vendor, the cheapest first."""

    def price(device: GPU) -> float:
        return device.usd_per_hour or float("inf")

    if question.within is None:
        devices = [device for device in gpus() if device.memory > machines.gpu.memory]
        devices.sort(key=lambda device: (device.memory, price(device)))
        direction = "A GPU with more memory"
    else:
        devices = sorted((device for device in gpus() if device != machines.gpu), key=price)
        direction = "Another GPU"
    devices = [device for device in devices if device.vendor == machines.gpu.vendor]
    yield from _enough(direction, [Machines(device, machines.nodes, machines.per_node) for device in devices], question)
    total = machines.total
    while question.within is None and (total := 2 * total) <= MOST_GPUS:
        yield from _enough("More GPUs with more memory", [of_total(device, total) for device in devices], question)


def _enough(direction: str, choices: Sequence[Machines], question: Question) -> Iterator[Nearest]:
    """Try each of `choices`. Without a deadline they are sorted by memory, so if nothing fits the last, none is
    tried."""
    connected = [choice for choice in choices if joined(choice)]
    if question.within is not None or (connected and fitting(question, connected[-1])):
        for choice in connected:
            yield from _answer(direction, str(choice), question, choice)


def _shorter(question: Question, machines: Machines) -> Iterator[Nearest]:
    seq_len, batch = question.seq_len, question.global_batch
    while (seq_len := seq_len // 2) >= LEAST_SEQ_LEN:
        batch *= 2
        description = f"{seq_len} tokens, {batch} sequences per step"
        shorter = replace(question, fixed={**question.fixed, "seq_len": seq_len}, global_batch=batch)
        yield from _answer("Shorter sequences", description, shorter, machines)


def _smaller(question: Question, machines: Machines) -> Iterator[Nearest]:
    """Try presets of the same family, the largest first."""
    spec = question.spec
    presets = (find_model(name) for name in models())
    smaller = [preset for preset in presets if preset.family == spec.family and preset.parameters < spec.parameters]
    for preset in sorted(smaller, key=lambda preset: -preset.parameters):
        if preset.max_positions >= question.seq_len:
            yield from _answer("A smaller model", preset.name, replace(question, spec=preset), machines)


def _other(question: Question, machines: Machines) -> Iterator[Nearest]:
    if not question.stack.own_program:
        for method in METHODS[METHODS.index(question.method) + 1 :]:
            yield from _answer("Another method", method, replace(question, method=method), machines)
