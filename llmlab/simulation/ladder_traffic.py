"""Memory traffic of the rungs of `llmlab.course.kernels`, forward and backward, counted kernel by kernel.

Rungs 0 and 1 are counted in the simulator, on the operators that the GPU has: they move what `Operators` says, each
argument and each result once. Rung 2 is Inductor's own count of the code it writes for this machine's CPU; for a GPU
it may fuse more. Rungs 3 and 4 move what their Triton programs load and store, seen in Triton's interpreter on a CPU:
twice what they load twice (`asked`), of which a cache may spare the second time (`bytes`).
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from ..base.compat import TorchDispatchMode, check, symbol
from ..base.errors import NotAvailable
from ..course import kernels
from ..course.kernels import rungs
from ..hardware.gpu import GPU
from .profile.operator_log import Operators
from .simulator import Simulator, simulator

# FLOP of the forward formula per value of the input; an exponential or a division counts as one.
FLOPS = {"softmax": 5, "rms_norm": 4, "swiglu": 5, "rope": 3, "cross_entropy": 4}
ROWS, COLUMNS = 32, 512  # of a count
HEADS, KV_HEADS, HEAD = 32, 8, 128  # of Llama-3.1-8B, because all heads share cos and sin
REAL_ROWS = 8192  # tokens that a count stands for, where the number of programs matters


class Moved(NamedTuple):
    """What kernels moved: how many were launched; distinct bytes read and written, counted per launch; bytes of every
    load and store, those of repeated reads too."""

    launches: int
    bytes: int
    asked: int


class Counted(NamedTuple):
    """What one rung moves forward and backward; `unit` is the bytes of reading its input once (of rope: q and k, of
    swiglu: the gate)."""

    rung: int
    forward: Moved
    backward: Moved
    unit: int

    @property
    def times(self) -> tuple[float, float]:
        """How many readings of the input forward and backward are worth. RMSNorm also moves its weight, which counts
        for less with more rows."""
        return self.forward.bytes / self.unit, self.backward.bytes / self.unit


def count_ladder(kernel: str, gpu: GPU | str, dtype: torch.dtype = torch.bfloat16) -> list[Counted]:
    """Return what rungs 0 and 1 move on `gpu`; rung 2, where a C++ compiler is; 3 and 4, where Triton interprets."""
    counts = []
    for rung in (0, 1):
        with simulator(gpu) as sim:
            counts.append(_count(kernel, rung, dtype, "cuda", partial(_count_simulated, sim)))
    if shutil.which(os.environ.get("CXX", "g++")):
        counts.append(_count_compiled(kernel, dtype))
    if rungs.INTERPRETED:
        # A program of RMSNorm's backward sums over as many rows as it would of REAL_ROWS.
        norm = import_module("llmlab.course.kernels.ladder.rms_norm")
        with mock.patch.object(norm, "PROGRAMS", norm.PROGRAMS * ROWS // REAL_ROWS):
            counts += [_count(kernel, rung, dtype, "cpu", count_moved) for rung in (3, 4)]
    return counts


def count_all(gpu: str) -> dict[str, list[Counted]]:
    """Return `count_ladder` of every kernel, by its name. Where Triton compiles, another process interprets."""
    if rungs.triton is None or rungs.INTERPRETED:
        return {kernel: count_ladder(kernel, gpu) for kernel in FLOPS}
    script = (
        "import pickle, sys\nfrom llmlab.simulation.ladder_traffic import count_all\n"
        "sys.stdout.buffer.write(pickle.dumps(count_all(sys.argv[1])))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script, gpu], env=environment, capture_output=True, check=True)
    return pickle.loads(done.stdout)


def _count(
    kernel: str, rung: int, dtype: torch.dtype, device: str, count: Callable[[Callable[[], object]], Moved]
) -> Counted:
    """Return what `count` says of forward and backward of a rung."""
    arguments = _inputs(kernel, device, dtype)
    results: list[Any] = []
    forward = count(lambda: results.append(getattr(kernels, kernel)(*arguments, rung=rung)))
    results = [*results[0]] if isinstance(results[0], tuple) else results
    gradients = [torch.ones_like(one) for one in results]
    backward = count(lambda: torch.autograd.backward(results, gradients))
    unit = arguments[0].nbytes + (arguments[1].nbytes if kernel == "rope" else 0)
    return Counted(rung, forward, backward, unit)


def _count_compiled(kernel: str, dtype: torch.dtype) -> Counted:
    GraphLowering = symbol("torch._inductor.graph.GraphLowering")
    graphs: list[Moved] = []
    count_bytes = GraphLowering.count_bytes

    def counted(graph: Any) -> Any:
        count = count_bytes(graph)
        graphs.append(Moved(len(graph.scheduler.nodes), count[0], count[0]))
        return count

    def uncounted(step: Callable[[], object]) -> Moved:
        step()
        return Moved(0, 0, 0)

    symbol("torch._dynamo.reset")()  # a shape seen before would make this one symbolic, of no known size
    with (
        # Inductor counts where somebody listens.
        mock.patch.object(symbol("torch._inductor.compile_fx"), "inductor_metrics_log"),
        mock.patch.object(GraphLowering, "count_bytes", counted),
        # A GPU adds fp32 numbers atomically inside of a kernel. A CPU with several threads would call scatter_add.
        symbol("torch._inductor.config.patch")({"fx_graph_cache": False, "cpp.fallback_scatter_reduce_sum": False}),
        symbol("torch._functorch.config.patch")(enable_autograd_cache=False),
    ):
        done = _count(kernel, 2, dtype, "cpu", uncounted)
    forward, backward = graphs
    return done._replace(forward=forward, backward=backward)


def _inputs(kernel: str, device: str, dtype: torch.dtype) -> tuple:
    """Return small arguments for a kernel in `dtype`, those that get a gradient asking for it."""

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape).to(device, dtype).requires_grad_()

    if kernel == "rope":
        angles = torch.randn(ROWS, HEAD)
        turns = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
        return leaf(1, HEADS, ROWS, HEAD), leaf(1, KV_HEADS, ROWS, HEAD), *turns
    if kernel == "cross_entropy":
        return leaf(ROWS, COLUMNS), torch.zeros(ROWS, dtype=torch.int64).to(device)
    if kernel == "rms_norm":
        return leaf(ROWS, COLUMNS), leaf(COLUMNS)
    return tuple(leaf(ROWS, COLUMNS) for _ in range(2 if kernel == "swiglu" else 1))


def _count_simulated(sim: Simulator, step: Callable[[], object]) -> Moved:
    with sim.operators() as operators:
        step()
    return moved(operators)


def moved(operators: Operators) -> Moved:
    """Return what PyTorch's operators moved; views move nothing."""
    total = sum(kernel.bytes for kernel in operators)
    return Moved(sum(kernel.launches for kernel in operators), total, total)


# ---- Triton's interpreter


def count_moved(step: Callable[[], object]) -> Moved:
    """Run `step` once, on real CPU tensors, and return what its operators and its Triton kernels moved.

    Raises NotAvailable where Triton compiles: compiled kernels cannot be watched.
    """
    operators = Operators()
    with interpreted() as launches, _Watched(operators, launches):
        step()
    counts = [moved(operators), *(launch.moved() for launch in launches)]
    return Moved(*map(sum, zip(*counts, strict=True)))


class _Launch(dict[tuple[str, int], list[np.ndarray]]):
    """The addresses of one launch's accesses, by what it did there ("read", "wrote") and the size of the values."""

    running = True

    def add(self, did: str, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        self.setdefault((did, size), []).append(pointers.data[mask.data])

    def moved(self) -> Moved:
        accesses = [(size, np.concatenate(addresses)) for (_, size), addresses in self.items()]
        distinct = sum(size * np.unique(addresses).size for size, addresses in accesses)
        return Moved(1, distinct, sum(size * addresses.size for size, addresses in accesses))


@contextmanager
def interpreted() -> Iterator[list[_Launch]]:
    """Give the list of the launches of Triton kernels inside the block; NotAvailable where Triton compiles."""
    if not rungs.INTERPRETED:
        raise NotAvailable("counting loads and stores needs Triton's interpreter: set TRITON_INTERPRET=1 before Python")
    check("triton.runtime.interpreter")
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.interpreter import interpreter_builder as builder

    launches: list[_Launch] = []
    load, store, run = builder.create_masked_load, builder.create_masked_store, GridExecutor.__call__

    def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
        launches.append(_Launch())
        run(executor, *args, **kwargs)
        launches[-1].running = False

    def loaded(pointers: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].add("read", pointers, mask)
        return load(pointers, mask, *rest)

    def stored(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].add("wrote", pointers, mask)
        return store(pointers, value, mask, *rest)

    accesses = mock.patch.multiple(builder, create_masked_load=loaded, create_masked_store=stored)
    with accesses, mock.patch.object(GridExecutor, "__call__", launched):
        yield launches


class _Watched(TorchDispatchMode):
    def __init__(self, operators: Operators, launches: list[_Launch]) -> None:
        super().__init__()
        self.operators, self.launches = operators, launches

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not (self.launches and self.launches[-1].running):  # the interpreter copies arguments: a GPU does not
            self.operators(func, args, kwargs or {}, out)
        return out
