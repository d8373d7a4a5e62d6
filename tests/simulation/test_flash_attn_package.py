"""A script that imports flash-attn on a simulated GPU, where the package is not installed.

Allocations are those of the package's 2.8.4: flash_attn_interface.py, layers/rotary.py, ops/triton/layer_norm.py and
losses/cross_entropy.py.
"""

import importlib.util
import sys
import warnings

import pytest
import torch

import llmlab as lab
from llmlab.base.errors import LabWarning

pytestmark = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
B, T, H, D = 2, 128, 4, 64
HALF = torch.bfloat16
SMS = 108  # of an A100


def grown(card, function):
    """Return the result of a call, the bytes that stay allocated and the highest additional bytes during it."""
    held = card.allocated
    card.reset_peak()
    result = function()
    return result, card.allocated - held, card.peak_allocated - held


def test_rotary_embeddings_allocate_their_result_unless_they_are_in_place():
    with lab.simulator("A100-40GB") as card:
        from flash_attn.layers import rotary

        x = torch.randn(B, T, H, D, dtype=HALF, device="cuda", requires_grad=True)
        angles = torch.randn(T, D // 2, dtype=HALF, device="cuda")
        out, kept, _ = grown(card, lambda: rotary.apply_rotary_emb(x, angles, angles))
        assert out.shape == x.shape and kept == x.nbytes
        qkv = torch.randn(B, T, 3, H, D, dtype=HALF, device="cuda", requires_grad=True).mul(1)
        out, kept, _ = grown(card, lambda: rotary.apply_rotary_emb_qkv_(qkv, angles, angles))
        assert out.data_ptr() == qkv.data_ptr() and kept == 0
        (made,), kept, _ = grown(card, lambda: torch.autograd.grad(out, qkv, torch.empty_like(out)))
        assert kept == made.nbytes  # the gradient that was given is the one that returns


@pytest.mark.parametrize("residual", [False, True])
def test_norms_keep_a_statistic_a_row_and_sum_the_weights_gradient_in_parts(residual):
    with lab.simulator("A100-40GB") as card:
        from flash_attn.ops.triton.layer_norm import layer_norm_fn

        x, before = (torch.randn(B, T, H * D, dtype=HALF, device="cuda", requires_grad=True) for _ in range(2))
        weight = torch.ones(H * D, dtype=HALF, device="cuda", requires_grad=True)
        named = {"residual": before, "prenorm": True} if residual else {}
        out, kept, _ = grown(card, lambda: layer_norm_fn(x, weight, None, is_rms_norm=True, **named))
        assert kept == (2 if residual else 1) * x.nbytes + 4 * B * T
        outputs = out if residual else (out,)
        grads = [torch.empty_like(each) for each in outputs]
        wanted = (x, weight, before) if residual else (x, weight)
        made, kept, most = grown(card, lambda: torch.autograd.grad(outputs, wanted, grads))
        assert kept == x.nbytes + weight.nbytes - 4 * B * T  # the gradient of the residual is that of x
        assert most >= x.nbytes + 8 * SMS * H * D * 4 and len(made) == len(wanted)


def test_that_the_package_is_simulated_is_said_at_the_line_that_imports_it():
    with lab.simulator("A100-40GB"), pytest.warns(LabWarning, match="flash_attn is not installed") as warned:
        import flash_attn  # noqa: F401
    assert [each.filename for each in warned] == [__file__]


def test_a_library_that_asks_whether_the_package_is_installed_does_not_import_it():
    from transformers.utils.import_utils import _is_package_available

    with lab.simulator("A100-40GB"), warnings.catch_warnings():
        warnings.simplefilter("error")
        installed, _ = _is_package_available("flash_attn", return_version=True)
        assert not installed
        assert importlib.util.find_spec("flash_attn")


def test_the_modules_are_gone_after_the_block_and_others_are_not_found():
    with lab.simulator("A100-40GB"):
        import flash_attn.layers.rotary  # noqa: F401

        with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.modules"):
            import flash_attn.modules.mha  # noqa: F401
    assert importlib.util.find_spec("flash_attn") is None
    assert not [name for name in sys.modules if name.startswith("flash_attn")]
