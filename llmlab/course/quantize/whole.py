"""Quantizing a whole model: every linear layer but the head, calibrated on the inputs that the layer gets in the model.

T tokens, I inputs of a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor, nn

from ...base.errors import SpecError
from .formats.affine import Quantized

Model = TypeVar("Model", bound=nn.Module)
Method = Callable[[Tensor, "Tensor | None"], "Quantized | Tensor"]


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers by name, without the head (a tied one is the embedding), in the order they run."""
    modules = model.named_modules()
    return {name: layer for name, layer in modules if isinstance(layer, nn.Linear) and not name.endswith("lm_head")}


class _Enough(Exception):
    """Ends a forward pass in which nothing is left to see."""


@torch.no_grad()
def inputs_of(model: nn.Module, ids_BT: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the inputs (T, I) of the layers called `names` when `model` reads `ids_BT`, no further than to the last of
    them; the model is not changed."""
    inputs: dict[str, Tensor] = {}
    layers = {name: model.get_submodule(name) for name in names}

    def keep(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs[name] = args[0].detach().reshape(-1, args[0].shape[-1])
        if len(inputs) == len(layers):
            raise _Enough

    hooks = [layer.register_forward_pre_hook(partial(keep, name)) for name, layer in layers.items()]
    try:
        with suppress(_Enough):
            model(ids_BT)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


def quantize_model(model: Model, method: Method, ids_BT: Tensor | None = None) -> Model:
    """Return a copy whose linear layers have the weights that `method(weight, inputs)` restores, dequantized.

    With a calibration text `ids_BT` the blocks are quantized in order, each with the inputs that the quantized blocks
    before it produce, as in GPTQ (arXiv 2210.17323, section 4); without one, `inputs` is None. Raises SpecError for a
    model without linear layers besides its head. `model` is not changed.
    """
    copied = copy.deepcopy(model)
    layers = linears(copied)
    if not layers:
        raise SpecError(f"{type(model).__name__} has no linear layer besides a head: nothing to quantize")
    for _, block in groupby(layers, key=lambda name: name.split(".")[:2]):
        names = list(block)
        inputs = inputs_of(copied, ids_BT, names) if ids_BT is not None else {}
        for name in names:
            weight = layers[name].weight
            restored = method(weight.detach(), inputs.get(name))
            weight.data = (restored.dequantize() if isinstance(restored, Quantized) else restored).to(weight)
    return copied


def replace_linears(model: Model, make: Callable[[str, nn.Linear], nn.Module]) -> Model:
    """Return a copy with `make(name, layer)` in place of each linear layer but the head; `model` is not changed."""
    copied = copy.deepcopy(model)
    for name, linear in linears(copied).items():
        parent, _, last = name.rpartition(".")
        setattr(copied.get_submodule(parent), last, make(name, linear))
    return copied
