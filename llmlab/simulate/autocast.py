"""torch.autocast as on CUDA, for fake tensors that are CPU tensors to torch: CUDA's lists of operators in CPU's place.

Both devices cast the same matrix products down, with the same cache of cast weights. They differ in what is kept in
fp32: softmax, norms, powers, exponentials and sums are on CUDA's list and not on the CPU's. The lists follow
aten/src/ATen/autocast_mode.h (torch 2.13), the operators that language models do not have left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

# AT_FORALL_FP32: inputs are cast up.
FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "group_norm",
    "cosine_similarity", "nll_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "binary_cross_entropy_with_logits", "dist", "cdist", "renorm", "logsumexp",
)  # fmt: skip
# AT_FORALL_FP32_SET_OPT_DTYPE: computed in fp32 by the dtype argument, so that no cast-up input is written.
FP32_BY_DTYPE = (
    "softmax.int",
    "log_softmax.int",
    "cumsum",
    "cumprod",
    "sum",
    "sum.dim_IntList",
    "prod",
    "prod.dim_int",
)
# AT_FORALL_PROMOTE: inputs are cast to the widest among them.
WIDEST = ("addcdiv", "addcmul", "atan2", "dot", "index_put", "scatter_add")


def impl_cuda_autocast(library: torch.library.Library, on_card: Callable[[Tensor], bool]) -> None:
    """Register CUDA's policies in `library` for the tensors that are `on_card`."""

    def register(name: str, kernel: Callable[..., Any]) -> None:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(operator(name).name(), "AutocastCPU"):
            library.impl(name, kernel, "AutocastCPU")
        # else the CPU has a policy for it, and that is the same: fp32

    def up(op: Any, dtype_of: Callable[..., torch.dtype]) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with no_autocast():
                dtype = dtype_of(args)
                cast = lambda each: each.to(dtype) if _casts(each) and on_card(each) else each  # noqa: E731
                args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
                return op(*args, **kwargs)

        return kernel

    def by_dtype(op: Any) -> Callable[..., Any]:
        names = [argument.name for argument in op._schema.arguments]

        def kernel(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            with no_autocast():
                if given.get("dtype") is None and _casts(given["self"]) and on_card(given["self"]):
                    given["dtype"] = torch.float32
                return op(**given)

        return kernel

    for name in FP32:
        register(name, up(operator(name), lambda args: torch.float32))
    for name in FP32_BY_DTYPE:
        register(name, by_dtype(operator(name)))
    for name in WIDEST:
        register(name, up(operator(name), _widest))


def _casts(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64


def _widest(args: tuple) -> torch.dtype:
    dtypes = [each.dtype for each in torch.utils._pytree.tree_leaves(args) if _casts(each)]
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cpu")


def operator(name: str) -> Any:
    """Return the operator that a name such as "softmax.int" means; without a dot it is the default overload."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


@contextmanager
def no_autocast() -> Iterator[None]:
    """Run what is inside below autocast, as its own kernels do."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        yield
