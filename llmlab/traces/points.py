"""The range of sizes in which a trace is valid, and the sizes at which it is derived: all on the same side of every
known threshold.

Kernels are chosen by size. All sequences of one trace have 2^k to 2^(k+1) tokens and the same greatest common divisor
with 64 (chunks of linear attention are 64 tokens, and kernels need multiples of 8 or 16). All its batches have one
sequence, or all have several. All have at most 3072 tokens, or all have more, so that the gradient of an embedding is
computed by sorting (cuda/Embedding.cu, embedding_dense_backward_cuda). All have 2^m to 2^(m+1) tokens, because a sum
over tokens is split by their number (cuda/Reduce.cuh). Any other threshold is noticed because the points of one trace
then run different operators.
"""

from __future__ import annotations

from itertools import product
from math import gcd
from typing import NamedTuple

CHUNK = 64
SORTED = 3072  # tokens


class Range(NamedTuple):
    """The range in which a trace is valid. `tokens` is the largest power of two up to T, or T itself if at least one
    size is `fixed`, and `all_tokens` the largest power of two up to B · T, or B · T itself if both sizes are."""

    several: bool
    tokens: int
    all_tokens: int
    divisor: int
    sorts: bool
    fixed: int = 0


def range_of(batch: int, tokens: int, fixed: int = 0) -> Range:
    """Return the range of a step with `batch` sequences of `tokens` tokens.

    >>> range_of(4, 2048)
    Range(several=True, tokens=2048, all_tokens=8192, divisor=64, sorts=True, fixed=0)
    """
    sizes = tokens, batch * tokens
    length, whole = (
        size if fixed > number else 1 << (size.bit_length() - 1) for number, size in enumerate(sizes)
    )
    return Range(batch > 1, length, whole, gcd(tokens, CHUNK), batch * tokens > SORTED, fixed)


def points(
    batch: int, tokens: int, fixed: int = 0, most: int = 2**53, least: int = 1
) -> list[tuple[int, int]] | None:
    """Return the (B, T) in the range of a step at which its trace is derived: four, which determine polynomials of up
    to three monomials, three or four if T is fixed (`fixed` = 1), or the step's own if B is fixed as well (2). Return
    None if the range has too few. If T is not fixed, it is at most `most`, the model's number of positions, and at
    least `least`, the tokens of its images.

    >>> points(4, 2048)
    [(4, 2048), (4, 3072), (3, 4032), (5, 2048)]
    """
    if fixed == 2:
        return [(batch, tokens)]
    where = range_of(batch, tokens, fixed)
    lengths = [tokens] if fixed else range(max(where.tokens, least), min(2 * where.tokens, most + 1))
    batches = range(max(2, batch // 2), 2 * batch + 1) if where.several else (1,)
    counts: dict[int, list[int]] = {}  # numbers of sequences by length
    for length, sequences in product(lengths, batches):
        if range_of(sequences, length, fixed) == where:
            counts.setdefault(length, []).append(sequences)
    if fixed:
        known = [(sequences, tokens) for sequences in counts.get(tokens, ())]
        return known[:4] if len(known) >= 3 else None  # two do not determine a + b · B and check it
    usable = list(counts)
    if len(usable) < 3 + (not where.several):
        return None
    spread = usable[0], usable[len(usable) // 2], usable[-1]
    chosen = [(counts[length][number % len(counts[length])], length) for number, length in enumerate(spread)]
    if not where.several:
        return [*chosen, (1, usable[len(usable) // 4])]
    used = {sequences for sequences, _ in chosen}
    sizes = ((sequences, length) for length in usable for sequences in counts[length])
    last = next((pair for pair in sizes if pair not in chosen and (len(used) > 1 or pair[0] not in used)), None)
    return [*chosen, last] if last else None
