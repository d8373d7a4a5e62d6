"""A step of torchtitan on fake tensors: its Llama 3, its Qwen 3 with and without experts, what cuts them up, its loss,
its optimizer, and torch's pipeline schedules, on one rank of many.

What is ours is the configuration and the loop, which follows torchtitan/train.py (0.2.2): logits are deleted before
backward, gradients are clipped by their norm, and are set to None before the next step. Routers send all experts
as many tokens (values/counts.py).
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
FLOAT8 = "quantize.linear.float8"  # the converter of that name


def check(spec: ModelSpec, run: Training) -> None:
    """Raise NotAvailable for what is not simulated of torchtitan; import what the step calls."""
    full = run.checkpointing == "full" or Torchtitan.of(run).recomputes_one_in > 0
    options = {
        # AOTAutograd, in torch 2.13, puts a tensor behind the mesh that such a block's backward is given, and refuses.
        f"compile=True, tp={run.tp} of blocks recomputed whole": run.compile and run.tp > 1 and full,
        f"{spec.dense_layers} dense layers of {spec.family}": spec.experts > 0 and spec.dense_layers > 0,
        # SDPA's plain formula, which fp32 takes, adds a mask that is no DTensor to scores that are.
        f"tp={run.tp} alone of {spec.family}": spec.family != "llama" and run.tp > 1 and run.precision == "fp32",
        # its queries are DTensors then, which torch's context parallelism takes none of
        f"cp={run.cp}, tp={run.tp} of {spec.family}": spec.family != "llama" and run.cp > 1 and run.tp > 1,
    }
    for what, value in options.items():
        if value:
            raise NotAvailable(f"simulate has no {what} with stack='torchtitan'; ask lab.estimate")
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
    schedule: Any = None  # of a pipeline: torch's, with this rank's stages
    stages: tuple[Any, ...] = ()
    pipeline: Any = None  # its mesh

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
                    ids, labels, beside = self._share(ids)
                    logits = self.model(ids, **beside)  # (B, T, V)
                    loss = self.loss_function(logits, labels) / ids.numel()
                enter("backward", logits=getattr(logits, "_local_tensor", logits))
                del logits
                with _made_again():
                    loss.backward()
        enter("optimizer")
        symbol("torchtitan.distributed.utils.clip_grad_norm_")(
            parameters, 1.0, foreach=True, pp_mesh=self.pipeline, ep_enabled=self.run.ep > 1
        )
        self.optimizers.step()
        enter("optimizer")

    def _pipelined(self, ids: Tensor, enter: Enter) -> None:
        """Let the schedule take all micro-batches of `ids` through this rank's stages, forward and backward."""
        ids, labels, beside = self._share(ids)
        last = any(stage.is_last for stage in self.stages)
        given = [ids] if any(stage.is_first for stage in self.stages) else []
        losses: list[Tensor] | None = [] if last else None
        with ExitStack() as stack:
            stack.enter_context(stages_alone({}))
            for stage in self.stages:
                for phase in ("forward", "backward"):
                    name = f"{phase}_one_chunk"
                    stack.enter_context(mock.patch.object(stage, name, _entering(enter, phase, stage)))
            self.schedule.step(
                *given, target=labels if last else None, losses=losses, return_outputs=False, **beside
            )
        if losses:
            torch.sum(torch.stack(losses))

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors that live across phases, by part: also what stages receive into, which lasts."""
        parts = super().tensors()
        received = [info.buffer for stage in self.stages for infos in (stage.args_recv_info, stage.grad_recv_info)
                    for of_batch in infos.values() for info in of_batch]  # fmt: skip
        return {**parts, COMMUNICATION: [tensor for tensor in received if tensor is not None]}

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


def _entering(enter: Enter, phase: str, stage: Any) -> Callable[..., Any]:
    """Return what runs a micro-batch through `stage`, `phase` beginning with it."""
    real = getattr(stage, f"{phase}_one_chunk")

    def call(number: int, *args: Any, **kwargs: Any) -> Any:
        logits = stage.fwd_cache[number][0] if stage.is_last and phase == "backward" else ()
        enter(phase, logits=[getattr(tensor, "_local_tensor", tensor) for tensor in logits])
        return real(number, *args, **kwargs)

    return call


def _made_again() -> AbstractContextManager:
    """Let selective checkpointing make again what a block's forward had not: FSDP2 gathers experts, a unit within the
    block, ahead in forward and not in backward. Torch refuses that from 2.13 on, which torchtitan 0.2.2 is older than.
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
    """Return torchtitan's function of grouped experts as it is at first: compiling any Qwen 3, apply_compile puts a
    compiled one in its place for all later models of the process."""
    return symbol("torchtitan.models.moe.moe._run_experts_grouped_mm")


def build(
    spec: ModelSpec, run: Training, device: torch.device, inputs: list[Tensor], recomputing: Around, stage: int = 0
) -> TitanStep:
    """Return the step of `run` on `device`, with torchtitan's own model; the process group is there already, in which
    this is a rank of pipeline stage `stage`."""
    own = training_spec(spec)
    symbol("torchtitan.models.moe.moe")._run_experts_grouped_mm = _own_experts()
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
        with disable_current_modes(), DisableTorchFunction():  # Dynamo reads which ranks these are
            dims.build_mesh()
        loss_function, schedule, parts = own.build_loss_fn(job), None, []
        stages: list[Any] = []
        if run.pp > 1:
            patched = mock.patch("torchtitan.distributed.pipeline_parallel.PipelineStage", _stage(spec, run, stages))
            with patched, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Parallelize plan key")  # of modules that other stages have
                schedule, parts, *_ = own.pipelining_fn(
                    model, dims, job, device, arguments, own.parallelize_fn, loss_function
                )
            inputs = [torch.cat(inputs)]  # the loader's batch, which the schedule cuts
        else:
            parts = [own.parallelize_fn(model, dims, job)]
    for part in parts:
        part.to_empty(device=device)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "DTensor random operators")
            part.init_weights(buffer_device=device)
        part.train()
    model = parts[0] if len(parts) == 1 else nn.ModuleList(parts)
    optimizers = own.build_optimizers_fn(parts, job.optimizer, dims)
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


def _stage(spec: ModelSpec, run: Training, made: list[Any]) -> Callable[..., Any]:
    """Return what makes a stage, tells it what it receives, which else the ranks of the stage before it say, and adds
    it to `made`."""
    real = symbol("torch.distributed.pipelining.PipelineStage")
    shape = run.micro_batch, run.seq_len // (run.cp * run.tp), spec.hidden  # sequence parallelism's part
    dtype = torch.float32 if run.precision == "fp32" else torch.bfloat16
    received = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    def make(model: nn.Module, index: int, *args: Any, **kwargs: Any) -> Any:
        made.append(real(model, index, *args, input_args=received if index else None, **kwargs))
        return made[-1]

    return make


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
        float8.filter_fqns = ["output", "router.gate"]  # as its configurations have it
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
    degrees |= {"ep": run.ep, "etp": run.tp if run.ep > 1 else 1}
    return symbol("torchtitan.distributed.ParallelDims")(**degrees, world_size=run.world_size)


def _kept_operators(spec: ModelSpec, run: Training) -> AbstractContextManager:
    """Take attention off the list of what selective checkpointing keeps, where the stack's option says so."""
    path = f"torchtitan.models.{MODELS[spec.family]}.infra.parallelize._op_sac_save_list"
    keeps = Torchtitan.of(run).keeps_attention
    less = {operator for operator in symbol(path) if keeps or "attention" not in str(operator)}
    return mock.patch(path, less)


def _norms(run: Training) -> AbstractContextManager:
    """Write RMSNorm out, where the stack's option says so, as torchtitan's own class did (models/norms.py at 9dec370);
    a compiler does so itself."""
    if Torchtitan.of(run).norm_type == "fused_rmsnorm" or run.compile:
        return nullcontext()

    def forward(self: nn.RMSNorm, x: Tensor) -> Tensor:
        wide = x.float()
        normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + (self.eps or 0.0))
        return normalized.type_as(x) * self.weight

    return mock.patch.object(nn.RMSNorm, "forward", forward)


def model_arguments(spec: ModelSpec, kind: type) -> Any:
    """Return torchtitan's arguments of the model; its Llama computes the MLP's width, `_set_width` corrects it."""
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
    """Give every MLP, still on the meta device, the width that the model's configuration names."""
    for block in model.layers.values():  # type: ignore[operator]
        if getattr(block, "moe_enabled", False):
            continue
        mlp = block.feed_forward
        if mlp.w1.out_features != spec.intermediate:
            with torch.device("meta"):
                mlp.w1, mlp.w3 = (nn.Linear(spec.hidden, spec.intermediate, bias=False) for _ in range(2))
                mlp.w2 = nn.Linear(spec.intermediate, spec.hidden, bias=False)
