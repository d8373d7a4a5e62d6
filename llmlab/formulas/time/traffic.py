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


# Bytes per element that RMSNorm's backward pass reads and writes in fp32: the gradient times x (8 + 4), times rsqrt
# (4 + 4), and the sum of the first (4); the mean's gradient (0 + 4), x ** 1 (4 + 4), twice that (4 + 4), and their
# product (8 + 4); the sum of both gradients of x (8 + 4).
RMSNORM_BACKWARD = 12 + 8 + 4 + 4 + 8 + 8 + 12 + 12
# Bytes per element of a norm over heads whose gradients are transposed: in fp32, and reads and writes in the dtype of
# its output.
TRANSPOSED_NORM, TRANSPOSED_MOVES = 38, 6


def rmsnorm(b: int, trained: bool, wide_weight: bool = False) -> Pass:
    """Return the bytes per element of RMSNorm as transformers writes it out, of elements of `b` bytes. Gemma's classes
    multiply by the weight in fp32 (`wide_weight`), others after the cast back."""
    there_and_back, w = cast(b, 4) + cast(4, b), 4 if wide_weight else b
    backward = RMSNORM_BACKWARD + there_and_back + (6 if trained else 2) * w
    return Pass(8 + 4 + 8 + there_and_back + 2 * w, backward)


def transposed_norm(b: int) -> int:
    """Return how many bytes per element of RMSNorm's backward pass are in transposed tensors if its output was
    transposed, as that of queries and keys is."""
    return TRANSPOSED_NORM + TRANSPOSED_MOVES * b + 2 * cast(b, 4)
