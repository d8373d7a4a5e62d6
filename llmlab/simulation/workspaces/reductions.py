"""Workspaces of reductions: sums, means, norms and extremes over few outputs are split over thread blocks.

Source: aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig and gpu_reduce_kernel (torch 2.13), and TensorIterator.cpp
for the order of the dimensions. Blocks that share an output store their partial results in global memory, one per
thread along x if those threads have different outputs. For the gradient of a bias, a sum over all tokens, this often
needs more memory than the gradient of the layer's output.

Shapes and strides are those of TensorIterator: the dimension that moves fastest comes first, and strides count bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch

from ...hardware.gpu import GPU
from .registry import OUTPUTS, Operator, Step, workspace

aten = torch.ops.aten

MAX_THREADS = 512  # max_reduce_threads
WARP = 32
VALUES_PER_THREAD = 16, 256  # min_values_per_thread, max_values_per_thread
INT_MAX = 2**31 - 1
THREADS_PER_MULTIPROCESSOR: dict[tuple[int, int] | None, int] = {
    (7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536,
}  # fmt: skip


class Kind(NamedTuple):
    """How a reduction accumulates. `accumulator` maps the bytes of an input element to those of the accumulator of an
    output, `loads` to the elements of one vectorized load."""

    accumulator: Callable[[int], int]
    loads: Callable[[int], int] = lambda item: 4
    casts: bool = True  # casts to the dtype of the output first, if no kernel reads that of the input
    whole: bool = False  # a full reduction, which makes its input contiguous (ReduceAllOps.cpp)


def _wide(item: int) -> int:
    return max(4, item)


SUM = Kind(_wide, lambda item: 8 if item == 2 else 4)  # ReduceSumProdKernel.cu, ReduceMomentKernel.cu (mean)
WIDE = Kind(_wide)  # ReduceSumProdKernel.cu (prod), ReduceNormKernel.cu
SAME = Kind(lambda item: item, casts=False)  # ReduceMaxValuesKernel.cu, ReduceLogicKernel.cu
WHOLE = Kind(lambda item: item, casts=False, whole=True)
PAIR = Kind(lambda item: 16, casts=False)  # a value and its int64 index: ReduceArgMaxKernel.cu, TensorCompare.cu
WELFORD = Kind(lambda item: 16, lambda item: 2)  # mean, sum of squares and two counts: ReduceMomentKernel.cu

KINDS = {
    aten.sum.default: SUM, aten.sum.dim_IntList: SUM, aten.mean.default: SUM, aten.mean.dim: SUM,
    aten.prod.default: WIDE, aten.prod.dim_int: WIDE,
    aten.linalg_vector_norm.default: WIDE, aten.norm.ScalarOpt_dim: WIDE,
    aten.max.default: WHOLE, aten.min.default: WHOLE, aten.amax.default: SAME, aten.amin.default: SAME,
    aten.any.default: SAME, aten.any.dim: SAME, aten.all.default: SAME, aten.all.dim: SAME,
    aten.argmax.default: PAIR, aten.argmin.default: PAIR, aten.max.dim: PAIR, aten.min.dim: PAIR,
    aten.var.correction: WELFORD, aten.var_mean.correction: WELFORD,
    aten.std.correction: WELFORD, aten.std_mean.correction: WELFORD,
}  # fmt: skip


def slots(gpu: GPU) -> tuple[int, int]:
    """Return the number of multiprocessors of `gpu`, and the number of threads that fit on each."""
    return gpu.sms, THREADS_PER_MULTIPROCESSOR.get(gpu.compute_capability, 2048)


@workspace(*KINDS, source="cuda/Reduce.cuh")
def reduction(op: Operator, gpu: GPU) -> Iterator[Step]:
    """A copy of the input in another dtype or order, then partial results of each output and a counter per block."""
    yield OUTPUTS
    x, kind = op.self, KINDS[op.func]
    if not x.numel():
        return
    result = op.out[0] if isinstance(op.out, tuple) else op.out
    item, offset = x.element_size(), x.storage_offset()
    shape, strides = list(x.shape), [step * item for step in x.stride()]
    half_to_float = item == 2 and result.dtype == torch.float32 and x.is_floating_point()
    if kind.casts and result.dtype != x.dtype and not half_to_float:
        strides = [step // item * result.element_size() for step in strides]
        item, offset = result.element_size(), 0
        yield x.numel() * item
    elif kind.whole and not x.is_contiguous():
        strides, offset = [prod(shape[dim + 1 :]) * item for dim in range(len(shape))], 0
        yield x.numel() * item
    reduced = _reduced(op.dim if op.has("dim") else None, len(shape))
    yield from buffers(shape, strides, reduced, item, result.element_size(), kind, slots(gpu), int(offset))


NORM_CHUNK = 65536  # elements; kChunkSize, cuda/MultiTensorApply.cuh


@workspace(aten._foreach_norm.Scalar, source="cuda/ForeachReduceOp.cu")
def foreach_norm(op: Operator, gpu: GPU) -> Iterator[Step]:
    """foreach_tensor_norm_cuda: for every tensor as many partial norms as the largest tensor has chunks."""
    tensors = op.self
    chunks = max(-(-tensor.numel() // NORM_CHUNK) for tensor in tensors)
    yield len(tensors) * chunks * max(tensors[0].element_size(), 4)
    yield OUTPUTS


def _reduced(dims: Any, count: int) -> list[bool]:
    if dims is None or dims == [] or dims == ():
        return [True] * count
    chosen = {dim % count for dim in ([dims] if isinstance(dims, int) else dims)} if count else set()
    return [dim in chosen for dim in range(count)]


def buffers(
    shape: list[int], strides: list[int], reduced: list[bool], item: int, out_item: int, kind: Kind,
    slots: tuple[int, int], offset: int = 0,
) -> list[int]:  # fmt: skip
    """Return the bytes that a reduction allocates. Its input has `item` bytes per element, begins `offset` elements
    into its storage, and has `strides` in bytes; `slots` describes the GPU."""
    reduced_shape = [1 if is_reduced else size for size, is_reduced in zip(shape, reduced, strict=True)]
    steps = [0 if is_reduced else prod(reduced_shape[dim + 1 :]) * out_item for dim, is_reduced in enumerate(reduced)]
    sizes, outputs, inputs = _ordered(shape, steps, strides)
    accumulator, parts = kind.accumulator(item), []
    if not _fits_32_bit(sizes, outputs, inputs) and item == out_item == 2:  # AccumulationBuffer
        parts = [prod(reduced_shape) * accumulator]
    while not _fits_32_bit(sizes, outputs, inputs):  # with_32bit_indexing: halve the dimension with the largest extent
        extents = [(size - 1) * max(pair) for size, *pair in zip(sizes, outputs, inputs, strict=True)]
        sizes[extents.index(max(extents))] //= 2
    return parts + _split_over_blocks(sizes, outputs, inputs, item, accumulator, kind.loads(item), slots, offset)


def _split_over_blocks(
    sizes: list[int], outputs: list[int], inputs: list[int], item: int, accumulator: int, loads: int,
    slots: tuple[int, int], offset: int,
) -> list[int]:  # fmt: skip
    """setReduceConfig, and the allocations of gpu_reduce_kernel that follow from it."""
    first_kept = sum(step == 0 for step in outputs)  # num_reduce_dims
    results = prod(size for size, step in zip(sizes, outputs, strict=True) if step)
    values = prod(sizes) // results
    over_rows = not sizes or first_kept == len(sizes) or inputs[0] < inputs[first_kept]
    along_x, along_y = (values, results) if over_rows else (results, values)
    fastest = (inputs[0] if over_rows else inputs[first_kept]) if sizes else item
    vector = 1
    if not sizes:
        along_x = along_y = 1
    elif fastest == item and over_rows and along_x >= 128 and first_kept == 1:
        along_x //= loads
    elif fastest == item and not over_rows:
        other_steps = [step // item for dim, step in enumerate(inputs) if dim != first_kept]
        aligned = (offset, sizes[first_kept], *other_steps)
        vector = next(size for size in (4, 2, 1) if not any(n % size for n in aligned))
        along_x //= vector
    max_threads = MAX_THREADS // vector
    x, y = (_power_below(size) if size < max_threads else max_threads for size in (along_x, along_y))
    width = min(x, WARP)
    height = min(y, max_threads // width)
    width = min(x, max_threads // height)
    step_in, step_out = (width, 1) if over_rows else (1, width)
    by_warps = -(-values // step_in) >= min(height * 16, VALUES_PER_THREAD[1])
    if by_warps:
        step_in *= height
    else:
        step_out *= height
    grid = -(-(results // vector) // step_out)
    target_blocks = slots[0] * (slots[1] // (width * height))
    per_step = -(-values // step_in)
    if not by_warps or per_step < VALUES_PER_THREAD[1] or grid > target_blocks:
        return []
    least, most = (-(-per_step // count) for count in reversed(VALUES_PER_THREAD))
    blocks = max(min(-(-target_blocks // grid), most), least)
    if blocks <= 1:
        return []
    return [accumulator * results * blocks * (1 if over_rows else width * vector), 4 * grid]


def _power_below(size: int) -> int:
    return 1 << (size.bit_length() - 1) if size > 0 else 1


def _fits_32_bit(sizes: list[int], *strides: list[int]) -> bool:
    """TensorIterator.cpp, can_use_32bit_indexing."""
    if prod(sizes) > INT_MAX:
        return False
    return all(
        1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) <= INT_MAX for steps in strides
    )


def _ordered(shape: list[int], outputs: list[int], inputs: list[int]) -> tuple[list[int], list[int], list[int]]:
    """TensorIterator.cpp, reorder_dimensions and coalesce_dimensions: reduced dimensions come first, then by stride."""
    order = list(reversed(range(len(shape))))
    for place in range(1, len(order)):
        position = place
        for before in range(place - 1, -1, -1):
            compared = _compare(order[before], order[position], shape, outputs, inputs)
            if compared > 0:
                order[before], order[position] = order[position], order[before]
                position = before
            elif compared < 0:
                break
    rows: list[list[int]] = []
    for size, out, step in ((shape[dim], outputs[dim], inputs[dim]) for dim in order):
        last = rows[-1] if rows else None
        if not last or not (1 in (last[0], size) or (last[0] * last[1] == out and last[0] * last[2] == step)):
            rows.append([size, out, step])
            continue
        if last[0] == 1:
            last[1:] = out, step
        last[0] *= size
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def _compare(a: int, b: int, shape: list[int], outputs: list[int], inputs: list[int]) -> int:
    """should_swap of reorder_dimensions: 1 where dimension `a` belongs behind `b`, -1 before it, 0 undecided."""
    if (outputs[a] == 0) != (outputs[b] == 0):
        return 1 if outputs[b] == 0 else -1
    for steps in (outputs, inputs):
        if not steps[a] or not steps[b]:
            continue
        if steps[a] != steps[b]:
            return 1 if steps[a] > steps[b] else -1
        if shape[a] > shape[b]:
            return 1
    return 0
