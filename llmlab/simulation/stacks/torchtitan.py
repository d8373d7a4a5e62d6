"""A step of torchtitan on fake tensors: its Llama 3 and Qwen 3, what cuts them up, its loss, its optimizer.

What is ours is the configuration and the loop, which follows torchtitan/train.py (0.2.2): logits are deleted before
backward, gradients are clipped by their norm, and are set to None before the next step.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ...base.compat import symbol
from ...base.errors import NotAvailable
from ...specs.model import ModelSpec
from ...specs.run import Training
from ...specs.stacks import Torchtitan
from ...step.model import Around
from ...step.step import Enter, Step, ignore

MODELS = {"llama": "llama3", "qwen3": "qwen3"}  # its packages


def check(spec: ModelSpec, run: Training) -> None:
    """Raise NotAvailable for what is not simulated of torchtitan; import what the step calls."""
    for asked, what in ((run.pp > 1, f"pp={run.pp}"), (run.cp > 1, f"cp={run.cp}"), (run.compile, "compile=True")):
        if asked:
            raise NotAvailable(f"simulate has no {what} with stack='torchtitan'; see lab.estimate")
    logging.getLogger().setLevel(logging.WARNING)  # of torchtitan, which logs to the root
    training_spec(spec)


def training_spec(spec: ModelSpec) -> Any:
    """Return torchtitan's TrainSpec of the family: its classes and functions."""
    return symbol(f"torchtitan.models.{MODELS[spec.family]}.get_train_spec")()


@dataclass
class TitanStep(Step):
    """A step as torchtitan's Trainer takes it."""

    optimizers: Any = None
    loss_function: Any = None
    context: Any = field(default=None, repr=False)  # around forward and backward

    def __call__(self, enter: Enter = ignore) -> None:
        """Take one step, as train_step and forward_backward_step do."""
        self.optimizers.zero_grad()
        parameters = list(self.model.parameters())
        for ids in self.inputs:  # (B, T)
            enter("forward")
            with self.context():
                with self._cast():
                    logits = self.model(ids)  # (B, T, V)
                    loss = self.loss_function(logits, ids) / ids.numel()
                enter("backward", logits=getattr(logits, "_local_tensor", logits))
                del logits
                loss.backward()
        enter("optimizer")
        symbol("torchtitan.distributed.utils.clip_grad_norm_")(parameters, 1.0, foreach=True)
        self.optimizers.step()
        enter("optimizer")

    def _cast(self) -> AbstractContextManager:
        assert isinstance(self.run, Training)
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.run.precision.startswith("autocast"))


def build(
    spec: ModelSpec, run: Training, device: torch.device, inputs: list[Tensor], recomputing: Around
) -> TitanStep:
    """Return the step of `run` on `device`, with torchtitan's own model; the process group is there already."""
    own = training_spec(spec)
    job, dims = job_config(run), parallel_dims(run)
    arguments = model_arguments(spec, type(next(iter(own.model_args.values()))))
    arguments.update_from_config(job)
    with torch.device("meta"):
        model = own.model_cls(arguments)
    _set_width(model, spec)
    with mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"), _kept_operators(spec, run):
        dims.build_mesh()
        model = own.parallelize_fn(model, dims, job)
    model.to_empty(device=device)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor random operators")
        model.init_weights(buffer_device=device)
    model.train()
    optimizers = own.build_optimizers_fn([model], job.optimizer, dims)
    step = TitanStep(
        run, device, model, [ids.to(device, copy=True) for ids in inputs], parameters=list(model.parameters())
    )
    step.optimizers, step.optimizer = optimizers, optimizers.optimizers[0]
    step.loss_function = own.build_loss_fn(job)
    step.context = symbol("torchtitan.distributed.utils.get_train_context")(run.tp > 1)
    return step


def job_config(run: Training) -> Any:
    """Return torchtitan's configuration of `run`."""
    job, stack = symbol("torchtitan.config.JobConfig")(), run.stack
    assert isinstance(stack, Torchtitan)
    job.training.seq_len, job.training.local_batch_size = run.seq_len, run.micro_batch
    job.parallelism.tensor_parallel_degree = run.tp
    job.parallelism.fsdp_reshard_after_forward = stack.reshard_after_forward
    job.optimizer.implementation = stack.optimizer
    ac = job.activation_checkpoint
    ac.mode = run.checkpointing or "none"
    ac.selective_ac_option = str(stack.every) if stack.ac == "selective_layers" else "op"
    return job


def parallel_dims(run: Training) -> Any:
    """Return torchtitan's degrees of `run`."""
    degrees = {"dp_replicate": run.dp_replicate, "dp_shard": run.dp_shard, "cp": run.cp, "tp": run.tp, "pp": run.pp}
    degrees |= {"ep": 1, "etp": 1}
    return symbol("torchtitan.distributed.ParallelDims")(**degrees, world_size=run.world_size)


def _kept_operators(spec: ModelSpec, run: Training) -> AbstractContextManager:
    """Take attention off the list of what selective checkpointing keeps, where the stack's option says so."""
    assert isinstance(run.stack, Torchtitan)
    path = f"torchtitan.models.{MODELS[spec.family]}.infra.parallelize._op_sac_save_list"
    less = {each for each in symbol(path) if run.stack.keeps_attention or "attention" not in str(each)}
    return mock.patch(path, less)


def model_arguments(spec: ModelSpec, kind: type) -> Any:
    """Return torchtitan's arguments of the model; its Llama computes the MLP's width, `_set_width` corrects it."""
    sizes = dict(
        dim=spec.hidden, n_layers=spec.layers, n_heads=spec.heads, n_kv_heads=spec.kv_heads, vocab_size=spec.vocab
    )
    if spec.family == "qwen3":
        return kind(**sizes, head_dim=spec.head_dim, hidden_dim=spec.intermediate, qk_norm=True)
    return kind(**sizes, multiple_of=1, ffn_dim_multiplier=1.5 * spec.intermediate / (4 * spec.hidden))


def _set_width(model: nn.Module, spec: ModelSpec) -> None:
    """Give every MLP, still on the meta device, the width that the model's configuration names."""
    for block in model.layers.values():  # type: ignore[operator]
        mlp = block.feed_forward
        if mlp.w1.out_features != spec.intermediate:
            with torch.device("meta"):
                mlp.w1, mlp.w3 = (nn.Linear(spec.hidden, spec.intermediate, bias=False) for _ in range(2))
                mlp.w2 = nn.Linear(spec.intermediate, spec.hidden, bias=False)
