"""What CUDA's reductions, products and sorts take besides their outputs, each figure derived from its source here.

M  rows    N  columns
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import llmlab as lab
from llmlab.simulation.simulator import simulator
from llmlab.simulation.workspaces.reductions import _ordered

if torch.cuda.is_available():
    pytest.skip("the simulated device must not be mistaken for a real one", allow_module_level=True)


@pytest.fixture
def card(monkeypatch):
    """A GPU on which no block keeps the rest of its segment."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with simulator("A100-40GB") as sim:
        warm = torch.zeros(64, 64, device="cuda", requires_grad=True)
        (warm @ warm).sum().backward()  # both workspaces are there
        yield sim


def made(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype, requires_grad=grad)


def peak(run: Callable[[], Any]) -> int:
    """Bytes that `run` had at most above where it began; what it returns is alive until then."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    del result
    return torch.cuda.max_memory_allocated() - before


def block(size: int) -> int:
    return ceil(size / 512) * 512


# ---- reductions


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


def test_values_are_followed_through_reductions(card):
    mask = torch.ones(4, 8, dtype=torch.bool, device="cuda")
    assert bool(mask.all()) and mask.sum().item() == 32 and torch.arange(5, device="cuda").max().item() == 4


# ---- products


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_bias_is_added_in_place_where_the_input_is_not_contiguous(card, contiguous):
    """native/Linear.cpp: addmm, or matmul, whose input is copied, and add_."""
    layer = nn.Linear(256, 512).cuda()
    layer(made(4, 256))
    x = made(64, 32, 256) if contiguous else made(32, 64, 256).transpose(0, 1)
    out, copied = 64 * 32 * 512 * 4, 64 * 32 * 256 * 4
    assert peak(lambda: layer(x)) == (out if contiguous else out + copied)


# ---- sorts, indices, draws


# ---- between host and GPU


# ---- operators that are composed of others


def test_the_cpu_composes_safe_softmax_of_the_same_parts():
    """The same code as on a GPU, measured: a byte per element and a row beside the output, and numbers."""
    x = torch.randn(64, 4096)
    n = x.numel()
    torch.ops.aten._safe_softmax(x, -1)
    with lab.meter("cpu") as meter:
        torch.ops.aten._safe_softmax(x, -1)
    assert 5 * n + 64 <= meter.peak_allocated <= 5 * n + 64 + 64


# ---- norms, libraries


@pytest.mark.parametrize("function", [F.silu, F.mish])
def test_a_backward_that_is_also_written_in_other_operators_is_the_one_kernel_that_the_card_has(card, function):
    x, grad = made(1024, 256, grad=True), made(1024, 256)
    y = function(x)
    assert peak(lambda: torch.autograd.grad(y, x, grad)) == 4 * x.numel()


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_says_that_on_the_card_it_is_a_kernel_of_cudnn(card, layer):
    layer(16, 32, 2).cuda()(made(4, 2, 16))[0].sum().backward()
    (note,) = card.notes
    assert note.code == "library-workspace" and "cuDNN" in note and f"torch.{layer.__name__.lower()}" in note
