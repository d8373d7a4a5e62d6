"""A step of torchtitan on fake tensors: its Llama 3 and Qwen 3, what cuts them up, its loss, its optimizer.

What is ours is the configuration and the loop, which follows torchtitan/train.py (0.2.2): logits are deleted before
backward, gradients are clipped by their norm, and are set to None before the next step.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
FLOAT8 = "quantize.linear.float8"  # the converter of that name


def check(spec: ModelSpec, run: Training) -> None:
    """Raise NotAvailable for what is not simulated of torchtitan; import what the step calls."""
    asked = {
        f"pp={run.pp}": run.pp > 1,
        f"compile=True, tp={run.tp}": run.compile and run.tp > 1,
        f"compile=True, cp={run.cp}": run.compile and run.cp > 1,
        # its queries are DTensors then, which torch's context parallelism takes none of
        f"cp={run.cp}, tp={run.tp} of qwen3": spec.family == "qwen3" and run.cp > 1 and run.tp > 1,
    }
    for what, given in asked.items():
        if given:
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
    around_attention: Any = nullcontext
    mesh: Any = None  # of context parallelism

    def __call__(self, enter: Enter = ignore) -> None:
        """Take one step, as train_step and forward_backward_step do."""
        self.optimizers.zero_grad()
        parameters = list(self.model.parameters())
        for ids in self.inputs:  # (B, T)
            enter("forward")
            with self.context(), self.around_attention():
                with self._cast():
                    ids, labels, beside = self._share(ids)
                    logits = self.model(ids, **beside)  # (B, T, V)
                    loss = self.loss_function(logits, labels) / ids.numel()
                enter("backward", logits=getattr(logits, "_local_tensor", logits))
                del logits
                loss.backward()
        enter("optimizer")
        symbol("torchtitan.distributed.utils.clip_grad_norm_")(parameters, 1.0, foreach=True)
        self.optimizers.step()
        enter("optimizer")

    def _share(self, ids: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return this rank's ids and labels, and what else the model is given."""
        if self.mesh is None:
            return ids, ids, {}
        path = "torchtitan.distributed.context_parallel"
        balancer = symbol(f"{path}._HeadTailLoadBalancer")  # which would be where the mesh is, on the host
        with mock.patch(f"{path}._HeadTailLoadBalancer", lambda length, ranks, _: balancer(length, ranks, self.device)):
            return symbol(f"{path}.prepare_context_parallel_input")(ids, ids.clone(), {}, self.mesh, self.device)

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
    around_attention = _ring_attention if run.cp > 1 else nullcontext
    with (
        mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"),
        mock.patch("torchtitan.components.quantization.float8.has_cuda_capability", lambda *least: True),
        _kept_operators(spec, run),
        mock.patch("torchtitan.distributed.activation_checkpoint._layer_sac_count", 0),  # of all models so far
        _rounding(),
        around_attention(),
    ):
        converters = symbol("torchtitan.protocols.model_converter.build_model_converters")(job, dims)
        converters.convert(model)
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
    optimizers.register_step_post_hook(lambda *args, **kwargs: converters.post_optimizer_hook([model]))
    step.loss_function = own.build_loss_fn(job)
    step.context = symbol("torchtitan.distributed.utils.get_train_context")(run.tp > 1)
    step.around_attention = around_attention
    step.mesh = dims.get_mesh("cp") if run.cp > 1 else None
    return step


def _rounding() -> AbstractContextManager:
    """Restore how Inductor rounds, which torchtitan changes for good for "rowwise"; no buffer depends on it."""
    name = "emulate_precision_casts"
    return symbol("torch._inductor.config.patch")({name: symbol(f"torch._inductor.config.{name}")})


@contextmanager
def _ring_attention() -> Iterator[None]:
    """Let DTensor compute attention over the ranks of context parallelism; torchtitan leaves it on."""
    path = "torch.distributed.tensor.experimental._attention"
    symbol(f"{path}._enable_context_parallel_dispatcher")()
    try:
        yield
    finally:
        symbol(f"{path}._disable_context_parallel_dispatcher")()


def job_config(run: Training) -> Any:
    """Return torchtitan's configuration of `run`."""
    job, stack = symbol("torchtitan.config.JobConfig")(), run.stack
    assert isinstance(stack, Torchtitan)
    job.training.seq_len, job.training.local_batch_size = run.seq_len, run.micro_batch
    job.parallelism.tensor_parallel_degree = run.tp
    job.parallelism.fsdp_reshard_after_forward = stack.reshard_after_forward
    job.optimizer.implementation = stack.optimizer
    job.parallelism.context_parallel_degree = run.cp
    job.compile.enable = run.compile
    job.compile.components = ["model", "loss"] if stack.compile_loss else ["model"]
    if run.fp8:
        job.model.converters = [FLOAT8]
        float8 = job.quantize.linear.float8
        float8.filter_fqns = ["output"]  # as its configurations have it
        if run.fp8 == "tensorwise" and stack.enable_fsdp_float8_all_gather:
            float8.enable_fsdp_float8_all_gather = float8.precompute_float8_dynamic_scale_for_fsdp = True
        else:
            float8.recipe_name = run.fp8
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
