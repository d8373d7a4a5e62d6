"""Megatron-LM on the simulated card: what it imported from torch before, and nothing of its groups stays behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

from ...base.compat import symbol

# By module: a function that it has from torch by name, and where torch has it.
TAKEN = {
    "tensor_parallel.random": ("_lazy_call", "torch.cuda"),
    "distributed.param_and_grad_buffer": ("_coalescing_manager", "torch.distributed"),
}


@contextmanager
def megatron_core() -> Iterator[None]:
    """Let megatron-core, which may have been imported where no card was simulated, find torch as it is now; it forgets
    its process groups and its global memory buffer at the end."""
    with ExitStack() as stack:
        stack.callback(symbol("megatron.core.parallel_state.destroy_model_parallel"))
        for module, (name, home) in TAKEN.items():
            stack.enter_context(mock.patch.object(symbol(f"megatron.core.{module}"), name, _now(home, name)))
        yield


def _now(home: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(home), name)(*args, **kwargs)

    return call
