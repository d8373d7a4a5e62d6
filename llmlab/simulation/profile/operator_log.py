"""A log of the operators of a step: FLOP, bytes, dtype and shape of each kernel, in the order they run.

An `Engine` calls `Operators` after each operator. FLOP are those of PyTorch's FlopCounterMode, from its own table
(torch/utils/flop_counter.py), plus the matmuls that it lacks, those of bitsandbytes and of experts. Bytes are those
that a kernel must read and write at least once: each argument and each output, with a repeated (expanded) dimension
counted once.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ...base.compat import arg_tree_leaves, current_graph_task_id
from ...base.errors import NotAvailable
from ...formulas.time.efficiency import Efficiency, efficiency
from ...formulas.time.kernels import Kernels, kernels
from ...formulas.time.operators import Timing, durations, grids, kernel_seconds, timing
from ...formulas.time.step import FOREACH_ELEMENTS, Traced
from ...hardware.gpu import GPU
from ...recording.timing import ATTENTION_FLOPS
from ...traces.kernels import Kernel
from ..devices import HOST
from ..values.collectives import COLLECTIVES
from ..workspaces.bitsandbytes import multiplies_packed
from ..workspaces.none import is_view
from ..workspaces.registry import Operator

aten = torch.ops.aten

# Operators that read only as many elements of their first argument as they write.
GATHERS = frozenset(("aten::embedding", "aten::index_select", "aten::gather", "aten::index"))
WRITES_ONLY = frozenset((
    "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::randn_like", "aten::rand_like", "aten::zero_",
    "aten::fill_", "aten::normal_", "aten::uniform_", "aten::nll_loss_backward", "aten::zeros", "aten::ones",
))  # fmt: skip
ADDING = frozenset(("aten::addmm", "aten::baddbmm", "aten::addmm_", "aten::baddbmm_"))  # add to their first argument
PRODUCTS = ADDING | {"aten::mm", "aten::bmm"}
# FlopCounterMode does not know the matmuls that add in place, so they count like those that do not.
OUT_OF_PLACE = {"aten::addmm_": aten.addmm, "aten::baddbmm_": aten.baddbmm}
# cuda/SoftMax.cu reads a row several times: the further reads, in units of the output's bytes. A row that is still in
# the L2 cache is read from there. The backward pass of softmax computes grad × output first, which moves 3 units more.
SOFTMAX_AGAIN = {
    "aten::_softmax": 2, "aten::_log_softmax": 2, "aten::_softmax_backward_data": 1,
    "aten::_log_softmax_backward_data": 1,
}  # fmt: skip


# By name, because some operators belong to libraries that may be missing. The functions get shapes instead of tensors.
MORE_FLOPS = {
    **ATTENTION_FLOPS,
    "aten::_grouped_mm": lambda a, b, *rest, **named: 2 * prod(a) * b[-1],
    "bitsandbytes::gemm_4bit": lambda a, b, shape, *rest, **named: 2 * prod(a) * shape[0],  # b: packed (out, in)
    "bitsandbytes::int8_scaled_mm": lambda a, b, *rest, **named: 2 * prod(a) * b[0],
    "bitsandbytes::int8_linear_matmul": lambda a, b, *rest, **named: 2 * prod(a) * b[0],
}


def _extent(tensor: Tensor) -> int:
    """Return the bytes of a tensor, with a repeated dimension counted once."""
    return prod(size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step) * tensor.itemsize


def flops_of(func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    """Return the FLOP of one operator as FlopCounterMode counts them, also for matmuls that it does not know."""
    if more := MORE_FLOPS.get(func._schema.name):
        return more(*(arg.shape if isinstance(arg, Tensor) else arg for arg in args), **kwargs)
    count = flop_registry.get(OUT_OF_PLACE.get(func._schema.name, func._overloadpacket))
    # torch's formulas have no parameter out_dtype, which is an argument of aten.addmm.dtype and similar overloads.
    known = [arg for arg in args if not isinstance(arg, torch.dtype)]
    return count(*known, **kwargs, out_val=out) if count else 0


class Operators(list):
    """A list of the `Kernel`s of a step on `gpu`, which an engine fills: `engine.watch = operators`. The code that runs
    the step sets `phase`."""

    phase = ""

    def __init__(self, gpu: GPU | None = None) -> None:
        super().__init__()
        self.gpu = gpu
        self._kernels = kernels(gpu) if gpu and not gpu.by_memory else None

    @property
    def flops(self) -> int:
        """FLOP of all operators."""
        return sum(kernel.flops for kernel in self)

    @property
    def seconds(self) -> float | None:
        """Seconds that these operators take on the GPU, in this order; None without a GPU, or if it has no units for
        one of the dtypes."""
        times = self._timing(self)
        return times.step if times else None

    @property
    def untimed(self) -> str | None:
        """The dtype of the first operator whose time on the GPU is not known, which makes `seconds` None."""
        if self._kernels is None:
            return None
        rates, grids = self._kernels.operators, self._grids
        return next((kernel.dtype for kernel in self if kernel_seconds(kernel, rates, grids) is None), None)

    def traced(self, logits: int) -> Traced | None:
        """Return the seconds of the step's passes by kind of operator, and of its update; None if `seconds` is None.
        Operators on as many elements as a micro-batch's `logits` have on this rank count as outside of blocks."""
        result = durations(self, logits, self._kernels) if self._kernels else None
        return result.traced if result else None

    def _timing(self, operators: list[Kernel]) -> Timing | None:
        return timing(operators, self._kernels.operators, self._grids) if self._kernels else None

    @property
    def interval(self) -> float:
        """The 80 % interval of a step's time, as a factor."""
        return self._kernels.interval if self._kernels else 1.0

    @property
    def rates(self) -> Efficiency:
        """The GPU's measured rates; raises NotAvailable for a GPU without measured rates."""
        rates = efficiency(self.gpu) if self.gpu else None
        if rates is None:
            name = self.gpu.name if self.gpu else "no GPU"
            raise NotAvailable(f"{name} has no measured rates; give a GPU of hardware/efficiencies.toml")
        return rates

    @property
    def _grids(self) -> Kernels | None:
        return grids(self._kernels) if self._kernels else None

    def by_operator(self) -> dict[tuple[str, str], tuple[float, float, float]]:
        """Return FLOP, bytes and seconds by (kind, operator). An element-wise operator counts one FLOP per element.

        Raises NotAvailable without a GPU, and for a dtype for which it has no units.
        """
        if self._kernels is None:
            raise NotAvailable("the time of operators needs a GPU; name one: Operators(gpu)")
        sums: dict[tuple[str, str], tuple[float, float, float]] = {}
        for kernel in self:
            if kernel.kind == "none":
                continue
            kind = "attention" if "attention" in kernel.kind else kernel.kind if kernel.kind == "matmul" else "memory"
            seconds = kernel_seconds(kernel, self._kernels.operators, self._grids)
            if seconds is None:
                raise NotAvailable(f"{self._kernels.gpu.name} has no units for {kernel.kind} in {kernel.dtype}")
            name = kernel.name.split("::")[-1] + (f" {kernel.shape}" if kind == "matmul" else "")
            flop, moved, spent = sums.get((kind, name), (0.0, 0.0, 0.0))
            done = kernel.flops or (kernel.shape[-1] if kernel.shape else 1)
            sums[kind, name] = (flop + done, moved + kernel.bytes, spent + seconds)
        return sums

    def launched(self, name: str, moved: int) -> None:
        """Add a kernel from torch.compile, which moves `moved` bytes."""
        backward = current_graph_task_id() != -1
        self.append(Kernel(name, "memory", "", 0, moved, (), 1, backward, self.phase, compiled=True))

    def __call__(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any, compiled: bool = False) -> None:
        """Add one operator."""
        name = func._schema.name
        # Recomputation runs inside the backward pass, but from Python and with gradients on, like the forward pass.
        backward = current_graph_task_id() != -1 and not torch.is_grad_enabled()
        if is_view(func):
            self.append(Kernel(name, "none", "", 0, 0, (), 0, backward, self.phase, compiled=compiled))
            return
        given = {key: value for key, value in kwargs.items() if key != "out"}  # `out` is only written
        read = args[1:] if name in ADDING and given.get("beta") == 0 else args  # 0 · c is not read, even if c is NaN
        inputs = [leaf for leaf in arg_tree_leaves(*read, **given) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in arg_tree_leaves(out) if isinstance(leaf, Tensor)]
        if not outputs:  # in place
            outputs = [leaf for leaf in arg_tree_leaves(*_written(func, args, kwargs)) if isinstance(leaf, Tensor)]
        if self.gpu and {tensor.device for tensor in (*inputs, *outputs)} == {HOST}:
            # The CPU runs it and launches nothing. torch's optimizers count their steps there.
            self.append(Kernel(name, "none", "", 0, 0, (), 0, backward, self.phase, compiled=compiled))
            return
        flops = flops_of(func, args, kwargs, out)
        kind, shape, dtype = _classify(func, flops, args, kwargs, inputs, outputs)
        moved, again, row = _moved(name, inputs, outputs)
        launches = LAUNCHES.get(name, 1)
        if "_foreach" in name:
            launches = -(-sum(tensor.numel() for tensor in outputs) // FOREACH_ELEMENTS)
        if name == "bitsandbytes::gemm_4bit" and not (
            self.gpu and multiplies_packed(self.gpu, args[0].dtype, shape[1], tuple(args[2]), args[4])
        ):  # one kernel unpacks the weight, another multiplies it
            packed, unpacked = _extent(args[1]), shape[2] * shape[3] * args[0].itemsize
            self.append(Kernel(name, "memory", dtype, 0, packed + unpacked, shape[2:], 1, backward, self.phase))
            name, moved = "aten::mm", moved - packed + unpacked
        self.append(
            Kernel(name, kind, dtype, flops, moved, shape, launches, backward, self.phase, again, row, compiled)
        )


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes according to its schema, except the gradients of optimizers, which
    the schema also lists as written."""
    given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
    return [given[argument.name] for argument in func._schema.arguments
            if argument.name in given and argument.name not in ("g", "grads")
            and argument.alias_info and argument.alias_info.is_write]  # fmt: skip


def _moved(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> tuple[int, int, int]:
    """Return the bytes that a kernel moves at least, those that it also moves if rows are not in cache, and a row's."""
    written = sum(map(_extent, outputs))
    if name in GATHERS:
        return 2 * written, 0, 0
    if name == "fsdp::all_gather_copy_in":  # copies a shard into its place in the whole tensor
        return 2 * sum(map(_extent, inputs[:-1])), 0, 0
    if name in WRITES_ONLY:
        return written, 0, 0
    read = sum(map(_extent, inputs))
    if name == "aten::_foreach_copy_":  # its inputs are both lists, of which it reads the second and writes the first
        return read, 0, 0
    if name == "aten::copy_":
        return 2 * written if len(inputs) < 2 else written + _extent(inputs[1]), 0, 0
    if name == "aten::slice_backward":  # zeros, then a copy of the gradient into them
        return written + 2 * read, 0, 0
    if name == "aten::nll_loss_forward":  # one element per row
        return read // max(1, inputs[0].shape[-1]), 0, 0
    if name == "aten::embedding_dense_backward":  # the gradient, sums of its segments, and the table
        return 3 * read + written, 0, 0
    if name in SOFTMAX_AGAIN:
        extra = 3 * written if name == "aten::_softmax_backward_data" else 0
        row = outputs[0].shape[-1] * outputs[0].itemsize
        return read + written + extra, SOFTMAX_AGAIN[name] * written, row
    return read + written, 0, 0


# cuda/Embedding.cu: a radix sort of the indices (cub), then segments and their sums.
LAUNCHES = {"aten::embedding_dense_backward": 20, "aten::slice_backward": 2}


def _classify(
    func: Any, flops: int, args: tuple, kwargs: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]
) -> tuple[str, tuple[int, ...], str]:
    name = func._schema.name
    if func.namespace in COLLECTIVES:
        return "sent", (), ""
    if not flops:
        largest = max((tensor.numel() for tensor in outputs), default=0)
        strided = any(tensor.numel() * 2 >= largest and not tensor.is_contiguous() for tensor in (*inputs, *outputs))
        kind = "gather" if name in GATHERS else "strided" if strided else "memory"
        if name == "aten::nll_loss_forward":
            kind, largest = "serial", args[1].numel()
        all_elements = (sum(tensor.numel() for tensor in outputs),) if "_foreach" in name else ()
        return kind, (largest, *all_elements), _dtype(outputs[0]) if outputs else ""
    if "attention" in name:
        first = 1 if "backward" in name else 0
        query, key, op = args[first], args[first + 1], Operator(func, args, kwargs)
        if query.dim() == 3:  # sequences without padding (patching/flash_attn.py)
            rows, queries, keys = query.shape[1] * (op.cum_seq_q.numel() - 1), op.max_q, op.max_k
        else:
            rows, queries, keys = query.shape[0] * query.shape[1], query.shape[2], key.shape[2]
        shape = (rows, queries, keys, query.shape[-1], int(op.is_causal))
        return "attention backward" if first else "attention", shape, _dtype(query)
    if name in PRODUCTS:
        a, b = (args[1], args[2]) if name in ADDING else (args[0], args[1])
        batch = a.shape[0] if a.dim() == 3 else 1
        return "matmul", (batch, a.shape[-2], b.shape[-1], a.shape[-1]), _dtype(a)
    a, out = args[0], outputs[0]
    rows = a.numel() // a.shape[-1]
    return "matmul", (1, rows, out.shape[-1], a.shape[-1]), _dtype(a)


def _dtype(tensor: Tensor) -> str:
    short = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    name = str(tensor.dtype).removeprefix("torch.")
    return "fp8" if name.startswith("float8") else short.get(tensor.dtype, name)
