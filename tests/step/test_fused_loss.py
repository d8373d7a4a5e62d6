"""flash-attn's loss."""

import torch
from torch.nn import functional as F

from llmlab.simulation.patching.flash_attn import fake_fused_loss
from llmlab.step import fused_loss
from llmlab.step.fused_loss import causal_loss


def test_what_stands_for_flash_attns_loss_keeps_the_logits_and_returns_their_gradient():
    with fake_fused_loss():
        logits = torch.zeros(2, 8, 16, dtype=torch.bfloat16, requires_grad=True)
        loss = causal_loss(logits, torch.zeros(2, 8, dtype=torch.long), 16)
        assert loss.shape == () and loss.dtype == torch.float32
        loss.backward()
    assert logits.grad.dtype == torch.bfloat16 and logits.grad.shape == logits.shape


def test_each_position_is_asked_for_the_next_token(monkeypatch):
    monkeypatch.setattr(fused_loss, "cross_entropy", lambda: F.cross_entropy)
    logits, labels = torch.randn(2, 8, 16), torch.randint(16, (2, 8))
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert torch.allclose(causal_loss(logits, labels, 16), expected)
