"""Bytes that operators move, one after the other."""

from __future__ import annotations

from typing import NamedTuple


class Pass(NamedTuple):
    """Bytes that a block's operators move forward and backward."""

    forward: float
    backward: float


def cast(one: int, other: int) -> int:
    """Return the bytes that a copy moves per element from one dtype to another; none where they are the same."""
    return one + other if one != other else 0


def rmsnorm(b: int, trained: bool) -> Pass:
    """Return the bytes per element of RMSNorm as transformers writes it out, of elements of `b` bytes."""
    there_and_back = cast(b, 4) + cast(4, b)
    return Pass(8 + 4 + 8 + there_and_back + 2 * b, 68 + there_and_back + (6 if trained else 2) * b)
