"""What CUDA's reductions, products and sorts take besides their outputs, each figure derived from its source here.

M  rows    N  columns
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import llmlab as lab
from llmlab.hardware.gpu import gpu as find_gpu
from llmlab.simulation.simulator import simulator
from llmlab.simulation.workspaces.cub import sort_scratch

if torch.cuda.is_available():
    pytest.skip("the simulated device must not be mistaken for a real one", allow_module_level=True)

CARD = find_gpu("A100-40GB")


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


def test_deterministic_writes_are_sorted_too(card):
    """native/TensorAdvancedIndexing.cpp, _index_put_impl_, under torch.use_deterministic_algorithms."""
    n = 1 << 16
    x, ids, values = made(1000, 4), torch.zeros(n, dtype=torch.int64, device="cuda"), made(n, 4)
    assert peak(lambda: x.index_put_((ids,), values)) == 0
    torch.use_deterministic_algorithms(True)
    try:
        assert peak(lambda: x.index_put_((ids,), values)) == 4 * 8 * n + block(sort_scratch(n, 8, 8, CARD, 10))
    finally:
        torch.use_deterministic_algorithms(False)


def test_indices_that_lie_differently_are_written_out(card):
    """native/TensorAdvancedIndexing.cpp, AdvancedIndex: (batch, 1) beside (tokens), as in looking up a padding mask."""
    mask = made(64, 4096, dtype=torch.bool)
    rows, columns = torch.arange(64, device="cuda")[:, None], torch.arange(4096, device="cuda")
    n = 64 * 4096
    assert peak(lambda: mask[rows, columns]) == n + 2 * 8 * n
    assert peak(lambda: mask[:, columns]) == n
    dense = rows.expand(64, 4096).contiguous()
    assert peak(lambda: mask[dense, columns.expand(64, 4096).contiguous()]) == n + 8 * n  # the second is made here
    alike = made(4096, 64, dtype=torch.int64).t()
    assert peak(lambda: mask[alike, alike]) == n
    x, value = made(64, 4096), made(64, 4096)
    assert peak(lambda: x.index_put_((rows, columns), value)) == 2 * 8 * n


# ---- between host and GPU


def test_an_embeddings_indices_are_sorted_before_its_gradient_is_made(card):
    """cuda/Embedding.cu, embedding_dense_backward_cuda: sorted, where each was, a range and the scratch of all 64 bits;
    the last two are gone when the gradient comes."""
    n, N = 8192, 256
    table, ids = made(1000, N, grad=True), torch.zeros(n, dtype=torch.int64, device="cuda")
    rows, grad = F.embedding(ids, table), made(n, N)
    before = len(card._simulated.engine.events)
    torch.autograd.grad(rows, table, grad)
    scratch = block(sort_scratch(n, 8, 8, CARD))
    wanted = [8 * n, 8 * n, 8 * n, scratch, -scratch, -8 * n, block(4 * 1000 * N)]
    assert [event.size for event in card._simulated.engine.events[before:]][:7] == wanted


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


def test_a_workspace_that_only_its_library_knows_is_named(card):
    assert card.notes == ()
    nn.Conv1d(16, 32, 3).cuda()(made(2, 16, 64))
    (note,) = card.notes
    assert note.code == "library-workspace" and "cuDNN" in note and "convolution" in note
