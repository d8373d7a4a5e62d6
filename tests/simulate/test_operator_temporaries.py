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

from llmlab.simulate.reductions import SUM, _ordered, buffers
from llmlab.simulate.simulator import simulator

if torch.cuda.is_available():
    pytest.skip("the simulated device must not be mistaken for a real one", allow_module_level=True)

A100, T4 = (108, 2048), (40, 1024)  # multiprocessors, threads each of them holds
MiB = 2**20


@pytest.fixture
def card(monkeypatch):
    """A card on which no block keeps the rest of its segment."""
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
    kept = run()
    del kept
    return torch.cuda.max_memory_allocated() - before


def block(size: int) -> int:
    return ceil(size / 512) * 512


def of_sum(shape: tuple[int, ...], dims: tuple[int, ...], item: int = 4, slots: tuple[int, int] = A100) -> list[int]:
    strides = [prod(shape[dim + 1 :]) * item for dim in range(len(shape))]
    return buffers(list(shape), strides, [dim in dims for dim in range(len(shape))], item, item, SUM, slots)


# ---- reductions


@pytest.mark.parametrize(
    ("M", "N", "slots", "blocks_an_output"),
    [
        # 4 outputs a thread, 32 threads along N: N / 128 blocks; 4 threads along M: M / 4 values each. So many blocks
        # share an output that the card is full (multiprocessors × threads / 128), with 16 values a thread at least.
        (8192, 3072, A100, ceil(108 * 16 / 24)),
        (8192, 768, A100, 8192 // 4 // 16),
        (2048, 4096, (80, 2048), 2048 // 4 // 16),
        (8192, 3072, T4, ceil(40 * 8 / 24)),
    ],
)
def test_the_gradient_of_a_bias_takes_its_parts_a_thread_each(M, N, slots, blocks_an_output):
    """Reduce.cuh, global_memory_size: 4 B × outputs × blocks an output × 32 threads × 4 outputs a thread, as allocated,
    of which a part is written; and a counter a block along N."""
    assert of_sum((M, N), (0,), slots=slots) == [4 * N * blocks_an_output * 32 * 4, 4 * N // 128]


def test_a_sum_is_split_only_where_each_thread_has_256_values():
    assert of_sum((1020, 4096), (0,)) == []
    assert of_sum((1024, 4096), (0,)) == [4 * 4096 * 16 * 128, 128]
    assert of_sum((8192, 4096), (1,)) == []  # a row an output: enough outputs to fill the card


def test_a_loss_takes_a_part_a_block():
    """One output: 512 threads of 4 values, blocks until 16 values a thread are left: here the card is full before."""
    n = 1 << 24
    assert of_sum((n,), (0,)) == [4 * 108 * 4, 4]


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


def test_a_linears_backward_holds_the_parts_of_its_biases_gradient(card):
    M, N = 8192, 3072
    layer = nn.Linear(64, N).cuda()
    layer(made(8, 64))  # cuBLASLt's workspace
    x, grad = made(M, 64), made(M, N)
    with_bias = peak(lambda: torch.autograd.grad(layer(x), list(layer.parameters()), grad))
    parts = of_sum((M, N), (0,))
    weight = layer.weight.numel() * 4
    assert with_bias == 4 * M * N + weight + N * 4 + parts[0] + block(parts[1])


def test_a_sum_of_a_mask_is_of_a_copy_in_int64_and_half_sums_in_fp32_are_not(card):
    """ReduceOpsUtils.h, make_reduction: integers are cast up first; half to fp32 is read by the kernel."""
    mask = made(1024, 1024, dtype=torch.bool)
    parts = of_sum((1024 * 1024,), (0,), item=8)
    assert peak(lambda: mask.sum()) == 512 + 8 * 1024 * 1024 + sum(map(block, parts))
    half = made(1024, 1024, dtype=torch.bfloat16)
    assert peak(lambda: half.sum(dtype=torch.float32)) < 16 * 1024


def test_the_largest_of_a_whole_tensor_wants_it_contiguous(card):
    """native/ReduceAllOps.cpp: max_all_stub(self.contiguous())."""
    x = made(1024, 2048)
    assert peak(lambda: x.max()) < 64 * 1024 <= 8 * MiB <= peak(lambda: x.t().max())


def test_values_are_followed_through_reductions(card):
    mask = torch.ones(4, 8, dtype=torch.bool, device="cuda")
    assert bool(mask.all()) and mask.sum().item() == 32 and torch.arange(5, device="cuda").max().item() == 4


# ---- products


def test_an_expanded_gradient_is_copied_for_each_product(card):
    """cuda/Blas.cpp, prepare_matrix_for_cublas: strides (0, 0) are none of cuBLAS."""
    x, y = made(1024, 1024, grad=True), made(1024, 1024, grad=True)
    size = 4 * MiB
    grad = made(1).expand(1024, 1024)
    assert peak(lambda: torch.autograd.grad(x @ y, (x, y), grad)) == size + 2 * size + size
    dense = made(1024, 1024)
    assert peak(lambda: torch.autograd.grad(x @ y, (x, y), dense)) == size + 2 * size


def test_batches_are_copied_where_neither_of_their_dimensions_is_dense(card):
    """prepare_batch_matrix_for_cublas."""
    a, b = made(8, 128, 128), made(8, 128, 256)[:, :, ::2]
    size = 8 * 128 * 128 * 4
    assert peak(lambda: torch.bmm(a, a.transpose(1, 2))) == size
    assert peak(lambda: torch.bmm(a, b)) == 2 * size


def test_one_output_column_needs_no_cublaslt():
    """isInputCompliesAddmmCudaLt: more than one row and column."""
    with simulator("A100-40GB"):
        x = made(64, 64)
        (x @ x).sum()
        held = torch.cuda.memory_allocated()
        F.linear(x, made(1, 64), made(1))
        assert torch.cuda.memory_allocated() == held
        F.linear(x, made(2, 64), made(2))
        assert torch.cuda.memory_allocated() == held + MiB


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_bias_is_added_in_place_where_the_input_is_not_contiguous(card, contiguous):
    """native/Linear.cpp: addmm, or matmul, whose input is copied, and add_."""
    layer = nn.Linear(256, 512).cuda()
    layer(made(4, 256))
    x = made(64, 32, 256) if contiguous else made(32, 64, 256).transpose(0, 1)
    out, copied = 64 * 32 * 512 * 4, 64 * 32 * 256 * 4
    assert peak(lambda: layer(x)) == (out if contiguous else out + copied)


# ---- sorts, indices, draws


def test_added_indices_are_sorted(card):
    """cuda/Indexing.cu, index_put_with_sort_kernel: linear, sorted, original indices and their range, each int64, and
    cub's second set of keys and values."""
    table, ids = made(1000, 256, grad=True), torch.zeros(1 << 16, dtype=torch.int64, device="cuda")
    rows, grad = table[ids], made(1 << 16, 256)
    assert peak(lambda: torch.autograd.grad(rows, table, grad)) == table.numel() * 4 + 6 * 8 * 2**16


@pytest.mark.parametrize(
    ("rows", "columns", "scratch"),
    [(4, 4096, 8 * 4096), (1, 50_000, 8 * 50_000 + 12 * 50_000), (4, 50_000, 200_000 * (8 + 8 + 4 + 12))],
)
def test_a_sort_takes_a_range_or_pairs(card, rows, columns, scratch):
    """cuda/Sort.cpp and Sort.cu."""
    x = made(rows, columns)
    assert peak(lambda: torch.sort(x)) == pytest.approx(block(12 * rows * columns) + scratch, abs=8 * 512)


def test_a_draw_divides_all_probabilities_by_an_exponential(card):
    """native/Distributions.cpp, multinomial_out."""
    probabilities = made(16, 32_000)
    assert peak(lambda: torch.multinomial(probabilities, 1)) == 512 + 4 * 16 * 32_000


def test_masked_scatter_counts_its_mask_in_int64(card):
    """cuda/Indexing.cu, masked_scatter__cuda; images' embeddings go into a text's by it."""
    x, images = made(2, 512, 256), made(512, 256)
    mask = torch.zeros(2, 512, 1, dtype=torch.bool, device="cuda").expand_as(x)
    n = x.numel()
    assert peak(lambda: x.masked_scatter(mask, images)) == 4 * n + 8 * n + n


def test_logsumexp_writes_out_the_exponentials(card):
    """native/ReduceOps.cpp, logsumexp_out_impl."""
    x = made(1024, 32_000)
    assert peak(lambda: x.logsumexp(-1)) == pytest.approx(4 * x.numel() + 2 * 4 * 1024, abs=4096)


# ---- norms, libraries


def test_norms_of_very_many_short_rows_write_out_partial_gradients(card):
    """cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: above 64 Ki rows, in parts of 32."""
    N = 64
    norm = nn.LayerNorm(N).cuda()
    for rows, parts in ((65536, 0), (65536 + 32, 2 * block((65536 // 32 + 1) * N * 4))):
        x, grad = made(rows, N, grad=True), made(rows, N)
        y = norm(x)
        gradients = rows * N * 4 + 2 * block(4 * N)
        found = peak(lambda y=y, x=x, grad=grad: torch.autograd.grad(y, (x, *norm.parameters()), grad))
        assert found == gradients + parts


def test_group_norm_has_a_scale_and_a_shift_a_channel(card):
    norm = nn.GroupNorm(8, 256).cuda()
    x = made(64, 256, 32)
    statistics, factors = 2 * block(4 * 64 * 8), 2 * 4 * 64 * 256
    assert peak(lambda: norm(x)) == 4 * x.numel() + statistics + factors


def test_a_workspace_that_only_its_library_knows_is_named(card):
    assert card.notes == ()
    nn.Conv1d(16, 32, 3).cuda()(made(2, 16, 64))
    assert len(card.notes) == 1 and "cuDNN" in card.notes[0] and "convolution" in card.notes[0]
