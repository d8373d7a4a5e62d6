"""One rank of many, alone: a process group that sends nothing, and PyTorch's own engines on fake tensors over it.

FSDP2, DDP and DTensor run as they are. What they do beside operators is followed here: storages that are resized (FSDP2
frees gathered parameters so), and the streams FSDP2 gathers and reduces on, whose blocks the allocator keeps apart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import arg_tree_leaves

from ...base.errors import NotAvailable
from ...base.units import show_bytes
from ...hardware.gpu import GPU
from ...recording.phases import COMMUNICATION, GATHERED
from ...specs.model import ModelSpec
from ...specs.run import Run, Training
from ...step.ranks import Ranks, check_ranks, is_sharded, join
from ..devices import GPU_DEVICE
from ..engine.engine import Engine
from ..streams import Event, Stream, Streams

if TYPE_CHECKING:
    from ..recording import Recording

FSDP = "torch.distributed.fsdp._fully_shard."
EMPTY = torch.ops.aten.empty.memory_format
NOTES = {
    0: "Rank 0 of DistributedDataParallel, with torch's defaults: gradients, and buckets of as many bytes.",
    1: "Rank 0 of DistributedDataParallel with ZeroRedundancyOptimizer, torch's ZeRO-1.",
    2: "Rank 0 of FSDP2 with reshard_after_forward=False: blocks stay whole from forward to backward.",
    3: "Rank 0 of FSDP2 (fully_shard), a block a unit, the rest of the model another.",
}
POLICY_NOTE = (
    "{} is FSDP2's MixedPrecisionPolicy: fp32 shards, gathered in half precision, reduced in fp32; the optimizer steps "
    "as torch chooses, by foreach."
)
EXPERTS_NOTE = (
    "FSDP2 cuts a layer's {0} experts along the first dimension, by default: of {1} ranks, {0} hold one each, the rest "
    "none, and it is gathered with padding. A shard_placement_fn that cuts another dimension divides them by {1}."
)
EACH_NOTE = "FSDP2 reduces gradients after each of the {} micro-batches."
NO_NCCL_NOTE = "What NCCL takes outside of PyTorch's allocator is not in it, so `process` is not known."
NCCL_NOTE = "`process` has {} for NCCL, read on one {}: it depends on NCCL's version, channels and groups."


def checked(spec: ModelSpec, run: Run) -> None:
    """Raise what `check_ranks` raises, and import what compiles TorchScript: it must see torch as it is."""
    check_ranks(spec, run, "simulate")
    if isinstance(run, Training) and run.zero == 1:
        import_module("torch.distributed.optim")


def notes(spec: ModelSpec, run: Run, card: GPU | None) -> tuple[str, ...]:
    """Return what a report says of a run on several ranks of `card`; None is the CPU, which has no NCCL."""
    if not isinstance(run, Training) or run.world_size == 1:
        return ()
    engine: tuple[str, ...] = (NOTES[run.zero],) if run.dp > 1 else ()
    if is_sharded(run) and run.precision.startswith("mixed"):
        engine += (POLICY_NOTE.format(run.precision),)
    if is_sharded(run) and 0 < spec.experts < run.dp:
        engine += (EXPERTS_NOTE.format(spec.experts, run.dp),)
    if is_sharded(run) and run.accumulation > 1:
        engine += (EACH_NOTE.format(run.accumulation),)
    split = "parallelize_module cuts linears, embedding, logits and loss"
    tensor = (f"Rank 0 of tp={run.tp}: torch's {split}.",) if run.tp > 1 else ()
    if card is None:
        return (*engine, *tensor)
    nccl = NO_NCCL_NOTE if card.nccl is None else NCCL_NOTE.format(show_bytes(card.nccl), card.name)
    return (*engine, *tensor, nccl)


@contextmanager
def fake_ranks(run: Training, recording: Recording) -> Iterator[Ranks]:
    """Make this process rank 0 of the world of `run`, whose others are not there.

    Raises NotAvailable where a process group is running: there is one a process.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        raise NotAvailable("simulate needs a process group of its own; call it before init_process_group, or after "
                           "destroy_process_group")  # fmt: skip
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with ExitStack() as stack:
        stack.enter_context(followed(recording.engine))
        dist.init_process_group("fake", rank=0, world_size=run.world_size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        if is_sharded(run):
            stack.enter_context(_fsdp(recording))
        elif run.dp > 1:
            stack.enter_context(reducer(lambda function: recording.labelled(function, COMMUNICATION)))
        yield join(run, fake=True)


@contextmanager
def followed(engine: Engine) -> Iterator[None]:
    """Let `engine` follow what DDP, FSDP2 and DTensor do beside operators; nothing of a process group stays behind."""
    from torch.distributed.tensor import DTensor

    parameter = import_module(FSDP + "_fsdp_param")
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "excepthook", sys.excepthook))  # init_process_group puts in its own
        stack.callback(torch._C._clear_DTensor_sharding_propagator_cache)  # it remembers meshes of groups that are gone
        stack.enter_context(_resized_storages(engine))
        stack.enter_context(_shapes_of_dtensors())
        stack.enter_context(mock.patch.object(parameter, "_chunk_with_empty", _Chunks))
        stack.enter_context(mock.patch.object(engine, "defers", frozenset((DTensor,))))
        yield


@contextmanager
def _resized_storages(engine: Engine) -> Iterator[None]:
    """Follow UntypedStorage.resize_, which is no operator."""
    real = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        out = real(storage, size)
        engine.resized(storage)
        return out

    with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
        yield


@contextmanager
def _shapes_of_dtensors() -> Iterator[None]:
    """Let DTensor find the shapes of whole tensors where no engine sees it: nothing is allocated for that."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    real = getattr(ShardingPropagator, name)

    def unseen(self: ShardingPropagator, schema: Any) -> Any:
        with _disable_current_modes():
            return real(self, schema)

    with mock.patch.object(ShardingPropagator, name, unseen):
        yield


# ---- FSDP2


class _Streams:
    """What FSDP2 asks of torch.cuda."""

    def __init__(self, engine: Engine) -> None:
        self.Stream, self.Event = Stream, Event
        self._streams = Streams(engine)
        self.current_stream = self._streams.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._streams.set(stream)
        try:
            yield
        finally:
            self._streams.set(before)


class _Chunks:
    """torch.chunk with empty chunks for the ranks that get nothing, each made when it is asked for: 512 take long."""

    def __init__(self, tensor: Tensor, chunks: int, dim: int) -> None:
        self.tensor, self.chunks, self.dim = tensor, chunks, dim

    def __getitem__(self, index: int) -> Tensor:
        whole = self.tensor.size(self.dim)
        size = -(-whole // self.chunks)
        start = min(index * size, whole)
        return self.tensor.narrow(self.dim, start, min(size, whole - start))


@contextmanager
def _fsdp(recording: Recording) -> Iterator[None]:
    """Let FSDP2 see a card, and know what is for what it allocates."""
    engine = recording.engine
    group = import_module(FSDP + "_fsdp_param_group")
    with ExitStack() as stack:
        patch = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
        if engine.device == GPU_DEVICE:
            streams = _Streams(engine)
            for name in ("_fsdp_param_group", "_fsdp_collectives", "_fsdp_init", "_fsdp_state"):
                patch(import_module(FSDP + name), "_get_device_handle", lambda *_: streams)
            for name in ("_fsdp_init", "_fully_shard"):
                module = import_module(FSDP + name)
                if hasattr(module, "_get_device_from_mesh"):
                    patch(module, "_get_device_from_mesh", lambda mesh: GPU_DEVICE)
        for name, part in {
            "foreach_all_gather": COMMUNICATION,
            "foreach_all_gather_copy_out": GATHERED,
            "foreach_reduce": COMMUNICATION,
        }.items():
            patch(group, name, recording.labelled(getattr(group, name), part))
        yield


# ---- DDP


class _RealIndices(TorchDispatchMode):
    """Lets the reducer write the buckets' indices, which all ranks must agree on, into a real tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in arg_tree_leaves(*args, **kwargs) if isinstance(each, Tensor)]
        real = tensors and not any(isinstance(each, FakeTensor) for each in tensors)
        if real or (func is EMPTY and kwargs.get("dtype") == torch.int32):
            with _disable_current_modes():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def reducer(labelled: Callable[[Callable], Callable] = lambda function: function) -> Iterator[None]:
    """Let DDP's reducer (torch/csrc/distributed/c10d/reducer.cpp) run: its buckets, and copies into and out of them.

    A group that sends nothing has no result for its all-reduces, so a hook says that each is done at once. `labelled`
    wraps what allocates buckets.
    """
    from torch.nn.parallel import distributed

    cls = distributed.DistributedDataParallel
    make = labelled(cls.__init__)
    rebuild = labelled(cls._pre_forward)  # buckets, in the order gradients came

    def done(state, bucket):  # without annotations, which DDP compares
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def init(self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any):
        make(self, module, None, None, *args, **kw)  # the devices name the card, and to DDP its tensors are the CPU's
        self.register_comm_hook(None, done)

    def pre_forward(*args: Any, **kwargs: Any) -> Any:
        with _RealIndices():
            return rebuild(*args, **kwargs)

    with (
        mock.patch.object(cls, "__init__", init),
        mock.patch.object(cls, "_pre_forward", pre_forward),
        # It compares shapes between ranks, by their values.
        mock.patch.object(distributed, "_verify_param_shape_across_processes", lambda *_, **__: None),
    ):
        yield
