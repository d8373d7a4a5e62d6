"""Facts about the functions that the page on post-training asks for."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def _near(f, policy: list[float], reference: list[float], beta: float, expected: float) -> bool:
    loss = f(torch.tensor(policy), torch.tensor(reference), beta)
    return torch.allclose(loss, torch.tensor(expected), atol=1e-5)


def _gradients(f) -> bool:
    """Return whether the loss raises the chosen answer, lowers the rejected one, and reaches no reference."""
    policy, reference = (torch.zeros(2, requires_grad=True) for _ in range(2))
    f(policy, reference.detach(), 0.5).backward()
    return bool(policy.grad is not None and policy.grad[0] < 0 < policy.grad[1])


dpo_loss = {
    "a policy equal to its reference: log 2": lambda f: _near(f, [-9.0, -5.0], [-9.0, -5.0], 0.1, math.log(2)),
    "only the differences to the reference count": lambda f: _near(
        f, [-9.0, -5.0], [-11.0, -4.0], 0.1, -float(F.logsigmoid(torch.tensor(0.3)))
    ),
    "the first half of the batch is chosen": lambda f: _near(
        f, [-1.0, -2.0, -4.0, -4.0], [-2.0, -2.0, -2.0, -5.0], 1.0,
        -float(F.logsigmoid(torch.tensor([3.0, -1.0])).mean()),
    ),
    "its gradient raises the chosen answer and lowers the rejected one": _gradients,
}  # fmt: skip
