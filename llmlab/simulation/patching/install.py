"""Installation of a simulated GPU: all monkeypatches, in order, undone at the end of the block."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ...base.compat import check, disable_current_modes
from ...base.errors import SpecError
from ...recording.events import exclusive
from ..capability import capability_of
from ..checkpoints.distributed import distributed_checkpoints
from ..checkpoints.files import Checkpoints
from ..compiled.dynamo import dynamo_on
from ..compiled.inductor import inductor_on
from ..devices import GPU_DEVICE
from ..distributed.deepspeed import deepspeed_engine, no_accelerator
from ..distributed.megatron import megatron_core
from ..distributed.pipelining import stages_alone
from ..distributed.process_group import without_peers
from ..engine.engine import Engine
from ..engine.real_host import RealHost
from ..engine.unsupported import counted_triton, no_extensions, no_other_ranks
from ..host_parameters import HostParameters
from ..profile.timeline import Phases
from ..simulated_gpu import SimulatedGPU
from ..streams import nothing, profiled_as_host
from ..values.placeholders import warned
from .bitsandbytes import fake_bitsandbytes
from .cuda_api import cuda_api, cuda_autocast
from .device_mode import Redirect
from .flash_attn import fake_flash_attn, fake_fused_loss
from .flash_attn_package import importable_flash_attn
from .flex_attention import flex_attention_unfused
from .imports import default_device, devices_found, on_import, swept
from .patches import (
    cuda_operators,
    drawn_tokens,
    fake_parameters,
    full_beams,
    no_end_of_sequence,
    note_recurrent_layers,
    tensors_on_gpu,
)

ENVIRONMENT = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}  # transformers loads weights in this thread
_open: list[str] = []  # the name of the GPU of the open simulator


@contextmanager
def installed(gpu: SimulatedGPU) -> Iterator[None]:
    """Let torch and its libraries find `gpu` as their only GPU; operators run on it while its engine is entered."""
    capability = capability_of(gpu.gpu)
    check("torch")
    with ExitStack() as stack:

        def put(module: str, name: str, function: Callable) -> None:
            stack.enter_context(mock.patch.object(sys.modules[module], name, function))

        def bitsandbytes() -> None:
            stack.enter_context(fake_bitsandbytes(on_gpu=True))
            put("bitsandbytes.functional", "get_paged", _paged(gpu.engine))
            for name in ("fill", "prefetch_tensor"):
                put("bitsandbytes.functional", name, nothing)

        def generation() -> None:
            stack.enter_context(full_beams())
            stack.enter_context(drawn_tokens())

        libraries: dict[str, Callable[[], Any]] = {
            "bitsandbytes": bitsandbytes,
            "deepspeed.accelerator.real_accelerator": lambda: stack.enter_context(no_accelerator()),
            "deepspeed": lambda: stack.enter_context(deepspeed_engine()),
            "megatron.core.distributed.param_and_grad_buffer": lambda: stack.enter_context(megatron_core()),
            "torch._dynamo.convert_frame": lambda: stack.enter_context(dynamo_on(gpu)),
            "torch._inductor.compile_fx": lambda: stack.enter_context(inductor_on(gpu)),
            "torch.nn.attention.flex_attention": lambda: stack.enter_context(flex_attention_unfused(gpu.engine)),
            "triton.runtime.jit": lambda: stack.enter_context(counted_triton(gpu.engine.launches)),
            "torch.utils.cpp_extension": lambda: stack.enter_context(no_extensions()),
            "transformers.generation.stopping_criteria": lambda: stack.enter_context(no_end_of_sequence()),
            "transformers.generation.utils": generation,
            "transformers.modeling_flash_attention_utils": lambda: stack.enter_context(fake_flash_attn(capability)),
        }
        stack.enter_context(cuda_autocast())  # before Dynamo, which must know the functions that answer for the GPU
        stack.enter_context(fake_fused_loss())
        stack.enter_context(fake_parameters())
        stack.enter_context(cuda_operators(capability))
        stack.enter_context(note_recurrent_layers(gpu.engine))
        if gpu.engine.host is None:  # else a function mode sees torch.tensor
            stack.enter_context(tensors_on_gpu())
        stack.enter_context(cuda_api(gpu))
        stack.enter_context(profiled_as_host())
        stack.enter_context(default_device())
        stack.enter_context(mock.patch.dict(os.environ, ENVIRONMENT))
        stack.enter_context(devices_found())
        # Hide the GPU from libraries that look for one while they are imported.
        stack.enter_context(on_import(libraries, lambda: mock.patch.object(gpu, "hidden", True)))
        yield


@contextmanager
def script_on(gpu: SimulatedGPU, host: RealHost, world_size: int | None, rank: int) -> Iterator[Phases]:
    """Install `gpu` for a script written for "cuda", as `rank` of `world_size`; yield the phases of its run.

    Steps of our own name the engine's device and simulate the host too, so they use `installed` alone: the additions
    here make every call of torch slower. Raises SpecError if a simulator is already open, in this thread or another.
    """
    if _open:
        shared = "because all threads share one simulator"
        raise SpecError(f"a simulator of {_open[0]} is open; end its block first, {shared}")
    phases = Phases(gpu.engine)
    gpu.history.place = phases.place
    gpu.memory.driver.on_event = gpu.history.record
    gc.collect()  # else garbage of earlier code would be freed at an unpredictable moment in the block
    with exclusive("simulator()"), swept("__main__") as look, ExitStack() as stack:
        _open.append(gpu.gpu.name)
        stack.callback(_open.clear)
        stack.enter_context(as_cuda(gpu, host, world_size, rank))
        stack.enter_context(phases.watched())
        try:
            yield phases
        finally:
            look()


@contextmanager
def as_cuda(gpu: SimulatedGPU, host: RealHost, world_size: int | None, rank: int) -> Iterator[None]:
    """Install `gpu` for code that names "cuda" and computes real values on the host, as `rank` of `world_size`."""
    engine = gpu.engine
    checkpoints, redirect = Checkpoints(engine, gpu.kept_files), Redirect(engine, host)
    parameters = HostParameters(engine, checkpoints)
    with ExitStack() as stack:
        stack.callback(warned.clear)
        stack.enter_context(importable_flash_attn(capability_of(gpu.gpu)))
        stack.enter_context(installed(gpu))
        stack.enter_context(parameters.patched())
        stack.enter_context(redirect.patched())
        stack.enter_context(checkpoints.patched())
        stack.callback(engine.stop)
        stack.enter_context(engine)
        stack.enter_context(redirect)
        loaders: dict[str, Callable[[], Any]] = {
            "safetensors.torch": lambda: stack.enter_context(checkpoints.safetensors()),
            "transformers.modeling_utils": lambda: stack.enter_context(
                checkpoints.safe_open("transformers.modeling_utils")
            ),
            "torch.distributed.checkpoint": lambda: stack.enter_context(distributed_checkpoints(checkpoints.contents)),
        }
        if not dist.is_initialized():
            alone: dict[str, tuple[str, ...]] = {
                "torch.distributed.rpc": ("init_rpc",),
                "torch.distributed._symmetric_memory": ("empty", "enable_symm_mem_for_group", "rendezvous"),
            }
            loaders["torch.distributed.pipelining.stage"] = lambda: stack.enter_context(stages_alone(engine.notes))
            for module, names in alone.items():
                loaders[module] = partial(lambda *what: stack.enter_context(no_other_ranks(*what)), module, *names)
        stack.enter_context(on_import(loaders))
        stack.enter_context(without_peers(gpu, world_size, rank, parameters))
        yield


def _paged(engine: Engine) -> Callable[..., Tensor]:
    """bitsandbytes.functional.get_paged: unified memory, which does not come from PyTorch's allocator."""

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, **device: Any) -> Tensor:
        with disable_current_modes(), engine.fake:
            tensor = torch.zeros(shape, dtype=dtype, device=GPU_DEVICE)
        engine.hold_at(tensor, 0)
        vars(tensor).update(is_paged=True, page_deviceid=0)
        return tensor

    return get_paged
