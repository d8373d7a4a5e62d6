"""Where Liger's kernels run in Triton's interpreter, ours agree: cross entropy, also fused with the linear, RoPE."""

import sys

import pytest
import torch

import llmlab.course.kernels as kernels

if sys.platform != "linux":
    pytest.skip("Liger needs Triton, which has wheels for Linux alone", allow_module_level=True)

from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
from liger_kernel.ops.rope import LigerRopeFunction

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TARGETS = torch.tensor([3, -100, 0, 36, 5], device=DEVICE)


def leaves(*shapes):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]
    return tuple([value.clone().requires_grad_() for value in values] for _ in range(2))


def assert_same(ours, theirs, our_leaves, their_leaves):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.autograd.backward(ours, torch.ones_like(ours))
    torch.autograd.backward(theirs, torch.ones_like(theirs))
    for a, b in zip(our_leaves, their_leaves, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_cross_entropy():
    (ours,), (theirs,) = leaves((5, 37))
    wanted = LigerCrossEntropyFunction.apply(theirs * 1, TARGETS, None)[0]  # it overwrites its logits
    assert_same(kernels.cross_entropy(ours, TARGETS, rung=4), wanted, [ours], [theirs])


def test_linear_cross_entropy():
    (hidden, weight), (their_hidden, their_weight) = leaves((5, 16), (37, 16))
    wanted = LigerFusedLinearCrossEntropyFunction.apply(their_hidden, their_weight, TARGETS)[0]
    ours = kernels.linear_cross_entropy(hidden, weight, TARGETS, rung=4, chunk=2)
    assert_same(ours, wanted, [hidden, weight], [their_hidden, their_weight])


def test_rope():
    (q, k), (their_q, their_k) = leaves((2, 4, 5, 8), (2, 2, 5, 8))
    angle = torch.arange(20.0, device=DEVICE).view(1, 5, 4).repeat(1, 1, 2)  # both halves alike, as Llama's are
    wanted = torch.cat(LigerRopeFunction.apply(their_q * 1, their_k * 1, angle.cos(), angle.sin()), 1)
    ours = torch.cat(kernels.rope(q, k, angle.cos(), angle.sin(), rung=4), 1)
    assert_same(ours, wanted, [q, k], [their_q, their_k])


# ---------------------------------------------------------------- Hugging Face models
