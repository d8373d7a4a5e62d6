"""Decomposition of composite operators, which have no kernel of their own; inference mode leaves that to the engine."""

from __future__ import annotations

from functools import cache
from typing import Any

from ...base.compat import DispatchKey, dispatch_has_kernel_for_dispatch_key

KEYS = DispatchKey


@cache
def is_composite(func: Any) -> bool:
    """Whether an operator has no kernel and is made of others, by C++ (func.decompose() also knows Python's).

    Three have both, silu_backward among them: what stands in for other devices is not what the card runs.
    """
    has_kernel = dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), KEYS.CompositeImplicitAutograd) and not has_kernel(func.name(), KEYS.CPU)


def decomposed(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run what the composite operator `func` is made of: with autograd's kernels, if a patch put it there."""
    patched = dispatch_has_kernel_for_dispatch_key(func.name(), KEYS.AutogradCPU)
    return func._op_dk(KEYS.AutogradCPU if patched else KEYS.CompositeImplicitAutograd, *args, **kwargs)
