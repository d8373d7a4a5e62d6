"""Optimizers from scratch: SGD with momentum and Nesterov, Adam, AdamW, Lion, Adafactor, each tested against a library.

    w  a parameter     g  its gradient     m, v  first and second moment     t  the step, from 1
    β1, β2  decay rates of the moments     λ  weight decay     lr  learning rate

Each is a torch optimizer, so schedulers, gradient scalers and `lab.simulator` accept it. 8-bit Adam is in
`optimizers_8bit.py`; clipping and schedules are in `learning_rate.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Rule(torch.optim.Optimizer):
    """Calls `update` for each parameter that has a gradient. Each subclass implements one update rule.

    The first step creates the states with `zeros_like`, which gives them the parameter's dtype.
    """

    def __init__(self, parameters: Iterable[Tensor], **settings: Any) -> None:
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter once; return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is not None:
                    state = self.state[w]
                    state["step"] = state.get("step", 0) + 1
                    self.update(w, w.grad, state, group)
        return loss

    def update(self, w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


def moment(state: dict[str, Any], name: str, like: Tensor) -> Tensor:
    """Return the state `name`, which is zeros in the shape of `like` before its first update."""
    if name not in state:
        state[name] = torch.zeros_like(like)
    return state[name]


class SGD(Rule):
    """v ← momentum · v + g;  w ← w − lr · v, or with Nesterov's look ahead w ← w − lr · (g + momentum · v).

    Without momentum there is no v. The first v is g, with no factor (torch/optim/sgd.py).
    """

    def __init__(self, parameters, lr: float, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0):
        super().__init__(parameters, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)

    def update(self, w, g, state, group):
        if group["weight_decay"]:
            g = g + group["weight_decay"] * w  # L2: the gradient of λ/2 · w²
        if group["momentum"]:
            v = moment(state, "v", w).mul_(group["momentum"]).add_(g)
            g = g + group["momentum"] * v if group["nesterov"] else v
        w.add_(g, alpha=-group["lr"])


class Adam(Rule):
    """m̂ / (√v̂ + ε): the mean gradient over its root mean square (Kingma and Ba, arXiv 1412.6980, algorithm 1).

    `weight_decay` is L2: λw is added to the gradient, so it is divided by √v̂ too. AdamW changes that.
    """

    decoupled = False

    def __init__(self, parameters, lr: float, betas=(0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0):
        super().__init__(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def update(self, w, g, state, group):
        lr, (beta1, beta2), t = group["lr"], group["betas"], state["step"]
        if self.decoupled:
            w.mul_(1 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            g = g + group["weight_decay"] * w
        m = moment(state, "m", w).mul_(beta1).add_(g, alpha=1 - beta1)
        v = moment(state, "v", w).mul_(beta2).addcmul_(g, g, value=1 - beta2)
        # Both start at zero: after t steps their weights add up to 1 − βᵗ, and dividing by that makes them means.
        mean, mean_square = m / (1 - beta1**t), v / (1 - beta2**t)
        w.sub_(lr * mean / (mean_square.sqrt() + group["eps"]))


class AdamW(Adam):
    """Adam with a separate decay, w ← (1 − lr · λ) w (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2).

    The decay does not pass through the moments, so every weight shrinks at the same rate.
    """

    decoupled = True

    def __init__(self, parameters, lr: float, betas=(0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01):
        super().__init__(parameters, lr, betas, eps, weight_decay)


class Lion(Rule):
    """w ← (1 − lr · λ) w − lr · sign(β1 · m + (1 − β1) · g); then m ← β2 · m + (1 − β2) · g.

    One moment. Every weight moves by lr, so lr is 3–10 times smaller than Adam's (Chen et al., arXiv 2302.06675,
    algorithm 2 and section 5).
    """

    def __init__(self, parameters, lr: float, betas=(0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(parameters, lr=lr, betas=betas, weight_decay=weight_decay)

    def update(self, w, g, state, group):
        lr, (beta1, beta2) = group["lr"], group["betas"]
        w.mul_(1 - lr * group["weight_decay"])
        m = moment(state, "m", w)
        w.add_(m.mul(beta1).add(g, alpha=1 - beta1).sign(), alpha=-lr)
        m.mul_(beta2).add_(g, alpha=1 - beta2)


class Adafactor(Rule):
    """Adam without m, and with the row means and column means of v instead of v itself.

    Shazeer and Stern, arXiv 1804.04235, algorithm 4, without a first moment. The learning rate, at most 1 / √t, is
    multiplied by the root mean square of the tensor's weights (at least `eps2`). An update whose root mean square is
    above 1 is scaled down to 1. β2 is 1 − t^`decay`, which grows towards 1. `eps1` is the smallest root of v; None is
    the machine epsilon of the dtype, as in torch/optim/_adafactor.py.
    """

    def __init__(self, parameters, lr: float = 1e-2, decay: float = -0.8, eps1: float | None = None, eps2=1e-3):
        super().__init__(parameters, lr=lr, decay=decay, eps1=eps1, eps2=eps2)

    def update(self, w, g, state, group):
        t = state["step"]
        new = t ** group["decay"]  # 1 − β2: the share of the newest gradient
        eps1 = torch.finfo(w.dtype).eps if group["eps1"] is None else group["eps1"]
        if w.dim() > 1:
            rows = moment(state, "rows", g[..., :1])  # (..., R, 1)
            columns = moment(state, "columns", g[..., :1, :])  # (..., 1, C)
            rows.lerp_(g.square().mean(-1, keepdim=True), new)
            columns.lerp_(g.square().mean(-2, keepdim=True), new)
            v = rows @ columns / rows.mean(-2, keepdim=True).clamp(min=eps1)  # (..., R, C): of rank 1
        else:
            v = moment(state, "v", w).lerp_(g.square(), new)
        step = g / v.clamp(min=eps1**2).sqrt()
        step = step / max(1.0, root_mean_square(step))
        w.sub_(self.step_size(w, t, group) * step)

    def step_size(self, w, t, group):
        return min(group["lr"], 1 / math.sqrt(t)) * max(group["eps2"], root_mean_square(w))


def root_mean_square(x: Tensor) -> float:
    """Return √(mean of x²)."""
    return x.norm().item() / math.sqrt(x.numel())
