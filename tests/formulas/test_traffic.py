"""Bytes that the operators of transformers' RMSNorm move, counted as torch runs them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from llmlab.formulas.time.traffic import cast, rmsnorm, transposed_norm


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write, and those among transposed tensors; views are free."""

    bytes = transposed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func._schema.name not in ("aten::detach", "aten::_unsafe_view"):
            for each in tree_leaves((args, kwargs, out)):
                if torch.is_tensor(each):
                    size = min(each.nbytes, each.untyped_storage().nbytes())  # what is expanded is read once
                    self.bytes += size
                    self.transposed += 0 if each.is_contiguous() else size
        return out


def counted(dtype, trained=True, across=False):
    """Return the bytes per element forward and backward, and those of transposed tensors backward."""
    norm = LlamaRMSNorm(256).to(dtype).requires_grad_(trained)
    x = torch.randn(64, 32, 256, dtype=dtype, requires_grad=True)
    with Traffic() as forward:
        out = norm(x)
    grad = torch.ones_like(out.transpose(0, 1).contiguous()).transpose(0, 1) if across else torch.ones_like(out)
    with Traffic() as backward:
        out.backward(grad)
    return [size / x.numel() for size in (forward.bytes, backward.bytes, backward.transposed)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained", [True, False])
def test_rmsnorm_as_transformers_writes_it_out(dtype, trained):
    forward, backward, _ = counted(dtype, trained)
    assert rmsnorm(dtype.itemsize, trained) == (pytest.approx(forward, abs=0.5), pytest.approx(backward, abs=0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transposed_gradient_makes_others_transposed(dtype):
    assert transposed_norm(dtype.itemsize) == pytest.approx(counted(dtype, across=True)[2], rel=0.15)


def test_a_cast_reads_one_dtype_and_writes_the_other():
    assert (cast(2, 4), cast(4, 2), cast(4, 4)) == (6, 6, 0)
