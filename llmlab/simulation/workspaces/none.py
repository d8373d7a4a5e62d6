"""Operators that need no workspace, and a check whether an operator's allocations are fully known.

A view allocates nothing. An elementwise operator (torch.Tag.pointwise) is one kernel over a TensorIterator, which casts
while it reads. Every other known operator has a workspace function or is listed here, with the file in which its CUDA
kernel allocates nothing but its outputs (torch 2.13, aten/src/ATen/native). Any other operator may allocate more than
is counted, and a note in the report says so.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cache
from typing import Any

import torch

# These launch no kernel: they return a view (most schemas say so too), or uninitialized memory.
WITHOUT_KERNEL = frozenset((
    "aten::_unsafe_view", "aten::detach", "aten::lift_fresh", "aten::empty", "aten::empty_like", "aten::empty_strided",
    "aten::new_empty", "aten::new_empty_strided", "aten::_reshape_alias", "aten::alias", "aten::set_", "aten::resize_",
    "aten::_local_scalar_dense", "aten::is_pinned",
))  # fmt: skip


NO_WORKSPACE = {
    "cuda/Fill.cu": "fill_.Scalar fill_.Tensor zero_",
    "TensorFactories.cpp": (
        "arange arange.start arange.start_step full full_like new_full new_ones new_zeros ones ones_like scalar_tensor "
        "zeros zeros_like rand rand_like randn randn_like randint randint.low randint.low_out randint_like "
        "randint_like.low_dtype eye linspace polar"
    ),
    "TensorShape.cpp": (
        "repeat stack slice_backward select_backward diagonal_backward diagonal_copy t_ transpose_ unsafe_split.Tensor"
    ),
    "cuda/Shape.cu": "cat cat.out",
    "PadNd.cpp": "constant_pad_nd",
    "cuda/TensorTransformations.cu": "flip",
    "cuda/TriangularOps.cu": "tril triu tril_ triu_",
    "cuda/Indexing.cu": "index_select index_add index_add_ index_copy_",
    "Embedding.cpp": "embedding",
    "cuda/ScatterGatherKernel.cu": (
        "gather scatter.src scatter.value scatter_.src scatter_.value scatter_add scatter_add_"
    ),
    "cuda/IndexKernel.cu": "masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar masked_fill_.Tensor",
    "cuda/DistributionTemplates.h": "normal_ uniform_ exponential_ bernoulli_.float random_ random_.from",
    "cuda/BinaryDivFloorKernel.cu": "floor_divide floor_divide_.Tensor",
    "cuda/ActivationLogSigmoidKernel.cu": "log_sigmoid_backward",
    "Loss.cpp": "mse_loss_backward smooth_l1_loss_backward",
    "cuda/ActivationSoftplusKernel.cu": "softplus_backward",
    "cuda/ForeachUnaryOp.cu and its like, cuda/MultiTensorApply.cuh": (
        "_foreach_add.Scalar _foreach_add.List _foreach_add_.Scalar _foreach_add_.Tensor _foreach_add_.List "
        "_foreach_add_.ScalarList "
        "_foreach_addcdiv_.Scalar _foreach_addcdiv_.ScalarList _foreach_addcdiv_.Tensor _foreach_addcmul_.Scalar "
        "_foreach_addcmul_.ScalarList _foreach_copy_ _foreach_div.Scalar _foreach_div_.Scalar _foreach_div_.ScalarList "
        "_foreach_div_.List _foreach_lerp_.Scalar _foreach_maximum_.List _foreach_mul.Scalar _foreach_mul.ScalarList "
        "_foreach_mul_.Scalar _foreach_mul_.ScalarList _foreach_mul_.Tensor _foreach_mul_.List _foreach_neg "
        "_foreach_pow.ScalarAndTensor _foreach_reciprocal_ _foreach_sign _foreach_sqrt _foreach_sqrt_ "
        "_foreach_sub.Scalar _foreach_sub_.Scalar _foreach_sub_.List _foreach_zero_"
    ),
    "cuda/FusedAdamKernel.cu and its like": "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_",
    "transformers/cuda/flash_attn/flash_api.cpp": "_flash_attention_forward",  # mha_varlen_fwd splits no keys
    "cuda/AmpKernels.cu": "_amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_",
}
# Under torch.use_deterministic_algorithms they sort their indices (TensorAdvancedIndexing.cpp, cuda/Indexing.cu).
ELSE_SORTED = frozenset((
    "index_add", "index_add_", "index_copy_", "scatter.src", "scatter_.src", "scatter.value", "scatter_.value",
    "scatter_add", "scatter_add_",
))  # fmt: skip
_NO_WORKSPACE_NAMES = frozenset(name for names in NO_WORKSPACE.values() for name in names.split())


@cache
def is_view(func: Any) -> bool:
    """Return whether an operator returns the memory of its argument, or allocates memory without writing to it."""
    if func._schema.name in WITHOUT_KERNEL:
        return True
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


def has_known_workspace(func: Any, workspaces: Container[str]) -> bool:
    """Return whether all allocations of `func` are known; `workspaces` are the operators with a workspace function."""
    if func.name() in workspaces or func.namespace != "aten" or is_view(func):
        return True
    name = func.name().removeprefix("aten::")
    if name in ELSE_SORTED and torch.are_deterministic_algorithms_enabled():
        return False
    return torch.Tag.pointwise in func.tags or name in _NO_WORKSPACE_NAMES
