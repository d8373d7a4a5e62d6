"""Facts about the functions that the chapter on launching asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Codes = Sequence[int | None]


class Child:
    """A pretended process. It ends with `code` after as many polls as its local rank; with None, it never ends."""

    def __init__(self, environment: dict[str, str], code: int | None) -> None:
        self.environment, self.code, self.polls, self.terminated = environment, code, 0, False

    def poll(self) -> int | None:
        self.polls += 1
        if self.polls > 1000:
            raise RuntimeError("polled a process 1,000 times that waits for a dead one and never ends")
        if self.code is not None and self.polls > int(self.environment["LOCAL_RANK"]):
            return self.code
        return -15 if self.terminated else None

    def terminate(self) -> None:
        self.terminated = True


def _played(
    function: Callable[..., Any], *attempts: Codes, node: int = 0, nodes: int = 1, restarts: int = 0
) -> tuple[Any, list[Child]]:
    """Return the result, and the children that were started. Those of the n-th start end with the n-th codes."""
    children: list[Child] = []
    codes = [code for attempt in attempts for code in attempt]

    def start(environment: dict[str, str]) -> Child:
        children.append(Child(environment, codes[len(children)]))
        return children[-1]

    return function(start, node, nodes, len(attempts[0]), restarts), children


def _numbered(function: Callable[..., Any]) -> bool:
    _, children = _played(function, [0] * 8, node=1, nodes=4)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    numbers = [tuple(child.environment[name] for name in names) for child in children]
    return numbers == [(str(8 + local), str(local), "32") for local in range(8)]


def _ended(function: Callable[..., Any], *attempts: Codes, restarts: int = 0) -> tuple[Any, int, bool]:
    """Return the result, the number of children, and whether none was left that waits."""
    code, children = _played(function, *attempts, restarts=restarts)
    return code, len(children), all(child.terminated for child in children if child.code is None)


def _spared(function: Callable[..., Any]) -> bool:
    code, children = _played(function, GOOD)
    return (code, len(children)) == (0, 3) and not any(child.terminated for child in children)


KILLED: Codes = [None, -9, None]  # rank 1 is killed, and the others wait for it
GOOD: Codes = [0, 0, 0]

supervise: dict[str, Callable[[Callable[..., Any]], bool]] = {
    "the second of four nodes has ranks 8 to 15 of 32": _numbered,
    "none is terminated if all end well": _spared,
    "the others are terminated if one is killed and its code is returned":
        lambda f: _ended(f, KILLED) == (-9, 3, True),
    "a restart starts all again": lambda f: _ended(f, KILLED, GOOD, restarts=1) == (0, 6, True),
    "it gives up after the last restart":
        lambda f: _ended(f, KILLED, [None, None, 2], GOOD, restarts=1) == (2, 6, True),
}  # fmt: skip


# ---- the order of the data

SEQUENCES = 10


def _shuffled(epoch: int) -> list[int]:
    return Random(epoch).sample(range(SEQUENCES), SEQUENCES)


def _steps(function: Callable[..., Any], seen: int, *ranks: int, size: int = 2) -> list[list[int]]:
    """Return the sequences that all ranks read in each step, sorted. `ranks` are the numbers of ranks of the steps."""
    results = []
    for number in ranks:
        read = [function(_shuffled, seen, size, rank, number) for rank in range(number)]
        results.append(sorted(sequence for batch in read for sequence in batch))
        seen += size * number
    return results


def _stream(start: int, end: int) -> list[int]:
    """Return sequences `start` to `end` of all epochs in a row, sorted."""
    return sorted([sequence for epoch in range(9) for sequence in _shuffled(epoch)][start:end])


next_batch: dict[str, Callable[[Callable[..., Any]], bool]] = {
    "five ranks read an epoch in one step": lambda f: _steps(f, 0, 5) == [list(range(SEQUENCES))],
    "two ranks continue where three stopped": lambda f: _steps(f, 0, 3, 2) == [_stream(0, 6), _stream(6, 10)],
    "each epoch has its own order": lambda f: _steps(f, 10, 1, 1) == [_stream(10, 12), _stream(12, 14)],
    "a step may end an epoch and begin the next": lambda f: _steps(f, 36, 4) == [_stream(36, 44)],
    "so may the batch of one rank": lambda f: _steps(f, 28, 1, size=15) == [_stream(28, 43)],
}


# ---- elasticity


def _largest(function: Callable[..., Any], *cases: tuple[tuple[int, ...], int]) -> bool:
    return all(function(*arguments) == dp for arguments, dp in cases)


largest_dp: dict[str, Callable[[Callable[..., Any]], bool]] = {
    "dp = 32 on 512 GPUs with 16 per copy": lambda f: _largest(f, ((512, 16, 1024, 1), 32)),
    "dp = 16 without one node": lambda f: _largest(f, ((504, 16, 1024, 1), 16)),
    "dp = 512 with one GPU per copy and micro-batches of 2": lambda f: _largest(f, ((512, 1, 1024, 2), 512)),
    "dp = 30 on 504 GPUs with 960 sequences": lambda f: _largest(f, ((504, 16, 960, 1), 30)),
    "no copy on 8 GPUs": lambda f: _largest(f, ((8, 16, 1024, 1), 0)),
}
