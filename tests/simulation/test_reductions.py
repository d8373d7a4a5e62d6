"""The partial results of CUDA's reductions, and the dimensions that TensorIterator makes of a tensor's."""

from math import ceil, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.simulation.simulator import simulator
from llmlab.simulation.workspaces.reductions import _ordered

pytestmark = pytest.mark.usefixtures("no_gpu")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_dimensions_are_coalesced_into_the_same_reduction(shape, data):
    """TensorIterator.cpp: elements, outputs and strides survive; a contiguous block of reduced dimensions is one."""
    reduced = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    kept = [1 if gone else size for size, gone in zip(shape, reduced, strict=True)]
    outputs = [0 if gone else prod(kept[dim + 1 :]) * 4 for dim, gone in enumerate(reduced)]
    inputs = [prod(shape[dim + 1 :]) * 4 for dim in range(len(shape))]
    sizes, out_steps, in_steps = _ordered(shape, outputs, inputs)
    assert prod(sizes) == prod(shape)
    assert prod(size for size, step in zip(sizes, out_steps, strict=True) if step) == prod(kept)
    gone = [step == 0 for step in out_steps]
    assert gone == sorted(gone, reverse=True)  # reduced ones first
    last = sum((size - 1) * step for size, step in zip(sizes, in_steps, strict=True))
    assert last == (prod(shape) - 1) * 4


@pytest.mark.parametrize(("shape", "dim", "sizes"), [  # an A100 has 108 multiprocessors for 4 blocks of threads each
    ((1 << 24,), None, (4, 4 * 108 * 4, 4)),  # one output, of which each block has a part, and a counter
    ((8192, 3072), 0, (4 * 3072, 4 * 3072 * ceil(108 * 16 / 24) * 128, 4 * 24)),  # columns: 24 groups of 32 × 4
    ((8192, 3074), 0, (4 * 3074, 4 * 3074 * ceil(108 * 8 / 49) * 64, 4 * 49)),  # pairs of columns: 49 groups of 32 × 2
    ((1020, 4096), 0, (4 * 4096,)),  # fewer than 256 values per thread
    ((8192, 4096), 1, (4 * 8192,)),  # enough outputs to fill the GPU
])  # fmt: skip
def test_blocks_of_threads_share_a_sum_if_there_are_too_few_outputs(monkeypatch, shape, dim, sizes):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with simulator("A100-40GB") as card:
        x = torch.empty(shape, device="cuda")
        total = x.sum() if dim is None else x.sum(dim)
        assert card.peak_allocated - x.nbytes == sum(ceil(size / 512) * 512 for size in sizes) >= total.nbytes
