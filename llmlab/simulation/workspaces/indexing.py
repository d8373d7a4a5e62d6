"""Workspaces of indexing and of random draws (torch 2.13, aten/src/ATen/native/cuda).

n  elements
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...hardware.gpu import GPU
from .cub import reduce_scratch, scan_scratch, select_scratch, sort_scratch
from .extra import Extra
from .reductions import THREADS_A_MULTIPROCESSOR

aten = torch.ops.aten

INDEX = 8  # bytes of an int64
MASKS = (torch.bool, torch.uint8)


def index_copies(x: Tensor, indices: Sequence[Tensor | None], *rest: Any, **named: Any) -> list[int]:
    """native/TensorAdvancedIndexing.cpp, make_info and AdvancedIndex: int32 indices in int64; two or more that do not
    lie alike once they are broadcast, as (batch, 1) beside (tokens), each written out in full."""
    given = [index for index in indices if index is not None]
    if any(index.dtype in MASKS for index in given):
        return []  # each is first made into indices, which come back here
    taken = [INDEX * index.numel() for index in given if index.dtype == torch.int32]
    if len(given) < 2:
        return taken
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    spread = [index.expand(shape) for index in given]
    if len({index.stride() for index in spread}) > 1:
        taken += [INDEX * prod(shape) for index in spread if not index.is_contiguous()]
    return taken


def _sorts(accumulate: bool) -> bool:
    """native/TensorAdvancedIndexing.cpp, _index_put_impl_: whether the indices are sorted."""
    return accumulate or torch.are_deterministic_algorithms_enabled()


def indices_sorted(gpu: GPU) -> Callable[..., list[int]]:
    """Return what index_put takes on `gpu` where it adds, or must do the same each time."""

    def taken(
        out: Any, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *rest: Any
    ) -> list[int]:
        """Indexing.cu, index_put_with_sort_kernel: the linear index, sorted, where each was, their range and the sort's
        scratch, by as many bits as the greatest index has; before them a dense copy of values that are not. Masks are
        counted as read in full."""
        if not _sorts(accumulate):
            return []
        places = [place for place, index in enumerate(indices) if index is not None]
        given = [index for index in indices if index is not None]
        if any(index.dtype in MASKS for index in given):
            return []  # how many there are only values say
        n = prod(torch.broadcast_shapes(*(index.shape for index in given)))
        dense = values.is_contiguous() and values.numel() >= n
        copied = [] if dense else [max(values.numel(), n) * values.element_size()]
        adjacent = places == list(range(places[0], places[-1] + 1))
        sizes = x.shape[places[-1] + 1 :] if adjacent else [size for i, size in enumerate(x.shape) if i not in places]
        bits = ((x.numel() - 1) // max(1, prod(sizes))).bit_length() or 1
        return [n * INDEX, *copied, *(n * INDEX,) * 3, sort_scratch(n, INDEX, INDEX, gpu, bits)]

    return taken


def drawn(out: Any, x: Tensor, samples: int, replacement: bool = False, **named: Any) -> list[int]:
    """native/Distributions.cpp, multinomial_out: a draw of an exponential an element; MultinomialKernel.cu, where more
    than one is drawn with replacement: the distribution, normalized, and its sums."""
    size = x.numel() * x.element_size()
    return [size] if samples == 1 or not replacement else [size] * 3


def mask_positions(out: Any, x: Tensor, mask: Tensor, source: Tensor) -> list[int]:
    """Indexing.cu, masked_scatter__cuda: the mask's prefix sum in int64; IndexKernel.cu, launch_masked_scatter_kernel:
    a dense mask, if it is not, and the sum's scratch."""
    n = x.numel()
    dense = mask.shape == x.shape and mask.is_contiguous()
    return [n * INDEX, *([] if dense else [n]), scan_scratch(n, INDEX)]


COUNT = 4  # bytes: how many are not zero, an int32


def positions(gpu: GPU) -> Extra:
    """Return what nonzero takes on `gpu`: Nonzero.cu, nonzero_cuda_out_impl. How many there are, and the scratch that
    counts them; then, beside the output, the scratch that finds them."""
    threads = THREADS_A_MULTIPROCESSOR.get(gpu.compute_capability, 2048)

    def before(x: Tensor) -> list[int]:
        copied = [] if x.is_contiguous() else [x.numel() * x.element_size()]
        return [*copied, COUNT, reduce_scratch(x.numel(), gpu, threads)]

    def after(out: Tensor, x: Tensor) -> list[int]:
        return [COUNT, select_scratch(x.numel(), gpu)] if x.dim() else [COUNT]

    return Extra(before, after)


def repeats(out: Tensor | None, counts: Tensor, **named: Any) -> list[int]:
    """native/Repeat.cpp, repeat_interleave_common: where each begins, and the scratch of that sum."""
    return [INDEX * counts.numel(), scan_scratch(counts.numel(), INDEX)] if counts.numel() else []


def indexing_extras(gpu: GPU) -> dict[Any, Extra]:
    """Return by operator what it takes on `gpu`."""
    put, masked = Extra(before=put_copies, after=indices_sorted(gpu)), Extra(after=mask_positions)
    return {
        aten.index.Tensor: Extra(before=index_copies),
        aten.index_put_.default: put, aten.index_put.default: put, aten._index_put_impl_.default: put,
        aten.multinomial.default: Extra(after=drawn),
        aten.nonzero.default: positions(gpu), aten.repeat_interleave.Tensor: Extra(after=repeats),
        aten.masked_scatter_.default: masked, aten.masked_scatter.default: masked,
    }  # fmt: skip


def put_copies(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *rest: Any
) -> list[int]:  # fmt: skip
    """As index_copies, where the indices are not sorted."""
    return [] if _sorts(accumulate) else index_copies(x, indices)
