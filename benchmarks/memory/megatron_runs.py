"""Megatron-LM's GPT runs whose memory was published, as llmlab's: estimated, and, of Megatron's own layers, simulated.

Published are `mem-allocated-bytes`, after a step, and `mem-max-allocated-bytes`, both of the last rank, from the golden
values of Megatron-LM (tests/functional_tests/test_cases/gpt). NeMo prints what rank 0 holds after backward, and the
most that PyTorch reserved, which is more than a step's tensors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from unittest import mock

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
# NeMo's recipes: https://github.com/NVIDIA/dgxc-benchmarking at v25.04. Nemotron's MLP, of squared ReLU, keeps as much
# as a gated one with as many parameters.
NEMOTRON = {
    "model_type": "llama", "hidden_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 48,
    "num_key_value_heads": 8, "intermediate_size": 16384, "vocab_size": 256000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
FUSED = lab.Megatron(accumulate_allreduce_grads_in_fp32=False, cross_entropy_fusion_impl="native")
RECIPES = {
    "Llama 3.1 8B": ("meta-llama/Llama-3.1-8B", Training(1, 8192, dp=4, cp=2, zero=1, accumulation=32, stack=FUSED)),
    "Nemotron-4 15B": (
        NEMOTRON, Training(2, 4096, dp=32, tp=2, sequence_parallel=True, zero=1, accumulation=4, stack=FUSED)),
}  # fmt: skip


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


def recipe(name: str) -> tuple[int, int, int, int]:
    """Return what rank 0 of one of NeMo's recipes held after backward, and the most it reserved, as published; and what
    it holds, and its peak, by formulas."""
    spec, run = RECIPES[name]
    found = MegatronMemory(share_of(model(spec), run, lab.gpu("H100-80GB")))
    peak = max(moment.total for moment in found.moments())
    held, reserved = (int(figure("nemo-memory")[f"{name}: {what}"]) for what in ("held", "reserved"))
    return held, reserved, sum(found.resident.values()), peak


def simulated(name: str) -> tuple[int, int]:
    """Return the same by megatron-core's own code on a simulated card."""
    from llmlab.recording.parts import divide
    from llmlab.simulation.report import recorded

    run, (card, cublas) = RUNS[name], conditions(name)
    with mock.patch.dict(os.environ, {"CUBLAS_WORKSPACE_CONFIG": cublas}):
        step = recorded(spec_of(run), training_of(run), card, stage=run.pp - 1)
    live: dict[int, int] = {}
    for event in step.engine.events:
        if event.time <= step.marks[-1].time:
            live[event.address] = max(event.size, 0)
    return sum(live.values()), divide(step.engine.events, step.marks).peak
