"""torch.distributed on the simulated GPU: this process is one rank of many, and the others do not exist.

The group uses torch's "fake" backend, which sends nothing. The result of a collective has the right shape and memory,
but this rank's own values. DDP, FSDP2 and DTensor run unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ...base.compat import symbol
from ...base.errors import NotAvailable, SpecError, check_counts
from ...base.notes import Note
from ...hardware.links import GPUS_PER_NODE
from ..devices import Shown
from ..host_parameters import HostParameters
from ..simulated_gpu import SimulatedGPU
from ..streams import nothing
from ..values.collectives import summed
from ..values.placeholders import located
from .moving import moved
from .torch_engines import start_group, torch_engines

OWN_VALUES = Note(
    "own-values",
    "Collectives, and objects that another rank would broadcast, have the values that this rank itself has.",
)


def launched(world_size: int, per_node: int = GPUS_PER_NODE, rank: int = 0) -> dict[str, str]:
    """Return the environment that torchrun sets for `rank` of `world_size`, with `per_node` ranks on each node."""
    check_counts(world_size=world_size)
    node, local = divmod(rank, per_node)
    on_node = min(per_node, world_size - node * per_node)  # the last node may have fewer
    return {
        "RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node), "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(on_node), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
    }  # fmt: skip


def launch(gpu: SimulatedGPU, world_size: int, per_node: int = GPUS_PER_NODE, rank: int = 0) -> None:
    """Make this process `rank` of `world_size`, as if torchrun had started it on nodes of `per_node` GPUs."""
    environment = launched(world_size, per_node, rank)
    os.environ.update(environment)
    gpu.local_ranks = int(environment["LOCAL_WORLD_SIZE"])
    Shown.device = torch.device("cuda", int(environment["LOCAL_RANK"]))
    if rank:
        gpu.engine.remark(OWN_VALUES)


@contextmanager
def without_peers(gpu: SimulatedGPU, world_size: int | None, rank: int, parameters: HostParameters) -> Iterator[None]:
    """Let code in the block create process groups, as `rank` of `world_size`, or as the environment or arguments say.

    `parameters` are on the host, and FSDP2 moves them to the GPU.
    """
    if dist.is_initialized():
        if world_size is not None:
            raise SpecError("a process group exists already; open the simulator before init_process_group")
        yield  # a real group, with real collectives
        return
    with ExitStack() as stack:
        stack.callback(setattr, Shown, "device", Shown.device)
        if world_size is not None:
            stack.enter_context(mock.patch.dict(os.environ))
            launch(gpu, world_size, rank=rank)
        patch = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
        patch(dist, "is_nccl_available", lambda: True)
        for module in (dist, symbol("torch.distributed.device_mesh")):
            patch(module, "init_process_group", _init_process_group(gpu, parameters, stack))
        patch(dist.ProcessGroup, "monitored_barrier", nothing)
        patch(torch.multiprocessing, "spawn", _first_rank)
        replaced = {
            "new_group": _new_group(distributed_c10d.new_group),
            "all_gather_object": _all_gather_object,
            "gather_object": _gather_object,
            "scatter_object_list": _scatter_object_list,
            "broadcast_object_list": nothing,
            "send_object_list": nothing,
            "recv_object_list": _recv_object_list,
            "monitored_barrier": nothing,
            "all_reduce": _all_reduce(distributed_c10d.all_reduce),
            "_coalescing_manager": _one_by_one(distributed_c10d._coalescing_manager),
        }
        for name, function in replaced.items():
            for module in (dist, distributed_c10d):
                patch(module, name, function)
        yield


def _init_process_group(gpu: SimulatedGPU, parameters: HostParameters, stack: ExitStack) -> Callable[..., None]:
    real = dist.init_process_group

    @wraps(real)
    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        **unused: Any,
    ) -> None:
        if world_size <= 0 and "WORLD_SIZE" not in os.environ:
            raise located(NotAvailable(
                f"torch.distributed.init_process_group({backend!r}): the number of ranks is unknown; open the "
                "block with lab.simulator(gpu, world_size=8), or llmlab run with --world-size 8"
            ))  # fmt: skip
        size = world_size if world_size > 0 else int(os.environ["WORLD_SIZE"])
        rank = rank if rank >= 0 else int(os.environ.get("RANK", 0))
        if rank >= size:
            raise SpecError(f"rank={rank} with world_size={size}: ranks are 0 to {size - 1}")
        if not gpu.engine.defers:  # once only: the patches stay when the group is destroyed
            stack.enter_context(torch_engines(gpu.engine))
            stack.enter_context(moved(parameters))
        start_group(real, size, rank)
        gpu.ranks = size
        gpu.memory.driver.capacity = gpu.gpu.room(size)  # NCCL's memory stays when the group is destroyed
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())

    return init_process_group


def _new_group(real: Callable) -> Callable:
    @wraps(real)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("backend", None)  # a real backend would wait for the missing ranks
        return real(*args[:2], **kwargs)

    return new_group


def _first_rank(fn: Callable[..., Any], args: tuple = (), *processes: Any, **options: Any) -> None:
    """torch.multiprocessing.spawn: the process of this local rank runs here, and the others do not exist."""
    fn(Shown.device.index, *args)


def _all_reduce(real: Callable) -> Callable:
    """torch.distributed.all_reduce, where sums can be told from averages; in the operator the argument is opaque."""

    running = False  # torch's function calls itself again if a function mode is on

    @wraps(real)
    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        nonlocal running
        outer, running = not running, True
        try:
            work = real(tensor, op, group, async_op)
        finally:
            running = not outer
        if outer and op == dist.ReduceOp.SUM:
            summed(tensor, dist.get_world_size(group))
        return work

    return all_reduce


def _one_by_one(real: Callable) -> Callable:
    """torch.distributed._coalescing_manager: coalesced collectives have no fake kernels, so each collective runs by
    itself when it is called. Sends and receives, which pass a device, are separate calls anyway."""

    @contextmanager
    def coalescing(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        if device is None:
            yield distributed_c10d._CoalescingManager()
        else:
            with real(group, device, async_ops) as manager:
                yield manager

    return coalescing


# Python objects are sent as pickles, but there are no pickles from other ranks.


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
    if object_gather_list is not None:
        _all_gather_object(object_gather_list, obj)


def _scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    if scatter_object_input_list is None:
        raise _unknown("scatter_object_list")
    scatter_object_output_list[0] = scatter_object_input_list[dist.get_rank(group)]


def _recv_object_list(*args: Any, **kwargs: Any) -> None:
    raise _unknown("recv_object_list")


def _unknown(name: str) -> Exception:
    return located(NotAvailable(
        f"torch.distributed.{name}: what another rank would send is unknown here; let this rank make the objects, or "
        "lab.measure it"
    ))  # fmt: skip
