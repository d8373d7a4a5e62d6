"""Bytes that attention moves per head between the memory of the GPU and its multiprocessors.

Standard attention is algorithms 0 and 3 of FlashAttention (Dao et al., arXiv 2205.14135). Its scores pass through
memory from one kernel to the next. Attention in tiles is FlashAttention-2 (arXiv 2307.08691). A program keeps one tile
of queries and reads all keys and values. In the backward pass, one kernel does the same, and another keeps a tile of
keys and reads all queries. Reads that the L2 cache serves do not reach memory, so a real kernel moves between
`least_traffic` and `flash_traffic`.

    S  tokens per sequence    d  head size    b  bytes per value    M  rows of a tile
"""

from __future__ import annotations

from typing import NamedTuple

from ...base.errors import check_counts

STATISTIC = 4  # bytes of a log-sum-exp, and of a row sum in the backward pass: fp32


class Traffic(NamedTuple):
    """Bytes that one head reads and writes in its forward and in its backward pass."""

    forward: int
    backward: int


def standard_traffic(S: int, d: int, b: int = 2) -> Traffic:
    """Return the bytes of standard attention, with softmax as one kernel and without scale, mask and dropout.

    The forward pass writes and reads the scores, and writes and reads the probabilities: 4·S² values. The backward pass
    reads the probabilities twice, writes and reads their gradient dP, and writes ds and reads it twice: 7·S² values.
    """
    check_counts(S=S, d=d, b=b)
    return Traffic(4 * S * d * b + 4 * S * S * b, 8 * S * d * b + 7 * S * S * b)


def least_traffic(S: int, d: int, b: int = 2) -> Traffic:
    """Return the bytes of q, k, v, the output, their gradients and the log-sum-exp, if each moves exactly once."""
    check_counts(S=S, d=d, b=b)
    return Traffic(4 * S * d * b + STATISTIC * S, 8 * S * d * b + STATISTIC * S)


def flash_traffic(S: int, d: int, b: int = 2, M: int = 64, causal: bool = False) -> Traffic:
    """Return the bytes that the programs of rung 4 in llmlab/course/kernels/ladder/attention.py read and write.

    In the forward pass, each of S/M tiles of queries reads k and v. The backward pass has three kernels. One computes
    the row sums. One computes dk and dv: each of S/M tiles of keys reads q, dout and two statistics per row. One
    computes dq: each of S/M tiles of queries reads k and v.
    """
    check_counts(S=S, d=d, b=b, M=M)
    # Rows that all tiles together read. With a causal mask, a tile of queries reads the keys up to its last query, and
    # a tile of keys reads the queries from its first key to the end.
    whole = range(0, S, M)
    keys = sum(min(first + M, S) for first in whole) if causal else S * len(whole)
    queries = sum(S - first for first in whole) if causal else S * len(whole)
    own = S * d * b
    forward = 2 * own + STATISTIC * S + 2 * d * b * keys
    sums = 2 * own + STATISTIC * S
    backward_keys = 4 * own + (2 * d * b + 2 * STATISTIC) * queries
    backward_queries = 3 * own + 2 * STATISTIC * S + 2 * d * b * keys
    return Traffic(forward, sums + backward_keys + backward_queries)
