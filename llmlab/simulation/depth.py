"""Divides a model's layers into a beginning and a group that repeats, and builds the same model with fewer groups.

Layers are compared on the meta device. Two layers are equal if the names, types, parameter shapes and settings of their
modules are (a window's length, for example). A model with fewer layers must have the same layers in the same order.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import nn

from ..base.errors import NotAvailable, SpecError
from ..specs.generic import families, text_config
from ..specs.model import ModelSpec
from ..specs.run import Training
from ..step.model import on_meta

COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
          "num_decoder_layers")  # fmt: skip
Signature = tuple[Any, ...]


@dataclass(frozen=True)
class Depth:
    """A model's `layers`: the `first` ones do not repeat, the others are groups of `period` layers (0: none repeat).

    With `least` layers, the model has a first and a last group, and its last layers equal those of the whole model.
    `stacks` are the paths of the module lists that hold the layers; an encoder and a decoder have one each.
    """

    layers: int
    first: int
    period: int
    least: int
    stacks: tuple[str, ...]

    @property
    def groups(self) -> int:
        """The number of groups that the model has in addition to its `least` layers."""
        return (self.layers - self.least) // self.period if self.period else 0

    def begun_after(self, groups: int) -> Depth:
        """Return this depth with `groups` more groups among the `least` layers; if no further group is left, a depth
        in which no layers repeat.

        >>> Depth(32, 0, 1, 2, ()).begun_after(2).least, Depth(4, 0, 1, 2, ()).begun_after(2).period
        (4, 0)
        """
        if self.groups <= groups:
            return replace(self, first=0, period=0, least=self.layers)
        return replace(self, least=self.least + groups * self.period)

    def deeper(self, path: str) -> str:
        """Return the new path of the module at `path` after one more group is inserted in the middle of the model with
        the `least` layers.

        >>> Depth(32, 0, 1, 2, ("model.layers",)).deeper("model.layers.1.mlp")
        'model.layers.2.mlp'
        """
        half = self.first + self.period * ((self.least - self.first) // self.period // 2) if self.period else 0
        for stack in self.stacks if self.period else ():
            match = re.search(rf"(^|\.){re.escape(stack)}\.(\d+)", path)
            if match and int(match[2]) >= half:
                return f"{path[: match.start(2)]}{int(match[2]) + self.period}{path[match.end(2) :]}"
        return path


@lru_cache(maxsize=64)
def depth_of(spec: ModelSpec) -> Depth:
    """Return which layers of `spec` repeat."""
    stacks = _stacks(spec)
    lengths = {len(layers) for layers in stacks.values()}
    if len(lengths) != 1:
        return Depth(spec.layers, 0, 0, spec.layers, tuple(stacks))
    columns = list(zip(*stacks.values(), strict=True))
    count = len(columns)
    for length in range(2 + _deepstack(spec), count):  # layers of the beginning and of two groups
        for period in range(1, length // 2 + 1):
            first = length - 2 * period
            least = length + (count - length) % period
            repeats = all(columns[i] == columns[i + period] for i in range(first, count - period))
            if repeats and least + period <= count and _has(spec, least, columns):
                return Depth(count, first, period, least, tuple(stacks))
    return Depth(count, 0, 0, count, tuple(stacks))


def _deepstack(spec: ModelSpec) -> int:
    """Return the number of first layers in which features of the vision tower are added to the text, as in Qwen3-VL."""
    vision = spec.config.get("vision_config") or {}
    known = 3 if spec.family.startswith("qwen3_vl") else 0
    return len(vision.get("deepstack_visual_indexes", range(known)))


def with_layers(spec: ModelSpec, layers: int) -> ModelSpec:
    """Return `spec` with only its first `layers` layers; with an encoder and a decoder, of each."""
    config = spec.config
    text = dict(text_config(config))
    known = families().get(text["model_type"], {})
    whole = {**known.get("sizes", {}), **text}
    names = {*COUNTS, known.get("names", {}).get("num_hidden_layers", "num_hidden_layers")}
    counts = {name: whole[name] for name in names if isinstance(whole.get(name), int)}
    text |= dict.fromkeys(counts, layers)
    for name, value in list(text.items()):
        listed = isinstance(value, list) or (isinstance(value, str) and name.endswith("pattern"))
        if listed and len(value) in counts.values():
            text[name] = value[:layers]  # one entry per layer
        elif isinstance(value, list) and name.endswith("layers") and all(isinstance(item, int) for item in value):
            text[name] = [item for item in value if item < layers]  # numbers of layers
    if config["model_type"] != text["model_type"]:
        nested = families()[config["model_type"]]["nested"]
        text = config | {next(key for key, kind in nested.items() if kind == text["model_type"]): text}
    return replace(spec, name=f"{spec.name}, {layers} layers", config_json=json.dumps(text))


def _has(spec: ModelSpec, layers: int, columns: list[Any]) -> bool:
    """Whether the model with `layers` layers has the first `layers` layers of `columns`."""
    try:
        stacks = _stacks(with_layers(spec, layers))
    except (SpecError, NotAvailable):
        return False
    return list(zip(*stacks.values(), strict=False)) == columns[:layers]


def _stacks(spec: ModelSpec) -> dict[str, list[Signature]]:
    """Return the signatures of the layers in each module list that is as long as the config says, by path."""
    model = on_meta(spec, Training(attention="eager"))
    text = text_config(spec.config)
    known = {**families().get(text["model_type"], {}).get("sizes", {}), **text}
    counts = {value for name, value in known.items() if name in COUNTS} | {spec.layers}
    return {
        path: [_signature(layer) for layer in module]
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) in counts and "vision" not in path and "visual" not in path
    }


def _signature(layer: nn.Module) -> Signature:
    """Return a value that is the same for equal layers: their modules' names, types, parameter shapes and settings."""
    return tuple(
        (name, type(module).__name__, tuple((key, tuple(own.shape)) for key, own in module._parameters.items()
                                            if own is not None), _settings(module))
        for name, module in layer.named_modules()
    )  # fmt: skip


def _settings(module: nn.Module) -> Signature:
    plain = ((key, value) for key, value in vars(module).items() if isinstance(value, (bool, int, float, str)))
    return tuple((key, value) for key, value in plain if "idx" not in key and "index" not in key)
