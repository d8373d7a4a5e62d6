"""PyTorch's own distributed engines on fake tensors: one rank of many, whose process group sends nothing.

FSDP, FSDP2, DDP and DTensor run unchanged. This module follows their effects outside operators: they resize storages to
free gathered parameters, and gather and reduce on streams of their own, whose blocks the allocator keeps separate.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base.compat import C, FakeTensor, TorchDispatchMode, arg_tree_leaves, check, disable_current_modes, symbol
from ...base.errors import NotAvailable
from ...recording.parts import COMMUNICATION, GATHERED
from ...specs.model import ModelSpec
from ...specs.run import Run, Training, stack_of
from ...step.ranks import Ranks, check_ranks, join
from ..devices import GPU_DEVICE, HOST, Shown
from ..engine.engine import Engine
from ..profile.recording import Labelled
from ..streams import nothing

FSDP = "torch.distributed.fsdp._fully_shard."
FAKE_STORE = "torch.testing._internal.distributed.fake_pg.FakeStore"
FSDP_MODULES = ("_fsdp_param_group", "_fsdp_collectives", "_fsdp_init", "_fsdp_state", "_fully_shard")
EMPTY = torch.ops.aten.empty.memory_format
# By function of FSDP2: the part of memory that it allocates.
FSDP_PARTS = {
    "foreach_all_gather": COMMUNICATION, "foreach_all_gather_copy_out": GATHERED, "foreach_reduce": COMMUNICATION,
}  # fmt: skip


def checked(spec: ModelSpec, run: Run) -> None:
    """Raise the errors of `check_ranks`, and import modules that compile TorchScript before torch is patched."""
    check_ranks(spec, run, "simulate")
    if isinstance(run, Training) and run.zero == 1:
        import_module("torch.distributed.optim")


@contextmanager
def fake_ranks(run: Training, engine: Engine, labelled: Labelled, stage: int = 0) -> Iterator[Ranks | None]:
    """Make this process the first rank of pipeline stage `stage` of `run`, whose other ranks do not exist. `labelled`
    is the function of the recording. Yields None for a stack that creates its own meshes.

    Raises NotAvailable if a process group exists, because a process can have only one.
    """
    if dist.is_initialized():
        raise NotAvailable("simulate needs a process group of its own; call it before init_process_group, or after "
                           "destroy_process_group")  # fmt: skip
    group = symbol(FSDP + "_fsdp_param_group")
    functions: dict[str, Any] = {
        name: labelled(symbol(f"{FSDP}_fsdp_param_group.{name}"), part) for name, part in FSDP_PARTS.items()
    }
    with torch_engines(engine, labelled), mock.patch.multiple(group, **functions):
        start_group(dist.init_process_group, run.world_size, stage * run.world_size // run.pp)  # stages are outermost
        try:
            yield None if stack_of(run).own_program else join(run, fake=True)
        finally:
            dist.destroy_process_group()


def start_group(init_process_group: Callable[..., None], world_size: int, rank: int = 0) -> None:
    """Start a process group of torch's "fake" backend, which sends nothing."""
    init_process_group("fake", world_size=world_size, rank=rank, store=symbol(FAKE_STORE)())


@contextmanager
def torch_engines(engine: Engine, labelled: Labelled = lambda function, part: function) -> Iterator[None]:
    """Let DDP, FSDP2 and DTensor run on the device of `engine`; `labelled` labels the memory that DDP allocates.

    Nothing of a process group remains at the end.
    """
    check("torch.distributed")
    from torch.distributed.tensor import DTensor

    with ExitStack() as stack:
        patch = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
        patch(sys, "excepthook", sys.excepthook)  # init_process_group replaces it
        # The cache contains meshes of destroyed groups.
        stack.callback(symbol("torch._C._clear_DTensor_sharding_propagator_cache"))
        # The first random DTensor creates the tracker for the device of its mesh, and later code would use that device.
        patch(symbol("torch.distributed.tensor._random"), "_rng_tracker", None)
        stack.enter_context(_resized_storages(engine))
        stack.enter_context(_shapes_of_dtensors())
        stack.enter_context(_reducer(engine, labelled))
        patch(engine, "defers", frozenset((DTensor,)))
        patch(symbol(FSDP + "_fsdp_param"), "_chunk_with_empty", _Chunks)
        if engine.device == GPU_DEVICE:
            patch(C, "_get_accelerator", lambda: torch.device("cuda"))
            # FSDP2 compares the device of the mesh with the devices of tensors, which torch sees as the engine's.
            answers = {"_get_device_from_mesh": lambda mesh: GPU_DEVICE, "_get_device_handle": lambda *_: torch.cuda}
            for module in [symbol(FSDP + name) for name in FSDP_MODULES]:
                for name in answers.keys() & vars(module).keys():
                    patch(module, name, answers[name])
        yield


def _resized_storages(engine: Engine) -> AbstractContextManager:
    """Follow UntypedStorage.resize_, which is not an operator."""
    real = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        out = real(storage, size)
        engine.resized(storage)
        return out

    return mock.patch.object(torch.UntypedStorage, "resize_", resize_)


def _shapes_of_dtensors() -> AbstractContextManager:
    """Hide from the engine how DTensor computes the shapes of whole tensors, because that allocates nothing."""
    propagator = symbol("torch.distributed.tensor._sharding_prop.ShardingPropagator")
    name = "_propagate_tensor_meta_non_cached"
    real, empty_strided = getattr(propagator, name), torch.empty_strided

    def on_host(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return empty_strided(*args, device=HOST if device == "cuda" else device, **kwargs)

    def unseen(self: Any, schema: Any) -> Any:
        # For random operators it creates fake arguments on the mesh's device, which this build of torch may lack.
        with disable_current_modes(), mock.patch.object(torch, "empty_strided", on_host):
            return real(self, schema)

    return mock.patch.object(propagator, name, unseen)


class _Chunks:
    """torch.chunk with empty chunks for ranks that get nothing. Chunks are created on demand, because 512 take long."""

    def __init__(self, tensor: Tensor, chunks: int, dim: int) -> None:
        self.tensor, self.chunks, self.dim = tensor, chunks, dim

    def __getitem__(self, index: int) -> Tensor:
        whole = self.tensor.size(self.dim)
        size = -(-whole // self.chunks)
        start = min(index * size, whole)
        return self.tensor.narrow(self.dim, start, min(size, whole - start))


class _RealIndices(TorchDispatchMode):
    """Lets the reducer write the indices of the buckets, on which all ranks must agree, into a real tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
        real = tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        real = real and kwargs.get("device") != GPU_DEVICE  # unless DDP moves an input to the GPU
        if real or (func is EMPTY and kwargs.get("dtype") == torch.int32):
            with disable_current_modes():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def _reducer(engine: Engine, labelled: Labelled) -> Iterator[None]:
    """Let DDP's reducer (torch/csrc/distributed/c10d/reducer.cpp) run, with its buckets and the copies to and from
    them.

    A group that sends nothing has no results for its all-reduces, so a hook completes each one immediately.
    """
    from torch.nn.parallel import distributed

    cls = distributed.DistributedDataParallel
    make = labelled(cls.__init__, COMMUNICATION)
    rebuild = labelled(cls._pre_forward, COMMUNICATION)  # buckets, in the order in which gradients arrived

    def done(state, bucket):  # without annotations, which DDP compares
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def init(self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any):
        make(self, module, None, None, *args, **kw)  # the ids name the GPU, but DDP sees CPU tensors
        if device_ids and engine.device == GPU_DEVICE:  # forward moves its inputs there
            self.device_type, self.device_ids = "cuda", [Shown.device.index]
        self.register_comm_hook(None, done)

    def pre_forward(*args: Any, **kwargs: Any) -> Any:
        with _RealIndices():
            return rebuild(*args, **kwargs)

    # The check compares shapes between ranks, and so reads values.
    unverified = mock.patch.object(distributed, "_verify_param_shape_across_processes", nothing)
    handle = nothing  # DDP sees a CPU, on which it refuses SyncBatchNorm
    with (
        unverified,
        mock.patch.multiple(cls, __init__=init, _pre_forward=pre_forward, _passing_sync_batchnorm_handle=handle),
    ):
        yield
