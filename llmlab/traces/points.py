"""Where a trace is valid, and at which sizes it is made: on the same side of every threshold that is known.

Kernels are chosen by size. All sequences of one trace have 2^k to 2^(k+1) tokens and the same greatest common divisor
with 64 (chunks of linear attention are 64 tokens, and kernels want multiples of 8 or 16). A batch is one sequence or
several. It has at most 3072 tokens or more than that, where the gradient of an embedding sorts (cuda/Embedding.cu,
embedding_dense_backward_cuda). Any other threshold shows because the points of one trace then run different operators.
"""

from __future__ import annotations

from itertools import product
from math import gcd
from typing import NamedTuple

CHUNK = 64
SORTED = 3072  # tokens
BATCHES = (2, 3, 4, 5, 7, 9, 11)


class Range(NamedTuple):
    """Where a trace is valid. `tokens` is the lower end of T's power of two, or T itself where it is `fixed`."""

    several: bool
    tokens: int
    divisor: int
    sorts: bool
    fixed: bool = False


def range_of(batch: int, tokens: int, fixed: bool = False) -> Range:
    """Return the range that a step of `batch` sequences of `tokens` tokens is in.

    >>> range_of(4, 2048)
    Range(several=True, tokens=2048, divisor=64, sorts=True, fixed=False)
    """
    lowest = tokens if fixed else 1 << (tokens.bit_length() - 1)
    return Range(batch > 1, lowest, gcd(tokens, CHUNK), batch * tokens > SORTED, fixed)


def points(batch: int, tokens: int, fixed: bool = False) -> list[tuple[int, int]] | None:
    """Return four (B, T) in the range of a step that determine a polynomial of degree two in T and the power of B; None
    where the range has too few.

    >>> points(4, 2048)
    [(2, 2048), (3, 3072), (4, 4032), (2, 3072)]
    """
    where = range_of(batch, tokens, fixed)
    lengths = [tokens] if fixed else range(where.tokens, 2 * where.tokens)
    batches = BATCHES if where.several else (1,)
    found: dict[int, list[int]] = {}  # numbers of sequences by length
    for length, sequences in product(lengths, batches):
        if range_of(sequences, length, fixed) == where:
            found.setdefault(length, []).append(sequences)
    if fixed:
        known = [(sequences, tokens) for sequences in found.get(tokens, ())]
        return known[:4] if len(known) >= 4 else None
    usable = [length for length, sequences in found.items() if len(sequences) >= min(2, len(batches))]
    if len(usable) < 3 + (not where.several):
        return None
    spread = usable[0], usable[len(usable) // 2], usable[-1]
    chosen = [(found[length][number % len(found[length])], length) for number, length in enumerate(spread)]
    if where.several:
        return [*chosen, (found[spread[1]][0], spread[1])]
    return [*chosen, (1, usable[len(usable) // 4])]
