"""Monkeypatch of torch.autocast: it applies CUDA's policies to fake tensors that torch believes to be on the CPU.

Every build of torch contains the autocast kernels of both devices (aten/src/ATen/autocast_mode.cpp), even a CPU wheel.
We learn CUDA's policies by running its kernels on tensors that consist of a dtype and a device only. A CPU kernel with
the same policy stays, as for matmuls; a CPU kernel without a counterpart on CUDA is removed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.compat import (
    AutoDispatchBelowAutograd,
    DisableTorchFunction,
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    disable_current_modes,
    dispatch_get_registrations_for_dispatch_key,
    tree_leaves,
    tree_map_only,
)

KEYS = DispatchKey
aten = torch.ops.aten

HALF, FP32, BY_DTYPE, WIDEST, REFUSED = "half", "fp32", "fp32 by the dtype argument", "widest", "refused"
# The error of CUDA for a dtype other than fp32 and that of autocast (autocast_mode.h, prioritize).
NO_WIDEST = "Unexpected floating ScalarType in at::autocast::prioritize"
# With this weight, the `linear` of patches.py returns its input: autocast has cast it by then, and caches the cast.
CAST_ONLY = torch.empty(0, dtype=torch.int64, device="cpu")


class Policy(NamedTuple):
    """How autocast casts an operator's tensors (autocast_mode.h, CastPolicy), and the operator it calls afterwards."""

    kind: str
    then: Any


@cache
def policies(device: str) -> dict[str, Policy]:
    """Return the policies of "cuda" or "cpu", by operator name, such as "aten::softmax.int"."""
    key = {"cuda": KEYS.AutocastCUDA, "cpu": KEYS.AutocastCPU}[device]
    names = dispatch_get_registrations_for_dispatch_key(key.name)
    make = lambda dtype: _Empty(dtype, device)  # noqa: E731
    with disable_current_modes(), DisableTorchFunction():
        return {name: _policy(operator(name), key, make, device) for name in names if name.startswith("aten::")}


def _policy(op: Any, key: Any, make: Callable[[torch.dtype], Tensor], device: str) -> Policy:
    half, wide = torch.get_autocast_dtype(device), torch.float32
    try:
        target, dtypes, requested = handed_on(op, key, make, [wide])
    except RuntimeError:
        return Policy(REFUSED, op)
    if requested == wide:
        return Policy(BY_DTYPE, target)
    if half in dtypes:
        return Policy(HALF, target)
    if wide in handed_on(op, key, make, [half])[1]:
        return Policy(FP32, target)
    return Policy(WIDEST, target)


class Reached(Exception):
    """The operator that a kernel of autocast calls, the dtypes of its tensors, and its dtype argument."""


def handed_on(op: Any, key: Any, make: Callable[[torch.dtype], Tensor], dtypes: list[torch.dtype]) -> tuple:
    """Return the operator that the kernel of `op` under `key` calls, the dtypes of its tensors, and its dtype argument.

    The kernel receives tensors of `dtypes`, the last of which repeats. The tensors come from `make`, and raise Reached.
    """
    tensors = (make(dtype) for dtype in chain(dtypes, repeat(dtypes[-1])))
    required = [argument for argument in op._schema.arguments if not argument.has_default_value()]
    try:
        with AutoDispatchBelowAutograd():  # a composite operator is not decomposed
            op._op_dk(key, *(_example(str(argument.type), tensors) for argument in required))
    except Reached as reached:
        return reached.args
    raise RuntimeError(f"autocast's kernel of {op} called no operator")


def _example(kind: str, tensors: Iterator[Tensor]) -> Any:
    if kind == "Tensor":
        return next(tensors)
    if kind == "List[Tensor]":
        return [next(tensors), next(tensors)]
    plain = {"int": 1, "number": 1, "float": 1.0, "bool": False, "str": "", "List[Optional[Tensor]]": [None]}
    return [1] if kind == "List[int]" else plain.get(kind)


class _Empty(Tensor):
    """A tensor that raises Reached at the first operator other than a cast."""

    @staticmethod
    def __new__(cls, dtype: torch.dtype, device: Any) -> Any:
        return Tensor._make_wrapper_subclass(cls, (1,), dtype=dtype, device=device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch annotates the base as a function that raises
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.to.dtype:
            return cls(args[1], args[0].device)
        raise reached(func, args, kwargs or {})


def reached(func: Any, args: tuple, kwargs: dict[str, Any]) -> Reached:
    """Return the exception that carries the result of `handed_on` for this operator call."""
    values = [*args, *kwargs.values()]
    dtypes = [leaf.dtype for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return Reached(func, dtypes, next((arg for arg in values if isinstance(arg, torch.dtype)), None))


def impl_cuda_autocast(library: torch.library.Library, on_gpu: Callable[[Tensor], bool]) -> None:
    """Register CUDA's policies in `library` for the tensors that are `on_gpu`."""
    cuda, cpu = policies("cuda"), policies("cpu")
    kernels = {name: _kernel(operator(name), cuda[name], on_gpu) for name in cuda if cpu.get(name) != cuda[name]}
    kernels |= dict.fromkeys(cpu.keys() - cuda.keys(), torch.library.fallthrough_kernel)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # about overridden kernels
        for name, kernel in kernels.items():
            library.impl(name.removeprefix("aten::"), kernel, "AutocastCPU")


def _kernel(op: Any, policy: Policy, on_gpu: Callable[[Tensor], bool]) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]
    # The dispatcher omits arguments that equal their default, but the operator called instead may lack that default.
    defaults = {
        argument.name: argument.default_value for argument in op._schema.arguments if argument.has_default_value()
    }

    def casts(tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dtype != torch.float64 and on_gpu(tensor)

    def wide(tensor: Tensor) -> Tensor:
        return tensor.float() if casts(tensor) else tensor

    def half(tensor: Tensor) -> Tensor:
        return aten.linear.default._op_dk(KEYS.AutocastCPU, tensor, CAST_ONLY) if casts(tensor) else tensor

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if policy.kind == BY_DTYPE:
            arguments = defaults | dict(zip(names, args, strict=False)) | kwargs
            with no_autocast():
                if arguments.get("dtype") is not None or not casts(arguments["self"]):
                    return op(*args, **kwargs)
                return policy.then(**{**arguments, "dtype": torch.float32})
        cast = half if policy.kind == HALF else wide
        dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and casts(leaf)}
        if policy.kind == REFUSED and dtypes:
            return op._op_dk(KEYS.AutocastCUDA, *args, **kwargs)
        if policy.kind == WIDEST and dtypes - {torch.float32, torch.get_autocast_dtype("cpu")}:
            raise RuntimeError(NO_WIDEST)
        if policy.kind != WIDEST or torch.float32 in dtypes:
            args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
        with no_autocast():
            return op(*args, **kwargs)

    return kernel


def operator(name: str) -> Any:
    """Return the operator of a name such as "aten::softmax.int"; a name without a dot means the default overload."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(aten, packet), overload or "default")


@contextmanager
def no_autocast() -> Iterator[None]:
    """Run the block below autocast, as the kernels of autocast do."""
    keys = DispatchKeySet(DispatchKey.AutocastCPU)
    with ExcludeDispatchKeyGuard(keys):
        yield
