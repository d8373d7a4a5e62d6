"""Parameter-efficient fine-tuning: formulas for the number of trained parameters, and the methods themselves by peft.

    r rank, or an adapter's width   n virtual tokens   d hidden size

    LoRA           adds r · (in + out) per target                                 arXiv 2106.09685
    DoRA           adds a magnitude for each output to LoRA                       2402.09353
    adapters       add two bottlenecks per block                                  1902.00751
    (IA)³          adds a factor for each key, value and MLP feature              2205.05638
    BitFit         trains the existing biases, of which Llama has none            2106.10199
    prompt tuning  trains n embeddings                                            2104.08691
    P-tuning       trains a network that computes these embeddings                2103.10385
    prefix tuning  trains n keys and values in every layer                        2101.00190
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...base.errors import NotAvailable, SpecError, check_counts, unknown_name
from ...specs.model import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METHODS = ("full", "lora", "dora", "adapter", "ia3", "bitfit", "prompt", "p-tuning", "prefix")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AFTER = ("o_proj", "down_proj")  # the last linears of attention and of the MLP: adapters follow them


def trained(method: str, spec: ModelSpec, rank: int = 16, tokens: int = 20) -> int:
    """Return how many parameters `method` trains on a Llama-like `spec`.

    `rank` is that of LoRA and DoRA on all linear layers of a block, and the width of adapters. `tokens` are virtual.
    """
    _check(method)
    linears = [linear for linear in spec.linears if linear.name in TARGETS]
    if not linears:
        raise SpecError(f"{spec.name} has no {', '.join(TARGETS)}; the formulas here are for Llama-like models")
    keys_and_values, d = 2 * spec.kv_heads * spec.head_dim, spec.hidden
    return {
        "full": spec.parameters,
        "lora": rank * sum(linear.count * (linear.inputs + linear.outputs) for linear in linears),
        "dora": sum(linear.count * (rank * (linear.inputs + linear.outputs) + linear.outputs) for linear in linears),
        "adapter": spec.layers * 2 * (2 * d * rank + rank + d),  # section 2.1: 2md + d + m each
        "ia3": spec.layers * (keys_and_values + spec.intermediate),
        "bitfit": sum(linear.count * linear.outputs for linear in spec.linears if linear.bias),
        "prompt": tokens * d,
        "p-tuning": tokens * d + 3 * (d * d + d),  # three linears with biases, used while training only
        "prefix": tokens * spec.layers * keys_and_values,
    }[method]


def apply(method: str, model: PreTrainedModel, rank: int = 16, tokens: int = 20) -> nn.Module:
    """Prepare `model` for `method` and return it: only the parameters that the method trains require a gradient.

    `model` is a transformers model with Llama's names. peft prepares it for most methods. The adapters are those of
    this module, and "full" and "bitfit" only choose among the model's own parameters.
    """
    _check(method)
    if method in ("full", "bitfit"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(method == "full" or name.endswith(".bias"))
        return model
    if method == "adapter":
        return insert(model, rank)
    try:
        import peft
    except ImportError:
        raise NotAvailable(f"{method} needs the peft package: pip install peft") from None
    task = peft.TaskType.CAUSAL_LM
    lora: dict[str, Any] = {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(TARGETS), "task_type": task}
    virtual: dict[str, Any] = {"num_virtual_tokens": tokens, "task_type": task}
    factors = ["k_proj", "v_proj", "down_proj"]
    configs = {
        "lora": peft.LoraConfig(**lora),
        "dora": peft.LoraConfig(**lora, use_dora=True),
        "ia3": peft.IA3Config(target_modules=factors, feedforward_modules=["down_proj"], task_type=task),
        "prompt": peft.PromptTuningConfig(**virtual),
        "p-tuning": peft.PromptEncoderConfig(**virtual, encoder_hidden_size=model.config.hidden_size),
        "prefix": peft.PrefixTuningConfig(**virtual),
    }
    return peft.get_peft_model(model, configs[method])


def _check(method: str) -> None:
    if method not in METHODS:
        raise unknown_name("method", str(method), list(METHODS), f"It is one of {', '.join(METHODS)}.")


class Adapter(nn.Module):
    """The frozen linear layer `base`, and y + up(GELU(down(y))) on its output y (arXiv 1902.00751, section 2.1).

    It cannot be merged into the weights, so its two additional matmuls remain at inference.
    """

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
