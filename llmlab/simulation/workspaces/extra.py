"""`Extra`: the workspace of a CUDA kernel, as data, which the engine reads; workspaces/cuda.py has all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

GIVE_BACK = -1  # in the place of a size: the last buffer goes before the operator ends


class Extra(NamedTuple):
    """What a kernel takes besides its outputs: bytes of each buffer, taken in this order and given back at its end.

    Each is a function of the operator's arguments (and outputs): `before` the outputs are allocated, `after` them; what
    is gone earlier is followed by GIVE_BACK.
    `outputs` replaces the operator, where CUDA's returns other sizes than the CPU's. `order`: the positions of its
    outputs in the order in which they are allocated, where that is not the one in which they are returned. `matmul`: it
    needs cuBLAS, and where `fused` of its arguments is true cuBLASLt too. `library`: what else it needs, which takes a
    workspace whose size only the library knows.
    """

    before: Callable[..., Iterable[int]] | None = None
    after: Callable[..., Iterable[int]] | None = None
    outputs: Callable[..., Any] | None = None
    matmul: bool = False
    fused: Callable[..., bool] | None = None
    library: str | None = None
    order: tuple[int, ...] = ()


def is_dense(tensor: Tensor) -> bool:
    """is_non_overlapping_and_dense: in the order of their strides, the dimensions lie as in a contiguous tensor."""
    expected = 1
    for stride, size in sorted(each for each in zip(tensor.stride(), tensor.shape, strict=True) if each[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True
