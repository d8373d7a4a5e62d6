"""A step of Megatron-LM on fake tensors: megatron-core's GPT of its own layers, its gradient buffers, its optimizer and
its pipeline schedules, on one rank of many.

Only the configuration and the loop are ours; they follow Megatron-LM's pretrain_gpt.py and train_step
(megatron/training/training.py). Kernels that are compiled for a GPU are replaced by their allocations: Apex's softmax
computes its backward in place, its Adam has no temporaries, and its LayerNorm saves the same tensors as PyTorch's.

    b  micro_batch    s  seq_len
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.compat import symbol
from ...base.errors import NotAvailable
from ...specs.model import ModelSpec
from ...specs.run import Training
from ...specs.stacks import Megatron
from ...step.model import DTYPES, Around
from ...step.optimizer import LEARNING_RATE
from ...step.step import Enter, Step, ignore
from ..streams import nothing

CORE = "megatron.core."
SCHEDULES = CORE + "pipeline_parallel.schedules"
# Imported before a GPU is simulated, because modules imported later would keep patched names.
MODULES = ("distributed", "models.gpt.gpt_layer_specs", "optimizer", "pipeline_parallel", "transformer.module")
ACTIVATIONS = {"gelu_new": F.gelu, "silu": F.silu}


def check(spec: ModelSpec, run: Training) -> None:
    """Raise NotAvailable for options of Megatron-LM that are not simulated; import the modules that the step calls."""
    stack = Megatron.of(run)
    see = "ask lab.estimate"
    if stack.deepspeed:
        raise NotAvailable(f"deepspeed=True: simulate runs Megatron-LM's own pipeline and optimizer; {see}")
    if stack.transformer_engine:
        own = "give stack='megatron:transformer_engine=False', which is Megatron's own"
        raise NotAvailable(f"simulate has no layers of Transformer Engine, whose kernels need a GPU: {own}, or {see}")
    if stack.cross_entropy_fusion_impl == "te":
        raise NotAvailable("simulate has no loss of Transformer Engine, whose kernel needs a GPU: give "
                           f"cross_entropy_fusion_impl=native, which is Megatron's own, or {see}")  # fmt: skip
    kernels = {"use_precision_aware_optimizer": "Transformer Engine's Adam", "distributed_fused_adam": "Apex's Adam",
               "defer_embedding_wgrad_compute": "Apex's fused weight gradient",
               "moe_flex_dispatcher_backend": "flexible dispatcher's communication"}  # fmt: skip
    for option, whose in kernels.items():
        if value := getattr(stack, option):
            raise NotAvailable(f"{option}={value!r}: simulate has no {whose}, a kernel that needs a GPU: leave it out, "
                               f"or {see}")  # fmt: skip
    if stack.pipeline_model_parallel_layout or (spec.experts and spec.dense_layers):
        raise NotAvailable("simulate divides equal layers equally among stages: leave out "
                           "pipeline_model_parallel_layout, and give a model whose layers all have experts, or none, "
                           f"or {see}")  # fmt: skip
    if stack.cuda_graph_impl:
        raise NotAvailable(f"cuda_graph_impl={stack.cuda_graph_impl!r}: simulate has no CUDA graphs, which use a "
                           f"memory pool of their own: leave it out, or {see}")  # fmt: skip
    if spec.experts and stack.moe_expert_capacity_factor is None:
        raise NotAvailable("simulate does not know how many tokens the router sends to each expert: give "
                           f"moe_expert_capacity_factor=1, which makes the numbers equal, or {see}")  # fmt: skip
    if spec.activation not in ACTIVATIONS:
        raise NotAvailable(f"simulate has no activation {spec.activation!r} with stack='megatron'; {see}")
    if spec.kv_heads % run.tp:
        problem = f"tp={run.tp} does not divide {spec.name}'s {spec.kv_heads} key-value heads"
        raise NotAvailable(f"simulate with stack='megatron': {problem}; {see}")
    if spec.layers % run.pp and (spec.layers + 2) % run.pp:
        problem = f"pp={run.pp} divides neither {spec.name}'s {spec.layers} layers nor these with embedding and head"
        raise NotAvailable(f"simulate with stack='megatron': {problem}; {see}")
    for name in MODULES:
        symbol(CORE + name)


@dataclass
class MegatronStep(Step):
    """A training step of Megatron-LM's train_step. `chunks` are the parts of the model on this rank, each with its
    gradient buffers; `own` is Megatron's optimizer, which wraps torch's."""

    chunks: list[Any] = field(default_factory=list)
    own: Any = None

    def __call__(self, enter: Enter = ignore) -> None:
        """Take one step: the schedule calls forward and backward."""
        with _quiet():
            self._step(enter)

    def _step(self, enter: Enter) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.own.zero_grad()
        run, several, backward = self.run, len(self.chunks) > 1, symbol(SCHEDULES + ".backward_step")
        assert isinstance(run, Training)

        def forward_step(batches: Iterator[dict[str, Tensor | None]], chunk: Any) -> tuple[Tensor, Callable]:
            enter("forward")
            return _forward(next(batches), chunk)

        def backward_step(*args: Any, **kwargs: Any) -> Any:
            enter("backward")
            return backward(*args, **kwargs)

        data = [self._batches(chunk) for chunk in self.chunks]
        # moe_utils.py reads this name of Transformer Engine even if that is not installed.
        no_te = mock.patch(CORE + "transformer.moe.moe_utils.te_general_gemm", None, create=True)
        with mock.patch(SCHEDULES + ".backward_step", backward_step), _apex(run), no_te:
            symbol(CORE + "pipeline_parallel.get_forward_backward_func")()(
                forward_step_func=forward_step, data_iterator=data if several else data[0],
                model=self.chunks if several else self.chunks[0], seq_length=run.seq_len,
                micro_batch_size=run.micro_batch, num_microbatches=run.accumulation,
            )  # fmt: skip
            enter("optimizer")
            self.own.step()
        enter("optimizer")

    def _batches(self, chunk: Any) -> Iterator[dict[str, Tensor | None]]:
        """Yield the result of get_batch of pretrain_gpt.py for a chunk: chunks in the middle of the model get no
        tensors."""
        attribute = symbol(CORE + "utils.get_attr_wrapped_model")
        first, last = (attribute(chunk, end) for end in ("pre_process", "post_process"))
        for ids in self.inputs:  # (b, s)
            b, s = ids.shape
            empty = partial(torch.empty, device="cuda")
            mask = empty(b, 1, s, s, dtype=torch.bool) if (first or last) else None
            tokens, positions, labels = (
                empty(b, s, dtype=torch.int64) if needed else None for needed in (first, first, last)
            )
            yield {"tokens": tokens, "positions": positions, "labels": labels, "mask": mask,
                   "loss_mask": empty(b, s) if last else None}  # fmt: skip

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors that live across phases, by part, including the gradient buffers."""
        parts = super().tensors()
        for chunk in self.chunks:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                parts["gradients"].append(buffer.grad_data)
        first, *expert_optimizers = _steppers(self.own)
        for optimizer in (first, *expert_optimizers):
            parts["optimizer"] += [master for group in optimizer.param_groups for master in group["params"]]
        for optimizer in expert_optimizers:
            parts["optimizer"] += [moment for state in optimizer.state.values() for moment in state.values()]
        return parts


def _forward(batch: dict[str, Tensor | None], chunk: Any) -> tuple[Tensor, Callable]:
    """Return the output of a chunk, and the function that computes its loss: loss_func of pretrain_gpt.py."""
    out = chunk(batch["tokens"], batch["positions"], batch["mask"], labels=batch["labels"])
    return out, partial(_loss, batch["loss_mask"])


def _loss(mask_bs: Any, losses_bs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    mask = mask_bs.view(-1)
    mean = torch.sum(losses_bs.view(-1).float() * mask) / mask.sum()
    return mean, {"lm loss": mean.detach()}


def build(
    spec: ModelSpec, run: Training, device: torch.device, inputs: list[Tensor], recomputing: Around, stage: int = 0
) -> MegatronStep:
    """Return the step of `run` on the first rank of pipeline stage `stage`."""
    rank = stage * run.world_size // run.pp  # stages are the outermost ranks: parallel_state.py, "tp-cp-ep-dp-pp"
    torch.distributed.init_process_group("nccl", rank=rank, world_size=run.world_size)
    chunks_of_rank = run.virtual_stages if run.virtual_stages > 1 else None
    symbol(CORE + "parallel_state.initialize_model_parallel")(
        run.tp, run.pp, chunks_of_rank, expert_model_parallel_size=run.ep, create_gloo_process_groups=False
    )
    symbol(CORE + "tensor_parallel.model_parallel_cuda_manual_seed")(1)
    with _quiet():
        config = transformer_config(spec, run)
        chunks = _chunks(spec, run, config)
        own = _optimizer(run, chunks)
    config.grad_scale_func = own.scale_loss
    model = nn.ModuleList(chunks)
    step = MegatronStep(run, device, model, inputs, chunks=chunks, own=own, parameters=list(model.parameters()))
    step.optimizer = _steppers(own)[0]
    return step


def transformer_config(spec: ModelSpec, run: Training) -> Any:
    """Return Megatron's configuration of the model and the run."""
    stack, half = Megatron.of(run), DTYPES[run.compute_dtype]
    unequal_stages = spec.layers % run.pp > 0  # specs/stages.py
    recompute: dict[str, Any] = {"recompute_granularity": run.checkpointing}
    if run.checkpointing == "selective":
        recompute["recompute_modules"] = list(stack.recompute_modules)
    elif run.checkpointing == "full":
        method = stack.recompute_method or "uniform"
        recompute.update(recompute_method=method, recompute_num_layers=stack.recompute_num_layers)
    return symbol(CORE + "transformer.TransformerConfig")(
        num_layers=spec.layers, hidden_size=spec.hidden, num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads, kv_channels=spec.head_dim, ffn_hidden_size=spec.intermediate,
        gated_linear_unit=spec.gated, activation_func=ACTIVATIONS[spec.activation],
        add_bias_linear=spec.mlp_bias, add_qkv_bias=spec.qkv_bias, qk_layernorm=spec.qk_norm,
        normalization="RMSNorm" if spec.norm == "rmsnorm" else "LayerNorm",
        hidden_dropout=spec.dropout, attention_dropout=spec.attention_dropout,
        masked_softmax_fusion=stack.masked_softmax_fusion and stack.apex,
        bias_activation_fusion=stack.bias_swiglu_fusion if spec.activation == "silu" else spec.mlp_bias,
        bias_dropout_fusion=True,
        fp16=half is torch.float16, bf16=half is torch.bfloat16, params_dtype=half, pipeline_dtype=half,
        autocast_dtype=half, tensor_model_parallel_size=run.tp, pipeline_model_parallel_size=run.pp,
        virtual_pipeline_model_parallel_size=run.virtual_stages if run.virtual_stages > 1 else None,
        sequence_parallel=run.sequence_parallel, deallocate_pipeline_outputs=True,
        account_for_embedding_in_pipeline_split=unequal_stages, account_for_loss_in_pipeline_split=unequal_stages,
        gradient_accumulation_fusion=False, **recompute,
        **_experts(spec, run), cross_entropy_loss_fusion=stack.cross_entropy_fusion_impl is not None,
    )  # fmt: skip


def _experts(spec: ModelSpec, run: Training) -> dict[str, Any]:
    """Return the options of Megatron's configuration for experts, each of which is filled to its capacity."""
    if not spec.experts:
        return {}
    return {
        "num_moe_experts": spec.experts, "moe_router_topk": spec.experts_per_token,
        "moe_ffn_hidden_size": spec.moe_intermediate, "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none", "moe_pad_expert_input_to_capacity": True,
        "moe_expert_capacity_factor": Megatron.of(run).moe_expert_capacity_factor,
        "expert_model_parallel_size": run.ep,
    }  # fmt: skip


def _chunks(spec: ModelSpec, run: Training, config: Any) -> list[Any]:
    """Return the parts of the model on this rank, in half precision, each wrapped in Megatron's
    DistributedDataParallel."""
    stack, distributed = Megatron.of(run), symbol(CORE + "distributed")
    edge_checks = [symbol(f"{CORE}parallel_state.is_pipeline_{name}_stage") for name in ("first", "last")]
    layer = symbol(CORE + "models.gpt.gpt_layer_specs.get_gpt_layer_local_spec")(
        spec.experts or None, qk_layernorm=spec.qk_norm, normalization=config.normalization
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _Norm
    if spec.qk_norm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = _Norm
    padding = stack.make_vocab_size_divisible_by * run.tp
    vocab = -(-spec.vocab // padding) * padding
    settings = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=stack.accumulates_in_fp32(run.compute_dtype), use_distributed_optimizer=run.zero == 1
    )
    config.finalize_model_grads_func = distributed.finalize_model_grads
    chunks = []
    for number in range(run.virtual_stages):
        part = number if run.virtual_stages > 1 else None
        first, last = (is_edge(ignore_virtual=False, vp_stage=part) for is_edge in edge_checks)
        with mock.patch(CORE + "transformer.transformer_block.LayerNormImpl", _Norm):
            gpt = symbol(CORE + "models.gpt.GPTModel")(
                config, layer, vocab, spec.max_positions, pre_process=first, post_process=last, vp_stage=part,
                share_embeddings_and_output_weights=spec.tied,
                position_embedding_type="learned_absolute" if spec.learned_positions else "rope",
            )  # fmt: skip
        half = symbol(CORE + "transformer.module.Float16Module")(config, gpt.cuda())
        chunks.append(distributed.DistributedDataParallel(config, settings, half, disable_bucketing=number > 0))
    return chunks


def _optimizer(run: Training, chunks: list[Any]) -> Any:
    """Return Megatron's optimizer with fp32 weights and moments, which wraps a fused Adam."""
    half = DTYPES[run.compute_dtype]
    settings = symbol(CORE + "optimizer.OptimizerConfig")(
        optimizer="adam", lr=LEARNING_RATE, clip_grad=1.0, fp16=half is torch.float16, bf16=half is torch.bfloat16,
        params_dtype=half, use_distributed_optimizer=run.zero == 1,
    )  # fmt: skip
    fused = mock.patch.multiple(CORE + "optimizer", USING_PYTORCH_OPTIMIZER=False, Adam=_fused_adam)
    with fused if Megatron.of(run).apex else nullcontext():
        return symbol(CORE + "optimizer.get_megatron_optimizer")(settings, chunks, use_gloo_process_groups=False)


def _steppers(own: Any) -> list[Any]:
    """Return torch's optimizers in Megatron's; experts that are distributed over ranks have a separate one."""
    return [chained.optimizer for chained in getattr(own, "chained_optimizers", [own])]


def _fused_adam(params: Any, adam_w_mode: bool = True, **settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, fused=True, **settings)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide deprecation warnings of megatron-core, and warnings about functions that newer torch renamed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.simplefilter("ignore", FutureWarning)
        yield


class _Norm:
    """PyTorch's norm with the sequence-parallel attribute of Apex's; a class, because Megatron's specs require one."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> nn.Module:  # type: ignore[misc]
        norm = (nn.LayerNorm if config.normalization == "LayerNorm" else nn.RMSNorm)(hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


@contextmanager
def _apex(run: Training) -> Iterator[None]:
    """Replace Apex's kernels during a step of `run`: the softmax that fusions/fused_softmax.py imports when it calls
    it, and the function that scales gradients in place and copies fp32 weights to fp16 weights."""
    if not Megatron.of(run).apex:
        yield
        return
    causal, masked = (ModuleType(f"scaled_{name}masked_softmax_cuda") for name in ("upper_triang_", ""))
    causal.forward = lambda scores, scale: torch.empty_like(scores)  # type: ignore[attr-defined]
    causal.backward = lambda gradient, softmax, scale: gradient  # type: ignore[attr-defined]
    masked.get_batch_per_block = lambda *sizes: 1  # type: ignore[attr-defined]
    replacements = {mask.__name__: mask for mask in (causal, masked)}
    sys.modules.update(replacements)
    try:
        scale = "multi_tensor_scale_impl"
        with mock.patch(f"{CORE}optimizer.clip_grads.{scale}", nothing), mock.patch(
            f"{CORE}optimizer.optimizer.{scale}", nothing
        ):
            yield
    finally:
        for name in replacements:
            del sys.modules[name]
