"""Gradient clipping and learning-rate schedules from scratch.

A schedule maps the step, counted from 0, to a factor of the peak learning rate:
`torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, 100, 1000))`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scale all gradients by one factor so that their joint norm is at most `limit`; return the norm before.

    One factor for all parameters keeps the direction of the gradient (Pascanu et al., arXiv 1211.5063, algorithm 1).
    """
    gradients = [w.grad for w in parameters if w.grad is not None]
    norm = torch.stack([g.float().norm() for g in gradients]).norm()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch/nn/utils/clip_grad.py: the norm may be 0
    for g in gradients:
        g.mul_(factor)
    return norm


def warmup_cosine(step: int, warmup: int, total: int, least: float = 0.0) -> float:
    """Return a factor: linear from 0 to 1 over `warmup` steps, then half a cosine down to `least` at step `total`.

    Loshchilov and Hutter, arXiv 1608.03983, equation 5, without restarts.
    """
    if step < warmup:
        return step / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * progress))


def warmup_stable_decay(step: int, warmup: int, stable: int, decay: int, least: float = 0.0) -> float:
    """Return a factor: linear from `least` to 1 in `warmup` steps, 1 for `stable`, linear to `least` in `decay` steps.

    WSD (Hu et al., arXiv 2404.06395, section 4). The length of the run can be decided when the decay begins.
    """
    if step < warmup:
        return least + (1 - least) * step / warmup
    progress = min(1.0, max(0, step - warmup - stable) / max(1, decay))
    return 1 - (1 - least) * progress
