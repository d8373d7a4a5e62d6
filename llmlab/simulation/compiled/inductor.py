"""Inductor on the simulated GPU: it generates its wrapper, which runs here with kernels that do nothing.

Inductor turns a graph into a Python module. Its function `call` receives the inputs, allocates each buffer, launches
fused Triton kernels, calls cuBLAS and other external kernels, and deletes each buffer after its last use. By then it is
decided which buffers exist, because fusion, in-place updates, and the tensors saved for backward are fixed. Here the
module is Inductor's own, generated for the simulated GPU's properties. Triton compiles nothing, a launch only counts,
and `call` allocates its buffers from the engine, which also runs the remaining operators.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule

from ...base.compat import DisableTorchFunction, check, symbol
from ...base.errors import NotAvailable
from ...base.notes import Note
from ..devices import GPU_DEVICE, Shown
from ..engine.engine import Engine
from ..simulated_gpu import SimulatedGPU
from .dynamo import on_device, tracing, uncollected

# A cache would return code compiled for other GPUs, and nothing can be chosen by measuring.
CONFIG = {
    "force_disable_caches": True, "compile_threads": 1, "max_autotune": False, "max_autotune_gemm": False,
    "max_autotune_pointwise": False, "coordinate_descent_tuning": False, "triton.cudagraphs": False,
    "profile_bandwidth": True,  # adds to each kernel's source the bytes that it moves, and marks where a graph begins
}  # fmt: skip
TEMPLATE = "@triton_heuristics.template("  # select_algorithm.py
MOVED = re.compile(r"'kernel_num_gb': ([0-9.e+-]+)")  # 1e9 bytes; simd.py, estimate_kernel_num_bytes
MEASURES = {"max_autotune": "max-autotune", "max_autotune_gemm": "max-autotune", "triton.cudagraphs": "CUDA graphs"}
# CUDA C++ Programming Guide, technical specifications per compute capability: the same since 7.0.
THREADS_PER_BLOCK = 1024
PADDED = Note(
    "padded-matmuls",
    "On a GPU Inductor times whether padding rows to multiples of 16 bytes makes a matmul faster; the simulation pads "
    "those that are compute-bound.",
)
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
ALIGNMENT = 16  # bytes; torch/_inductor/utils.py


@contextmanager
def inductor_on(gpu: SimulatedGPU) -> Iterator[None]:
    """Let Inductor compile for `gpu` until the block ends. A graph that it cannot compile here runs eagerly."""
    check("torch._inductor.compile_fx")
    entry, config = symbol("torch._inductor.compile_fx"), symbol("torch._inductor.config")
    autograd = symbol("torch._functorch.config")
    folder = symbol("torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder")
    utils = symbol("torch._inductor.utils")
    padding = symbol("torch._inductor.fx_passes.pad_mm")
    interface = symbol("torch._dynamo.device_interface.CudaInterface")
    peephole, full = folder._add_peephole_patterns, torch.full
    real, inner, fold, remark = entry.compile_fx, entry.compile_fx_inner, folder.run, gpu.engine.remark
    properties = SimpleNamespace(**vars(torch.cuda.get_device_properties(0)), max_threads_per_block=THREADS_PER_BLOCK)

    def compile_fx(graph: GraphModule, inputs: Any, inner_compile: Any = inner, **options: Any) -> Any:
        if options.get("config_patches"):  # torch's own function applies the patches and calls this one again
            return real(graph, inputs, inner_compile=inner_compile, **options)
        for name in {mode for key, mode in MEASURES.items() if config.get_config_copy().get(key)}:
            remark(Note("compile-mode", f"torch.compile's {name} is not simulated; its memory is not counted."))
        try:
            if find_spec("triton") is None:
                raise NotAvailable("Inductor needs Triton, which is not installed: pip install triton")
            with config.patch(CONFIG), autograd.patch(graphsafe_rng_functionalization=False):  # else asks the driver
                return real(graph, inputs, inner_compile=_compiler(gpu, inner_compile), **options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            gpu.engine.ran_eager(_line(graph), error)
            return graph.forward

    # Constant folding runs operators, so they must run on the engine, because there is no CUDA device.
    def folded(self: Any) -> Any:
        on_device(self.module, GPU_DEVICE)
        return fold(self)

    def find_zeros(self: Any) -> None:
        on_engine = lambda *args, **options: full(*args, **{**options, "device": GPU_DEVICE})  # noqa: E731
        with mock.patch.object(torch, "full", on_engine):
            peephole(self)

    def should_pad(match: Any, first: Tensor, second: Tensor, op: Any, input: Any = None) -> bool:
        """pad_mm.should_pad, which times whether rows padded to 16 B are faster. In 16 bit we assume that they are."""
        if not padding.can_pad(first, second, op, input) or first.itemsize != 2:
            return False
        sizes = padding.hint_symbols((first.shape[-2], first.shape[-1], second.shape[-1]))
        padded = padding.is_mm_compute_bound(*sizes, first.dtype)
        if padded:
            remark(PADDED)
        return padded

    answer = staticmethod(lambda device=None: properties)
    patches: list[tuple[Any, str, Any]] = [
        (entry, "compile_fx", compile_fx), (folder, "run", folded), (folder, "_add_peephole_patterns", find_zeros),
        (padding, "should_pad", should_pad),
        (utils, "get_device_tflops", lambda dtype: (gpu.gpu.peak(DTYPES.get(dtype, "")) or 0) / 1e12),
        (utils, "get_gpu_dram_gbps", lambda: gpu.gpu.bandwidth / 1e9),
        (symbol("torch.utils._triton"), "triton_hash_with_backend", lambda: ""),  # it asks the driver
        (interface, "get_device_properties", answer), (interface.Worker, "get_device_properties", answer),
        (interface, "current_device", staticmethod(lambda: 0)),
    ]  # fmt: skip
    with ExitStack() as stack:
        _forget()
        stack.callback(_forget)
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def forget_answers(*names: str) -> None:
    """Clear the caches of the functions in torch's modules `names`, if they are imported."""
    for name in names:
        for value in vars(sys.modules.get(name, object)).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def _forget() -> None:
    """Clear the caches of the GPU's properties."""
    forget_answers("torch._inductor.utils", "torch.utils._triton")
    symbol("torch._inductor.runtime.hints.DeviceProperties.create").cache_clear()


def _line(graph: GraphModule) -> str:
    """Return the line of the script that contains the first operator of `graph`."""
    traces = [node.stack_trace for node in graph.graph.nodes if node.stack_trace]
    lines = [line.strip() for line in traces[0].splitlines() if line.strip().startswith("File ")] if traces else []
    return lines[-1] if lines else "a graph without operators"


# ---- the wrapper


class _Kernel:
    """A Triton kernel of Inductor, which writes into existing buffers. For templates such as that of attention, the
    bytes moved say too little about the time, so it is unknown."""

    def __init__(self, name: str, source: str, engine: Engine) -> None:
        match = None if TEMPLATE in source else MOVED.search(source)
        self.name, self.engine = name, engine
        self.moved = round(1e9 * float(match[1])) if match else None

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Launch the kernel."""
        self.engine.launched(self.name, self.moved)


def _compiler(gpu: SimulatedGPU, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return compile_fx_inner, which compiles the forward or the backward graph, for `gpu`."""

    def compile(graph: GraphModule, inputs: Any, **options: Any) -> Any:
        on_device(graph, Shown.device)
        config = symbol("torch._inductor.config")
        # The backward graph may be compiled during a backward pass, when our torch function mode is on.
        with config.patch(CONFIG), tracing(gpu), uncollected(), DisableTorchFunction(), _wrapper_on(gpu):
            return real(graph, inputs, **options)

    return compile


@contextmanager
def _wrapper_on(gpu: SimulatedGPU) -> Iterator[None]:
    """Let the module that Inductor writes run on the engine."""
    engine = gpu.engine
    modules = symbol("torch._inductor.codecache.PyCodeCache")
    load = modules.load_by_key_path

    def start_graph() -> None:
        engine.in_graph = True

    def end_graph(path: Any) -> None:
        engine.in_graph = False

    replacements = {
        "start_graph": start_graph, "end_graph": end_graph,
        "empty_strided_cuda": _empty_strided, "reinterpret_tensor": _reinterpreted, "assert_alignment": _nothing,
        "copy_if_misaligned": _copy_if_misaligned,
    }  # fmt: skip

    def loaded(*args: Any, **kwargs: Any) -> Any:
        module = load(*args, **kwargs)
        vars(module).update(replacements)
        return module

    def triton(self: Any, name: str, source: str, *args: Any, **kwargs: Any) -> _Kernel:
        return _Kernel(name, source, engine)

    stream = mock.patch.object(symbol("torch._C"), "_cuda_getCurrentRawStream", _nothing, create=True)
    with (
        mock.patch.object(symbol("torch._inductor.async_compile.AsyncCompile"), "triton", triton),
        mock.patch.object(modules, "load_by_key_path", loaded),
        stream,
    ):
        yield


def _nothing(*args: Any, **kwargs: Any) -> int:
    return 0


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=GPU_DEVICE)


def _reinterpreted(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _copy_if_misaligned(tensor: Tensor) -> Tensor:
    """Inductor's kernels load 16 B at a time, so an input that is not aligned to 16 B is copied."""
    return tensor.clone() if tensor.storage_offset() * tensor.itemsize % ALIGNMENT else tensor
