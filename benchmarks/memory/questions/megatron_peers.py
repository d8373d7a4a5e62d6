"""Ask two tools that predict training with Megatron-LM: SimuMax, and the report of Megatron-LM itself.

git clone https://github.com/MooreThreads/SimuMax      # commit 4dcaae5, version 1.2; needs sympy, pandas and graphviz
git clone https://github.com/NVIDIA/Megatron-LM        # commit d98e8a6; Megatron-Bridge has a copy of its report
PYTHONPATH=SimuMax:Megatron-LM python -m benchmarks.memory.megatron_golden

Without a checkout on the path, the tool's column is empty.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import warnings
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import llmlab as lab
from llmlab import ModelSpec, Training
from llmlab.hardware.links import Cluster, cluster

BLACKWELL = (10, 0)  # compute capability
REFUSALS = AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError, ZeroDivisionError


def simumax(spec: ModelSpec, run: Training, card: lab.GPU, nodes: Cluster | None = None) -> Any:
    """Return SimuMax's PerfLLM of a run of Megatron-LM, estimated; None without SimuMax, and for what it refuses."""
    peak = card.peak(run.compute_dtype)
    stack = run.stack
    if find_spec("simumax") is None or not isinstance(stack, lab.Megatron) or run.lora or not peak:
        return None
    from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
    from simumax.core.perf_llm import PerfLLM

    shape = ModelConfig(
        hidden_size=spec.hidden, head_num=spec.heads, kv_head_num=spec.kv_heads, head_size=spec.head_dim,
        intermediate_size=spec.intermediate, layer_num=spec.layers, vocab_size=spec.vocab, use_swiglu=spec.gated,
        expert_num=spec.experts or 1, topk=spec.experts_per_token or None,
    )  # fmt: skip
    shape.make_vocab_size_divisible_by = stack.make_vocab_size_divisible_by
    # Of interleaved pipelines, version 1.2 only has the memory, and that only without overlapped sends, as a preview.
    again = {None: None, "full": "full_block", "selective": "sdp_only"}[run.checkpointing]
    strategy = StrategyConfig(
        seq_len=run.seq_len, micro_batch_size=run.micro_batch, micro_batch_num=run.accumulation,
        world_size=run.world_size, tp_size=run.tp, cp_size=run.cp, pp_size=run.pp, ep_size=run.ep,
        interleaving_size=run.virtual_stages, pp_comm_async=run.virtual_stages == 1, zero_state=run.zero,
        enable_sequence_parallel=run.sequence_parallel, fp8=bool(run.fp8),
        grad_reduce_in_bf16=stack.accumulate_allreduce_grads_in_fp32 is False,
        enable_recompute=again is not None, recompute_granularity=again,
        recompute_layer_num=spec.layers if again else 0, use_math_sdp=run.attention == "eager",
        use_flash_sdp=run.attention != "eager", use_fused_grad_accumulation=stack.gradient_accumulation_fusion,
        cross_entropy_loss_fusion=stack.cross_entropy_fusion_impl is not None,
        overlap_grad_reduce=stack.overlap_grad_reduce,
    )  # fmt: skip
    model = PerfLLM()
    with _silent():
        try:
            machine = SystemConfig.init_from_dict(_machine(card, peak, nodes))
            model.configure(strategy_config=strategy, model_config=shape, system_config=machine)
            model.run_estimate()
        except REFUSALS:
            return None
    return model


@contextmanager
def _silent():
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def _machine(card: lab.GPU, peak: float, nodes: Cluster | None) -> dict[str, Any]:
    """Return the nearest of SimuMax's own machines, as docs/system.md advises, with the data sheet's rates of `card`.

    The efficiencies are those that its authors measured on an A100, or on a B200 for Blackwell. The B200's networks
    stand for both, because those of its A100 are PCIe.
    """
    from simumax.utils import get_simu_system_config

    names = "b200_bf16_ceperm", "a100_pcie"
    newest, older = (json.loads(Path(get_simu_system_config(name)).read_text(encoding="utf-8")) for name in names)
    machine = newest if (card.compute_capability or (0, 0)) >= BLACKWELL else older
    machine["networks"] = newest["networks"]
    chip = machine["accelerator"]
    chip["mem_gbs"] = card.memory / 1e9
    for name, operation in chip["op"].items():
        operation["tflops"] = ((card.peak("fp8") or 0) if name.startswith("fp8") else peak) / 1e12
    for each in chip["bandwidth"].values():
        each["gbps"] = card.bandwidth / 1e9
    if nodes is not None:
        machine["num_per_node"] = nodes.gpus
        for name in ("low_intra_node", "high_intra_node"):
            machine["networks"][name]["bandwidth"]["gbps"] = nodes.inside.bandwidth / 1e9
        if nodes.across:
            machine["networks"]["inter_node"]["bandwidth"]["gbps"] = nodes.adapters * nodes.across.bandwidth / 1e9
    return machine


def simumax_peak(spec: ModelSpec, run: Training, card: str) -> int | None:
    """Return the peak of the last stage's allocated bytes that SimuMax predicts."""
    model = simumax(spec, run, lab.gpu(card), cluster(card))
    if model is None:
        return None
    stages = model.get_pp_stage_peak_mem(model.analysis_mem(), "peak_mem")
    return int(list(stages.values())[-1])


@cache
def _report() -> ModuleType | None:
    """Return Megatron-LM's theoretical_memory_usage.py, without the rest of its package, which needs Python 3.12."""
    found = find_spec("megatron")
    paths = [Path(root) / "training/theoretical_memory_usage.py" for root in found.submodule_search_locations or ()] \
        if found else []  # fmt: skip
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return None
    helpers = ModuleType("theoretical.utils")
    helpers.is_hybrid_model, helpers.print_rank_0 = lambda args: False, print  # type: ignore[attr-defined]
    where = spec_from_file_location("theoretical.memory", path)
    assert where and where.loader
    module = module_from_spec(where)
    with mock.patch.dict(sys.modules, {"theoretical": ModuleType("theoretical"), "theoretical.utils": helpers}):
        where.loader.exec_module(module)
    return module


def megatron_report(spec: ModelSpec, run: Training, card: str) -> int | None:
    """Return the bytes of Megatron-LM's --log-memory-to-tensorboard report, which is of the fullest stage."""
    report, stack = _report(), run.stack
    if report is None or not isinstance(stack, lab.Megatron) or spec.experts:
        return None
    multiple = stack.make_vocab_size_divisible_by * run.tp
    args = SimpleNamespace(
        kv_channels=spec.head_dim, num_attention_heads=spec.heads, hidden_size=spec.hidden, num_layers=spec.layers,
        group_query_attention=spec.kv_heads != spec.heads, num_query_groups=spec.kv_heads, num_experts=None,
        swiglu=spec.gated, ffn_hidden_size=spec.intermediate, normalization="RMSNorm" if spec.norm == "rmsnorm" else
        "LayerNorm", multi_latent_attention=False, padded_vocab_size=-(-spec.vocab // multiple) * multiple,
        untie_embeddings_and_output_weights=not spec.tied, moe_shared_expert_intermediate_size=None,
        moe_latent_size=None, mtp_num_layers=None, add_bias_linear=spec.mlp_bias, seq_length=run.seq_len,
        micro_batch_size=run.micro_batch, tensor_model_parallel_size=run.tp, pipeline_model_parallel_size=run.pp,
        virtual_pipeline_model_parallel_size=run.virtual_stages if run.virtual_stages > 1 else None,
        expert_tensor_parallel_size=run.tp, expert_model_parallel_size=1, world_size=run.world_size,
        data_parallel_size=run.dp * run.cp, use_distributed_optimizer=run.zero == 1,
        sequence_parallel=run.sequence_parallel, recompute_granularity=run.checkpointing,
    )  # fmt: skip
    with _silent():
        return int(report.report_theoretical_memory(args, run.accumulation)[2] * 2**20)
