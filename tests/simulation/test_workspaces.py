"""All modules of simulation/workspaces as one table: an operator, its arguments, and the bytes of all its allocations.

Outputs stand among the buffers, where CUDA allocates them. Nothing is rounded up. A tensor on "meta" stands for one on
the GPU, one on the CPU for one on the host.

    M  rows    N  columns    B  batch    H  heads    T  positions    D  head size
"""

from math import ceil
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from llmlab.hardware.gpu import gpu as find_gpu
from llmlab.simulation.allocator.memory import HostMemory
from llmlab.simulation.devices import GPU_DEVICE, HOST
from llmlab.simulation.engine.engine import Engine
from llmlab.simulation.values.known import know
from llmlab.simulation.workspaces.cub import scan_scratch, select_scratch, sort_scratch, sum_by_key_scratch
from llmlab.simulation.workspaces.registry import (
    CPU_WORKSPACES,
    OUTPUTS,
    SOURCES,
    WORKSPACES,
    Library,
    Operator,
    name_of,
    workspace,
)

pytestmark = pytest.mark.usefixtures("no_gpu")

aten = torch.ops.aten
A100 = find_gpu("A100-40GB")
CUBLAS, CUBLASLT = 2 * 4096 * 1024 + 8 * 16 * 1024, 1 << 20  # CublasHandlePool.cpp, before sm_90
f16, bf16, f32, i32, i64 = torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64
u8, i8, mask = torch.uint8, torch.int8, torch.bool
NF4 = ("nf4", u8)


def t(*shape: int, dtype: torch.dtype = f32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def known(values: Tensor) -> Tensor:
    """A tensor on the GPU whose values are known: these."""
    values.on_card = True
    return values


def host(*shape: int, dtype: torch.dtype = f32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


class Row(NamedTuple):
    """`operator` of `args` asks for `requests`, in bytes; on the CPU where `gpu` is None."""

    operator: Any
    args: tuple
    requests: list[int]
    gpu: str | None = "A100-40GB"
    named: dict[str, Any] = {}  # noqa: RUF012  # never written to


M, N = 64, 256
X, HALF, BYTES = 4 * M * N, 2 * M * N, M * N  # bytes of (M, N) in fp32, in half precision, and in one byte
x, half, transposed = t(M, N), t(M, N, dtype=f16), t(N, M).t()
ids = t(M, dtype=i64)

LONG = 65536 + 32  # rows; above 64 Ki the gradients of weight and bias are summed in parts of 32 rows
tall, wide, row, statistic = t(LONG, 64), t(1, 64).expand(LONG, 64), t(64), t(LONG, 1)
PARTIAL = (LONG // 32) * 64 * 4
C, GROUPS = 64, 16
image, channel = t(8, C, 128), t(C)
NORMALIZATION = [
    Row(aten.native_layer_norm, (t(N, M, dtype=f16).t(), [N], t(N, dtype=f16), t(N, dtype=f16), 1e-5),
        [HALF, HALF, 4 * M, 4 * M]),
    Row(aten.native_layer_norm, (x, [N], t(N), t(N), 1e-5), [X, 4 * M, 4 * M]),
    Row(aten.native_layer_norm_backward, (wide, tall, [64], statistic, statistic, row, row, [True] * 3),
        [4 * LONG * 64, 256, 256, 4 * LONG * 64, PARTIAL, PARTIAL]),
    Row(aten.native_layer_norm_backward,
        (t(65536, 64), t(65536, 64), [64], t(65536, 1), t(65536, 1), row, row, [True] * 3), [4 * 65536 * 64, 256, 256]),
    Row(aten.native_layer_norm_backward, (x, transposed, [N], t(M, 1), t(M, 1), t(N), t(N), [True] * 3),
        [X, X, 4 * N, 4 * N]),
    Row(aten._fused_rms_norm, (t(N, M, dtype=bf16).t(), [N], t(N, dtype=bf16), 1e-5), [HALF, HALF, 4 * M]),
    Row(aten._fused_rms_norm_backward, (wide, tall, [64], statistic, row, [True] * 2),
        [4 * LONG * 64, 256, 4 * LONG * 64, PARTIAL]),
    Row(aten._fused_rms_norm_backward, (x, x, [N], t(M, 1), t(N), [True, False]), [X]),
    Row(aten.native_group_norm, (image, channel, channel, 8, C, 128, GROUPS, 1e-5),
        [4 * 8 * C * 128, 4 * 8 * GROUPS, 4 * 8 * GROUPS, 4 * 8 * C, 4 * 8 * C]),
    Row(aten.native_group_norm_backward,
        (image, image, t(8, GROUPS), t(8, GROUPS), channel, 8, C, 128, GROUPS, [True] * 3),
        [4 * 8 * C * 128, 4 * C, 4 * C, *(4 * 8 * C,) * 2, *(4 * 8 * GROUPS,) * 2, 4 * 8 * C]),
    Row(aten.native_group_norm_backward,
        (t(8, C), t(8, C), t(8, GROUPS), t(8, GROUPS), channel, 8, C, 1, GROUPS, [True] * 3),
        [4 * 8 * C, 4 * C, 4 * C, *(4 * 8 * GROUPS,) * 2]),
]  # fmt: skip


def sums(n: int, weights: int, width: int, item: int = 8) -> list[int]:
    """EmbeddingBackwardKernel.cu: segments' offsets, two counts, partials' counts and offsets, partial rows in fp32."""
    segments = min(n, weights)
    partials = n // 10 + segments
    return [item * n, 8, item * segments, item * segments, 8, item * partials, 4 * partials * width]


n, WEIGHTS = 3073, 100
rows, table = t(n, 8), 4 * WEIGHTS * 8
sorting = [8 * n, 8 * n, 8 * n, sort_scratch(n, 8, 8, A100)]
BAGS = 16
bags, offsets, weight = t(BAGS, 8), t(BAGS, dtype=i64), t(WEIGHTS, 8)
few, few32 = t(40, dtype=i64), t(40, dtype=i32)
EMBEDDING = [
    Row(aten.embedding_dense_backward, (t(3072, 8), t(3072, dtype=i64), WEIGHTS, -1, False), [table]),
    Row(aten.embedding_dense_backward, (rows, t(n, dtype=i64), WEIGHTS, -1, False),
        [*sorting, table, *sums(n, WEIGHTS, 8)]),
    Row(aten.embedding_dense_backward, (t(1, 8).expand(n, 8), t(n, dtype=i64), WEIGHTS, -1, True),
        [4 * n * 8, *sorting, 8 * n, table, *sums(n, WEIGHTS, 8)]),
    # A bag's size, the bag of each index, the rows of bags; "max" keeps which row is the largest.
    Row(aten._embedding_bag, (weight, few, offsets), [8 * BAGS, 8 * 40, 4 * BAGS * 8]),
    Row(aten._embedding_bag, (weight, few32, offsets), [8 * 40, 8 * BAGS, 8 * 40, 4 * BAGS * 8]),
    Row(aten._embedding_bag_forward_only, (weight, few, t(BAGS + 1, dtype=i64), False, 2, False, None, True),
        [8 * (BAGS + 1), 8 * 40, 4 * BAGS * 8, 8 * BAGS * 8]),
    Row(aten._embedding_bag_backward,
        (t(1, 8).expand(BAGS, 8), few32, offsets, few, offsets, few, WEIGHTS, False, 1, False, None),
        [8 * 40, 4 * BAGS * 8, *[8 * 40] * 3, 1, table, *sums(40, WEIGHTS, 8)]),  # one block sorts 40 indices
    Row(aten._embedding_bag_dense_backward, (bags, few, few, offsets, few, WEIGHTS, True, 0, None),
        [*[8 * 40] * 3, 1, 8 * 40, table, *sums(40, WEIGHTS, 8)]),
    Row(aten._embedding_bag_dense_backward, (bags, few, few, offsets, bags, WEIGHTS, False, 2, None), [table]),
    Row(aten._embedding_bag_per_sample_weights_backward, (bags, weight, few, offsets, few, 0), [4 * 40]),
]  # fmt: skip

B, H, T, D = 2, 4, 100, 64
heads = {dtype: t(B, H, T, D, dtype=dtype) for dtype in (f16, f32)}
LSE = 4 * B * H * ceil(T / 32) * 32
OUT = 2 * B * H * T * D
seed = host(dtype=i64)
starts = t(4, dtype=i32)  # of three packed sequences, and their end
flash = t(B, H, T, D, dtype=bf16)
shared, key_72, cached = t(B, 2, T, D, dtype=bf16), t(B, H, T, 72, dtype=bf16), t(1, 8, 8192, 128, dtype=bf16)
FLASH_STATE = [16, 8]  # seed and offset; the log-sum-exps stand before them


def efficient_backward(dtype: torch.dtype, D: int, tile: int, key_tiles: int = 0) -> list[int]:
    """Gradients, delta, and sums of dQ in tiles of `tile` × 64 with 16 B of locks each."""
    gradient = dtype.itemsize * B * H * T * D
    elements = ceil(T / tile) * ceil(D / 64) * (tile * 64 + 4) + key_tiles
    return [gradient, gradient, gradient, 4 * B * H * T, 4 * B * H * elements]


def efficient_arguments(dtype: torch.dtype, D: int, dropout: float = 0.0) -> tuple:
    q, lse = t(B, H, T, D, dtype=dtype), t(B, H, T)
    return (q, q, q, q, None, q, lse, seed, seed, dropout, [True, True, True, False])


IN_TWO_PARTS = 2 * ceil(T / 64) * 64 * (2 + 2) * 64  # dK and dV of heads of 65 to 128, which fit no registers
ATTENTION = [
    Row(aten._scaled_dot_product_efficient_attention, (heads[f16],) * 3 + (None, True), [OUT, LSE]),
    # kernel_forward.h: above 128 columns the output of a half kernel is summed in fp32 in memory, of fp32 in itself.
    Row(aten._scaled_dot_product_efficient_attention, (t(2, 4, 64, 256, dtype=f16),) * 3 + (None, False),
        [2 * 2 * 4 * 64 * 256, 4 * 2 * 4 * 64 * 256]),
    Row(aten._scaled_dot_product_efficient_attention, (t(2, 4, 64, 128, dtype=f16),) * 3 + (None, False),
        [2 * 2 * 4 * 64 * 128]),
    Row(aten._scaled_dot_product_efficient_attention, (t(2, 4, 64, 256),) * 3 + (None, False), [4 * 2 * 4 * 64 * 256]),
    Row(aten._scaled_dot_product_efficient_attention_backward, efficient_arguments(f16, 64),
        efficient_backward(f16, 64, 64)),
    Row(aten._scaled_dot_product_efficient_attention_backward, efficient_arguments(f32, 128),
        efficient_backward(f32, 128, 128)),
    Row(aten._scaled_dot_product_efficient_attention_backward, efficient_arguments(f16, 128),
        efficient_backward(f16, 128, 64, IN_TWO_PARTS), "T4"),
    Row(aten._scaled_dot_product_efficient_attention_backward, efficient_arguments(f16, 128),
        efficient_backward(f16, 128, 128), "V100-16GB"),
    Row(aten._scaled_dot_product_efficient_attention_backward, efficient_arguments(bf16, 128),
        efficient_backward(bf16, 128, 128), "H100-80GB"),
    Row(aten._scaled_dot_product_efficient_attention_backward, efficient_arguments(bf16, 128),
        efficient_backward(bf16, 128, 64, IN_TWO_PARTS), "RTX-4090"),
    Row(aten._scaled_dot_product_efficient_attention_backward, efficient_arguments(bf16, 96),
        efficient_backward(bf16, 96, 128), "RTX-4090"),
    Row(aten._scaled_dot_product_efficient_attention_backward, efficient_arguments(bf16, 96, 0.1),
        efficient_backward(bf16, 96, 64, IN_TWO_PARTS), "RTX-4090"),
    Row(aten._scaled_dot_product_efficient_attention_backward, efficient_arguments(bf16, 96),
        efficient_backward(bf16, 96, 64, IN_TWO_PARTS), "RTX-5090"),
    Row(aten._scaled_dot_product_flash_attention, (flash, flash, flash),
        [2 * B * H * T * D, 4 * B * H * T, *FLASH_STATE]),
    # 8 heads of 4 rows, whose keys are split in 22 parts: 176 of 216 slots are busy.
    Row(aten._scaled_dot_product_flash_attention, (t(1, 32, 1, 128, dtype=bf16), cached, cached),
        [2 * 32 * 128, 4 * 32, *FLASH_STATE, 4 * 22 * 32, 4 * 22 * 32 * 128]),
    Row(aten._scaled_dot_product_flash_attention_backward,
        (flash, flash, flash, flash, flash, t(B, H, T), None, None, T, T, 0.0, False, seed, seed),
        [*[2 * B * H * T * D] * 3, 4 * B * H * 128, 4 * B * 128 * H * D]),
    Row(aten._scaled_dot_product_flash_attention_backward,
        (flash, flash, shared, shared, flash, t(B, H, T), None, None, T, T, 0.0, False, seed, seed),
        [2 * B * H * T * D, *[2 * B * 2 * T * D] * 2, 4 * B * H * 128, 4 * B * 128 * H * D, *[2 * B * H * T * D] * 2]),
    Row(aten._scaled_dot_product_flash_attention_backward,
        (*[key_72] * 5, t(B, H, T), None, None, T, T, 0.0, False, seed, seed),
        [*[2 * B * H * T * 72] * 3, 4 * B * H * 128, 4 * B * 128 * H * 96]),  # 72 columns in multiples of 32
    # 3 sequences of 50 rows together: 128 rows more for each.
    Row(aten._flash_attention_backward,
        (*[t(50, H, D, dtype=f16)] * 5, t(H, 50), starts, starts, 20, 20, 0.0, False, seed, seed),
        [*[2 * 50 * H * D] * 3, 4 * H * (50 + 3 * 128), 4 * (50 + 3 * 128) * H * D]),
]  # fmt: skip

labels = t(M, dtype=i64)
many = t(4096, 4096)  # a loss of each element, then 108 × 4 thread blocks' parts and a counter
PARTS = [4 * 108 * 4, 4]
LOSS = [
    Row(aten._softmax, (x, -1, False), [X]),
    Row(aten._softmax, (transposed, -1, False), [X, X]),
    Row(aten._log_softmax, (transposed, -1, False), [X, X]),
    Row(aten._softmax_backward_data, (x, x, -1, f32), [X, X]),
    Row(aten._softmax_backward_data, (transposed, transposed, -1, f32), [X, X, X]),
    Row(aten._log_softmax_backward_data, (transposed, transposed, -1, f32), [X, X, X]),
    Row(aten._safe_softmax, (x, -1), [X, M * N, M, 4]),
    Row(aten._safe_softmax, (transposed, -1), [X, X]),  # its copy is more than those
    Row(aten.logsumexp, (x, [-1]), [4 * M, X, 4 * M]),
    Row(aten.native_dropout, (x, 0.1, True), [BYTES, X]),
    Row(aten.log_sigmoid_forward, (x,), [X]),
    Row(aten.nll_loss_forward, (transposed, labels, None, 1, -100), [4, 4, X]),
    Row(aten.nll_loss_forward, (x, labels, None, 1, -100), [4, 4]),
    Row(aten.nll_loss_backward, (t(), transposed, t(2 * M, dtype=i64)[::2], t(2 * N)[::2], 1, -100, t()),
        [X, 8 * M, 4 * N]),
    Row(aten.mse_loss, (many, many), [4, 4 << 24, *PARTS]),
    Row(aten.smooth_l1_loss, (many, many), [4, 4 << 24, *PARTS]),
    Row(aten.mse_loss, (many, many, 0), [4 << 24]),
]  # fmt: skip

COPIES = [
    Row(aten._to_copy, (t(M, 2 * N)[:, :N],), [X], named={"device": HOST}),
    Row(aten._to_copy, (transposed,), [], named={"device": HOST}),  # dense, which is enough
    Row(aten._to_copy, (x,), [HALF], named={"device": HOST, "dtype": f16, "non_blocking": True}),
    Row(aten._to_copy, (x,), [], named={"device": HOST, "dtype": f16}),  # cast on the host
    Row(aten._to_copy, (host(M, N),), [HALF, X], named={"device": GPU_DEVICE, "dtype": f16, "non_blocking": True}),
    Row(aten._to_copy, (host(M, N),), [HALF], named={"device": GPU_DEVICE, "dtype": f16}),
    Row(aten.copy_, (transposed, host(M, N)), [X]),
    Row(aten.copy_, (x, host(M, N)), []),
    Row(aten.where.self, (t(M, N, dtype=mask), x, half), [X, X]),
    Row(aten.where.self, (t(M, N, dtype=mask), x, x), [X]),
    Row(aten.where.self, (t(M, N, dtype=mask), x, host()), [4, X]),
    Row(aten.isin.Tensor_Tensor, (ids, t(4, dtype=i64)), [M, 4 * M, M]),
    Row(aten.searchsorted.Tensor, (t(N), x), [8 * M * N]),
    Row(aten.searchsorted.Tensor, (t(N), t(M, N).t()), [8 * M * N, X]),
    Row(aten.searchsorted.Tensor, (t(N), t(M, dtype=f16)), [8 * M, 4 * M]),
    Row(aten.bucketize.Tensor, (t(M, dtype=f16), t(N)), [8 * M, 4 * M]),
    Row(aten.isinf, (x,), [X, BYTES]),
    Row(aten.isinf, (ids,), [M]),
    Row(aten.count_nonzero, (x,), [BYTES, 8 * M * N, 8]),
    Row(aten.count_nonzero.dim_IntList, (t(M, N, dtype=mask), [1]), [8 * M * N, 8 * M]),
    Row(aten.histc, (ids, 100), [800]),
]  # fmt: skip

a, b, batch = t(M, N), t(N, M), t(8, 128, 128)
float8 = torch.float8_e4m3fn
EIGHT = (t(M, N, dtype=float8), t(M, N, dtype=float8).t(), t(), t())  # a weight as a linear layer has it, two scales
spread = t(1).expand(M, N)  # an expanded gradient: strides that are none of cuBLAS
slices = t(8, 128, 256)[:, :, ::2]
grouped = (t(256, 64, dtype=bf16), t(64, 64, 128, dtype=bf16), t(64, dtype=i32))
MATMUL = [
    Row(aten.mm, (a, b), [4 * M * M, CUBLAS]),
    Row(aten.mm, (spread, b), [4 * M * M, X, CUBLAS]),
    Row(aten.mm.out, (a, b), [CUBLAS], named={"out": t(M, M)}),
    Row(aten.mm.dtype, (t(M, M, dtype=bf16), t(M, M, dtype=bf16), f32), [4 * M * M, CUBLAS]),
    Row(aten.mm, (a, b), [4 * M * M, 8 * 4096 * 1024], "H100-80GB"),  # 4096 × 8 KiB on sm_90
    Row(aten.addmm, (t(M), a, b), [4 * M * M, CUBLAS, CUBLASLT]),
    Row(aten.addmm, (t(M, M), a, b), [4 * M * M, CUBLAS]),
    Row(aten.addmm, (t(1), a, t(N, 1)), [4 * M, CUBLAS]),  # isInputCompliesAddmmCudaLt: more than one column
    Row(aten.addmm_, (t(M, M), a, b), [CUBLAS]),
    Row(aten.addmm.dtype, (t(M, M), t(M, M, dtype=bf16), t(M, M, dtype=bf16), f32), [4 * M * M, CUBLAS]),
    Row(aten.addmm.dtype_out, (t(M, M), t(M, M, dtype=bf16), t(M, M, dtype=bf16), f32), [CUBLAS],
        named={"out": t(M, M)}),
    Row(aten.addmm.out, (t(M), a, b), [CUBLAS, CUBLASLT], named={"out": t(M, M)}),
    Row(aten._scaled_mm, EIGHT, [2 * M * M, CUBLASLT], named={"out_dtype": bf16}),
    Row(aten._scaled_mm.out, EIGHT, [CUBLASLT], named={"out_dtype": bf16, "out": t(M, M, dtype=bf16)}),
    Row(aten.bmm, (batch, slices), [4 * 8 * 128 * 128, 4 * 8 * 128 * 128, CUBLAS]),
    Row(aten.bmm, (batch, batch.transpose(1, 2)), [4 * 8 * 128 * 128, CUBLAS]),
    Row(aten.bmm.dtype, (t(2, 8, 8, dtype=bf16), t(2, 8, 8, dtype=bf16), f32), [4 * 2 * 64, CUBLAS]),
    Row(aten.baddbmm, (batch, slices, batch), [4 * 8 * 128 * 128, 4 * 8 * 128 * 128, CUBLAS]),
    Row(aten.baddbmm_, (batch, batch, batch), [CUBLAS]),
    Row(aten.bmm.out, (batch, slices), [4 * 8 * 128 * 128, CUBLAS], named={"out": t(8, 128, 128)}),
    Row(aten.baddbmm.out, (batch, batch, batch), [CUBLAS], named={"out": t(8, 128, 128)}),
    Row(aten.addmv, (t(M), a, t(N)), [4 * M, CUBLAS]),
    Row(aten.mv, (a, t(N)), [4 * M, CUBLAS]),
    Row(aten.dot, (t(N), t(N)), [4, CUBLAS]),
    Row(aten.vdot, (t(N), t(N)), [4, CUBLAS]),
    Row(aten.linalg_solve_triangular, (t(N, N), t(N, M)), [X, CUBLAS], named={"upper": True}),
    Row(aten._grouped_mm, grouped, [2 * 256 * 128, CUBLAS]),
    # GroupMM.cu on Hopper: pointers, strides and shapes of 64 groups; CUTLASS: 5 tensor maps per multiprocessor.
    Row(aten._grouped_mm, grouped,
        [2 * 256 * 128, 64 * (3 * 8 + 3 * 8 + 3 * 4), 5 * 128 * find_gpu("H100-SXM").sms, 8 * 4096 * 1024], "H100-SXM"),
    Row(aten._grouped_mm, (t(1024, 16), t(4, 16, 3), t(4, dtype=i32)), [4 * (1024 * 4 - 1), CUBLAS]),  # rows of 16 B
    Row(aten._grouped_mm, (t(1024, 16), t(4, 16, 3), t(4, dtype=i32)), [4 * (1024 * 4 - 1)], None),
]  # fmt: skip

LINE = 1 << 24  # elements: one output, which 108 × 4 thread blocks share
REDUCTIONS = [
    # 24 blocks of 128 columns; 4 threads along the rows, and blocks until the GPU is full: 72 share an output.
    Row(aten.sum.dim_IntList, (t(8192, 3072), [0]), [4 * 3072, 4 * 3072 * ceil(40 * 8 / 24) * 128, 4 * 24], "T4"),
    Row(aten.sum.dim_IntList, (t(8192, 768), [0]), [4 * 768, 4 * 768 * (8192 // 4 // 16) * 128, 4 * 6]),
    Row(aten.sum.dim_IntList, (t(2048, 4096), [0]), [4 * 4096, 4 * 4096 * 32 * 128, 4 * 32], "V100-16GB"),
    Row(aten.sum.dim_IntList, (t(1024, 4096), [0]), [4 * 4096, 4 * 4096 * 16 * 128, 4 * 32]),
    Row(aten.sum, (t(LINE),), [4, *PARTS]),
    Row(aten.sum, (t(M, N, dtype=mask),), [8, 8 * M * N]),  # integers are cast up first
    Row(aten.sum, (half,), [4], named={"dtype": f32}),
    Row(aten.mean, (t(LINE),), [4, *PARTS]),
    Row(aten.mean.dim, (t(LINE), [0]), [4, *PARTS]),
    Row(aten.prod, (t(LINE),), [4, *PARTS]),
    Row(aten.prod.dim_int, (t(LINE), 0), [4, *PARTS]),
    Row(aten.linalg_vector_norm, (t(LINE),), [4, *PARTS]),
    Row(aten.norm.ScalarOpt_dim, (t(LINE), 2, [0]), [4, *PARTS]),
    Row(aten.max, (t(LINE),), [4, *PARTS]),
    Row(aten.max, (transposed,), [4, X]),  # ReduceAllOps.cpp wants it contiguous
    Row(aten.min, (t(LINE),), [4, *PARTS]),
    Row(aten.amax, (t(LINE),), [4, *PARTS]),
    Row(aten.amin, (t(LINE),), [4, *PARTS]),
    *(Row(operator, (t(LINE, dtype=mask), *dim), [1, 108 * 4, 4])
      for operator, dim in ((aten.any, ()), (aten.any.dim, (0,)), (aten.all, ()), (aten.all.dim, (0,)))),
    Row(aten.argmax, (t(LINE),), [8, 16 * 108 * 4, 4]),  # a value and its int64 index
    Row(aten.argmin, (t(LINE),), [8, 16 * 108 * 4, 4]),
    Row(aten.max.dim, (t(LINE), 0), [4, 8, 16 * 108 * 4, 4]),
    Row(aten.min.dim, (t(LINE), 0), [4, 8, 16 * 108 * 4, 4]),
    *(Row(operator, (t(LINE),), [4, 16 * 108 * 4, 4]) for operator in (aten.var.correction, aten.std.correction)),
    *(Row(operator, (t(LINE),), [4, 4, 16 * 108 * 4, 4])
      for operator in (aten.var_mean.correction, aten.std_mean.correction)),
    Row(aten._foreach_norm.Scalar, ([t(256), t(3 * 65536)],), [4 * 2 * 3, 4, 4]),  # 3 chunks of 64 Ki elements
]  # fmt: skip

n16 = 1 << 16
lookup, places = t(1000, 256), t(n16, dtype=i64)
values = t(n16, 256)
even = torch.zeros(4, 50_000, dtype=mask)
even[:, ::2] = True
twice = torch.full((50_000,), 2)


def sorted_indices(bits: int) -> list[int]:
    """Indexing.cu, index_put_with_sort_kernel: linear, sorted, original indices and their range, each int64."""
    return [8 * n16] * 4 + [sort_scratch(n16, 8, 8, A100, bits)]


INDEXING = [
    Row(aten.index.Tensor, (lookup, [t(M, dtype=i32)]), [8 * M, 4 * M * 256]),
    # TensorAdvancedIndexing.cpp, AdvancedIndex: (batch, 1) beside (tokens).
    Row(aten.index.Tensor, (t(M, 4096, dtype=mask), [t(M, 1, dtype=i64), t(4096, dtype=i64)]),
        [8 * M * 4096, 8 * M * 4096, M * 4096]),
    Row(aten.index_put_, (x, [t(M, 1, dtype=i64), t(N, dtype=i64)], x), [8 * M * N, 8 * M * N]),
    # 1000 rows have indices of 10 bits.
    Row(aten.index_put, (lookup, [places], values, True), [4 * 1000 * 256, *sorted_indices(10)]),
    Row(aten.index_put_, (t(256, 256), [places], values, True), sorted_indices(8)),
    Row(aten._index_put_impl_, (lookup, [places], values, True), sorted_indices(10)),
    Row(aten.index_put_, (lookup, [places], t(1).expand(n16, 256), True),
        [8 * n16, 4 * n16 * 256, *[8 * n16] * 3, sort_scratch(n16, 8, 8, A100, 10)]),
    # An int32 per thread block, 5 times as many as the GPU holds (108 × 8); then a state per tile of 2304 elements.
    Row(aten.nonzero, (known(even),),
        [4, 17_408 + 255, 16 * 100_000, 4, select_scratch(200_000, A100)]),
    Row(aten.repeat_interleave.Tensor, (known(twice),), [8 * 100_000, 8 * 50_000, scan_scratch(50_000, 8)]),
    Row(aten.multinomial, (x, 1), [8 * M, X]),
    Row(aten.multinomial, (x, 2, True), [8 * 2 * M, X, X, X]),
    Row(aten.masked_scatter, (x, t(M, 1, dtype=mask).expand(M, N), x), [X, 8 * M * N, M * N, scan_scratch(M * N, 8)]),
    Row(aten.masked_scatter_, (x, t(M, N, dtype=mask), x), [8 * M * N, scan_scratch(M * N, 8)]),
]  # fmt: skip

long = t(50_000)
pair = [4 * 200_000, 8 * 200_000]
hundred = torch.arange(50_000) % 100
chosen = [20_000, 40_000]


def selection(rows: int, columns: int, items: int) -> list[int]:
    """TensorTopK.cu, mbtopk::launch: the k-th values, k still to find, digits found; for each block of threads 256
    counts in int16, for each row in int32; counts of values by block, and their sums."""
    blocks = rows * ceil(columns / (items * 256))
    counts = [2 * 256 * blocks, 4 * 256 * rows, 4 * blocks, 4 * blocks]
    return [4 * rows, 8 * rows, 8 * rows, *counts, sum_by_key_scratch(blocks, A100)]


SORTING = [
    Row(aten.sort, (t(4, 4096),), [4 * 4 * 4096, 8 * 4 * 4096, 8 * 4096]),
    Row(aten.sort, (long,), [200_000, 400_000, 400_000, sort_scratch(50_000, 4, 8, A100)]),
    Row(aten.sort.stable, (t(4, 50_000),), [*pair, *[8 * 200_000] * 2, 4 * 200_000, sort_scratch(200_000, 4, 8, A100)],
        named={"stable": True}),
    # Pieces of one buffer start at multiples of 256.
    Row(aten.sort, (t(128, 5000),), [4 * 640_000, 8 * 640_000, 8 * 640_000, 12 * 640_000 + 255]),
    Row(aten.sort, (t(5000, 128), 0),  # the sorted dimension comes last in three copies
        [4 * 640_000, 8 * 640_000, 4 * 640_000, 4 * 640_000, 8 * 640_000, 8 * 640_000, 12 * 640_000 + 255]),
    # On 108 multiprocessors with 6 blocks of 256 threads each 64 rows are 50 elements per thread; 4 rows 4, the least.
    Row(aten.topk, (t(4, 128_256), 50), [4 * 4 * 50, 8 * 4 * 50, *selection(4, 128_256, 4)]),
    Row(aten.topk, (t(64, 128_256), 50), [4 * 64 * 50, 8 * 64 * 50, *selection(64, 128_256, 50)]),
    # should_use_multiblock: 200 rows of 3000 or more; a router's are shorter.
    Row(aten.topk, (t(200, 2999), 8), [4 * 200 * 8, 8 * 200 * 8]),
    Row(aten.topk, (t(200, 3000), 8), [4 * 200 * 8, 8 * 200 * 8, *selection(200, 3000, 4)]),
    # TensorTopK.cpp: values and indices of their own for the sort, which begins when the selection has ended.
    Row(aten.topk, (t(1, 20_000), 5000), [*chosen, 40_000, 20_000, 40_000, sort_scratch(5000, 4, 8, A100)]),
    Row(aten.topk, (t(1, 20_000), 5000, -1, True, False), [*chosen, *selection(1, 20_000, 4)]),
    Row(aten._unique2, (known(hundred),), [400_000, sort_scratch(50_000, 8, 0, A100), 800]),
    Row(aten._unique2, (known(hundred), True, True), [*[400_000] * 3, sort_scratch(50_000, 8, 8, A100), 800, 400_000]),
    Row(aten.cumsum, (long, 0), [200_000, scan_scratch(50_000, 4)]),
    Row(aten.cumsum, (x, -1), [X]),  # more rows than one
    Row(aten.cumsum, (transposed, 0), [X, X]),
    Row(aten.cumsum, (t(M, N, dtype=mask), -1), [8 * M * N, 8 * M * N]),
    Row(aten.cumprod, (transposed, 0), [X, X]),
    Row(aten.logcumsumexp, (long, 0), [200_000, scan_scratch(50_000, 4)]),
    Row(aten.randperm, (1000,), [8000, 8000, 4000, 4000, 1], named={"device": GPU_DEVICE, "dtype": i64}),
    Row(aten.randperm.generator, (n16,), [*[8 * n16] * 4, sort_scratch(n16, 8, 8, A100, 36)],  # keys of 36 bits
        named={"device": GPU_DEVICE, "dtype": i64, "generator": None}),
]  # fmt: skip


def bitsandbytes_rows() -> list[Row]:
    """backends/cuda/ops.py: NF4 unpacks the weight for many rows, and of double quantization the scales, twice in fp32;
    int8 sums in int32, and in fp16 before bf16; scales are allocated before the values that they scale, and returned
    after them. Without a GPU: backends/default/ops.py and backends/cpu/ops.py."""
    import bitsandbytes  # noqa: F401  # defines the operators

    ops = torch.ops.bitsandbytes
    M, K, N = 256, 4096, 14336
    act, packed, absmax = t(M, K, dtype=bf16), t(N * K // 2, 1, dtype=u8), t(N * K // 64)
    absmax_8bit, code, offset = t(N * K // 64, dtype=u8), t(256), t()
    double = {"absmax_8bit": absmax_8bit, "absmax_code": code, "absmax_offset": offset}
    S = 4 * absmax_8bit.numel()
    w, m, k = t(1024, 1000, dtype=f16), 256, 128
    n = w.numel()
    act8, act16, out = t(m, k, dtype=i8), t(m, k, dtype=f16), 384
    product = (act8, t(out, k, dtype=i8), t(m), t(out))
    g, p16 = t(4096), t(4096, dtype=bf16)
    adam = (None, 0.0, 0.0, 0.9, 0.95, 0.0, 0.0, 1e-8, 0.0, 1, 1e-3, 1.0)
    state8, map8, max8 = t(4096, dtype=u8), t(256), t(16)
    adam8 = (0.9, 0.95, 0.0, 0.0, 1e-8, 1, 1e-3, map8, map8, max8, max8, 0.0, 1.0)
    return [
        Row(ops.gemm_4bit, (act, packed, [N, K], absmax, 64, "nf4"), [2 * N * K, 2 * M * N, CUBLAS]),
        Row(ops.gemm_4bit, (act[:4], packed, [N, K], absmax, 64, "nf4"), [2 * 4 * N, CUBLAS]),  # one kernel
        Row(ops.gemm_4bit, (act, packed, [N, K], absmax, 64, "nf4", t(N, dtype=bf16)),
            [2 * N * K, 2 * M * N, CUBLAS, CUBLASLT]),
        Row(ops.gemm_4bit, (act, packed, [N, K], absmax, 64, "nf4"), [S, S, 2 * N * K, 2 * M * N, CUBLAS],
            named=double),
        Row(ops.quantize_4bit, (w, 64, *NF4), [4 * n // 64, n // 2]),
        Row(ops.quantize_blockwise, (w, t(256), 4096), [4 * ceil(n / 4096), n]),
        Row(ops.int8_vectorwise_quant, (w,), [4 * 1024, n]),
        Row(ops.int8_vectorwise_quant, (w, 6.0), [4 * 1024, n, 2 * n, n]),
        Row(ops.int8_mixed_scaled_mm, (act16, *product), [4 * m * out, 2 * m * out]),
        Row(ops.int8_mixed_scaled_mm, (act16.bfloat16(), *product), [4 * m * out, 2 * m * out, 2 * m * out]),
        Row(ops.quantize_4bit, (host(64, 64), 64, *NF4), [64 * 64 // 2, 4 * 64, 4 * 4096, 4 * 4096, 4096, 2048], None),
        Row(ops.int8_vectorwise_quant, (host(64, 64, dtype=f16), 6.0),
            [4096, 4 * 64, 4 * 64, 4 * 4096, 4 * 4096, 4096, 4 * 64], None),
        Row(ops.int8_mixed_scaled_mm, (act16, *product), [*[4 * m * out] * 4, 2 * m * out], None),
        Row(ops.optimizer_update_32bit, ("adam", g, g, g, g, *adam), [4 * 4096] * 3, None),
        Row(ops.optimizer_update_8bit_blockwise, ("adam", p16, p16, state8, state8, *adam8), [4 * 4096] * 6, None),
    ]  # fmt: skip


def requests(row: Row) -> list[int]:
    """The bytes that the engine asks for, in their order."""
    gpu = find_gpu(row.gpu) if row.gpu else None
    device = GPU_DEVICE if gpu else HOST
    engine = Engine(device, HostMemory(), gpu)

    def fake(tensor: Tensor) -> Tensor:
        on_card = hasattr(tensor, "on_card")
        place = device if tensor.is_meta or on_card else HOST
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
        if on_card:
            know(made, tensor)
        return made

    with engine, torch.inference_mode():  # in which autograd takes no operator apart
        args, named = tree_map_only(Tensor, fake, (row.args, row.named))
        before = len(engine.events)
        _out = row.operator(*args, **named)
        sizes = [event.size for event in engine.events[before:]]
    return [size for size in sizes if size > 0]


TABLE = [*NORMALIZATION, *EMBEDDING, *ATTENTION, *LOSS, *COPIES, *MATMUL, *REDUCTIONS, *INDEXING, *SORTING]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: name_of(row.operator))
def test_an_operator_allocates_what_its_kernel_does(row):
    assert requests(row) == row.requests


def test_bitsandbytes_operators_allocate_what_their_functions_do():
    pytest.importorskip("bitsandbytes")
    for row in bitsandbytes_rows():
        assert requests(row) == row.requests, row.operator


def test_each_registered_operator_has_a_line():
    pytest.importorskip("bitsandbytes")
    lines = [*TABLE, *bitsandbytes_rows()]
    of_libraries = {name for name, function in WORKSPACES.items() if function.__module__.endswith(".libraries")}
    assert WORKSPACES.keys() == {name_of(row.operator) for row in lines if row.gpu} | of_libraries
    measured = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution"}  # test_onednn.py
    assert CPU_WORKSPACES.keys() == {name_of(row.operator) for row in lines if not row.gpu} | measured


@pytest.mark.parametrize(
    ("operator", "library"),
    [
        (aten.convolution, "cuDNN"),
        (aten.convolution_backward, "cuDNN"),
        (aten._scaled_dot_product_cudnn_attention, "cuDNN"),
        (aten._scaled_dot_product_cudnn_attention_backward, "cuDNN"),
        (aten.mkldnn_rnn_layer, "cuDNN"),  # what an LSTM is on this CPU
        (aten.mkldnn_rnn_layer_backward, "cuDNN"),
        (aten._fft_c2c, "cuFFT"),
        (aten._fft_r2c, "cuFFT"),
        (aten._fft_c2r, "cuFFT"),
        (aten.linalg_qr, "cuSOLVER"),
        (aten._linalg_svd, "cuSOLVER"),
        (aten._linalg_eigh, "cuSOLVER"),
        (aten.linalg_cholesky_ex, "cuSOLVER"),
    ],
)
def test_a_library_decides_when_it_runs(operator, library):
    assert list(WORKSPACES[name_of(operator)](None, A100)) == [OUTPUTS, Library(library)]


# ---- the registry


def test_each_function_cites_the_file_that_it_follows():
    functions = {*WORKSPACES.values(), *CPU_WORKSPACES.values()}
    assert functions == {function for function in SOURCES if function.__module__.startswith("llmlab.")}
    for function in functions:
        assert SOURCES[function].endswith((".cu", ".cuh", ".cpp", ".h", ".py")), function
        assert function.__doc__, function


def test_an_operator_has_one_workspace():
    operators = {}

    @workspace(aten.sin, source="here.cu", table=operators)
    def first(op, gpu):
        yield OUTPUTS

    assert operators == {"aten::sin": first}
    with pytest.raises(ValueError, match=r"aten::sin would have two workspaces, .*first and .*second"):

        @workspace(aten.cos, aten.sin.default, source="there.cu", table=operators)
        def second(op, gpu):
            yield OUTPUTS

    assert operators["aten::sin"] is first


def test_arguments_are_bound_by_the_names_of_the_schema_with_their_defaults():
    op = Operator(aten.addmm.default, (1, 2, 3), {"alpha": 5})
    assert (op.self, op.mat1, op.mat2, op.beta, op.alpha, op.out) == (1, 2, 3, 1, 5, None)
    assert op.has("beta") and not op.has("bias")
    with pytest.raises(AttributeError, match=r"aten.addmm.default has no argument 'bias'; it has self, mat1, mat2"):
        op.bias  # noqa: B018


def test_a_function_without_outputs_is_refused():
    engine = Engine(HOST, HostMemory(), workspaces={"aten::sin": lambda op, gpu: (1024,)})
    with engine, pytest.raises(AssertionError, match=r"aten.sin.default yields no OUTPUTS"):
        torch.empty(8).sin()
    assert engine.memory.allocated == 0
