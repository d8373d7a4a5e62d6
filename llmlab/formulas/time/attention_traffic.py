"""Bytes that attention moves per head between a card's memory and its multiprocessors: standard, and in tiles.

Standard attention is algorithms 0 and 3 of FlashAttention (Dao et al., arXiv 2205.14135), whose scores pass through
memory from one kernel to the next. The tiles are FlashAttention-2's (arXiv 2307.08691): a program keeps one tile of
queries and reads all keys and values; in backward it does so once more, and once the other way around. What a program
finds in the second-level cache does not come from memory: the bytes moved lie between `least_traffic` and
`flash_traffic`.

    T  tokens    D  head size    b  bytes of a value    M  rows of a tile
"""

from __future__ import annotations

from typing import NamedTuple

from ...base.errors import check_counts

STATISTIC = 4  # bytes of a logsumexp, and of backward's row sum: fp32


class Traffic(NamedTuple):
    """Bytes read and written by a head's forward and by its backward pass."""

    forward: int
    backward: int


def standard_traffic(T: int, D: int, b: int = 2) -> Traffic:
    """Return the bytes of standard attention whose softmax is one kernel, without scale, mask and dropout.

    Forward writes the scores, reads them, writes the probabilities and reads these: 4·T². Backward reads the
    probabilities twice, writes dP, reads it, writes dS and reads that twice: 7·T².
    """
    check_counts(T=T, D=D, b=b)
    return Traffic(4 * T * D * b + 4 * T * T * b, 8 * T * D * b + 7 * T * T * b)


def least_traffic(T: int, D: int, b: int = 2) -> Traffic:
    """Return the bytes of q, k, v and the output, of their gradients and of logsumexp, each moved once."""
    check_counts(T=T, D=D, b=b)
    return Traffic(4 * T * D * b + STATISTIC * T, 8 * T * D * b + STATISTIC * T)


def flash_traffic(T: int, D: int, b: int = 2, M: int = 64, causal: bool = False) -> Traffic:
    """Return the bytes that the programs of rung 4 in llmlab/course/kernels/ladder/attention.py read and write.

    Forward: T/M tiles of queries, each of which reads k and v. Backward: the row sums; dk and dv, T/M tiles of keys
    that read q, dout and both statistics; dq, T/M tiles of queries that read k and v.
    """
    check_counts(T=T, D=D, b=b, M=M)
    # Rows read by all tiles together; a causal tile of queries reads up to its last key, one of keys from its first
    # query on.
    whole = range(0, T, M)
    keys = sum(min(first + M, T) for first in whole) if causal else T * len(whole)
    queries = sum(T - first for first in whole) if causal else T * len(whole)
    own = T * D * b
    forward = 2 * own + STATISTIC * T + 2 * D * b * keys
    sums = 2 * own + STATISTIC * T
    backward_keys = 4 * own + (2 * D * b + 2 * STATISTIC) * queries
    backward_queries = 3 * own + 2 * STATISTIC * T + 2 * D * b * keys
    return Traffic(forward, sums + backward_keys + backward_queries)
