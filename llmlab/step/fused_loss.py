"""The loss by flash-attn's CrossEntropyLoss, which reads half logits as they are; transformers' makes fp32 copies.

llm-foundry's MPT, TinyLlama and others train with it. What is kept of logits (rows, V) is themselves and a log-sum-exp
for each row; backward writes their gradient beside them (flash_attn/ops/triton/cross_entropy.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..base.compat import symbol

IGNORED = -100  # a label that counts for nothing


def cross_entropy() -> Callable[[Tensor, Tensor], Tensor]:
    """Return flash-attn's loss of logits (rows, V) and labels (rows,); `simulate` has one of its own in its place."""
    loss: Callable[[Tensor, Tensor], Tensor] = symbol("flash_attn.losses.cross_entropy.CrossEntropyLoss")()
    return loss


def causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Return the mean loss of logits (B, T, V) whose labels (B, T) are shifted by one; for `model.loss_function`."""
    shifted = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return cross_entropy()(logits.view(-1, vocab_size), shifted.view(-1))
