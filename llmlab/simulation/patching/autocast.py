"""Monkeypatch of torch.autocast: CUDA's policies in place of the CPU's, for fake tensors that torch takes for a CPU's.

Every build of torch has the autocast kernels of both devices (aten/src/ATen/autocast_mode.cpp), a CPU wheel too. What
CUDA's do with an operator's arguments is seen by running them on tensors that are nothing but a dtype and a device.
Where the CPU's do the same, as for matrix products, they stay; where CUDA has none, the CPU's is taken away.
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
# What CUDA does with tensors of another dtype than its own and fp32 (autocast_mode.h, prioritize).
NO_WIDEST = "Unexpected floating ScalarType in at::autocast::prioritize"
# With this operand `linear`, as patches.py has it, gives back its input: autocast's cast of it, which autocast keeps.
CAST_ONLY = torch.empty(0, dtype=torch.int64, device="cpu")


class Policy(NamedTuple):
    """What autocast does with an operator's tensors (autocast_mode.h, CastPolicy), and the operator it then calls."""

    kind: str
    then: Any


@cache
def policies(device: str) -> dict[str, Policy]:
    """Return the policies of "cuda" or "cpu", by the name of the operator, as in "aten::softmax.int"."""
    key = {"cuda": KEYS.AutocastCUDA, "cpu": KEYS.AutocastCPU}[device]
    names = dispatch_get_registrations_for_dispatch_key(key.name)
    make = lambda dtype: _Empty(dtype, device)  # noqa: E731
    with disable_current_modes(), DisableTorchFunction():
        return {name: _policy(operator(name), key, make, device) for name in names if name.startswith("aten::")}


def _policy(op: Any, key: Any, make: Callable[[torch.dtype], Tensor], device: str) -> Policy:
    half, wide = torch.get_autocast_dtype(device), torch.float32
    try:
        then, dtypes, asked = handed_on(op, key, make, [wide])
    except RuntimeError:
        return Policy(REFUSED, op)
    if asked == wide:
        return Policy(BY_DTYPE, then)
    if half in dtypes:
        return Policy(HALF, then)
    if wide in handed_on(op, key, make, [half])[1]:
        return Policy(FP32, then)
    return Policy(WIDEST, then)


class Reached(Exception):
    """The operator that a kernel of autocast calls, the dtypes of its tensors, and its dtype argument."""


def handed_on(op: Any, key: Any, make: Callable[[torch.dtype], Tensor], dtypes: list[torch.dtype]) -> tuple:
    """Return what the kernel of `op` under `key` calls, given tensors of `dtypes`, the last of which repeats.

    The operator, the dtypes of its tensors, its dtype argument: `make`'s tensors raise Reached with them.
    """
    tensors = (make(dtype) for dtype in chain(dtypes, repeat(dtypes[-1])))
    needed = [argument for argument in op._schema.arguments if not argument.has_default_value()]
    try:
        with AutoDispatchBelowAutograd():  # composite operators come in one piece
            op._op_dk(key, *(_example(str(argument.type), tensors) for argument in needed))
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
    """A tensor for which the first operator that is no cast raises Reached."""

    @staticmethod
    def __new__(cls, dtype: torch.dtype, device: Any) -> Any:
        return Tensor._make_wrapper_subclass(cls, (1,), dtype=dtype, device=device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch types it as the function that refuses
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.to.dtype:
            return cls(args[1], args[0].device)
        raise reached(func, args, kwargs or {})


def reached(func: Any, args: tuple, kwargs: dict[str, Any]) -> Reached:
    """Return the exception that says of an operator what `handed_on` returns."""
    given = [*args, *kwargs.values()]
    dtypes = [leaf.dtype for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    return Reached(func, dtypes, next((arg for arg in given if isinstance(arg, torch.dtype)), None))


def impl_cuda_autocast(library: torch.library.Library, on_card: Callable[[Tensor], bool]) -> None:
    """Register CUDA's policies in `library` for the tensors that are `on_card`."""
    cuda, cpu = policies("cuda"), policies("cpu")
    kernels = {name: _kernel(operator(name), cuda[name], on_card) for name in cuda if cpu.get(name) != cuda[name]}
    kernels |= dict.fromkeys(cpu.keys() - cuda.keys(), torch.library.fallthrough_kernel)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that kernels are overridden
        for name, kernel in kernels.items():
            library.impl(name.removeprefix("aten::"), kernel, "AutocastCPU")


def _kernel(op: Any, policy: Policy, on_card: Callable[[Tensor], bool]) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]
    # The dispatcher leaves out arguments that have their default, which the operator called instead may not have.
    defaults = {
        argument.name: argument.default_value for argument in op._schema.arguments if argument.has_default_value()
    }

    def casts(tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dtype != torch.float64 and on_card(tensor)

    def wide(tensor: Tensor) -> Tensor:
        return tensor.float() if casts(tensor) else tensor

    def half(tensor: Tensor) -> Tensor:
        return aten.linear.default._op_dk(KEYS.AutocastCPU, tensor, CAST_ONLY) if casts(tensor) else tensor

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if policy.kind == BY_DTYPE:
            given = defaults | dict(zip(names, args, strict=False)) | kwargs
            with no_autocast():
                if given.get("dtype") is not None or not casts(given["self"]):
                    return op(*args, **kwargs)
                return policy.then(**{**given, "dtype": torch.float32})
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
    """Return the operator that a name such as "aten::softmax.int" means; without a dot it is the default overload."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(aten, packet), overload or "default")


@contextmanager
def no_autocast() -> Iterator[None]:
    """Run what is inside below autocast, as its own kernels do."""
    keys = DispatchKeySet(DispatchKey.AutocastCPU)
    with ExcludeDispatchKeyGuard(keys):
        yield
