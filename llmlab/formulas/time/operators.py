"""Roofline of a step: the kernels that run on the GPU, and the seconds of each at measured rates.

A kernel takes as long as its FLOP or its bytes, whichever take longer (Williams et al., Roofline, 2009), at rates that
were measured on the GPU instead of those of the data sheet. The CPU launches the kernels one after another and runs
ahead. If kernels are short, the GPU waits for it, and the step takes as long as Python and the dispatcher.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ...hardware.gpu import DTYPES
from ...specs.model import ModelSpec
from ...specs.run import Training
from ...traces.kernels import Kernel
from .efficiency import Efficiency
from .host import COMPILED
from .kernels import Kernels
from .step import EIGHT_BIT, EIGHT_BIT_UPDATE, Passes, Traced

TILE = 64  # rows and columns of the smallest tile that libraries choose for a matmul
SPLIT = 256  # elements of a matmul's inner dimension that justify another multiprocessor
BATCHED = frozenset(("aten::bmm", "aten::baddbmm", "aten::baddbmm_"))  # the matmuls of eager attention


class Timing(NamedTuple):
    """Seconds of the step, of all its kernels on the GPU, and of launching them on the CPU."""

    step: float
    gpu: float
    host: float


def kernel_seconds(kernel: Kernel, rates: Efficiency, measured: Kernels | None = None) -> float | None:
    """Return the seconds of a kernel on the GPU, or None if its rate was never measured. Matmuls and attention use the
    times in `measured` if it is given, or else the `rates`."""
    if kernel.kind in ("none", "sent"):
        return 0.0
    moved = kernel.bytes
    if kernel.row and rates.exceeds_cache(kernel.row):
        moved += kernel.again
    seconds = moved / {"gather": rates.gather, "strided": rates.strided}.get(kernel.kind, rates.bandwidth)
    if kernel.kind == "serial":
        seconds += kernel.shape[0] * rates.serial
    elif kernel.name == EIGHT_BIT_UPDATE:
        seconds = max(seconds, kernel.shape[0] * EIGHT_BIT / rates.sms)
    elif kernel.kind in ("matmul", "attention", "attention backward") and measured:
        measured_seconds = _measured(kernel, measured)
        return None if measured_seconds is None else max(measured_seconds, kernel.launches * rates.launch + seconds)
    elif kernel.kind in ("matmul", "attention", "attention backward"):
        rate = _rate(kernel, rates)
        if rate is None:
            return None
        seconds = max(seconds, _work(kernel, rates) / rate)
    return kernel.launches * rates.launch + seconds


def _measured(kernel: Kernel, measured: Kernels) -> float | None:
    """Return the seconds of a matmul or of fused attention from `measured`, or None for a dtype that the GPU has no
    units for, such as float64."""
    if kernel.dtype not in DTYPES:
        return None
    if kernel.kind == "matmul":
        batch, rows, columns, inner = kernel.shape
        return measured.matmul(batch * rows, columns, inner, kernel.dtype)
    if measured.gpu.peak(kernel.dtype) is None:
        return None
    heads, queries, keys, size, causal = kernel.shape
    length = max(queries, keys)
    name = fused_attention(kernel)
    seconds = measured.attention(1, heads, length, size, name, kernel.dtype) * queries * keys / length**2
    return seconds * (1 if causal else 2) * (measured.backward(name) if kernel.kind == "attention backward" else 1)


def fused_attention(kernel: Kernel) -> str:
    """Return the SDPA kernel of an attention operator, named as in the formulas."""
    return next((name for name in ("efficient", "cudnn") if name in kernel.name), "flash")


def _rate(kernel: Kernel, rates: Efficiency) -> float | None:
    return (rates.matmul if kernel.kind == "matmul" else rates.attention).get(kernel.dtype)


def _work(kernel: Kernel, rates: Efficiency) -> float:
    """Return the FLOP whose time counts: causal attention skips half of them, and a small matmul counts more, because
    it leaves multiprocessors idle."""
    if kernel.kind != "matmul":
        return kernel.flops / 2 if kernel.shape[-1] else kernel.flops
    batch, rows, columns, inner = kernel.shape
    tiles = batch * max(1.0, rows * columns / TILE**2)
    # Few tiles leave multiprocessors idle, unless the sum over the inner dimension is split among them.
    split = min(rates.sms / tiles, max(1.0, inner / SPLIT)) if tiles < rates.sms else 1.0
    busy = min(1.0, tiles * split / rates.sms)
    return kernel.flops / busy


def host_seconds(kernel: Kernel, rates: Efficiency) -> float:
    """Return the CPU's seconds for an operator: Python, autograd, the dispatcher and the launch. A kernel of a compiled
    graph takes `COMPILED` (formulas/time/host.py), and a view in it takes nothing."""
    if kernel.compiled:
        return 0.0 if kernel.kind == "none" else COMPILED
    seconds = rates.view if kernel.kind == "none" else rates.dispatch
    if kernel.backward:  # called by autograd's engine, without Python
        seconds *= rates.backward_dispatch
    if kernel.name.startswith("bitsandbytes::"):
        seconds += rates.custom
    return seconds


def timing(kernels: Sequence[Kernel], rates: Efficiency, measured: Kernels | None = None) -> Timing | None:
    """Return the time of kernels that run in this order on an otherwise idle GPU, or None if a rate is unknown.

    A kernel begins when it has been launched and the previous kernel has ended.
    """
    started = free = gpu = 0.0
    known: dict[int, tuple[float | None, float]] = {}  # by identity: a long generation repeats the same objects
    for kernel in kernels:
        if id(kernel) not in known:
            known[id(kernel)] = kernel_seconds(kernel, rates, measured), host_seconds(kernel, rates)
        seconds, starting = known[id(kernel)]
        if seconds is None:
            return None
        started += starting
        if kernel.kind not in ("none", "sent"):
            free = max(free, started) + seconds
            gpu += seconds
    return Timing(max(free, started), gpu, started)


def logits_of(spec: ModelSpec, run: Training) -> int:
    """Return the number of logits of a micro-batch on one rank."""
    return run.sequences * run.num_labels if run.num_labels else run.tokens // run.cp * spec.vocab // run.tp


def grids(gpu_kernels: Kernels) -> Kernels | None:
    """Return `gpu_kernels` as the source of the times of matmuls and attention, or None if this GPU's rates were fitted
    to whole steps."""
    return None if gpu_kernels.kind == "fitted" else gpu_kernels


class Durations(NamedTuple):
    """Seconds of a step's operators.

    The first five are seconds of the GPU in the forward and backward passes by kind of work, and `gpu` is their sum.
    `host` is the CPU's time to launch these operators. `passes` is the time until the last of them ends, and `step` the
    time until the update ends. `kernel` is the attention kernel, named as in `share.attention_kernel`.
    """

    products: float
    head: float
    attention: float
    elementwise: float
    loss: float
    gpu: float
    host: float
    passes: float
    step: float
    kernel: str

    @property
    def traced(self) -> Traced:
        """The parts of the step's time, in place of those of the formulas."""
        products = {"blocks": self.products, "head": self.head}
        passes = Passes(products, self.attention, self.elementwise, self.loss, self.host)
        return Traced(passes, self.step - self.passes, self.kernel, self.passes - self.gpu)

    def extrapolated(self, deep: Durations, groups: int) -> Durations:
        """Return the seconds with `groups` more groups of layers; `deep` has those with one more group."""
        pairs = zip(self._asdict().items(), deep, strict=True)
        more = {name: here + groups * (there - here) for (name, here), there in pairs if name != "kernel"}
        return self._replace(**more)


def durations(operators: Sequence[Kernel], logits: int, gpu_kernels: Kernels) -> Durations | None:
    """Return the seconds of a step's operators, in the order in which they run, or None if a rate is unknown. Operators
    on at least as many elements as this rank has `logits` in a micro-batch belong to the head or the loss."""
    rates, measured = gpu_kernels.operators, grids(gpu_kernels)
    before = [kernel for kernel in operators if kernel.phase != "optimizer"]
    whole, passed = timing(operators, rates, measured), timing(before, rates, measured)
    if whole is None or passed is None:
        return None
    times = dict.fromkeys(("products", "head", "attention", "elementwise", "loss"), 0.0)
    counts = Counter(map(id, before))
    for kernel in {id(kernel): kernel for kernel in before}.values():
        seconds = kernel_seconds(kernel, rates, measured) or 0.0
        times[_takes(kernel, logits)] += counts[id(kernel)] * seconds
    fused = next((fused_attention(kernel) for kernel in before if kernel.kind == "attention"), "eager")
    return Durations(**times, gpu=passed.gpu, host=passed.host, passes=passed.step, step=whole.step, kernel=fused)


def _takes(kernel: Kernel, logits: int) -> str:
    """Return the part of a step's passes to which a kernel belongs. Batched matmuls are those of eager attention."""
    if "attention" in kernel.kind or kernel.name in BATCHED:
        return "attention"
    if kernel.kind == "matmul":
        _, rows, columns, inner = kernel.shape
        return "head" if logits in (rows * columns, rows * inner, columns * inner) else "products"
    elements = kernel.shape[0] if kernel.shape else kernel.bytes // 2  # a compiled kernel has no shape
    return "loss" if elements >= logits else "elementwise"
