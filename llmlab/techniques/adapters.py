"""Bottleneck adapters: a small network with a skip after each sublayer of a frozen model (Houlsby et al., 1902.00751).

peft has none, and nothing merges them: they stay in the forward pass, two more products in series after each sublayer.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..base.errors import SpecError

AFTER = ("o_proj", "down_proj")  # the last linear of attention and of the MLP, before the sum with the residual stream


class Adapter(nn.Module):
    """`base`, frozen, and y + up(GELU(down(y))) on what it returns (section 2.1, figure 2)."""

    def __init__(self, base: nn.Linear, width: int) -> None:
        """`width` is the bottleneck's; `up` starts at zero, so that training starts from the model itself."""
        super().__init__()
        self.base = base.requires_grad_(False)
        like: dict[str, Any] = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.down = nn.Linear(base.out_features, width, **like)
        self.up = nn.Linear(width, base.out_features, **like)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y + self.up(F.gelu(self.down(y)))


def insert(model: nn.Module, width: int) -> nn.Module:
    """Freeze `model`, put an Adapter of `width` around every linear named in `AFTER`, and return it.

    Raises SpecError where there is none; the model is then unchanged.
    """
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise SpecError(f"width={width!r} of an adapter is not a whole number >= 1")
    found = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in AFTER and isinstance(module, nn.Linear)
    }
    if not found:
        raise SpecError(f"this model has no linear named {' or '.join(AFTER)}; adapters here are for Llama-like models")
    model.requires_grad_(False)
    for name, module in found.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Adapter(module, width))
    return model
