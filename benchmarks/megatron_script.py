"""Megatron-LM's GPT runs whose memory was published, as a script for the simulator: megatron-core's own code.

    llmlab run --gpu A100-80GB --world-size 8 benchmarks/megatron_script.py '{"layers": 12, "tp": 2, "pp": 2}'

needs `pip install --no-deps megatron-core` (0.16) in an environment of its own, beside torch. Model, layers, schedules,
gradient buffers and distributed optimizer are megatron-core's. Kernels that need a card are replaced by what they
allocate: Apex's fused softmax, which writes its backward in place, the fused Adam of Apex and Transformer Engine, which
has no temporaries, and FlashAttention by PyTorch's. Transformer Engine's layers keep what Megatron's own keep, but they
take queries, keys and values as contiguous copies (dot_product_attention/utils.py, get_qkv_layout), and have a
workspace of their own (module/base.py).

Published are `mem-allocated-bytes`, after a step, and `mem-max-allocated-bytes`, both of the last rank, from the golden
values of Megatron-LM (tests/functional_tests/test_cases/gpt).

    s  sequence    b  batch    h  hidden
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import llmlab as lab
from llmlab.archive import figure
from llmlab.formulas.memory.megatron_step import MegatronMemory
from llmlab.formulas.memory.share import share_of
from llmlab.specs.model import ModelSpec, model
from llmlab.specs.run import Training

MiB = 1 << 20
DETERMINISTIC = ":4096:8"  # CUBLAS_WORKSPACE_CONFIG of most of the tests


@dataclass(frozen=True)
class Run:
    """A run, with Megatron's names shortened; the defaults are those of most of its functional tests."""

    layers: int = 12
    hidden: int = 512
    heads: int = 8
    groups: int | None = None  # key-value heads
    inner: int | None = None  # 4 × hidden
    vocab: int = 50257
    seq: int = 1024
    micro_batch: int = 4
    global_batch: int = 32
    tp: int = 1
    pp: int = 1
    cp: int = 1
    chunks: int = 1  # virtual pipeline stages of a rank
    sequence_parallel: bool = False
    swiglu: bool = False
    rmsnorm: bool = False
    rotary: bool = False
    untied: bool = False
    bias: bool = True
    dropout: float = 0.1
    fp16: bool = False
    distributed_optimizer: bool = False
    attention: str = "unfused"  # or "flash"
    fused_kernels: bool = True  # Apex's softmax and Adam
    transformer_engine: bool = False
    recompute: str | None = None
    method: str | None = None
    number: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and products."""
        return torch.float16 if self.fp16 else torch.bfloat16

    @property
    def padded(self) -> int:
        """The vocabulary as Megatron pads it."""
        return -(-self.vocab // (128 * self.tp)) * 128 * self.tp


TE = Run(transformer_engine=True)
LOCAL = Run()
SHARED = replace(TE, distributed_optimizer=True)
PARTS = replace(TE, attention="flash", dropout=0.0, sequence_parallel=True)  # of a sequence
LARGE = replace(
    SHARED, layers=32, hidden=4096, heads=32, groups=8, vocab=131073, seq=8192, untied=True, attention="flash",
    global_batch=8,
)  # fmt: skip
RUNS = {
    "TE, distributed optimizer": SHARED,
    "TE, full recomputation": replace(TE, recompute="full", method="uniform", number=1),
    "TE, pp 2, rotary": replace(TE, pp=2, rotary=True),
    "TE, pp 4, no biases": replace(TE, pp=4, bias=False),
    "TE, pp 4, SwiGLU": replace(TE, pp=4, swiglu=True, inner=1344),  # 2/3 of 4 × hidden, in whole 64
    "TE, pp 4, untied": replace(TE, pp=4, untied=True),
    "TE, pp 4, 3 virtual stages": replace(TE, pp=4, chunks=3),
    "TE, pp 4, 3 virtual stages, distributed optimizer": replace(SHARED, pp=4, chunks=3),
    "TE, tp 2, pp 2": replace(TE, tp=2, pp=2),
    "TE, tp 4, distributed optimizer": replace(SHARED, tp=4),
    "TE, flash, tp 2, cp 2": replace(PARTS, tp=2, cp=2),
    "TE, flash, tp 2, pp 2, cp 2": replace(PARTS, tp=2, pp=2, cp=2),
    "TE, flash, pp 2, cp 4": replace(PARTS, pp=2, cp=4, sequence_parallel=False),
    "local, distributed optimizer": replace(LOCAL, distributed_optimizer=True),
    "local, pp 2": replace(LOCAL, pp=2),
    "local, pp 4": replace(LOCAL, pp=4),
    "local, tp 4": replace(LOCAL, tp=4),
    "local without Apex, tp 2, pp 2": replace(LOCAL, tp=2, pp=2, fp16=True, fused_kernels=False),
    "7B, tp 4, A100": replace(LARGE, tp=4, micro_batch=2),
    "7B, tp 4, H100": replace(LARGE, tp=4, micro_batch=2),
    "7B, pp 4, 8 virtual stages, A100": replace(LARGE, pp=4, chunks=8, micro_batch=1),
    "7B, pp 4, 8 virtual stages, H100": replace(LARGE, pp=4, chunks=8, micro_batch=1),
}
RANKS = 8


def conditions(name: str) -> tuple[str, str]:
    """Return the card of a published run, and its CUBLAS_WORKSPACE_CONFIG: the tests with context parallelism, which
    are not deterministic, set none."""
    return "H100-80GB" if name.endswith("H100") else "A100-80GB", "" if "cp" in name else DETERMINISTIC


def published(name: str) -> tuple[int, int]:
    """Return the bytes that the last rank held after a step, and its peak, as published."""
    found = figure("megatron-golden-memory")
    return int(found[f"{name}: held"]), int(found[f"{name}: peak"])


def spec_of(run: Run) -> ModelSpec:
    """Return the run's model; GPT-2's class has neither groups of heads, gated MLPs nor rotary positions, Megatron's
    has all."""
    spec = model({
        "model_type": "gpt2", "vocab_size": run.vocab, "n_positions": run.seq, "n_embd": run.hidden,
        "n_layer": run.layers, "n_head": run.heads, "n_inner": run.inner, "resid_pdrop": run.dropout,
        "embd_pdrop": run.dropout, "attn_pdrop": run.dropout, "tie_word_embeddings": not run.untied,
    })  # fmt: skip
    biases = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), run.bias)
    other = {"kv_heads": run.groups or run.heads, "gated": run.swiglu, "learned_positions": not run.rotary, **biases}
    for field, value in {**other, "norm": "rmsnorm" if run.rmsnorm else "layernorm"}.items():
        object.__setattr__(spec, field, value)
    return spec


def training_of(run: Run, ranks: int = RANKS) -> Training:
    """Return the run as llmlab's."""
    dp = ranks // (run.tp * run.pp * run.cp)
    stack = lab.Megatron(
        recompute=run.recompute, recompute_method=run.method, recompute_num_layers=run.number or 1,
        transformer_engine=run.transformer_engine, masked_softmax_fusion=run.fused_kernels, apex=run.fused_kernels,
        virtual_pipeline=run.chunks,
    )  # fmt: skip
    return Training(
        micro_batch=run.micro_batch, seq_len=run.seq, accumulation=run.global_batch // (run.micro_batch * dp), dp=dp,
        tp=run.tp, pp=run.pp, cp=run.cp, zero=int(run.distributed_optimizer), sequence_parallel=run.sequence_parallel,
        precision="mixed-fp16" if run.fp16 else "mixed-bf16", stack=stack,
        attention="flash" if run.attention == "flash" else "eager",
    )  # fmt: skip


def memory(run: Run, card: str, stage: int = 0, cublas: str = "") -> MegatronMemory:
    """Return what formulas say of a rank of a run."""
    gpu = lab.gpu(card)
    if cublas == DETERMINISTIC:
        gpu = replace(gpu, cublas_workspace=32 * MiB)
    return MegatronMemory(share_of(spec_of(run), training_of(run), gpu, stage=stage))


def estimated(name: str) -> tuple[int, int]:
    """Return the bytes that the last rank of a published run holds after a step, and its peak, by formulas."""
    run, (card, cublas) = RUNS[name], conditions(name)
    totals = [moment.total for moment in memory(run, card, run.pp - 1, cublas).moments()]
    return totals[-1], max(totals)


class _Flash(nn.Module):
    """Core attention by PyTorch's FlashAttention."""

    copies = False  # as Transformer Engine makes

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.dropout = config.attention_dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.copies:
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))  # s b heads d -> b heads s d
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, dropout_p=self.dropout)
        return out.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


class _FlashOfContiguous(_Flash):
    copies = True


class _Norm:
    """torch's norm, also with sequence parallelism, where Megatron wants Apex's, which keeps the same."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:
        kind = nn.LayerNorm if config.normalization == "LayerNorm" else nn.RMSNorm
        norm = kind(hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def _fused_adam(params: Any, adam_w_mode: bool = True, **settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, fused=True, **settings)


def _softmax_kernels() -> dict[str, types.ModuleType]:
    """Return modules in place of Apex's fused softmax."""
    causal, masked = (types.ModuleType(f"scaled_{name}masked_softmax_cuda") for name in ("upper_triang_", ""))
    causal.forward = lambda scores, scale: torch.empty_like(scores)  # type: ignore[attr-defined]
    causal.backward = lambda gradient, softmax, scale: gradient  # type: ignore[attr-defined]
    masked.get_batch_per_block = lambda *sizes: 1  # type: ignore[attr-defined]
    return {each.__name__: each for each in (causal, masked)}


def _config(run: Run) -> Any:
    from megatron.core.transformer import TransformerConfig

    recompute = dict(recompute_granularity=run.recompute, recompute_method=run.method, recompute_num_layers=run.number)
    return TransformerConfig(
        num_layers=run.layers, hidden_size=run.hidden, num_attention_heads=run.heads, num_query_groups=run.groups,
        ffn_hidden_size=run.inner, gated_linear_unit=run.swiglu, activation_func=F.silu if run.swiglu else F.gelu,
        add_bias_linear=run.bias, normalization="RMSNorm" if run.rmsnorm else "LayerNorm", hidden_dropout=run.dropout,
        attention_dropout=run.dropout, attention_softmax_in_fp32=True, masked_softmax_fusion=run.fused_kernels,
        bias_activation_fusion=run.bias or run.swiglu, bias_dropout_fusion=True, fp16=run.fp16, bf16=not run.fp16,
        params_dtype=run.dtype, pipeline_dtype=run.dtype, autocast_dtype=run.dtype, tensor_model_parallel_size=run.tp,
        pipeline_model_parallel_size=run.pp, context_parallel_size=run.cp, sequence_parallel=run.sequence_parallel,
        virtual_pipeline_model_parallel_size=run.chunks if run.chunks > 1 else None, deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=False, **recompute,
    )  # fmt: skip


def _models(run: Run, config: Any) -> list[Any]:
    """Return the model chunks of this rank, in half precision, each in Megatron's DistributedDataParallel."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.module import Float16Module

    transformer_block.LayerNormImpl = _Norm
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _Norm
    if run.attention == "flash":
        attention = _FlashOfContiguous if run.transformer_engine else _Flash
        layer.submodules.self_attention.submodules.core_attention = attention
    made = []
    for chunk in range(run.chunks):
        where = dict(ignore_virtual=False, vp_stage=chunk if run.chunks > 1 else None)
        gpt = GPTModel(
            config, layer, run.padded, run.seq, share_embeddings_and_output_weights=not run.untied,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            position_embedding_type="rope" if run.rotary else "learned_absolute", vp_stage=where["vp_stage"],
        )  # fmt: skip
        made.append(Float16Module(config, gpt.cuda()))
    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not run.fp16, use_distributed_optimizer=run.distributed_optimizer
    )
    config.finalize_model_grads_func = finalize_model_grads
    return [DistributedDataParallel(config, buffers, each, disable_bucketing=i > 0) for i, each in enumerate(made)]


def _loss(mask_bs: Tensor, losses_bs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = torch.sum(losses_bs.view(-1).float() * mask_bs.view(-1)) / mask_bs.sum()
    return loss, {"lm loss": loss.detach()}


def _forward(batches: Iterator[tuple], chunk: Any) -> tuple[Tensor, Callable]:
    ids_bs, positions_bs, mask_bs, causal = next(batches)
    return chunk(ids_bs, positions_bs, causal, labels=ids_bs), partial(_loss, mask_bs)


def _causal(run: Run) -> Tensor | None:
    if run.attention == "flash":
        return None
    return torch.ones(run.micro_batch, 1, run.seq, run.seq, dtype=torch.bool, device="cuda")


def _batches(run: Run) -> Iterator[tuple]:
    b, s = run.micro_batch, run.seq // run.cp
    while True:
        ids_bs = torch.zeros(b, s, dtype=torch.int64).cuda()
        positions_bs = torch.arange(s, device="cuda").expand(b, s)
        yield ids_bs, positions_bs, torch.ones(b, s).cuda(), _causal(run)


def train(run: Run, steps: int = 2) -> Iterator[None]:
    """Take `steps` steps on "cuda", and yield after each."""
    from megatron.core import optimizer, parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(
        run.tp, run.pp, run.chunks if run.chunks > 1 else None, context_parallel_size=run.cp,
        create_gloo_process_groups=False,
    )  # fmt: skip
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    if run.fused_kernels:
        optimizer.USING_PYTORCH_OPTIMIZER, optimizer.Adam = False, _fused_adam
    config = _config(run)
    models = _models(run, config)
    settings = optimizer.OptimizerConfig(
        optimizer="adam", lr=1e-4, clip_grad=1.0, fp16=run.fp16, bf16=not run.fp16, params_dtype=run.dtype,
        use_distributed_optimizer=run.distributed_optimizer,
    )  # fmt: skip
    adam = optimizer.get_megatron_optimizer(settings, models, use_gloo_process_groups=False)
    config.grad_scale_func = adam.scale_loss
    engine = None
    if run.transformer_engine:
        hopper = torch.cuda.get_device_capability() >= (9, 0)
        engine = torch.empty((32 if hopper else 4) * MiB, dtype=torch.uint8, device="cuda")
        # Its unfused attention has no buffer that stays.
        buffer = parallel_state.get_global_memory_buffer()
        buffer.get_tensor = lambda shape, dtype, *_: torch.empty(shape, dtype=dtype, device="cuda")
    batches = [_batches(run) for _ in models]
    several = len(models) > 1
    for _ in range(steps):
        for each in models:
            each.zero_grad_buffer()
        adam.zero_grad()
        get_forward_backward_func()(
            forward_step_func=_forward, data_iterator=batches if several else batches[0],
            model=models if several else models[0], seq_length=run.seq, micro_batch_size=run.micro_batch,
            num_microbatches=run.global_batch // run.micro_batch // parallel_state.get_data_parallel_world_size(),
        )  # fmt: skip
        adam.step()
        yield
    del engine


def simulated(run: Run, card: Any, rank: int, ranks: int, cublas: str = DETERMINISTIC) -> tuple[int, int]:
    """Return the bytes that rank `rank` holds after a step, and its peak, on `card`."""
    place = {"RANK": rank, "LOCAL_RANK": rank % 8, "WORLD_SIZE": ranks, "MASTER_PORT": 29500}
    environment = {"MASTER_ADDR": "localhost", **{name: str(value) for name, value in place.items()}}
    with mock.patch.dict(os.environ, {**environment, "CUBLAS_WORKSPACE_CONFIG": cublas}), lab.simulator(card) as sim:
        kernels = _softmax_kernels() if run.fused_kernels else {}
        with mock.patch.dict(sys.modules, kernels):
            *_, held = [sim.allocated for _ in train(run)]
        return held, sim.peak_allocated


if __name__ == "__main__":
    asked = Run(**json.loads(sys.argv[1] if len(sys.argv) > 1 else "{}"))
    sys.modules.update(_softmax_kernels() if asked.fused_kernels else {})
    for _ in train(asked):
        pass
