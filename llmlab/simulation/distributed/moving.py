"""Modules that FSDP moves to the GPU with `.data =`. It cannot turn a real tensor into a fake one, so we do it
before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FullyShardedDataParallel

from ...base.errors import NotAvailable
from ..devices import GPU_DEVICE
from ..host_parameters import HostParameters
from ..values.placeholders import located
from .torch_engines import FSDP, FSDP_MODULES

FSDP1 = "torch.distributed.fsdp."


def _on_nccl(group: Any = None) -> torch.device:
    """Return the device on which states are gathered: of the fake group's two backends torch would choose the
    host's."""
    return torch.device("cuda")


def _no_local_state(*args: Any, **kwargs: Any) -> None:
    """Refuse an index of all ranks' shards, because the fake group returns this rank's names for all ranks."""
    raise located(NotAvailable(
        "StateDictType.LOCAL_STATE_DICT of FullyShardedDataParallel is not simulated; SHARDED_STATE_DICT holds as much"
    ))  # fmt: skip


def _own_states(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that gathers a parameter's optimizer states from the ranks that hold a part of it."""

    def convert(*args: Any, **kwargs: Any) -> Any:
        try:
            return real(*args, **kwargs)
        except RuntimeError as error:
            if "not in the optimizer state" not in str(error):
                raise
            raise located(NotAvailable(
                "FullyShardedDataParallel.optim_state_dict with use_orig_params=True asks other ranks for their "
                "parameters' states; save the model alone (save_only_model of the Trainer), or use_orig_params=False"
            )) from None  # fmt: skip

    return convert


@contextmanager
def moved(parameters: HostParameters) -> Iterator[None]:
    """Let FSDP2 and FSDP1 move parameters that `parameters` has made fake, and those that are still real."""
    with ExitStack() as stack:
        managed = _managed(parameters, import_module(FSDP + "_fsdp_init")._get_managed_states)
        for module in [import_module(FSDP + name) for name in FSDP_MODULES]:
            if hasattr(module, "_get_managed_states"):
                stack.enter_context(mock.patch.object(module, "_get_managed_states", managed))
        init = _init(parameters, FullyShardedDataParallel.__init__)
        stack.enter_context(mock.patch.object(FullyShardedDataParallel, "__init__", init))
        optim = import_module(FSDP1 + "_optim_utils")
        for module, name, function in (
            (distributed_c10d, "_get_pg_default_device", _on_nccl),
            (optim, "_get_pg_default_device", _on_nccl),
            (optim, "_convert_state_with_orig_params", _own_states(optim._convert_state_with_orig_params)),
            (import_module(FSDP1 + "_state_dict_utils"), "_local_post_state_dict_hook", _no_local_state),
        ):
            stack.enter_context(mock.patch.object(module, name, function))
        yield


def _managed(parameters: HostParameters, real: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP2's _get_managed_states, which lists the tensors to move: we move them to the GPU before."""

    def to_gpu(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to(GPU_DEVICE)

    def managed(modules: list[nn.Module], *args: Any, **kwargs: Any) -> Any:
        for module in modules:
            parameters.move(module, to_gpu)
        return real(modules, *args, **kwargs)

    return managed


def _init(parameters: HostParameters, real: Callable[..., None]) -> Callable[..., None]:
    """FSDP1's constructor, for a module whose parameters and buffers are fake and still on the host."""

    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        parameters.replace(module, buffers=True)
        real(self, module, *args, **kwargs)

    return init
