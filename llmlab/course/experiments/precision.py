"""The numbers of one fp32 training step: how large are activations, gradients, and the squares that Adam averages?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...data import batch

VOCAB = 2048
SIZES: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3, "vocab_size": VOCAB,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def warmed_up_llama(steps: int = 8, seed: int = 0) -> Any:
    """Return a Llama of a million parameters after `steps` fp32 steps of AdamW on real text.

    The first gradients of a run are larger than those of any later step, so a few steps come first.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        ids = batch(VOCAB, 2, 128, seed=step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def numbers_of_a_step(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Return every activation and gradient of one step on `ids` (B, S), each kind as one flat tensor.

    Activations are the outputs of the modules that contain no others.
    """
    outputs: list[Tensor] = []
    leaves = [module for module in model.modules() if not list(module.children())]
    hooks = [leaf.register_forward_hook(lambda module, inputs, output: outputs.append(output)) for leaf in leaves]
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    for hook in hooks:
        hook.remove()
    outputs = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
    by_output = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
    loss.backward()
    by_weight = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return {
        "activations": torch.cat([output.detach().flatten() for output in outputs]),
        "gradients of activations": torch.cat([g.flatten() for g in by_output if g is not None]),
        "gradients of weights": by_weight,
        "their squares": by_weight.square(),
    }
