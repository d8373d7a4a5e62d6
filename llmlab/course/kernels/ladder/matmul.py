"""A matmul by tiles in Triton, without any fusion. cuBLAS is faster, and no rung uses this kernel.

    x is T × p, W is p × q, y is T × q; w is the side of a tile

The programs load x once for each of the q/w columns of tiles, and W once for each of the T/w rows of tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....base.errors import NotAvailable, SpecError
from ..rungs import choose, dot, jit, missing, tl, triton


def matmul(x: Tensor, weight: Tensor, tile: int = 32) -> Tensor:
    """Return x · weight in the dtype of x, by the Triton kernel; sums are in fp32. x: (T, p), weight: (p, q).

    `tile` is the side of a tile: a power of 2, at least 16.
    Raises SpecError for other shapes, and NotAvailable if Triton cannot run here.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[0] or x.dtype != weight.dtype:
        inputs = f"{tuple(x.shape)} {x.dtype} and {tuple(weight.shape)} {weight.dtype}"
        raise SpecError(f"matmul was given {inputs}; allowed are (T, p) and (p, q) of the same dtype")
    choose(0, x, weight)
    if why := missing((x, weight)):
        raise NotAvailable(f"the Triton matmul {why}; torch.matmul runs here")
    (T, p), q = x.shape, weight.shape[1]
    y = torch.empty(T, q, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        grid = (triton.cdiv(T, tile), triton.cdiv(q, tile))
        matmul_kernel[grid](x, weight, y, T, p, q, *x.stride(), *weight.stride(), TILE=tile)
    return y


@jit
def matmul_kernel(X, W, Y, T, p, q, x_row, x_column, w_row, w_column, TILE: tl.constexpr):
    """Compute one tile of Y, along a row of tiles of X and down a column of tiles of W.

    x_row is the distance from a row of X to the next, in values; x_column, w_row and w_column likewise.
    """
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)  # in registers, until the end
    for start in range(0, p, TILE):
        i = start + tl.arange(0, TILE)
        in_x, in_w = (row[:, None] < T) & (i < p), (i[:, None] < p) & (column < q)
        x = tl.load(X + row[:, None].to(tl.int64) * x_row + i * x_column, mask=in_x, other=0.0)
        w = tl.load(W + i[:, None].to(tl.int64) * w_row + column * w_column, mask=in_w, other=0.0)
        total += dot(x, w)
    in_y = (row[:, None] < T) & (column < q)
    tl.store(Y + row[:, None].to(tl.int64) * q + column, total.to(Y.dtype.element_ty), mask=in_y)
