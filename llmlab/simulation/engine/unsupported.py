"""Operators that a simulated GPU refuses, with their name, the user's line and a way around the problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from ...base.errors import NotAvailable
from ..values.placeholders import located


def no_compiled_kernel(func: Any) -> NotAvailable:
    """Return the error for a higher-order operator."""
    return located(NotAvailable(
        f"{func.name()} is a kernel made by torch.compile, which is not simulated; use an eager form of "
        "it, as scaled_dot_product_attention, or lab.measure it"
    ))  # fmt: skip


def random_again(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run the higher-order operators with which a compiled graph draws the same numbers again in its backward pass;
    refuse all others."""
    if func.name() == "run_and_save_rng_state":
        return torch.get_rng_state(), args[0](*args[1:], **kwargs)
    if func.name() == "run_with_rng_state":
        return args[1](*args[2:], **kwargs)
    raise no_compiled_kernel(func)


def no_extensions() -> AbstractContextManager:
    """Refuse to compile kernels for the GPU, with their name."""
    from torch.utils import cpp_extension

    def refused(name: str, *args: Any, **kwargs: Any) -> None:
        raise located(NotAvailable(
            f"torch.utils.cpp_extension: {name!r} would be compiled for a GPU, and the simulated GPU runs no kernels; "
            "use PyTorch's own operators instead, or lab.measure it"
        ))  # fmt: skip

    return mock.patch.multiple(cpp_extension, load=refused, load_inline=refused)


def counted_triton(launches: Counter[str]) -> AbstractContextManager:
    """Count the launches of Triton kernels, which write into existing tensors and allocate nothing.

    An autotuned kernel, which a GPU would launch with many settings, counts as one launch.
    """
    from triton.runtime import jit

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        function = kernel if hasattr(kernel, "__name__") else getattr(kernel, "fn", None)  # of an autotuner
        name = getattr(function, "__name__", "without a name")

        def launch(*args: Any, **kwargs: Any) -> None:
            launches[name] += 1

        return launch

    return mock.patch.object(jit.KernelInterface, "__getitem__", launcher)


class CountedKernel:
    """A kernel that NVRTC would compile from CUDA source: each call counts as a launch, and allocates nothing."""

    def __init__(self, name: str, launches: Counter[str]) -> None:
        self._name, self._launches = name, launches

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._launches[self._name] += 1

    def set_shared_memory_config(self, size: int) -> None:
        pass


def no_other_ranks(module: str, *names: str) -> AbstractContextManager:
    """Refuse functions of a module that need the memory or the answers of other ranks, which do not exist."""

    def refused(name: str) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            raise located(NotAvailable(
                f"{module}.{name} needs other ranks, which the simulated GPU does not have; use "
                "torch.distributed's collectives, or lab.measure it"
            ))  # fmt: skip

        return call

    replaced: dict[str, Any] = {name: refused(name) for name in names}
    return mock.patch.multiple(module, **replaced)
