"""Checks of attention kernels without a GPU: their errors relative to PyTorch in fp64, and registers by tile size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import ptx
from ..kernels.ladder.attention import tiles_for
from ..kernels.rungs import triton

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class TileCost(NamedTuple):
    """A tile of the kernel that computes dk and dv, and its cost as the compiler reports it."""

    gpu: str
    keys: int  # rows that a program keeps
    queries: int  # rows that it reads per step of its loop
    warps: int
    stages: int
    chosen: bool  # whether the package uses it on this GPU
    registers: int  # per thread; 255 is the limit
    spilled: int  # bytes per thread that do not fit in registers


def output_and_gradients(attend: Attention, inputs: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the output of `attend` in `dtype`, and its gradients with respect to q, k and v."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    out = attend(*leaves)
    upstream = torch.ones_like(out).cumsum(-1) / out.shape[-1]
    return out, *torch.autograd.grad(out, leaves, upstream)


def largest_errors(attend: Attention, inputs: Sequence[Tensor], dtype: torch.dtype) -> list[float]:
    """Return the largest error of the output, dq, dk and dv against causal SDPA in fp64, relative to the largest
    element. The inputs q, k and v may have grouped heads."""

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    pairs = zip(
        output_and_gradients(attend, inputs, dtype), output_and_gradients(exact, inputs, torch.float64), strict=True
    )
    return [((ours - truth).abs().max() / truth.abs().max()).item() for ours, truth in pairs]


def compiled_tiles(head_size: int = 64) -> list[TileCost]:
    """Compile the kernel for dk and dv with three tile sizes for an A100 and an H100, in bf16, without a GPU.

    Returns an empty list where Triton cannot be installed (macOS, Windows).
    """
    tiles: list[tuple[str, int, int, int, int, bool]] = []
    jobs: list[tuple[Any, ...]] = []
    for gpu, arch, stages in (("A100", 80, 1), ("H100", 90, 2)):  # on an A100, two stages spill more
        for keys, queries, warps, depth in ((64, 32, 4, 2), (128, 32, 8, 2), (128, 64, 8, stages)):
            sizes, options = {"M": queries, "N": keys}, {"num_warps": warps, "num_stages": depth}
            chosen = tiles_for(head_size, 2, divmod(arch, 10), backward=True) == {**sizes, **options}
            constants = {"CAUSAL": True, "D": head_size, "WIDTH": head_size, **sizes}
            tiles.append((gpu, keys, queries, warps, depth, chosen))
            jobs.append(("attention", "keys_kernel", "bf16", constants, options, arch))
    if not triton:
        return []
    results = ptx.in_its_own_process("compile_kernel", jobs)
    costs = []
    for (gpu, keys, queries, warps, depth, chosen), result in zip(tiles, results, strict=True):
        registers, spilled = int(result[-3]), int(result[-2])
        costs.append(TileCost(gpu, keys, queries, warps, depth, chosen, registers, spilled))
    return costs
