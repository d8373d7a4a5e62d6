"""Megatron-LM on the simulated GPU: refreshes names that it imported from torch, and discards its process groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

from ...base.compat import symbol

# By module: the name of a function that it imported from torch, and the module of torch.
IMPORTED = {
    "tensor_parallel.random": ("_lazy_call", "torch.cuda"),
    "distributed.param_and_grad_buffer": ("_coalescing_manager", "torch.distributed"),
}


@contextmanager
def megatron_core() -> Iterator[None]:
    """Let megatron-core call the current functions of torch, even if it was imported before the GPU was simulated. At
    the end it discards its process groups and its global memory buffer."""
    with ExitStack() as stack:
        stack.callback(symbol("megatron.core.parallel_state.destroy_model_parallel"))
        for module, (name, home) in IMPORTED.items():
            stack.enter_context(mock.patch.object(symbol(f"megatron.core.{module}"), name, _current(home, name)))
        yield


def _current(home: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(home), name)(*args, **kwargs)

    return call
