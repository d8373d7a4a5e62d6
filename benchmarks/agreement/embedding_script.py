"""Liger-Kernel's embedding benchmark, the whole script on one simulated card, as it ran in one process on an A100.

Its rows cannot be simulated one by one: what torch.compile's runs leave on the card adds to every later peak, and which
free block a request gets depends on all that the process freed before. The memory of the script (linkedin/Liger-Kernel
0.2.1, benchmark/scripts/benchmark_embedding.py) follows from sources, except for when the tables that torch.compile
keeps are dropped. That was inferred from the published rows: if it is at the compilations of DROPS, 47 of the 48 rows
(of plain PyTorch, of Liger and compiled) are exact to the byte; with any other first one, 44 are not.

What else memory depends on, and its source:

- Every run makes a table for PyTorch and one for Liger, though it times only one of them.
- Each timed run has Triton's buffer of 256 MB (triton/testing.py, do_bench), after the first call.
- The first call of a compiled kernel compares two launch configurations, each with such a buffer, and writes to copies
  of the tensors that it changes (torch/_inductor: runtime/triton_heuristics.py, pointwise and clone_args; torch 2.4).
- Each compiled module is kept, with its gradient, by the code that was compiled for it.

    B  batch    T  tokens per sequence    V  vocabulary    D  width
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import llmlab as lab

PROVIDERS = ("liger", "huggingface", "torch_compile")
VOCABULARIES = tuple(2**i for i in range(10, 18))
SHAPES = ((32, 512, 768), (8, 2048, 4096))  # (B, T, D)
COMPILATIONS = 6 * len(VOCABULARIES)  # of both widths: timed forward, timed in full, measured
DROPS = (17, 45)  # the compilations that drop the tables kept so far
CALLS = 2  # of the timed calls: the third is like the second
REPEATS = 3  # of the ten measured calls: from the second on the table has its gradient
FLUSHED = 256_000_000  # bytes of do_bench's buffer


class LigerEmbedding(torch.autograd.Function):
    """What Liger's kernels (ops/experimental/embedding.py) and inductor's allocate: one output, one gradient."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, tune: Callable[..., None]) -> Tensor:
        ctx.save_for_backward(table, ids)
        ctx.tune = tune
        out = torch.empty(*ids.shape, table.shape[1], device=table.device)
        tune()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        table, _ = ctx.saved_tensors
        summed = torch.zeros_like(table)
        ctx.tune()  # the kernel that writes zeros
        ctx.tune(summed)  # the one that adds to them
        return summed, None, None


def _compare_configurations(changed: Tensor | None = None) -> None:
    """Time both launch configurations of a kernel as `_timed` does, each call with a copy of what it changes."""
    for _ in range(2):
        _timed(lambda: changed is None or changed.clone())


def _timed(call: Callable[[], Any]) -> None:
    """triton/testing.py, do_bench: one call, then the others, before each of which a buffer is cleared."""
    call()
    flushed = torch.empty(FLUSHED // 4, dtype=torch.int32, device="cuda")
    for _ in range(CALLS):
        call()
    del flushed


class Process:
    """The process of the script on the card `sim`; `kept` are the modules that compiled code keeps."""

    def __init__(self, sim: Any, drops: tuple[int, ...]) -> None:
        self.sim, self.drops = sim, drops
        self.kept: list[nn.Module] = []
        self.compilations = 0

    def run(self, provider: str, mode: str, V: int, B: int, T: int, D: int, timed: bool) -> int | None:
        """Return the median of the peaks of a memory run's calls, in bytes; None for a timed run."""
        plain, liger = (nn.Embedding(V, D).cuda() for _ in range(2))
        ids = torch.randint(0, V, (B, T), device="cuda")
        table = liger if provider == "liger" else plain
        if provider == "torch_compile":
            self._compile(table)
        tune = _compare_configurations if provider == "torch_compile" else _nothing

        def call() -> None:
            nonlocal tune
            out = plain(ids) if provider == "huggingface" else LigerEmbedding.apply(table.weight, ids, tune)
            if mode == "full":
                out.backward(torch.randn_like(out))
            tune = _nothing

        if timed:
            return _timed(call)
        peaks = []
        for _ in range(REPEATS):
            self.sim.reset_peak()
            call()
            peaks.append(self.sim.peak_allocated)
        return int(median(peaks))

    def _compile(self, module: nn.Module) -> None:
        self.compilations += 1
        if self.compilations in self.drops:
            self.kept.clear()
        self.kept.append(module)


def _nothing(changed: Tensor | None = None) -> None: ...


@cache
def simulate_script(gpu: str, drops: tuple[int, ...] = DROPS) -> dict[tuple[str, int, int], int]:
    """Return the bytes that the script's memory runs report, by provider, D and V."""
    with lab.simulator(gpu) as sim:
        process = Process(sim, drops)
        for provider, mode, V, shape in _runs(("forward", "full")):
            process.run(provider, mode, V, *shape, timed=True)
        return {
            (provider, shape[2], V): process.run(provider, mode, V, *shape, timed=False)
            for provider, mode, V, shape in _runs(("full",))
        }


def _runs(modes: tuple[str, ...]) -> Iterator[tuple[str, str, int, tuple[int, int, int]]]:
    return (
        (provider, mode, V, shape) for shape in SHAPES for mode in modes for provider in PROVIDERS for V in VOCABULARIES
    )
