"""Where a trace is valid, and at which sizes it is made: on the same side of every threshold that is known.

Kernels are chosen by size. All sequences of one trace have 2^k to 2^(k+1) tokens and the same greatest common divisor
with 64 (chunks of linear attention are 64 tokens, and kernels want multiples of 8 or 16). A batch is one sequence or
several. It has at most 3072 tokens or more than that, where the gradient of an embedding sorts (cuda/Embedding.cu,
embedding_dense_backward_cuda), and 2^m to 2^(m+1) tokens, because a sum over them is split by their number
(cuda/Reduce.cuh). Any other threshold shows because the points of one trace then run different operators.
"""

from __future__ import annotations

from itertools import product
from math import gcd
from typing import NamedTuple

CHUNK = 64
SORTED = 3072  # tokens


class Range(NamedTuple):
    """Where a trace is valid: `tokens` is the power of two that T has reached, or T itself where it is `fixed`, and
    `all_tokens` the one that B · T has reached."""

    several: bool
    tokens: int
    all_tokens: int
    divisor: int
    sorts: bool
    fixed: bool = False


def range_of(batch: int, tokens: int, fixed: bool = False) -> Range:
    """Return the range that a step of `batch` sequences of `tokens` tokens is in.

    >>> range_of(4, 2048)
    Range(several=True, tokens=2048, all_tokens=8192, divisor=64, sorts=True, fixed=False)
    """
    lowest, whole = (1 << (size.bit_length() - 1) for size in (tokens, batch * tokens))
    return Range(batch > 1, tokens if fixed else lowest, whole, gcd(tokens, CHUNK), batch * tokens > SORTED, fixed)


def points(
    batch: int, tokens: int, fixed: bool = False, most: int = 2**53, least: int = 1
) -> list[tuple[int, int]] | None:
    """Return the (B, T) in the range of a step at which a trace is made: four, which determine polynomials of up to
    three monomials, or at least two where T is `fixed`. None where the range has too few. No T is more than `most`, the
    positions of a model, or less than `least`, the tokens of its images.

    >>> points(4, 2048)
    [(4, 2048), (4, 3072), (3, 4032), (5, 2048)]
    """
    where = range_of(batch, tokens, fixed)
    lengths = [tokens] if fixed else range(max(where.tokens, least), min(2 * where.tokens, most + 1))
    batches = range(max(2, batch // 2), 2 * batch + 1) if where.several else (1,)
    counts: dict[int, list[int]] = {}  # numbers of sequences by length
    for length, sequences in product(lengths, batches):
        if range_of(sequences, length, fixed) == where:
            counts.setdefault(length, []).append(sequences)
    if fixed:
        known = [(sequences, tokens) for sequences in counts.get(tokens, ())]
        return known[:4] if len(known) >= 2 else None
    usable = list(counts)
    if len(usable) < 3 + (not where.several):
        return None
    spread = usable[0], usable[len(usable) // 2], usable[-1]
    chosen = [(counts[length][number % len(counts[length])], length) for number, length in enumerate(spread)]
    if not where.several:
        return [*chosen, (1, usable[len(usable) // 4])]
    used = {sequences for sequences, _ in chosen}
    others = ((sequences, length) for length in usable for sequences in counts[length])
    last = next((pair for pair in others if pair not in chosen and (len(used) > 1 or pair[0] not in used)), None)
    return [*chosen, last] if last else None
