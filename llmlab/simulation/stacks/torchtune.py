"""A step of torchtune on fake tensors: its Llama, its checkpointing and sharding, its loss, its optimizer.

Only the configuration and the loop are ours. The loop follows train() of its recipes (0.6.1): gradients are scaled in
place by the number of tokens, and set to None after the update. With the optimizer in backward, a parameter is updated
and its gradient freed as soon as the gradient is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ...base.compat import symbol
from ...base.errors import NotAvailable
from ...specs.model import ModelSpec
from ...specs.run import Training
from ...specs.stacks import Torchtune
from ...step.model import DTYPES, Around
from ...step.ranks import local
from ...step.step import Enter, Step, ignore

ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}  # LoRA's names
LEARNING_RATE = 2e-5
PAGED_FROM = 1e5  # elements: bitsandbytes/optim/optimizer.py, get_state_buffer


def check(spec: ModelSpec, run: Training) -> None:
    """Raise NotAvailable for options of torchtune that are not simulated."""
    stack = Torchtune.of(run)
    options = {
        f"quantization='nf4', dp={run.dp}": run.quantization and run.dp > 1,
        "packed=True": stack.packed,
        # bitsandbytes raises RuntimeError for DTensors, and FSDP2's parameters are DTensors.
        f"optimizer='adamw-8bit', dp={run.dp}": run.optimizer == "adamw-8bit" and run.dp > 1,
    }
    for what, value in options.items():
        if value:
            raise NotAvailable(f"simulate has no {what} with stack='torchtune'; ask lab.estimate")
    logging.getLogger("torchtune").setLevel(logging.WARNING)


@dataclass
class TuneStep(Step):
    """A training step of torchtune's recipes."""

    loss_function: Any = None
    around_model: Callable[[], AbstractContextManager] = field(default=nullcontext, repr=False)
    in_backward: list[torch.optim.Optimizer] = field(default_factory=list)  # one per parameter

    def __call__(self, enter: Enter = ignore) -> None:
        """Take one step, as train() and _loss_step() do."""
        tokens: Any = 0
        for ids in self.inputs:  # (B, T)
            enter("forward")
            valid = (ids != self.loss_function.ignore_index).sum()
            tokens += valid
            with self.around_model():
                logits = self.model(tokens=ids)
            labels = torch.hstack((ids[..., 1:], torch.full_like(ids[..., :1], self.loss_function.ignore_index)))
            if not isinstance(logits, list):
                labels, logits = labels.reshape(-1), logits.reshape(-1, logits.size(-1))
            loss = self.loss_function(logits, labels) * valid
            del logits
            enter("backward")
            loss.backward()
        enter("optimizer")
        if self.optimizer:
            symbol("torchtune.training.scale_grads")(self.model, 1 / tokens)
            self.optimizer.step()
        enter("optimizer")
        if self.optimizer:
            self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors that live across phases, by part, including states of optimizers that step in backward."""
        optimizers = self.in_backward
        states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
        parts = super().tensors()
        tensors = [local(state) for state in states if isinstance(state, Tensor)]
        return parts | {"optimizer": parts["optimizer"] + tensors}


def build(
    spec: ModelSpec, run: Training, device: torch.device, inputs: list[Tensor], recomputing: Around
) -> TuneStep:
    """Return the step of `run` on `device`, with torchtune's own model; the process group exists already."""
    stack = Torchtune.of(run)
    sharded = run.dp > 1
    # The recipes create the model on its final device, and NF4Tensor needs an existing weight.
    place = device if run.quantization else torch.device("meta")
    with symbol("torchtune.training.set_default_dtype")(DTYPES[run.precision]), place, _unscaled():
        model = model_of(spec, run)
    if run.lora:
        adapters = symbol("torchtune.modules.peft.get_adapter_params")(model)
        symbol("torchtune.modules.peft.set_trainable_params")(model, adapters)
    if run.compile:
        symbol("torchtune.training.compile_model")(model, verbose=False)
    if run.checkpointing:
        layer = symbol("torchtune.modules.TransformerSelfAttentionLayer")
        symbol("torchtune.training.set_activation_checkpointing")(model, auto_wrap_policy={layer})
    if sharded:
        extra_units = ["tok_embeddings", "output"] if stack.own_head(run) and not spec.tied else []
        _shard(model, run, extra_units)
    if not run.quantization:
        nn.Module.to_empty(model, device=device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    for module in {module for module in model.modules() if hasattr(module, "rope_init")}:
        with device, _unscaled():
            module.rope_init()  # a checkpoint does not contain the table of positions
    loss = symbol("torchtune.modules.loss.CEWithChunkedOutputLoss")
    function = loss(stack.num_output_chunks) if stack.num_output_chunks else nn.CrossEntropyLoss()
    if run.compile:
        symbol("torchtune.training.compile_loss")(function, verbose=False)
    if stack.num_output_chunks:
        model.set_num_output_chunks(stack.num_output_chunks)
    step = TuneStep(
        run, device, model.train(), [ids.to(device, copy=True) for ids in inputs], parameters=list(model.parameters())
    )
    step.loss_function = function
    if stack.enable_activation_offloading:
        step.around_model = _offloading(model, device)
    _add_optimizer(step, stack)
    return step


def _unscaled() -> AbstractContextManager:
    """Skip the scaling of the position table, which loops over numbers on the host and changes no memory."""
    name = "torchtune.models.llama3_1._position_embeddings.Llama3ScaledRoPE"
    return mock.patch.object(symbol(name), "apply_scaling", lambda self, frequencies, *how: frequencies)


def model_of(spec: ModelSpec, run: Training) -> Any:
    """Return torchtune's Llama with the sizes of `spec`: Llama 3.2 if the head is tied, else Llama 3.1."""
    sizes: dict[str, Any] = dict(
        vocab_size=spec.vocab, num_layers=spec.layers, num_heads=spec.heads, num_kv_heads=spec.kv_heads,
        embed_dim=spec.hidden, max_seq_len=max(run.seq_len, spec.config.get("max_position_embeddings", 0)),
        intermediate_dim=spec.intermediate,
    )  # fmt: skip
    name = "llama3_2" if spec.tied else "llama3_1"
    if not run.lora:
        return symbol(f"torchtune.models.{name}.{name}")(**sizes)
    targets = set(run.lora.targets)
    return symbol(f"torchtune.models.{name}.lora_{name}")(
        lora_attn_modules=[own for target, own in ATTENTION.items() if target in targets],
        apply_lora_to_mlp="gate_proj" in targets,
        lora_rank=run.lora.rank,
        lora_alpha=run.lora.alpha or 2 * run.lora.rank,
        lora_dropout=run.lora.dropout,
        quantize_base=run.quantization is not None,
        **sizes,
    )


def _shard(model: nn.Module, run: Training, extra_units: list[str]) -> None:
    """Shard the model over all data-parallel ranks, as the distributed recipes do; `extra_units` are units besides the
    blocks."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (run.dp,), mesh_dim_names=("dp",))
    conditions = symbol("torchtune.training.get_shard_conditions")
    symbol("torchtune.training.shard_model")(
        model=model,
        shard_conditions=[partial(conditions, names_to_match=extra_units)],
        cpu_offload=False,
        reshard_after_forward=run.zero == 3,
        dp_mesh=mesh,
    )


def _offloading(model: nn.Module, device: torch.device) -> Callable[[], AbstractContextManager]:
    """Return torchtune's context that offloads saved tensors to the host and loads them back to "cuda"."""
    manager = symbol("torchtune.training.get_act_offloading_ctx_manager")(model, True)

    @contextmanager
    def around() -> Iterator[None]:
        with mock.patch("torchtune.training._activation_offloading.torch", _Torch(device)), manager:
            yield

    return around


class _Torch:
    """The torch module, except that `empty_like` returns a host tensor without GPU memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_like(self, tensor: Tensor, **where: Any) -> _OnHost:
        return _OnHost(tensor, self.device)


class _OnHost:
    """A tensor that was offloaded to the host, and can be loaded back."""

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, device

    def copy_(self, *args: Any, **kwargs: Any) -> None:
        """Copy nothing, because no memory depends on values."""

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def _add_optimizer(step: TuneStep, stack: Torchtune) -> None:
    """Add the optimizer to the step, or an optimizer per parameter that steps in backward."""
    make = partial(_optimizer, step.run)
    if not stack.steps_in_backward(step.run):
        step.optimizer = make([parameter for parameter in step.model.parameters() if parameter.requires_grad])
        return
    optimizers = {parameter: make([parameter]) for parameter in step.model.parameters()}
    step.in_backward = list(optimizers.values())
    symbol("torchtune.training.register_optim_in_bwd_hooks")(model=step.model, optim_dict=optimizers)


def _optimizer(run: Any, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if run.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    from bitsandbytes import optim

    if not run.stack.paged(run):
        return optim.AdamW8bit(parameters, lr=LEARNING_RATE)
    return _paged(optim.PagedAdamW8bit(parameters, lr=LEARNING_RATE))


def _paged(optimizer: Any) -> torch.optim.Optimizer:
    """Let large states use no memory of PyTorch's allocator, because the driver holds them (bitsandbytes/functional.py,
    get_paged, which needs a CUDA device)."""
    unpaged = optimizer.get_state_buffer

    def buffer(parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        if parameter.numel() < PAGED_FROM:
            return unpaged(parameter, dtype)
        return torch.zeros(1, dtype=dtype, device=parameter.device).expand(parameter.shape)

    optimizer.get_state_buffer = buffer
    return optimizer
