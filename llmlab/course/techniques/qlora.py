"""QLoRA: LoRA adapters on a frozen base model in 4 bits (Dettmers et al., arXiv 2305.14314).

    y = x · dequantize(W)ᵀ + (alpha / r) · x Aᵀ Bᵀ      (equation 5)

The gradient flows through the dequantized weight to x, and never to the weight itself, so rounding needs no derivative.
bitsandbytes stores the codes and multiplies; `llmlab.course.quantize.formats.nf4` is the same format from scratch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...base.errors import NotAvailable, SpecError
from .lora import LoRALinear

HEAD = "lm_head"


def to_nf4(model: nn.Module, double: bool = False, compute: torch.dtype = torch.float32) -> nn.Module:
    """Replace each linear layer except the head by NF4 of bitsandbytes, and return the model.

    Matmuls are computed in `compute`. `double` also quantizes the scales (section 3). Embedding, head and norms do not
    change. Raises NotAvailable without bitsandbytes, and SpecError if the model already has LoRA layers, because they
    must be injected after the quantization.
    """
    try:
        import bitsandbytes as bnb
    except ImportError:
        raise NotAvailable("NF4 linears need bitsandbytes: pip install bitsandbytes") from None
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        raise SpecError("this model has LoRA layers, whose A and B must not be quantized: call to_nf4 before inject")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    how: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": double}
    for name, linear in linears.items():
        if name.rpartition(".")[2] == HEAD:
            continue
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        layer = bnb.nn.Linear4bit(*sizes, compute_dtype=compute, **how)
        # On a CPU with AVX512-BF16, bitsandbytes 0.50 repacks the weights at the first call in eval mode. The matmul
        # with packed weights has no backward pass, so the layers below would then train on wrong gradients.
        layer.support_avx512bf16_for_cpu = False
        layer.bias = linear.bias
        weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, **how)
        layer.weight = weight.to(linear.weight.device)  # type: ignore[misc]  # its stub says that this is a Module
        model.set_submodule(name, layer)
    return model

