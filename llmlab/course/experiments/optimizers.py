"""Small experiments on optimizers: weight decay under noise, and 8-bit states next to an outlier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def decayed(rule: Callable[..., Optimizer], noise: Sequence[float], lr: float, decay: float, steps: int) -> list[float]:
    """Return the mean of 500 weights after `steps` steps, for each size of their gradients; all weights start at 1.

    The gradients are random with mean 0, so that only the weight decay has a direction.
    """
    torch.manual_seed(0)
    w = nn.Parameter(torch.ones(len(noise), 500))
    optimizer = rule([w], lr=lr, weight_decay=decay)
    for _ in range(steps):
        w.grad = torch.randn_like(w) * torch.tensor(noise)[:, None]
        optimizer.step()
    return w.detach().mean(1).tolist()


def update_beside(ratio: float, rule: Callable[..., Optimizer], where: slice = slice(1, 256), **kwargs: Any) -> float:
    """Return the typical update of the weights `where`, divided by the learning rate, next to one with large gradients.

    The first of 512 weights has gradients that are `ratio` times as large. The result is the root mean square of the
    last 50 of 150 updates.
    """
    generator, w = torch.Generator().manual_seed(0), nn.Parameter(torch.zeros(512))
    optimizer, squares = rule([w], lr=1.0, weight_decay=0.0, **kwargs), torch.zeros(512)
    for step in range(150):
        w.grad = torch.randn(512, generator=generator)
        w.grad[0] *= ratio
        before = w.detach().clone()
        optimizer.step()
        if step >= 100:
            squares += (w.detach() - before) ** 2 / 50
    return squares[where].mean().sqrt().item()
