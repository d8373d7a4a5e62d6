"""A step of LitGPT on fake tensors: its GPT, its adapters, its chunked loss, and Fabric's precision around them.

What is ours is the configuration and the loop, which follows fit() of its recipes (0.5.13, litgpt/finetune/full.py and
lora.py): the logits have a name until the next micro-batch's, and gradients are set to None after the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...base.compat import symbol
from ...specs.model import ModelSpec
from ...specs.run import Training
from ...specs.stacks.litgpt import CHUNK
from ...step.model import Around
from ...step.step import Enter, Step, ignore

ADAPTERS = {  # LoRA's names
    "q_proj": "lora_query", "k_proj": "lora_key", "v_proj": "lora_value", "o_proj": "lora_projection",
    "gate_proj": "lora_mlp",
}  # fmt: skip
LEARNING_RATE = 2e-5


def check(spec: ModelSpec, run: Training) -> None:
    """Raise NotAvailable for what is not simulated of LitGPT: nothing that a run of it can ask for."""


@dataclass
class LitStep(Step):
    """A step as fit() of LitGPT's recipes takes it."""

    precision: Any = None  # Fabric's

    def __call__(self, enter: Enter = ignore) -> None:
        """Take one step."""
        assert isinstance(self.run, Training) and self.optimizer is not None
        loss_of, logits = symbol("litgpt.utils.chunked_cross_entropy"), None
        for ids in self.inputs:  # (B, T)
            enter("forward")
            with self.precision.forward_context():
                made = self.model(ids, lm_head_chunk_size=CHUNK if self.run.lora else 0)
            logits = self.precision.convert_output(made)
            del made
            if isinstance(logits, list):
                logits[-1] = logits[-1][..., :-1, :]
                loss = loss_of(logits, ids[..., 1:])
            else:
                loss = loss_of(logits[..., :-1, :], ids[..., 1:])
            enter("backward")
            (loss / self.run.accumulation).backward()
        enter("optimizer")
        self.optimizer.step()
        enter("optimizer")
        self.optimizer.zero_grad(set_to_none=True)


def build(spec: ModelSpec, run: Training, device: torch.device, inputs: list[Tensor], recomputing: Around) -> LitStep:
    """Return the step of `run` on `device`, with LitGPT's own model."""
    precision = symbol("lightning.fabric.plugins.HalfPrecision")("bf16-true")
    with precision.module_init_context(), torch.device("meta"):
        model = model_of(spec, run)
    if run.lora:
        symbol("litgpt.lora.mark_only_lora_as_trainable")(model)
    nn.Module.to_empty(model, device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    step = LitStep(run, device, model.train(), [ids.to(device, copy=True) for ids in inputs], precision=precision)
    step.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return step


def model_of(spec: ModelSpec, run: Training) -> Any:
    """Return LitGPT's Llama of the sizes of `spec`, for sequences of `run` (its recipes cut the table of positions)."""
    sizes: dict[str, Any] = dict(
        n_layer=spec.layers, n_embd=spec.hidden, n_head=spec.heads, n_query_groups=spec.kv_heads,
        head_size=spec.head_dim, intermediate_size=spec.intermediate, vocab_size=spec.vocab,
        padded_vocab_size=spec.vocab, block_size=run.seq_len, rotary_percentage=1.0, bias=False,
        parallel_residual=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
    )  # fmt: skip
    if run.lora is None:
        return symbol("litgpt.model.GPT")(symbol("litgpt.config.Config")(**sizes))
    adapted = {ADAPTERS[name]: True for name in run.lora.targets if name in ADAPTERS}
    config = symbol("litgpt.lora.Config")(
        lora_r=run.lora.rank, lora_alpha=run.lora.alpha or 2 * run.lora.rank, lora_dropout=run.lora.dropout,
        **adapted, **sizes,
    )  # fmt: skip
    return symbol("litgpt.lora.GPT")(config)
