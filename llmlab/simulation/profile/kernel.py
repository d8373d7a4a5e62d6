"""A kernel of a step as the card sees it: FLOP, bytes, dtype and shape, all that its time depends on."""

from __future__ import annotations

from typing import NamedTuple


class Kernel(NamedTuple):
    """One operator: `kind` is "matmul", "attention", "attention backward", "gather", "strided", "serial", "memory" or
    "none" (a view, no kernel): what its time depends on.

    `shape` is (batch, M, N, K) of a product, (batch · heads, T, S, head size, causal) of attention, else (elements of
    the largest tensor,). `launches` is how many kernels it starts, `backward` whether autograd's engine calls it,
    `phase` the phase of the step it runs in. `again` bytes more are moved where rows of `row` bytes do not fit in the
    cache.
    """

    name: str
    kind: str
    dtype: str
    flops: int
    bytes: int
    shape: tuple[int, ...]
    launches: int
    backward: bool
    phase: str
    again: int = 0
    row: int = 0
