"""A step of torchtitan on fake tensors: its Llama 3, its Qwen 3 with and without experts, their sharding, its loss, its
optimizer, and torch's pipeline schedules, on one rank of many.

Only the configuration and the loop are ours. The loop follows torchtitan/train.py (0.2.2): logits are deleted before
backward, gradients are clipped by their norm, and they are set to None before the next step. Routers send the same
number of tokens to every expert (values/counts.py).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ...base.compat import DisableTorchFunction, disable_current_modes, has, symbol
from ...base.errors import NotAvailable
from ...engines.torchtitan import schedule_name
from ...recording.parts import COMMUNICATION
from ...specs.model import ModelSpec
from ...specs.run import Training
from ...specs.stacks import Torchtitan
from ...step.model import Around
from ...step.step import Enter, Step, ignore
from ..distributed.pipelining import stages_alone

MODELS = {"llama": "llama3", "qwen3": "qwen3", "qwen3_moe": "qwen3"}  # its packages
FLOAT8 = "quantize.linear.float8"  # the name of a converter


def check(spec: ModelSpec, run: Training) -> None:
    """Raise NotAvailable for options of torchtitan that are not simulated; import the modules that the step calls."""
    full = run.checkpointing == "full" or Torchtitan.of(run).recomputes_one_in > 0
    options = {
        # In torch 2.13 the backward of such a block receives a tensor after the mesh, which AOTAutograd refuses.
        f"compile=True, tp={run.tp} of blocks recomputed whole": run.compile and run.tp > 1 and full,
        f"{spec.dense_layers} dense layers of {spec.family}": spec.experts > 0 and spec.dense_layers > 0,
        # In fp32, SDPA's math backend adds a mask that is a plain tensor to scores that are DTensors.
        f"tp={run.tp} alone of {spec.family}": spec.family != "llama" and run.tp > 1 and run.precision == "fp32",
        # Its queries are then DTensors, which torch's context parallelism does not accept.
        f"cp={run.cp}, tp={run.tp} of {spec.family}": spec.family != "llama" and run.cp > 1 and run.tp > 1,
    }
    for what, value in options.items():
        if value:
            raise NotAvailable(f"simulate has no {what} with stack='torchtitan'; ask lab.estimate")
    logging.getLogger().setLevel(logging.WARNING)  # torchtitan logs to the root logger
    training_spec(spec)


def training_spec(spec: ModelSpec) -> Any:
    """Return torchtitan's TrainSpec of the model family, which holds its classes and functions."""
    return symbol(f"torchtitan.models.{MODELS[spec.family]}.get_train_spec")()


@dataclass
class TitanStep(Step):
    """A training step of torchtitan's Trainer."""

    optimizers: Any = None
    loss_function: Any = None
    context: Any = field(default=None, repr=False)  # around forward and backward
    around_attention: Any = nullcontext
    mesh: Any = None  # of context parallelism
    schedule: Any = None  # torch's pipeline schedule with this rank's stages
    stages: tuple[Any, ...] = ()
    pipeline: Any = None  # mesh of the pipeline

    def __call__(self, enter: Enter = ignore) -> None:
        """Take one step, as train_step and forward_backward_step do."""
        assert isinstance(self.run, Training)
        self.optimizers.zero_grad()
        parameters = list(self.model.parameters())
        for ids in self.inputs:  # (B, T)
            if self.schedule:
                with self.context(), self.around_attention(), _norms(self.run):
                    self._pipelined(ids, enter)
                continue
            enter("forward")
            with self.context(), self.around_attention(), _norms(self.run):
                with self._cast():
                    ids, labels, kwargs = self._share(ids)
                    logits = self.model(ids, **kwargs)  # (B, T, V)
                    loss = self.loss_function(logits, labels) / ids.numel()
                enter("backward", logits=getattr(logits, "_local_tensor", logits))
                del logits
                with _recomputing_more():
                    loss.backward()
        enter("optimizer")
        symbol("torchtitan.distributed.utils.clip_grad_norm_")(
            parameters, 1.0, foreach=True, pp_mesh=self.pipeline, ep_enabled=self.run.ep > 1
        )
        self.optimizers.step()
        enter("optimizer")

    def _pipelined(self, ids: Tensor, enter: Enter) -> None:
        """Let the schedule run all micro-batches of `ids` forward and backward through this rank's stages."""
        ids, labels, kwargs = self._share(ids)
        last = any(stage.is_last for stage in self.stages)
        stage_inputs = [ids] if any(stage.is_first for stage in self.stages) else []
        losses: list[Tensor] | None = [] if last else None
        with ExitStack() as stack:
            stack.enter_context(stages_alone({}))
            for stage in self.stages:
                for phase in ("forward", "backward"):
                    name = f"{phase}_one_chunk"
                    stack.enter_context(mock.patch.object(stage, name, _entering(enter, phase, stage)))
            self.schedule.step(
                *stage_inputs, target=labels if last else None, losses=losses, return_outputs=False, **kwargs
            )
        if losses:
            torch.sum(torch.stack(losses))

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors that live across phases, by part, including the permanent receive buffers of stages."""
        parts = super().tensors()
        received = [info.buffer for stage in self.stages for infos in (stage.args_recv_info, stage.grad_recv_info)
                    for batch_infos in infos.values() for info in batch_infos]  # fmt: skip
        return {**parts, COMMUNICATION: [tensor for tensor in received if tensor is not None]}

    def _share(self, ids: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return this rank's ids and labels, and the other arguments of the model."""
        if self.mesh is None:
            return ids, ids, {}
        path = "torchtitan.distributed.context_parallel"
        balancer = symbol(f"{path}._HeadTailLoadBalancer")  # creates tensors on the mesh's device, the host
        with mock.patch(f"{path}._HeadTailLoadBalancer", lambda length, ranks, _: balancer(length, ranks, self.device)):
            return symbol(f"{path}.prepare_context_parallel_input")(ids, ids.clone(), {}, self.mesh, self.device)

    def _cast(self) -> AbstractContextManager:
        assert isinstance(self.run, Training)
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.run.precision.startswith("autocast"))


def _entering(enter: Enter, phase: str, stage: Any) -> Callable[..., Any]:
    """Return a function that enters `phase` and runs a micro-batch through `stage`."""
    real = getattr(stage, f"{phase}_one_chunk")

    def call(number: int, *args: Any, **kwargs: Any) -> Any:
        logits = stage.fwd_cache[number][0] if stage.is_last and phase == "backward" else ()
        enter(phase, logits=[getattr(tensor, "_local_tensor", tensor) for tensor in logits])
        return real(number, *args, **kwargs)

    return call


def _recomputing_more() -> AbstractContextManager:
    """Let selective checkpointing run operators in backward that the forward pass of a block did not run. FSDP2
    prefetches experts, a unit within the block, in the forward pass but not in the backward pass. Torch refuses that
    since 2.13, and torchtitan 0.2.2 is older.
    """
    path = "torch.utils.checkpoint"
    if not has(f"{path}._sac_storage_key"):
        return nullcontext()
    mode, key_of = symbol(f"{path}._CachedTorchDispatchMode"), symbol(f"{path}._sac_storage_key")
    real = mode.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = key_of(func, args)
        if self.func_counter[key] in self.storage.get(key, ()):
            return real(self, func, types, args, kwargs)
        return func(*args, **(kwargs or {}))

    return mock.patch.object(mode, "__torch_dispatch__", dispatch)


@cache
def _own_experts() -> Any:
    """Return torchtitan's original function for grouped experts. When it compiles a Qwen 3, apply_compile replaces the
    function for all later models of the process."""
    return symbol("torchtitan.models.moe.moe._run_experts_grouped_mm")


def build(
    spec: ModelSpec, run: Training, device: torch.device, inputs: list[Tensor], recomputing: Around, stage: int = 0
) -> TitanStep:
    """Return the step of `run` on `device`, with torchtitan's own model. The process group exists already, and this
    rank belongs to pipeline stage `stage`."""
    train_spec = training_spec(spec)
    symbol("torchtitan.models.moe.moe")._run_experts_grouped_mm = _own_experts()
    job, dims = job_config(run), parallel_dims(run)
    arguments = model_arguments(spec, type(next(iter(train_spec.model_args.values()))))
    arguments.update_from_config(job)
    with torch.device("meta"):
        model = train_spec.model_cls(arguments)
    _set_width(model, spec)
    around_attention = _ring_attention if run.cp > 1 else nullcontext
    with (
        mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"),
        mock.patch("torchtitan.components.quantization.float8.has_cuda_capability", lambda *least: True),
        _saved_operators(spec, run),
        mock.patch("torchtitan.distributed.activation_checkpoint._layer_sac_count", 0),  # counts layers of all models
        _rounding(),
        around_attention(),
    ):
        converters = symbol("torchtitan.protocols.model_converter.build_model_converters")(job, dims)
        converters.convert(model)
        with disable_current_modes(), DisableTorchFunction():  # the ranks must be real, because Dynamo reads them
            dims.build_mesh()
        loss_function, schedule, parts = train_spec.build_loss_fn(job), None, []
        stages: list[Any] = []
        if run.pp > 1:
            patched = mock.patch("torchtitan.distributed.pipeline_parallel.PipelineStage", _stage(spec, run, stages))
            with patched, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Parallelize plan key")  # for modules of other stages
                schedule, parts, *_ = train_spec.pipelining_fn(
                    model, dims, job, device, arguments, train_spec.parallelize_fn, loss_function
                )
            inputs = [torch.cat(inputs)]  # the loader's batch, which the schedule splits
        else:
            parts = [train_spec.parallelize_fn(model, dims, job)]
    for part in parts:
        part.to_empty(device=device)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "DTensor random operators")
            part.init_weights(buffer_device=device)
        part.train()
    model = parts[0] if len(parts) == 1 else nn.ModuleList(parts)
    optimizers = train_spec.build_optimizers_fn(parts, job.optimizer, dims)
    step = TitanStep(
        run, device, model, [ids.to(device, copy=True) for ids in inputs], parameters=list(model.parameters())
    )
    if schedule:
        step.schedule, step.pipeline = schedule, dims.get_mesh("pp")
        step.stages = tuple(stages)
    step.optimizers, step.optimizer = optimizers, optimizers.optimizers[0]
    optimizers.register_step_post_hook(lambda *args, **kwargs: converters.post_optimizer_hook(parts))
    step.loss_function = loss_function
    step.context = symbol("torchtitan.distributed.utils.get_train_context")(run.tp > 1)
    step.around_attention = around_attention
    step.mesh = dims.get_mesh("cp") if run.cp > 1 else None
    return step


def _stage(spec: ModelSpec, run: Training, stages: list[Any]) -> Callable[..., Any]:
    """Return a constructor of stages that adds each stage to `stages`. It passes the shape of the input, which the
    ranks of the previous stage would send."""
    real = symbol("torch.distributed.pipelining.PipelineStage")
    # With sequence parallelism, a part of the sequence.
    shape = run.micro_batch, run.seq_len // (run.cp * run.tp), spec.hidden
    dtype = torch.float32 if run.precision == "fp32" else torch.bfloat16
    received = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    def make(model: nn.Module, index: int, *args: Any, **kwargs: Any) -> Any:
        stages.append(real(model, index, *args, input_args=received if index else None, **kwargs))
        return stages[-1]

    return make


def _rounding() -> AbstractContextManager:
    """Restore the rounding of Inductor, which torchtitan changes for good with "rowwise"; no buffer depends on it."""
    name = "emulate_precision_casts"
    return symbol("torch._inductor.config.patch")({name: symbol(f"torch._inductor.config.{name}")})


@contextmanager
def _ring_attention() -> Iterator[None]:
    """Let DTensor compute attention over the ranks of context parallelism; torchtitan never turns that off."""
    path = "torch.distributed.tensor.experimental._attention"
    symbol(f"{path}._enable_context_parallel_dispatcher")()
    try:
        yield
    finally:
        symbol(f"{path}._disable_context_parallel_dispatcher")()


def job_config(run: Training) -> Any:
    """Return torchtitan's configuration of `run`."""
    job, stack = symbol("torchtitan.config.JobConfig")(), Torchtitan.of(run)
    job.training.seq_len, job.training.local_batch_size = run.seq_len, run.micro_batch
    job.parallelism.tensor_parallel_degree = run.tp
    job.parallelism.fsdp_reshard_after_forward = stack.reshard_after_forward
    job.optimizer.implementation = stack.optimizer
    job.parallelism.context_parallel_degree = run.cp
    job.parallelism.expert_parallel_degree = run.ep
    if run.pp > 1:
        job.parallelism.pipeline_parallel_degree = run.pp
        job.parallelism.pipeline_parallel_schedule = schedule_name(run)
        job.parallelism.pipeline_parallel_microbatch_size = run.micro_batch
        job.training.local_batch_size = run.micro_batch * run.accumulation
    job.compile.enable = run.compile
    job.compile.components = ["model", "loss"] if stack.compile_loss else ["model"]
    if run.fp8:
        job.model.converters = [FLOAT8]
        float8 = job.quantize.linear.float8
        float8.filter_fqns = ["output", "router.gate"]  # as in its configurations
        if run.fp8 == "tensorwise" and stack.enable_fsdp_float8_all_gather:
            float8.enable_fsdp_float8_all_gather = float8.precompute_float8_dynamic_scale_for_fsdp = True
        else:
            float8.recipe_name = run.fp8
    ac = job.activation_checkpoint
    ac.mode = run.checkpointing or "none"
    ac.selective_ac_option = str(stack.every) if stack.ac == "selective_layers" else "op"
    return job


def parallel_dims(run: Training) -> Any:
    """Return torchtitan's parallel degrees for `run`."""
    degrees = {"dp_replicate": run.dp_replicate, "dp_shard": run.dp_shard, "cp": run.cp, "tp": run.tp, "pp": run.pp}
    degrees |= {"ep": run.ep, "etp": run.tp if run.ep > 1 else 1}
    return symbol("torchtitan.distributed.ParallelDims")(**degrees, world_size=run.world_size)


def _saved_operators(spec: ModelSpec, run: Training) -> AbstractContextManager:
    """Remove attention from the operators that selective checkpointing saves, if the option of the stack says so."""
    path = f"torchtitan.models.{MODELS[spec.family]}.infra.parallelize._op_sac_save_list"
    keeps = Torchtitan.of(run).keeps_attention
    saved = {operator for operator in symbol(path) if keeps or "attention" not in str(operator)}
    return mock.patch(path, saved)


def _norms(run: Training) -> AbstractContextManager:
    """Compute RMSNorm operator by operator, if the option of the stack says so, like torchtitan's former class
    (models/norms.py at 9dec370). Under torch.compile nothing changes, because it decomposes the norm itself."""
    if Torchtitan.of(run).norm_type == "fused_rmsnorm" or run.compile:
        return nullcontext()

    def forward(self: nn.RMSNorm, x: Tensor) -> Tensor:
        wide = x.float()
        normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + (self.eps or 0.0))
        return normalized.type_as(x) * self.weight

    return mock.patch.object(nn.RMSNorm, "forward", forward)


def model_arguments(spec: ModelSpec, kind: type) -> Any:
    """Return torchtitan's arguments for the model. Its Llama computes the width of the MLP, which `_set_width`
    fixes."""
    sizes = dict(
        dim=spec.hidden, n_layers=spec.layers, n_heads=spec.heads, n_kv_heads=spec.kv_heads, vocab_size=spec.vocab
    )
    if spec.family == "llama":
        return kind(**sizes, multiple_of=1, ffn_dim_multiplier=1.5 * spec.intermediate / (4 * spec.hidden))
    sizes |= dict(head_dim=spec.head_dim, hidden_dim=spec.intermediate, qk_norm=True)
    if spec.experts:
        experts = symbol("torchtitan.models.moe.MoEArgs")(
            num_experts=spec.experts, num_shared_experts=0, top_k=spec.experts_per_token, score_func="softmax",
            route_norm=True, score_before_experts=False,
        )  # fmt: skip
        sizes |= dict(moe_enabled=True, moe_inter_dim=spec.moe_intermediate, moe_args=experts)
    return kind(**sizes)


def _set_width(model: nn.Module, spec: ModelSpec) -> None:
    """Give every MLP the width in the model's configuration, while the model is on the meta device."""
    for block in model.layers.values():  # type: ignore[operator]
        if getattr(block, "moe_enabled", False):
            continue
        mlp = block.feed_forward
        if mlp.w1.out_features != spec.intermediate:
            with torch.device("meta"):
                mlp.w1, mlp.w3 = (nn.Linear(spec.hidden, spec.intermediate, bias=False) for _ in range(2))
                mlp.w2 = nn.Linear(spec.intermediate, spec.hidden, bias=False)
