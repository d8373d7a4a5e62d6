"""Functions of flash-attn on fake tensors."""

import importlib.util

import pytest
import torch

import llmlab as lab

pytestmark = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")

B, T, H, D = 2, 128, 4, 64
HALF = torch.bfloat16


def grown(card, function):
    """Return the result of a call, the bytes that stay allocated and the highest additional bytes during it."""
    held = card.allocated
    card.reset_peak()
    result = function()
    return result, card.allocated - held, card.peak_allocated - held


@pytest.mark.parametrize("packed", [1, 2])
def test_a_packed_gradient_is_one_tensor_of_the_same_bytes(packed):
    with lab.simulator("A100-40GB") as card:
        import flash_attn

        functions = {1: flash_attn.flash_attn_qkvpacked_func, 2: flash_attn.flash_attn_kvpacked_func}
        shapes = {1: [(B, T, 3, H, D)], 2: [(B, T, H, D), (B, T, 2, H, D)]}
        given = [torch.randn(s, dtype=HALF, device="cuda", requires_grad=True) for s in shapes[packed]]
        out, kept, _ = grown(card, lambda: functions[packed](*given, causal=True))
        assert out.shape == (B, T, H, D) and kept == out.nbytes + 4 * B * H * T + 512
        grad = torch.empty_like(out)
        made, kept, most = grown(card, lambda: torch.autograd.grad(out, given, grad))
        inputs, freed = sum(each.nbytes for each in given), 4 * B * H * T + 512
        assert [each.shape for each in made] == [each.shape for each in given] and kept == inputs - freed
        assert most == inputs + 4 * B * H * T + 4 * B * H * T * D


def test_packed_sequences_without_padding():
    with lab.simulator("A100-40GB"):
        from flash_attn import flash_attn_varlen_qkvpacked_func
        from flash_attn.bert_padding import pad_input, unpad_input

        mask = torch.ones(B, T, dtype=torch.int64)
        mask[0, 100:] = 0
        hidden = torch.randn(B, T, 3 * H * D, dtype=HALF, device="cuda", requires_grad=True)
        tokens, indices, starts, longest, lengths = unpad_input(hidden, mask.cuda())
        assert tokens.shape == (100 + T, 3 * H * D) and longest == T and lengths.shape == (B,)
        out = flash_attn_varlen_qkvpacked_func(tokens.view(-1, 3, H, D), starts, longest)
        padded = pad_input(out.flatten(1), indices, B, T)
        assert padded.shape == (B, T, H * D)
        padded.sum().backward()
        assert hidden.grad.shape == hidden.shape


def test_the_loss_can_write_its_gradient_over_the_logits():
    with lab.simulator("A100-40GB") as card:
        from flash_attn.losses.cross_entropy import CrossEntropyLoss

        labels = torch.zeros(64, dtype=torch.int64, device="cuda")
        most = {}
        for in_place in (False, True):
            logits = torch.randn(64, 1 << 14, dtype=HALF, device="cuda", requires_grad=True).mul(2)
            loss = CrossEntropyLoss(inplace_backward=in_place)(logits, labels)
            _, _, most[in_place] = grown(card, loss.backward)
        assert most[False] - most[True] == logits.nbytes
