"""Bottleneck adapters: a small residual MLP after each sublayer of a frozen model (Houlsby et al., arXiv 1902.00751).

The peft library has no such adapters. They cannot be merged into the weights: the forward pass keeps two more matrix
products, one after the other, behind each sublayer.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..base.errors import SpecError, check_counts

AFTER = ("o_proj", "down_proj")  # the last linear layers of attention and of the MLP, before the residual addition


class Adapter(nn.Module):
    """The frozen linear layer `base`, and y + up(GELU(down(y))) on its output y (section 2.1, figure 2)."""

    def __init__(self, base: nn.Linear, width: int) -> None:
        """`width` is the size of the bottleneck; `up` starts at zero, so training starts from the unchanged model."""
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
    """Freeze `model`, wrap every linear layer named in `AFTER` in an Adapter of `width`, and return the model.

    Raises SpecError, and changes nothing, if the model has no such layer or `width` is below 1.
    """
    check_counts(width=width)
    linears = {
        name: module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in AFTER and isinstance(module, nn.Linear)
    }
    if not linears:
        raise SpecError(f"this model has no linear named {' or '.join(AFTER)}; adapters here are for Llama-like models")
    model.requires_grad_(False)
    for name, linear in linears.items():
        model.set_submodule(name, Adapter(linear, width))
    return model
