"""Memory traffic of the rungs of `llmlab.kernels`, forward and backward, counted kernel by kernel.

Rungs 0 and 1 are counted in the simulator, on the operators that the card has; rungs 3 and 4 in Triton's interpreter.
Rung 2 is Inductor's own count of the code it writes for this machine's CPU; for a card it may fuse more.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from .. import kernels
from ..base.compat import symbol
from ..hardware.gpu import GPU
from ..kernels.rungs import INTERPRETED
from .profile.kernel_traffic import Moved, count_moved, interpreted, moved
from .simulator import simulator

# FLOP of the forward formula per value of the input; an exponential or a division counts as one.
FLOPS = {"softmax": 5, "rms_norm": 4, "swiglu": 5, "rope": 3, "cross_entropy": 4}
ROWS, COLUMNS, HEADS, KV_HEADS, HEAD = 32, 512, 4, 1, 64  # of a count: nothing in it depends on the sizes
REAL_ROWS = 8192  # tokens that a count stands for, where the number of programs matters


class Counted(NamedTuple):
    """What one rung moves forward and backward; `unit` is the bytes of reading its input once (of rope: q and k)."""

    rung: int
    forward: Moved
    backward: Moved
    unit: int

    @property
    def times(self) -> tuple[float, float]:
        """How many readings of the input forward and backward are worth. They hardly depend on its size."""
        return self.forward.bytes / self.unit, self.backward.bytes / self.unit


def inputs(kernel: str, device: str, dtype: torch.dtype, rows: int = ROWS, columns: int = COLUMNS) -> tuple:
    """Return arguments for a kernel, (rows, columns) in `dtype`, those that get a gradient asking for it."""

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape).to(device, dtype).requires_grad_()

    if kernel == "rope":
        angles = torch.randn(rows, HEAD)
        turns = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
        return leaf(1, HEADS, rows, HEAD), leaf(1, KV_HEADS, rows, HEAD), *turns
    if kernel == "cross_entropy":
        return leaf(rows, columns), torch.zeros(rows, dtype=torch.int64).to(device)
    if kernel == "rms_norm":
        return leaf(rows, columns), leaf(columns)
    return tuple(leaf(rows, columns) for _ in range(2 if kernel == "swiglu" else 1))


def count_ladder(kernel: str, card: GPU | str, dtype: torch.dtype = torch.bfloat16) -> list[Counted]:
    """Return what rungs 0 and 1 move on `card`; rung 2, where a C++ compiler is; 3 and 4, where Triton interprets."""
    found = [_count(kernel, rung, card, dtype) for rung in (0, 1)]
    if shutil.which(os.environ.get("CXX", "g++")):
        found.append(_count_compiled(kernel, dtype))
    if INTERPRETED:
        found += [_count(kernel, rung, None, dtype) for rung in (3, 4)]
    return found


def _count_compiled(kernel: str, dtype: torch.dtype) -> Counted:
    GraphLowering = symbol("torch._inductor.graph.GraphLowering")
    graphs: list[Moved] = []
    count_bytes = GraphLowering.count_bytes

    def counted(graph: Any) -> Any:
        found = count_bytes(graph)
        graphs.append(Moved(len(graph.scheduler.nodes), found[0], found[0]))
        return found

    symbol("torch._dynamo.reset")()  # a shape seen before would make this one symbolic, of no known size
    arguments = inputs(kernel, "cpu", dtype)
    with (
        # Inductor counts where somebody listens.
        mock.patch.object(symbol("torch._inductor.compile_fx"), "inductor_metrics_log"),
        mock.patch.object(GraphLowering, "count_bytes", counted),
        symbol("torch._inductor.config.patch")(fx_graph_cache=False),
        symbol("torch._functorch.config.patch")(enable_autograd_cache=False),
    ):
        results = getattr(kernels, kernel)(*arguments, rung=2)
        results = [*results] if isinstance(results, tuple) else [results]
        torch.autograd.backward(results, [torch.ones_like(one) for one in results])
    forward, backward = graphs
    return Counted(2, forward, backward, _unit(kernel, arguments))


def _unit(kernel: str, arguments: tuple) -> int:
    return arguments[0].nbytes + (arguments[1].nbytes if kernel == "rope" else 0)


def _count(kernel: str, rung: int, card: GPU | str | None, dtype: torch.dtype) -> Counted:
    with ExitStack() as stack:
        if card is None:
            # A program of RMSNorm's backward sums over as many rows as it would of REAL_ROWS.
            module = import_module("llmlab.kernels.ladder.rms_norm")
            stack.enter_context(mock.patch.object(module, "PROGRAMS", module.PROGRAMS * ROWS // REAL_ROWS))
            count: Callable[[Callable[[], object]], Moved] = count_moved
        else:
            sim = stack.enter_context(simulator(card))

            def count(step: Callable[[], object]) -> Moved:
                with sim.operators() as operators:
                    step()
                return moved(operators)

        arguments = inputs(kernel, "cpu" if card is None else "cuda", dtype)
        results: list[Any] = []
        forward = count(lambda: results.append(getattr(kernels, kernel)(*arguments, rung=rung)))
        results = [*results[0]] if isinstance(results[0], tuple) else results
        gradients = [torch.ones_like(one) for one in results]
        backward = count(lambda: torch.autograd.backward(results, gradients))
        return Counted(rung, forward, backward, _unit(kernel, arguments))


class CountedLoss(NamedTuple):
    """Forward and backward of one rung of the fused loss: bytes moved, those of matrix products, and their FLOP."""

    rung: int
    bytes: int
    by_products: int
    flops: int


def count_loss(card: GPU | str, tokens: int, hidden: int, vocab: int) -> list[CountedLoss]:
    """Return what `linear_cross_entropy` in bf16 moves: rungs 0 and 1 on `card`, and 4 where Triton interprets.

    Rung 4 has rung 1's products. What its Triton kernels move is a multiple of the logits, counted on a few rows.
    """
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab}
    found = []
    for rung in (0, 1):
        with simulator(card) as sim:
            step = _loss_step("cuda", rung, **sizes)
            with sim.operators() as operators:
                step()
        products = sum(kernel.bytes for kernel in operators if kernel.kind == "matmul")
        found.append(CountedLoss(rung, moved(operators).bytes, products, sum(kernel.flops for kernel in operators)))
    if INTERPRETED:
        few = {"tokens": ROWS, "hidden": HEAD, "vocab": 8 * COLUMNS}
        with interpreted() as launches:
            _loss_step("cpu", 4, **few)()
        again = sum(launch.moved().bytes for launch in launches) / (2 * few["tokens"] * few["vocab"])
        products = found[1].by_products
        found.append(CountedLoss(4, products + round(again * 2 * tokens * vocab), products, found[1].flops))
    return found


def _loss_step(device: str, rung: int, tokens: int, hidden: int, vocab: int) -> Callable[[], None]:
    states, weight = (
        torch.randn(n, hidden, dtype=torch.bfloat16, device=device, requires_grad=True) for n in (tokens, vocab)
    )
    targets = torch.zeros(tokens, dtype=torch.int64, device=device)
    return lambda: kernels.linear_cross_entropy(states, weight, targets, rung=rung).backward()
