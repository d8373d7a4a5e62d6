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
from llmlab.hardware.gpu import gpu as find_gpu
from llmlab.simulation.simulator import simulator
from llmlab.simulation.workspaces.cub import scan_scratch, select_scratch, sort_scratch, sum_by_key_scratch
from llmlab.simulation.workspaces.reductions import SUM, _ordered, buffers

if torch.cuda.is_available():
    pytest.skip("the simulated device must not be mistaken for a real one", allow_module_level=True)

CARD = find_gpu("A100-40GB")
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


@pytest.mark.parametrize(
    "product",
    [
        lambda a, v: torch.mv(a, v),
        lambda a, v: torch.dot(v, v),
        lambda a, v: a.addmm_(a, a),
        lambda a, v: torch.mm(a, a, out_dtype=torch.float32),
    ],
    ids=["mv", "dot", "addmm_", "mm to fp32"],
)
def test_every_product_takes_a_handle(product):
    """cuda/Blas.cpp, getCurrentCUDABlasHandle: products by vectors, in place and into another dtype too."""
    with simulator("A100-40GB") as sim:
        a, v = made(64, 64, dtype=torch.bfloat16), made(64, dtype=torch.bfloat16)
        held = sim.allocated
        out = product(a, v)
        assert sim.allocated - held == sim.gpu.cublas_workspace + (0 if out is a else block(out.nbytes))


@pytest.mark.parametrize(("name", "taken"), [("H100-SXM", True), ("A100-40GB", False)])
def test_experts_products_are_one_kernel_on_hopper(name, taken):
    """cuda/GroupMM.cu: pointers to 64 groups' A, B and outputs, strides, shapes; CUTLASS: 5 tensor maps of 128 B a
    multiprocessor. Older cards multiply group by group."""
    with simulator(name) as sim:
        warm = made(64, 64, dtype=torch.bfloat16)
        warm @ warm
        a, b = made(256, 64, dtype=torch.bfloat16), made(64, 64, 128, dtype=torch.bfloat16)
        ends = torch.arange(4, 257, 4, dtype=torch.int32, device="cuda")
        found = peak(lambda: torch._grouped_mm(a, b, ends))
        arguments = block(3 * 8 * 64 + 3 * 8 * 64 + 3 * 4 * 64)
        assert found == 2 * 256 * 128 + (arguments + block(5 * 128 * sim.gpu.sms) if taken else 0)


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
    the sort's scratch: by the 8 bits of an index below 256 in one pass, without a second set of keys and values."""
    n = 1 << 16
    for rows, scratch in ((1000, sort_scratch(n, 8, 8, CARD, 10)), (256, sort_scratch(n, 8, 8, CARD, 8))):
        table, ids = made(rows, 256, grad=True), torch.zeros(n, dtype=torch.int64, device="cuda")
        taken, grad = table[ids], made(n, 256)
        found = peak(lambda taken=taken, table=table, grad=grad: torch.autograd.grad(taken, table, grad))
        assert found == table.numel() * 4 + 4 * 8 * n + block(scratch)
        assert (scratch > 16 * n) == (rows > 256)


@pytest.mark.parametrize(
    ("rows", "columns", "scratch"),
    [
        (4, 4096, [8 * 4096]),
        (1, 50_000, [8 * 50_000, sort_scratch(50_000, 4, 8, CARD)]),
        (4, 50_000, [8 * 200_000, 8 * 200_000, 4 * 200_000, sort_scratch(200_000, 4, 8, CARD)]),
        (128, 5000, [8 * 640_000, 12 * 640_000 + 255]),  # pieces of one buffer start at multiples of 256
    ],
)
def test_a_sort_takes_a_range_or_pairs(card, rows, columns, scratch):
    """cuda/Sort.cpp and SortStable.cu."""
    x, n = made(rows, columns), rows * columns
    assert peak(lambda: torch.sort(x)) == block(4 * n) + block(8 * n) + sum(map(block, scratch))


def test_a_sort_along_another_dimension_takes_three_copies_more(card):
    """cuda/Sort.cpp, sort_cuda_kernel: input, values and indices with that dimension last."""
    n = 5000 * 4
    along = peak(lambda: torch.sort(made(4, 5000), dim=1))
    across = peak(lambda: torch.sort(made(5000, 4), dim=0))
    assert across - along == 2 * block(4 * n) + block(8 * n)


@pytest.mark.parametrize(("rows", "items"), [(4, 4), (64, 50)])
def test_topk_over_a_vocabulary_takes_counts_of_digits(card, rows, items):
    """cuda/TensorTopK.cu, mbtopk::launch: on 108 multiprocessors with 6 blocks of 256 threads each 64 rows of 128,256
    are 50 elements a thread, and 4 rows 4, the least; for each block 256 counts in int16, for each row in int32."""
    columns, k = 128_256, 50
    blocks = rows * ceil(columns / (items * 256))
    values = block(4 * rows), block(2 * 4 * rows), block(2 * 4 * rows)  # the k-th, k still to find, digits found
    counts = block(2 * 256 * blocks), block(4 * 256 * rows), 2 * block(4 * blocks)
    x, scratch = made(rows, columns), block(sum_by_key_scratch(blocks, CARD))
    assert peak(lambda: x.topk(k)) == block(4 * rows * k) + block(8 * rows * k) + sum(values) + sum(counts) + scratch


def test_topk_over_short_rows_takes_nothing(card):
    """cuda/TensorTopK.cu, should_use_multiblock: 200 rows of 3000 or more; a router's are shorter."""
    scores = made(200, 2999)
    assert peak(lambda: scores.topk(8)) == block(4 * 8 * 200) + block(8 * 8 * 200)
    assert peak(lambda: made(200, 3000).topk(8)) > block(4 * 200 * 3000) + 200 * 1024


def test_topk_of_more_than_4096_sorts_them_after_it(card):
    """cuda/TensorTopK.cpp: values and indices of their own for the sort, which begins when the selection has ended."""
    x, n = made(1, 20_000), 5000
    out, copies = block(4 * n) + block(8 * n), block(4 * n) + block(8 * n)
    sort = block(8 * n) + block(sort_scratch(n, 4, 8, CARD))
    assert peak(lambda: x.topk(n)) == out + copies + sort
    assert peak(lambda: x.topk(n, sorted=False)) < out + copies


def test_a_running_sum_of_one_row_takes_a_state_a_tile_and_of_bools_a_copy(card):
    """cuda/ScanUtils.cuh, scan_dim; native/ReduceOps.cpp, impl_func_cum_ops."""
    n = 1 << 20
    row, scratch = made(n), block(scan_scratch(n, 4))
    assert peak(lambda: row.cumsum(0)) == 4 * n + scratch
    assert peak(lambda: row.view(2, n // 2).cumsum(-1)) == 4 * n
    assert peak(lambda: row.view(2, n // 2).t().cumsum(0)) == 4 * n + 4 * n  # made contiguous
    mask = made(1024, 1024, dtype=torch.bool)
    assert peak(lambda: mask.cumsum(-1)) == 2 * 8 * n


def test_a_permutation_is_sorted_from_random_keys(card):
    """cuda/Randperm.cu, randperm_out_cuda: the range and int32 keys twice; 1000 need 23 bits, which one block of
    threads sorts; 65,536 need more than 32 bits, which are int64."""
    assert peak(lambda: torch.randperm(1000, device="cuda")) == 2 * block(8000) + 2 * block(4000) + 512
    n = 1 << 16
    assert peak(lambda: torch.randperm(n, device="cuda")) == 4 * 8 * n + block(sort_scratch(n, 8, 8, CARD, 36))


def test_where_a_mask_is_set_is_counted_and_then_found(card):
    """cuda/Nonzero.cu, nonzero_cuda_out_impl: an int32 a block of threads, 5 times as many as the card holds (108 × 8);
    a state a tile of 2304 elements."""
    mask = torch.zeros(4, 50_000, dtype=torch.bool)
    mask[:, ::2] = True
    mask = mask.cuda()
    before = len(card._card.engine.events)
    assert peak(lambda: mask.nonzero()) == block(2 * 8 * 100_000) + 512 + block(select_scratch(200_000, CARD))
    taken = [event.size for event in card._card.engine.events[before:] if event.size > 0]
    assert taken == [512, block(4 * 108 * 8 * 5 + 255), block(16 * 100_000), 512, block(select_scratch(200_000, CARD))]


def test_distinct_values_are_sorted_first(card):
    """cuda/UniqueCub.cu: the values, sorted; with where each was, a range and its order too."""
    ids = torch.randint(0, 100, (50_000,), device="cuda")
    n = ids.numel()
    assert peak(lambda: torch.unique(ids)) == block(8 * n) + block(sort_scratch(n, 8, 0, CARD))
    both = peak(lambda: torch.unique(ids, return_inverse=True))
    assert both == 3 * block(8 * n) + block(sort_scratch(n, 8, 8, CARD))


def test_repeats_by_a_tensor_take_where_each_begins(card):
    """native/Repeat.cpp, repeat_interleave_common."""
    counts = torch.full((50_000,), 2, device="cuda")
    assert peak(lambda: torch.repeat_interleave(counts)) == (
        block(8 * 100_000) + block(8 * 50_000) + block(scan_scratch(50_000, 8))
    )


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


def test_int32_indices_are_made_int64(card):
    """native/TensorAdvancedIndexing.cpp, make_info."""
    table, ids = made(1000, 4), torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
    assert peak(lambda: table[ids]) == 4 * 4 * 2**16 + 8 * 2**16


def test_a_draw_divides_all_probabilities_by_an_exponential(card):
    """native/Distributions.cpp, multinomial_out."""
    probabilities = made(16, 32_000)
    assert peak(lambda: torch.multinomial(probabilities, 1)) == 512 + 4 * 16 * 32_000


def test_masked_scatter_counts_its_mask_in_int64(card):
    """cuda/Indexing.cu, masked_scatter__cuda; images' embeddings go into a text's by it."""
    x, images = made(2, 512, 256), made(512, 256)
    mask = torch.zeros(2, 512, 1, dtype=torch.bool, device="cuda").expand_as(x)
    n = x.numel()
    assert peak(lambda: x.masked_scatter(mask, images)) == 4 * n + 8 * n + n + block(scan_scratch(n, 8))


def test_logsumexp_writes_out_the_exponentials(card):
    """native/ReduceOps.cpp, logsumexp_out_impl."""
    x = made(1024, 32_000)
    assert peak(lambda: x.logsumexp(-1)) == pytest.approx(4 * x.numel() + 2 * 4 * 1024, abs=4096)


# ---- between host and card


def test_what_goes_to_the_host_is_made_contiguous_on_the_card(card):
    """cuda/Copy.cu, copy_kernel_cuda; a transposed tensor is dense, and needs no copy."""
    x = made(1024, 1024)
    size = 4 * 512 * 1024
    assert peak(lambda: x[:, :512].cpu()) == size and peak(lambda: x.t().cpu()) == peak(lambda: x[:512].cpu()) == 0
    assert peak(lambda: x[:512].to("cpu", torch.bfloat16)) == 0  # cast on the host
    assert peak(lambda: x[:512].to("cpu", torch.bfloat16, non_blocking=True)) == size // 2  # on the card


def test_what_comes_to_the_card_is_cast_on_the_host_unless_nobody_waits(card):
    """cuda/Copy.cu, copy_kernel_cuda: conversion_device."""
    weight = nn.Parameter(torch.empty(1024, 1024)).detach()
    assert peak(lambda: weight.to("cuda", torch.bfloat16)) == 2 * MiB
    assert peak(lambda: weight.to("cuda", torch.bfloat16, non_blocking=True)) == 2 * MiB + 4 * MiB
    assert peak(lambda: weight.to("cuda", non_blocking=True)) == 4 * MiB
    held = made(1024, 1024)
    assert peak(lambda: held.t().copy_(weight)) == 4 * MiB and peak(lambda: held.copy_(weight)) == 0


def test_an_embeddings_indices_are_sorted_before_its_gradient_is_made(card):
    """cuda/Embedding.cu, embedding_dense_backward_cuda: sorted, where each was, a range and the scratch of all 64 bits;
    the last two are gone when the gradient comes."""
    n, N = 8192, 256
    table, ids = made(1000, N, grad=True), torch.zeros(n, dtype=torch.int64, device="cuda")
    rows, grad = F.embedding(ids, table), made(n, N)
    before = len(card._card.engine.events)
    torch.autograd.grad(rows, table, grad)
    scratch = block(sort_scratch(n, 8, 8, CARD))
    wanted = [8 * n, 8 * n, 8 * n, scratch, -scratch, -8 * n, block(4 * 1000 * N)]
    assert [event.size for event in card._card.engine.events[before:]][:7] == wanted


# ---- operators that are composed of others


def test_rows_that_are_masked_in_full_are_looked_for(card):
    """native/transformers/attention.cpp, _safe_softmax: a byte an element and a row, and a 0, beside the output."""
    scores = made(2, 8, 256, 256)
    n = scores.numel()
    assert peak(lambda: torch.ops.aten._safe_softmax(scores, -1)) == 4 * n + n + n // 256 + 512


def test_the_cpu_composes_safe_softmax_of_the_same_parts():
    """The same code as on a GPU, measured: a byte an element and a row beside the output, and numbers."""
    x = torch.randn(64, 4096)
    n = x.numel()
    torch.ops.aten._safe_softmax(x, -1)
    with lab.meter("cpu") as meter:
        torch.ops.aten._safe_softmax(x, -1)
    assert 5 * n + 64 <= meter.peak_allocated <= 5 * n + 64 + 64


def test_softmax_and_losses_want_their_inputs_contiguous(card):
    """cuda/SoftMax.cu, host_softmax; cuda/Loss.cu, nll_loss_forward_out_cuda_template."""
    x = made(1024, 2048)
    size = 4 * x.numel()
    assert peak(lambda: x.softmax(-1)) == size and peak(lambda: x.t().softmax(-1)) == 2 * size
    assert peak(lambda: x.t().log_softmax(-1)) == 2 * size
    labels = torch.zeros(2048, dtype=torch.int64, device="cuda")
    assert peak(lambda: F.nll_loss(x.t(), labels)) == size + 2 * 512
    assert peak(lambda: F.nll_loss(x, labels[:1024])) == 2 * 512
    grad = x.t()
    assert peak(lambda: torch.ops.aten._log_softmax_backward_data(grad, grad, -1, torch.float32)) == 3 * size


def test_a_choice_between_two_dtypes_casts_one(card):
    """native/TensorCompare.cpp, where_self_out; a number on the host comes to the card."""
    mask, half, wide = made(512, 512, dtype=torch.bool), made(512, 512, dtype=torch.bfloat16), made(512, 512)
    assert peak(lambda: torch.where(mask, half, wide)) == 4 * 2**18 + 4 * 2**18
    assert peak(lambda: torch.where(mask, wide, wide)) == 4 * 2**18
    assert peak(lambda: torch.where(mask, wide, torch.tensor(0.0))) == 4 * 2**18 + 512


def test_membership_compares_each_element_with_each_test(card):
    """cuda/TensorCompare.cpp, isin_default_kernel_gpu, up to 10 · n^0.145 tests."""
    ids, ends = made(1 << 16, dtype=torch.int64), made(4, dtype=torch.int64)
    assert peak(lambda: torch.isin(ids, ends)) == 2**16 + 4 * 2**16 + 2**16


def test_searching_wants_one_dtype_and_contiguous_inputs(card):
    """native/BucketizationUtils.h, searchsorted_maybe_trim_input_tensors."""
    edges, x = made(1024), made(512, 512)
    n = x.numel()
    assert peak(lambda: torch.searchsorted(edges, x)) == 8 * n
    assert peak(lambda: torch.bucketize(x.bfloat16(), edges)) == 2 * n + 8 * n + 4 * n  # bf16, where, bf16 as fp32
    assert peak(lambda: torch.searchsorted(edges, x.t())) == 8 * n + 4 * n


def test_a_dropout_mask_is_allocated_before_what_it_leaves(card):
    """cuda/Dropout.cu, dropout_cuda: which of two free blocks each takes depends on it."""
    x = made(1024, 1024)
    before = len(card._card.engine.events)
    kept = torch.nn.functional.dropout(x, 0.1, True)
    taken = [event.size for event in card._card.engine.events[before:] if event.size > 0]
    assert taken == [MiB, 4 * MiB] and kept.shape == x.shape


def test_the_logarithm_of_a_sigmoid_keeps_no_buffer(card):
    """cuda/ActivationLogSigmoidKernel.cu, log_sigmoid_forward_cuda; the CPU's keeps one as large as the input."""
    x = made(1024, 1024, grad=True)
    assert peak(lambda: F.logsigmoid(x)) == 4 * MiB
    y = F.logsigmoid(x)
    assert peak(lambda: torch.autograd.grad(y, x, made(1024, 1024))) == 8 * MiB


def test_a_mean_squared_error_is_made_of_one_an_element(card):
    """native/Loss.cpp, mse_loss_out and smooth_l1_loss_out: a loss of each element, and its mean's buffers."""
    x, target = made(1024, 1024, grad=True), made(1024, 1024)
    mean = peak(lambda: target.mean())
    for loss in (F.mse_loss, F.smooth_l1_loss):
        assert peak(lambda loss=loss: loss(x, target)) == 4 * MiB + mean
        assert peak(lambda loss=loss: loss(x, target, reduction="none")) == 4 * MiB
    assert not card.notes


def test_infinite_and_nonzero_elements_are_compared_in_copies(card):
    """native/TensorCompare.cpp, isinf: abs(x) == inf; TensorAdvancedIndexing.cpp, count_nonzero_cuda."""
    x = made(1024, 1024)
    assert peak(lambda: x.isinf()) == MiB + 4 * MiB
    assert MiB + 8 * MiB < peak(lambda: x.count_nonzero()) <= MiB + 8 * MiB + 512
    assert peak(lambda: x.bool().count_nonzero()) <= MiB + 8 * MiB + 512


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


@pytest.mark.parametrize("function", [F.silu, F.mish])
def test_a_backward_that_is_also_written_in_other_operators_is_the_one_kernel_that_the_card_has(card, function):
    x, grad = made(1024, 256, grad=True), made(1024, 256)
    y = function(x)
    assert peak(lambda: torch.autograd.grad(y, x, grad)) == 4 * x.numel()


def test_group_norm_has_a_scale_and_a_shift_a_channel(card):
    norm = nn.GroupNorm(8, 256).cuda()
    x = made(64, 256, 32)
    statistics, factors = 2 * block(4 * 64 * 8), 2 * 4 * 64 * 256
    assert peak(lambda: norm(x)) == 4 * x.numel() + statistics + factors


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_says_that_on_the_card_it_is_a_kernel_of_cudnn(card, layer):
    layer(16, 32, 2).cuda()(made(4, 2, 16))[0].sum().backward()
    (note,) = card.notes
    assert "cuDNN" in note and f"torch.{layer.__name__.lower()}" in note and "one kernel there" in note


def test_a_workspace_that_only_its_library_knows_is_named(card):
    assert card.notes == ()
    nn.Conv1d(16, 32, 3).cuda()(made(2, 16, 64))
    assert len(card.notes) == 1 and "cuDNN" in card.notes[0] and "convolution" in card.notes[0]
