"""QLoRA: a base in 4 bits that is only read, adapters beside it that are trained (Dettmers et al., arXiv 2305.14314).

    y = x · dequantize(W)ᵀ + (alpha / r) · x Aᵀ Bᵀ      (equation 5)

The gradient goes through the dequantized weight to x, and never to the weight: rounding needs no derivative.
bitsandbytes holds the codes and multiplies; `llmlab.quantize.formats.nf4` is the same format from scratch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..base.errors import NotAvailable, SpecError
from .lora import LoRALinear, adapters

HEAD = "lm_head"


def to_nf4(model: nn.Module, double: bool = False, compute: torch.dtype = torch.float32) -> nn.Module:
    """Put bitsandbytes' NF4 in place of every linear but the head, multiplied in `compute`; return the changed model.

    `double` quantizes the scales too (section 3). Embeddings, head and norms stay as they are. Raises NotAvailable
    without bitsandbytes, SpecError where the model has LoRA layers already: quantize first, then inject.
    """
    try:
        import bitsandbytes as bnb
    except ImportError:
        raise NotAvailable("NF4 linears need bitsandbytes: pip install bitsandbytes") from None
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        raise SpecError("this model has LoRA layers, and A and B must stay as they are: call to_nf4 before inject")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    how: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": double}
    for name, linear in linears.items():
        parent, _, last = name.rpartition(".")
        if last == HEAD:
            continue
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        small = bnb.nn.Linear4bit(*sizes, compute_dtype=compute, **how)
        # On a CPU with AVX512-BF16, bitsandbytes 0.50 repacks the weights at the first call in eval mode. Backward does
        # not go through its product with packed weights: from then on, layers below would train on wrong gradients.
        small.support_avx512bf16_for_cpu = False
        small.bias = linear.bias
        weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, **how)
        small.weight = weight.to(linear.weight.device)  # type: ignore[misc]  # its stub takes it for a Module
        setattr(model.get_submodule(parent), last, small)
    return model


@torch.no_grad()
def merge_rounded(model: nn.Module) -> nn.Module:
    """Dequantize each base, add its adapter, and round to NF4 again; return the model, its adapters off.

    It is no `merge`: what the adapter learned is rounded with the sum. peft's merge does this too, with a warning.
    """
    import bitsandbytes as bnb

    for name, layer in adapters(model).items():
        old = layer.base.weight
        if not isinstance(old, bnb.nn.Params4bit) or old.quant_state is None:
            raise SpecError(f"{name}'s base is not in NF4: call to_nf4 before inject, or merge")
        how: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": old.compress_statistics}
        whole = bnb.functional.dequantize_4bit(old.data, old.quant_state).float() + layer.difference()
        rounded = bnb.nn.Params4bit(whole, requires_grad=False, **how)
        layer.base.weight = rounded.to(old.device)  # type: ignore[misc]  # its stub takes it for a Module
        layer.merged = True
    return model
