"""Monkeypatches of torch.cuda, torch.accelerator and DataLoader, which answer as on a machine with the simulated GPU.

Only the functions that call the driver are replaced. Torch's own functions on top of them (memory_allocated,
memory_summary, GradScaler, ...) run unchanged.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any
from unittest import mock
from uuid import UUID

import torch
from torch import Tensor, nn
from torch.amp import autocast_mode
from torch.autograd.graph import save_on_cpu
from torch.utils.data import DataLoader, dataloader

from ...base.compat import FakeTensor, has, tree_map_only
from ...base.errors import NotAvailable, SpecError
from ...hardware.gpu import BF16_CAPABILITY, GPU
from ..allocator.config import AllocatorConfig
from ..capability import capability_of
from ..devices import Shown
from ..engine.unsupported import CountedKernel
from ..profile.snapshot import write_snapshot
from ..simulated_gpu import SimulatedGPU
from ..streams import DEFAULT_STREAM, CUDAGraph, Event, Stream, nothing
from ..values.placeholders import PLACEHOLDER, Unknown, Whole, located
from .tensor_types import LEGACY_TYPES

CUDA_VERSION = "13.0"  # of the wheels of torch 2.13
NCCL_VERSION = (2, 29, 3)  # likewise: .ci/docker/ci_commit_pins/nccl.txt
CUDNN_VERSION = 92000  # likewise: nvidia-cudnn-cu13 9.20.0
# By compute capability: KiB of shared memory per multiprocessor and, at most, per block; threads per multiprocessor.
# CUDA C++ Programming Guide, technical specifications per compute capability.
LIMITS = {
    (7, 0): (96, 96, 2048), (7, 5): (64, 64, 1024), (8, 0): (164, 163, 2048), (8, 6): (100, 99, 1536),
    (8, 9): (100, 99, 1536), (9, 0): (228, 227, 2048), (10, 0): (228, 227, 2048), (12, 0): (100, 99, 1536),
}  # fmt: skip
UNKNOWN_PROPERTIES = (  # properties that torch reports and our tables lack
    "L2_cache_size", "clock_rate", "memory_bus_width", "memory_clock_rate", "pci_bus_id", "pci_device_id",
    "pci_domain_id",
)  # fmt: skip
SENSORS = ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate")  # what NVML reads
NOT_PINNED: dict[str, Any] = {"pin_memory": False, "pin_memory_device": ""}
NEED_DRIVER = (
    "MemPool", "use_mem_pool", "CUDAPluggableAllocator", "change_current_allocator", "caching_allocator_alloc",
    "caching_allocator_delete", "current_blas_handle", "list_gpu_processes",
)  # fmt: skip


@contextmanager
def cuda_api(gpu: SimulatedGPU) -> Iterator[None]:
    """Replace the functions that ask for a GPU by functions that answer for `gpu`; in any other thread they raise
    SpecError."""
    owner = threading.get_ident()

    def guarded(name: str, function: Callable) -> Callable:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != owner:
                raise SpecError(f"{name} in a second thread, which is not simulated; call the code that uses the GPU "
                                "in the thread that opened the simulator, which is a script's main thread")  # fmt: skip
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:

        def put(module: Any, names: dict[str, Any]) -> None:
            for name, value in names.items():
                if not hasattr(module, name) and not has(f"{module.__name__}.{name}"):  # an older torch
                    continue
                value = guarded(f"{module.__name__}.{name}", value) if not isinstance(value, type) else value
                stack.enter_context(mock.patch.object(module, name, value))

        memory = _memory(gpu)
        compiled = {"_compile_kernel": lambda source, name, *args, **kwargs: CountedKernel(name, gpu.engine.launches)}
        put(torch.cuda, {**_device(gpu), **memory, **_random(), **_streams(gpu), **LEGACY_TYPES, **compiled})
        on_module = {name: function for name, function in memory.items() if hasattr(torch.cuda.memory, name)}
        put(torch.cuda.memory, {**on_module, **_history(gpu), "is_initialized": lambda: True, "_lazy_init": nothing})
        put(torch.cuda.nvtx, {**dict.fromkeys(("range_push", "range_start"), lambda message: 0), "range_end": nothing,
                              "range_pop": lambda: 0, "mark": nothing})  # fmt: skip
        put(torch.cuda.random, {**_random(), "current_device": lambda: Shown.device.index})
        real_state = torch.set_rng_state
        for module in (torch, torch.random):
            put(module, {"set_rng_state": lambda state: None if isinstance(state, FakeTensor) else real_state(state)})
        put(torch.cuda.nccl, {"version": lambda: NCCL_VERSION, "is_available": lambda tensors: True})
        put(torch.backends.cudnn, {"version": lambda: CUDNN_VERSION, "is_available": lambda: True})
        put(torch.cuda.profiler, {"start": nothing, "stop": nothing})
        put(torch.accelerator, _accelerator(memory))
        of_device = torch.get_device_module
        put(torch, {"get_device_module": lambda device=None: of_device("cuda" if device is None else device)})
        put(torch.backends.cuda, {"is_built": lambda: True, "is_flash_attention_available": lambda: True,
                                  "preferred_linalg_library": nothing, "preferred_blas_library": _blas})  # fmt: skip
        put(torch.jit, {"trace": _unchecked(torch.jit.trace)})
        stack.enter_context(mock.patch.object(torch.version, "cuda", CUDA_VERSION))
        stack.enter_context(mock.patch.object(DataLoader, "_get_iterator", _one_process))
        workers = dataloader._MultiProcessingDataLoaderIter  # a library's own loader may create it
        stack.enter_context(mock.patch.object(workers, "__init__", _not_pinned(workers.__init__)))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", _record_stream(gpu)))
        stack.enter_context(mock.patch.object(nn.DataParallel, "forward", _data_parallel))
        stack.enter_context(mock.patch.object(save_on_cpu, "__init__", _save_unpinned(save_on_cpu.__init__)))
        yield


def check_index(device: Any, gpus: int = 0) -> int:
    """Return the index of the GPU; raise torch's error for another index that is not below `gpus`."""
    shown = Shown.device
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {device}")
        device = device.index
    if device not in (None, shown.index, *range(gpus)):
        raise torch.AcceleratorError(f"CUDA error: invalid device ordinal {device}; the simulator has one GPU, {shown}")
    return shown.index


def device_name(gpu: GPU) -> str:
    """Return the name of the GPU in the driver where the table lists it, else the name in the table."""
    return next((alias for alias in gpu.aliases if alias.startswith(("NVIDIA ", "Tesla "))), gpu.name)


class _CudaDeviceProperties(SimpleNamespace):
    """The result of torch.cuda.get_device_properties; the class is named as in torch, because the name is printed."""


def _properties(gpu: GPU) -> _CudaDeviceProperties:
    major, minor = capability_of(gpu)
    per_multiprocessor, per_block, threads = LIMITS[max(limit for limit in LIMITS if limit <= (major, minor))]
    return _CudaDeviceProperties(
        name=device_name(gpu),
        major=major,
        minor=minor,
        total_memory=gpu.memory,
        multi_processor_count=gpu.sms,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        max_threads_per_multi_processor=threads,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=per_block * 1024,
        shared_memory_per_multiprocessor=per_multiprocessor * 1024,
        uuid=str(UUID(int=0)),
        **dict.fromkeys(UNKNOWN_PROPERTIES, Whole(0)),
    )


def _device(simulated: SimulatedGPU) -> dict[str, Any]:
    gpu, properties = simulated.gpu, _properties(simulated.gpu)
    runtime = SimpleNamespace(
        cudaProfilerStart=nothing,
        cudaProfilerStop=nothing,
        cudaMemGetInfo=lambda device=0: (simulated.free, gpu.memory),
    )

    def get_device_properties(device: Any = None) -> SimpleNamespace:
        check_index(device, simulated.local_ranks)
        return properties

    def device_memory_used(device: Any = None) -> int:
        check_index(device)
        return gpu.memory - simulated.free

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation or capability_of(gpu) >= BF16_CAPABILITY  # torch: any GPU can emulate bf16

    return {
        "is_available": lambda: not simulated.hidden,
        "is_initialized": lambda: True,
        "init": nothing,
        "_lazy_init": nothing,
        "_lazy_call": nothing,
        "device_count": lambda: simulated.local_ranks,
        "current_device": lambda: Shown.device.index,
        "set_device": lambda device: nothing(check_index(device)),
        "_exchange_device": lambda index: check_index(index) if index >= 0 else -1,
        "_maybe_exchange_device": lambda index: check_index(index) if index >= 0 else -1,
        "get_device_properties": get_device_properties,
        "get_device_name": lambda device=None: get_device_properties(device).name,
        "get_device_capability": lambda device=None: (get_device_properties(device).major, properties.minor),
        "get_arch_list": lambda: [f"sm_{properties.major}{properties.minor}"],
        "is_bf16_supported": is_bf16_supported,
        "synchronize": lambda device=None: nothing(check_index(device)),
        "is_current_stream_capturing": _is_capturing,
        "get_allocator_backend": lambda: "native",
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": nothing,
        "cudart": lambda: runtime,
        "can_device_access_peer": lambda device, peer_device: False,
        "device_memory_used": device_memory_used,
        **dict.fromkeys(SENSORS, lambda device=None: Unknown(PLACEHOLDER)),
        **{name: _refused(name) for name in NEED_DRIVER},
    }


def _blas(backend: Any = None) -> None:
    """torch.backends.cuda.preferred_blas_library; we simulate the workspaces of cuBLAS, the default of torch."""
    if backend is not None and str(backend).lower().rpartition(".")[2] not in ("default", "cublas"):
        raise located(NotAvailable(
            f"torch.backends.cuda.preferred_blas_library({backend!r}): matmuls are simulated with cuBLAS, torch's "
            "default on NVIDIA GPUs; leave it out, or lab.measure it"
        ))  # fmt: skip


def _is_capturing() -> bool:
    # SyncBatchNorm reads the counts to leave out ranks without a batch. A CUDA graph cannot read them, nor can we.
    return sys._getframe(2).f_globals.get("__name__") == "torch.nn.modules._functions"


def _refused(name: str) -> Callable:
    def call(*args: Any, **kwargs: Any) -> None:
        raise located(NotAvailable(
            f"torch.cuda.{name} needs the driver or an allocator of its own, and the simulated GPU has neither; "
            "leave it out, or lab.measure it"
        ))  # fmt: skip

    return call


def _streams(gpu: SimulatedGPU) -> dict[str, Any]:
    engine, streams, host = gpu.engine, {0: DEFAULT_STREAM}, gpu.engine.host

    def set_stream(stream: Any) -> None:
        if stream is not None:
            streams[stream.stream_id] = stream
            engine.stream = stream.stream_id

    event: type = Event
    if host is not None and host.assume is not None:
        event = type("Event", (Event,), {"between": float(host.assume)})
    return {
        "Event": event,
        "Stream": Stream,
        "CUDAGraph": CUDAGraph,
        "graph": CUDAGraph,
        "make_graphed_callables": CUDAGraph,
        "graph_pool_handle": CUDAGraph,
        "ExternalStream": lambda stream_ptr, device=None, **known: Stream(device, stream_id=stream_ptr),
        "current_stream": lambda device=None: streams[engine.stream],
        "default_stream": lambda device=None: DEFAULT_STREAM,
        "set_stream": set_stream,
    }


def _memory(gpu: SimulatedGPU) -> dict[str, Any]:
    memory = gpu.memory

    def checked(function: Callable[[], Any]) -> Callable:
        def call(device: Any = None) -> Any:
            check_index(device)
            return function()

        return call

    fractions = [memory.config.per_process_memory_fraction]

    def set_fraction(fraction: float, device: Any = None) -> None:
        check_index(device)
        memory.settle()  # else the first request would set the fraction of the environment
        memory.set_memory_fraction(fraction)
        fractions.append(fraction)

    return {
        "memory_stats": checked(memory.stats),
        "memory_stats_as_nested_dict": checked(lambda: _nested(memory.stats())),
        "reset_peak_memory_stats": checked(gpu.reset_peak),
        "reset_max_memory_allocated": checked(gpu.reset_peak),
        "reset_max_memory_cached": checked(gpu.reset_peak),
        "reset_accumulated_memory_stats": checked(memory.statistics.reset_accumulated),
        "mem_get_info": checked(lambda: (gpu.free, gpu.gpu.memory)),
        "set_per_process_memory_fraction": set_fraction,
        "get_per_process_memory_fraction": checked(lambda: fractions[-1]),
        "host_memory_stats": lambda: {},
        "reset_peak_host_memory_stats": nothing,
        "reset_accumulated_host_memory_stats": nothing,
        "memory_snapshot": lambda *args, **kwargs: memory.segments(),
        "empty_cache": memory.empty_cache,
        "ipc_collect": nothing,
    }


def _nested(stats: dict[str, int]) -> dict[str, Any]:
    """torch.cuda.memory_stats_as_nested_dict, from the flat dictionary."""
    nested: dict[str, Any] = {}
    for name, value in stats.items():
        *path, last = name.split(".")
        place = nested
        for key in path:
            place = place.setdefault(key, {})
        place[last] = value
    return nested


def _history(gpu: SimulatedGPU) -> dict[str, Any]:
    def set_allocator_settings(text: str) -> None:
        gpu.memory.late_config = None  # else the settings of the environment would replace these
        gpu.memory.configure(AllocatorConfig.parse(text))

    return {
        "_set_allocator_settings": set_allocator_settings,
        "_record_memory_history": nothing,  # the history is always recorded
        "_snapshot": lambda *args, **kwargs: gpu.snapshot(),
        "_dump_snapshot": lambda filename="dump_snapshot.pickle", **kwargs: write_snapshot(filename, gpu.snapshot()),
    }


def _random() -> dict[str, Any]:
    """Return the functions of the GPU's generator, whose state never changes because no number is drawn."""
    state = torch.zeros(16, dtype=torch.uint8)
    return {
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), nothing),
        **dict.fromkeys(("set_rng_state", "set_rng_state_all"), nothing),
        "initial_seed": lambda: 0,
        "get_rng_state": lambda device="cuda": state.clone(),
        "get_rng_state_all": lambda: [state.clone()],
    }


class _GeneratorType(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _HostGenerator)


_HostGenerator = torch.Generator


class _Generator(_HostGenerator):
    """A random number generator on the host."""

    def set_state(self, state: Tensor) -> Any:
        """Ignore a state that was sent through the GPU: ranks share a state that way, and this rank's is its own."""
        return self if isinstance(state, FakeTensor) else super().set_state(state)


class Generator(_HostGenerator, metaclass=_GeneratorType):
    """torch.Generator for the host or the GPU."""

    place: torch.device

    def __new__(cls, device: Any = "cpu") -> Any:
        place = torch.device(device)
        if place.type != "cuda":
            return _Generator(device)
        check_index(place)
        self = super().__new__(cls)
        self.place = Shown.device
        return self

    def __init__(self, device: Any = "cpu") -> None:
        super().__init__()

    device = property(lambda self: self.place)


def _accelerator(memory: dict[str, Any]) -> dict[str, Any]:
    """Return the functions of torch.accelerator; its memory functions are those of torch.cuda."""
    shared = ("empty_cache", "memory_stats", "reset_peak_memory_stats", "reset_accumulated_memory_stats")
    own = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    return {
        **{name: memory[name] for name in shared},
        **{name: getattr(torch.cuda, name) for name in own},
        "device_count": lambda: torch.cuda.device_count(),
        "get_memory_info": memory["mem_get_info"],
        "set_device_index": check_index,
        "current_device_idx": lambda: Shown.device.index,
        "set_device_idx": check_index,
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: Shown.device.index,
        "current_stream": lambda device=None: DEFAULT_STREAM,
        "synchronize": nothing,
    }


def _record_stream(gpu: SimulatedGPU) -> Callable[..., None]:
    def record_stream(tensor: Tensor, stream: Any) -> None:
        """Tensor.record_stream: simulated streams finish immediately, so a freed block can be reused immediately."""
        owner = gpu.memory.stream_of(gpu.engine.address(tensor) or 0)
        gpu.engine.lends |= owner not in (None, stream.stream_id)

    return record_stream


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Let autocast for "cuda" apply to the simulated GPU, whose tensors look like CPU tensors to torch."""
    # patching/patches.py registers CUDA's policies under the CPU's dispatch key.
    real_init = autocast_mode.autocast.__init__

    @wraps(real_init)
    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        real_init(self, device_type, dtype, *args, **kwargs)

    real_enabled, real_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return real_enabled("cpu" if device_type == "cuda" else device_type)

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        inside = device_type == "cuda" and real_enabled("cpu")
        return real_dtype("cpu" if inside else device_type)

    real_set_enabled, real_set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype

    def set_autocast_enabled(device_type: str, *enabled: bool) -> None:
        real_set_enabled("cpu" if device_type == "cuda" else device_type, *enabled)

    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        inside = device_type == "cuda" and real_enabled("cpu")
        real_set_dtype("cpu" if inside else device_type, dtype)

    with (
        mock.patch.object(autocast_mode.autocast, "__init__", init),
        mock.patch.object(torch, "set_autocast_enabled", set_autocast_enabled),
        mock.patch.object(torch, "set_autocast_dtype", set_autocast_dtype),
        mock.patch.object(torch, "is_autocast_enabled", is_autocast_enabled),
        mock.patch.object(torch, "get_autocast_dtype", get_autocast_dtype),
        mock.patch.object(torch, "get_autocast_gpu_dtype", lambda: get_autocast_dtype("cuda")),
    ):
        yield


def _data_parallel(self: nn.DataParallel, *inputs: Any, **kwargs: Any) -> Any:
    """DataParallel.forward on one GPU, which moves the inputs there. Raises NotAvailable for several GPUs."""
    if len(self.device_ids) > 1:
        raise located(NotAvailable(
            f"nn.DataParallel on {len(self.device_ids)} GPUs in one process is not simulated; give it device_ids=[0], "
            "or DistributedDataParallel"
        ))  # fmt: skip
    inputs, kwargs = tree_map_only(Tensor, lambda tensor: tensor.cuda(), (inputs, kwargs))
    return self.module(*inputs, **kwargs)


def _one_process(self: DataLoader) -> Any:
    """DataLoader._get_iterator in this thread: worker processes and the pinning thread would not see the GPU."""
    return dataloader._SingleProcessDataLoaderIter(_with(self, num_workers=0, timeout=0, **NOT_PINNED))


def _not_pinned(init: Callable) -> Callable:
    """_MultiProcessingDataLoaderIter.__init__ without the pinning thread, which would not see the GPU."""

    @wraps(init)
    def call(self: Any, loader: DataLoader) -> None:
        init(self, _with(loader, **NOT_PINNED))

    return call


def _with(loader: DataLoader, **options: Any) -> DataLoader:
    """Return a copy of the loader with other options, although DataLoader forbids setting them."""
    loader = copy.copy(loader)
    vars(loader).update(options)
    return loader


def _save_unpinned(init: Callable) -> Callable:
    """save_on_cpu.__init__ without pinning, which would need values; Tensor.cpu() uses the same GPU memory."""

    @wraps(init)
    def call(self: Any, pin_memory: bool = False, *args: Any, **kwargs: Any) -> None:
        init(self, False, *args, **kwargs)

    return call


def _unchecked(trace: Callable) -> Callable:
    """torch.jit.trace without its check, which compares values."""

    @wraps(trace)
    def call(*args: Any, **kwargs: Any) -> Any:
        return trace(*args, **{**kwargs, "check_trace": False})

    return call
