"""The states of each optimizer."""

import torch
from torch import nn

from llmlab.step.optimizer import build_optimizer


def test_state_bytes_a_parameter():
    weight = nn.Parameter(torch.zeros(128, 256))
    bytes_of = {}
    for name in ("sgd", "adamw", "adamw-fused", "adamw-8bit", "adafactor", "lion"):
        weight.grad = torch.ones_like(weight)
        optimizer = build_optimizer(name, [weight])
        optimizer.step()
        state = optimizer.state[weight].values() if optimizer.state else []
        bytes_of[name] = sum(v.nbytes for v in state if isinstance(v, torch.Tensor) and v.numel() > 1)
    n, code_books = 128 * 256, 2 * 256 * 4
    assert bytes_of["sgd"] == 0
    assert bytes_of["adamw"] == bytes_of["adamw-fused"] == 8 * n
    assert bytes_of["lion"] == 4 * n
    assert bytes_of["adafactor"] == 4 * (128 + 256)
    assert bytes_of["adamw-8bit"] == 2 * (n + 4 * n // 256) + code_books
