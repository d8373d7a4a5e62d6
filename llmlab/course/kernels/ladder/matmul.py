"""Matrix product by tiles: what a Triton program does, before any fusion. cuBLAS is faster; no rung takes this one.

    M, N, K  sides: A is (M, K), B (K, N), C (M, N)     t  side of a tile

Bytes asked for: A once for each of C's N/t columns of tiles, B once for each of its M/t rows of tiles, C once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....base.errors import NotAvailable, SpecError
from ..rungs import choose, dot, jit, missing, tl, triton


def matmul(a: Tensor, b: Tensor, tile: int = 32) -> Tensor:
    """Return a · b in a's dtype, added up in fp32, by the Triton kernel. a: (M, K), b: (K, N).

    tile: a power of 2, at least 16.
    Raises SpecError for other shapes, NotAvailable where Triton does not run.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        given = f"{tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
        raise SpecError(f"matmul was given {given}; it takes (M, K) and (K, N) of one dtype")
    choose(0, a, b)
    if why := missing((a, b)):
        raise NotAvailable(f"the Triton product {why}; torch.matmul runs here")
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, dtype=a.dtype, device=a.device)
    with torch.cuda.device_of(a):
        grid = (triton.cdiv(M, tile), triton.cdiv(N, tile))
        matmul_kernel[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), TILE=tile)
    return c


@jit
def matmul_kernel(A, B, C, rows, columns, depth, a_m, a_k, b_k, b_n, TILE: tl.constexpr):
    """One tile of C per program: along a row of tiles of A and down a column of tiles of B."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)  # in registers, until the end
    for start in range(0, depth, TILE):
        k = start + tl.arange(0, TILE)
        in_a, in_b = (row[:, None] < rows) & (k < depth), (k[:, None] < depth) & (column < columns)
        a = tl.load(A + row[:, None].to(tl.int64) * a_m + k * a_k, mask=in_a, other=0.0)
        b = tl.load(B + k[:, None].to(tl.int64) * b_k + column * b_n, mask=in_b, other=0.0)
        total += dot(a, b)
    inside = (row[:, None] < rows) & (column < columns)
    tl.store(C + row[:, None].to(tl.int64) * columns + column, total.to(C.dtype.element_ty), mask=inside)
