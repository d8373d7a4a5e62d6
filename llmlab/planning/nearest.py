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
from .search import Found, Search
from .space import METHODS, Question

MOST_GPUS = 1024
LEAST_SEQ_LEN = 128
LOOKED_AT = 200  # candidates of a question, the fastest first, until one is sure to fit


def nearest(question: Question, where: Machines) -> tuple[Nearest, ...]:
    """Return, in each direction, the first run that fits by its estimate with room to spare (and finishes in time)."""
    directions = (_more(question, where), _larger(question, where), _shorter(question, where),
                  _smaller(question, where), _other(question, where))  # fmt: skip
    return tuple(found for each in directions if (found := next(each, None)))


def fitting(question: Question, where: Machines) -> Found | None:
    """Return the fastest run that is sure to fit; the batch is rounded up to a multiple of the number of GPUs."""
    batch = question.global_batch + -question.global_batch % where.total
    search = Search(replace(question, global_batch=batch, goal="fastest"), [where])
    return next((found for found in islice(search, LOOKED_AT) if found.certain and found.seconds), None)


def _answer(direction: str, what: str, question: Question, where: Machines) -> Iterator[Nearest]:
    from ..formulas.report import estimated

    if found := fitting(question, where):
        report = estimated(question.spec, found.run, where.card, where.cluster)
        yield Nearest(direction, what, question.spec.name, where, found.run, report, question.tokens)


def _more(question: Question, where: Machines) -> Iterator[Nearest]:
    total = 1
    while (total := 2 * total) <= MOST_GPUS:
        there = of_total(where.card, total)
        if total > where.total and joined(there):
            yield from _answer("More GPUs", str(there), question, there)


def _larger(question: Question, where: Machines) -> Iterator[Nearest]:
    """Try GPUs of the same vendor with more memory, the smallest first, then more of them. With a deadline, try any
    other GPU of the vendor, the cheapest first."""

    def price(card: GPU) -> float:
        return card.usd_per_hour or float("inf")

    if question.within is None:
        cards = sorted((card for card in gpus() if card.memory > where.card.memory), key=lambda c: (c.memory, price(c)))
        direction = "A GPU with more memory"
    else:
        cards = sorted((card for card in gpus() if card != where.card), key=price)
        direction = "Another GPU"
    cards = [card for card in cards if card.vendor == where.card.vendor]
    yield from _enough(direction, [Machines(card, where.nodes, where.per_node) for card in cards], question)
    total = where.total
    while question.within is None and (total := 2 * total) <= MOST_GPUS:
        yield from _enough("More GPUs with more memory", [of_total(card, total) for card in cards], question)


def _enough(direction: str, there: Sequence[Machines], question: Question) -> Iterator[Nearest]:
    """Try each of `there`. Without a deadline they are sorted by memory, so if nothing fits the last, none is tried."""
    there = [each for each in there if joined(each)]
    if question.within is not None or (there and fitting(question, there[-1])):
        for each in there:
            yield from _answer(direction, str(each), question, each)


def _shorter(question: Question, where: Machines) -> Iterator[Nearest]:
    seq_len, batch = question.seq_len, question.global_batch
    while (seq_len := seq_len // 2) >= LEAST_SEQ_LEN:
        batch *= 2
        what = f"{seq_len} tokens, {batch} sequences per step"
        shorter = replace(question, fixed={**question.fixed, "seq_len": seq_len}, global_batch=batch)
        yield from _answer("Shorter sequences", what, shorter, where)


def _smaller(question: Question, where: Machines) -> Iterator[Nearest]:
    """Try presets of the same family, the largest first."""
    spec = question.spec
    presets = (find_model(name) for name in models())
    smaller = [each for each in presets if each.family == spec.family and each.parameters < spec.parameters]
    for each in sorted(smaller, key=lambda preset: -preset.parameters):
        if each.max_positions >= question.seq_len:
            yield from _answer("A smaller model", each.name, replace(question, spec=each), where)


def _other(question: Question, where: Machines) -> Iterator[Nearest]:
    if not question.stack.own_program:
        for method in METHODS[METHODS.index(question.method) + 1 :]:
            yield from _answer("Another method", method, replace(question, method=method), where)
