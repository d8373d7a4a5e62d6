"""LoRA: train a low-rank difference to a frozen weight, W + (alpha / r) · B A (Hu et al., arXiv 2106.09685, 4.1).

W (out, in) is frozen. A (r, in) starts with random values and B (out, r) with zeros, so that training starts from the
unchanged model.
Trained parameters, gradients and optimizer states shrink to r · (in + out) per layer. Activations do not: gradients
still flow back through every layer, and A needs the layer's input.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from ...base.errors import SpecError
from ...specs.run import LoRA


class LoRALinear(nn.Module):
    """A frozen nn.Linear plus a trainable update of low rank."""

    def __init__(self, base: nn.Linear, lora: LoRA) -> None:
        """Freeze `base` and create A and B in torch's default dtype, which is fp32, as in peft."""
        super().__init__()
        self.base = base.requires_grad_(False)
        self.rank, self.alpha = lora.rank, lora.alpha if lora.alpha is not None else 2 * lora.rank
        self.dropout = nn.Dropout(lora.dropout)
        device = base.weight.device
        self.A = nn.Parameter(torch.empty(lora.rank, base.in_features, device=device))
        self.B = nn.Parameter(torch.zeros(base.out_features, lora.rank, device=device))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))  # as nn.Linear initializes its weight
        self.merged = False

    @property
    def scale(self) -> float:
        """alpha / r. If alpha is constant, the best learning rate changes little with the rank."""
        return self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return self.base(x)
        low = self.dropout(x).to(self.A.dtype) @ self.A.T  # (…, r)
        return self.base(x) + (low @ self.B.T * self.scale).to(x.dtype)

    def difference(self) -> Tensor:
        """Return the update (alpha / r) · B A, (out, in), which merging adds to the weight."""
        return self.B @ self.A * self.scale


def inject(model: nn.Module, lora: LoRA) -> nn.Module:
    """Freeze `model`, replace each linear layer named in `lora.targets` by a LoRALinear, and return the model.

    If a target names no layer, or one that is not an nn.Linear, raise SpecError and change nothing.
    """
    layers = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in lora.targets}
    if missing := sorted(set(lora.targets) - {name.rpartition(".")[2] for name in layers}):
        linears = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise SpecError(f"targets {', '.join(missing)} name no layer of this model; its linears: {', '.join(linears)}")
    for name, module in layers.items():
        if not isinstance(module, nn.Linear):
            raise SpecError(f"{name} is a {type(module).__name__}, not an nn.Linear; choose other targets, or use peft")
    model.requires_grad_(False)
    for name, module in layers.items():
        model.set_submodule(name, LoRALinear(module, lora))
    return model


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    """Return the injected layers by name; raises SpecError if there are none."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    if not layers:
        raise SpecError("this model has no LoRA layers; call inject first")
    return layers


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Add every layer's difference to its weight, so that the model costs no more than its base; return the model.

    Raises SpecError, and changes nothing, if a weight is already merged, or is quantized: its codes cannot store the
    sum.
    """
    layers = adapters(model)
    for name, layer in layers.items():
        weight = layer.base.weight
        if not weight.is_floating_point() or hasattr(weight, "quant_state"):
            raise SpecError(
                f"{name} has a quantized weight ({weight.dtype}); its codes cannot hold the sum: dequantize the base, "
                "merge, and quantize again, or keep the adapter beside it"
            )
        if layer.merged:
            raise SpecError(f"{name} is already merged; merging again would add the difference twice: unmerge first")
    for layer in layers.values():
        layer.base.weight += layer.difference().to(layer.base.weight.dtype)
        layer.merged = True
    return model


@torch.no_grad()
def unmerge(model: nn.Module) -> nn.Module:
    """Subtract every layer's difference again, up to rounding, which is coarser in 16 bits; return the model."""
    layers = adapters(model)
    for name, layer in layers.items():
        if not layer.merged:
            raise SpecError(f"{name} is not merged; there is nothing to subtract")
    for layer in layers.values():
        layer.base.weight -= layer.difference().to(layer.base.weight.dtype)
        layer.merged = False
    return model


def save(model: nn.Module, folder: str | Path) -> int:
    """Write A and B in peft's format, so that `peft.PeftModel.from_pretrained` loads them; return the file's bytes.

    The base is not saved: the file has a few MB, not the model's many GB.
    """
    from safetensors.torch import save_file

    layers = adapters(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, layer in layers.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = layer.A.detach().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = layer.B.detach().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    first = next(iter(layers.values()))
    config = {
        "peft_type": "LORA",
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout.p,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return (folder / "adapter_model.safetensors").stat().st_size


def load(model: nn.Module, folder: str | Path) -> nn.Module:
    """Load an adapter that `save` or peft wrote into the injected `model`; SpecError if names or shapes differ."""
    from safetensors.torch import load_file

    layers = adapters(model)
    try:
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
        config = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
        alpha = config["lora_alpha"]
    except Exception as error:  # safetensors raises a type of its own for a truncated file
        raise SpecError(f"{folder} has no readable adapter: {error}; give a folder that save or peft wrote") from None
    parameters = {f"base_model.model.{name}.lora_{side}.weight": getattr(layer, side) for name, layer in layers.items()
                  for side in "AB"}  # fmt: skip
    shapes = [{(name, tuple(tensor.shape)) for name, tensor in named.items()} for named in (parameters, tensors)]
    if differing := sorted(shapes[0] ^ shapes[1]):
        name, shape = differing[0]
        raise SpecError(f"{folder} is for another rank, other targets or another model: {name} {shape} differs")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    for layer in layers.values():
        layer.alpha = alpha
    return model


def trained_parameters(model: nn.Module) -> int:
    """Return how many parameters the optimizer updates: those that require a gradient."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
