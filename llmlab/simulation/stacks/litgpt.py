"""A step of LitGPT on fake tensors: its GPT, its adapters, its chunked loss, and Fabric's precision around them.

Only the configuration and the loop are ours. The loop follows fit() of its recipes (0.5.13, litgpt/finetune/full.py and
lora.py): a variable keeps the logits alive until the next micro-batch replaces them, and gradients are set to None
after the update.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from math import gcd
from typing import Any
from unittest import mock

import torch
from torch import Tensor

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
DEVICES = 8  # per node
LEARNING_RATE = 2e-5


def check(spec: ModelSpec, run: Training) -> None:
    """Silence the loggers of Lightning; all options of a run with LitGPT are simulated."""
    for name in ("lightning.fabric", "lightning.pytorch"):  # which log processes and GPUs
        logging.getLogger(name).setLevel(logging.ERROR)


@dataclass
class LitStep(Step):
    """A training step of fit() in LitGPT's recipes."""

    fabric: Any = None

    def __call__(self, enter: Enter = ignore) -> None:
        """Take one step."""
        run, optimizer, logits = self.run, self.optimizer, None
        assert isinstance(run, Training) and optimizer is not None
        for number, ids in enumerate(self.inputs, 1):  # (B, T)
            enter("forward")
            with self.fabric.no_backward_sync(self.model, enabled=number < run.accumulation):
                if run.lora:
                    logits = self.model(ids, lm_head_chunk_size=CHUNK)
                    logits[-1] = logits[-1][..., :-1, :]
                    loss = symbol("litgpt.utils.chunked_cross_entropy")(logits, ids[..., 1:])
                else:
                    logits = self.model(ids)
                    loss = symbol("litgpt.utils.chunked_cross_entropy")(logits[..., :-1, :], ids[..., 1:])
                enter("backward")
                self.fabric.backward(loss / run.accumulation)
        enter("optimizer")
        optimizer.step()
        enter("optimizer")
        optimizer.zero_grad()


def build(spec: ModelSpec, run: Training, device: torch.device, inputs: list[Tensor], recomputing: Around) -> LitStep:
    """Return the step of `run` on `device`, with LitGPT's own model, set up by Fabric as in its recipes."""
    gpus_per_node = gcd(run.dp, DEVICES)
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": run.dp, "LOCAL_WORLD_SIZE": gpus_per_node,
             "MASTER_ADDR": "localhost", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": 1}  # fmt: skip
    torchrun = {name: str(value) for name, value in ranks.items()} if run.dp > 1 else {}
    with mock.patch.dict(os.environ, torchrun), warnings.catch_warnings():
        # FSDP warns of "a full-precision copy" of the weights, which are in bf16 here.
        warnings.simplefilter("ignore", UserWarning)
        fabric = symbol("lightning.fabric.Fabric")(
            accelerator="cuda", devices=gpus_per_node, num_nodes=run.dp // gpus_per_node, strategy=_strategy(run),
            precision="bf16-true",
        )  # fmt: skip
        fabric.launch()
        with fabric.init_module(empty_init=run.dp > 1):
            model = model_of(spec, run)
        if run.lora:
            symbol("litgpt.lora.mark_only_lora_as_trainable")(model)
        model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    batches = [ids.to(device, copy=True) for ids in inputs]
    return LitStep(run, device, model.train(), batches, optimizer, parameters=list(model.parameters()), fabric=fabric)


def _strategy(run: Training) -> Any:
    """Return Fabric's strategy, as finetune/full.py and lora.py choose it."""
    if run.dp == 1:
        return "auto"
    if run.lora:
        return symbol("lightning.fabric.strategies.ModelParallelStrategy")(
            parallelize_fn=symbol("litgpt.finetune.lora.parallelize_fn"), data_parallel_size=run.dp,
            tensor_parallel_size=1,
        )  # fmt: skip
    block = symbol("litgpt.model.Block")
    return symbol("lightning.fabric.strategies.FSDPStrategy")(
        auto_wrap_policy={block}, activation_checkpointing_policy={block}, state_dict_type="full",
        limit_all_gathers=True, cpu_offload=False,
    )  # fmt: skip


def model_of(spec: ModelSpec, run: Training) -> Any:
    """Return LitGPT's Llama with the sizes of `spec`; the table of positions has the length of the run's sequences."""
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
