"""What other ways of predicting a training throughput say: 6ND at a share of the peak, llm-analysis and SimuMax.

pip install llm-analysis    # 0.2.2; without it its column is empty
For SimuMax, see benchmarks/memory/questions/megatron_peers.py.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec

import llmlab as lab
from benchmarks.memory.questions import megatron_peers
from benchmarks.time.throughput_rows import Row
from llmlab.hardware.links import cluster

RULE = 0.4  # of the data sheet's peak, for 6 FLOP per parameter and token
# llm-analysis reckons with the whole peak, and says itself that Megatron-LM reported up to 0.6 of it.
EFFICIENCY = 0.6


def rule(row: Row) -> float | None:
    """Return the tokens/s per GPU of 6ND FLOP at 40 % of the peak; None where the card has none in this dtype."""
    peak = lab.gpu(row.card).peak(row.run.compute_dtype)
    return RULE * peak / (6 * lab.model(row.model).parameters) if peak else None


def llm_analysis(row: Row) -> float | None:
    """Return the tokens/s per GPU that llm-analysis gives; None without it, and for adapters, which it lacks."""
    run, card, spec = row.run, lab.gpu(row.card), lab.model(row.model)
    if find_spec("llm_analysis") is None or run.lora or card.nvlink is None:
        return None
    from llm_analysis import analysis, config

    logging.disable(logging.WARNING)
    shape = config.ModelConfig(
        name=row.label, num_layers=spec.layers, n_head=spec.heads, hidden_dim=spec.hidden, vocab_size=spec.vocab,
        num_key_value_heads=spec.kv_heads, ffn_embed_dim=spec.intermediate, max_seq_len=run.seq_len,
        expansion_ratio=spec.intermediate / spec.hidden,
    )  # fmt: skip
    peak = card.peak(run.compute_dtype)
    chip = config.GPUConfig(
        name=card.name, mem_per_GPU_in_GB=card.memory / 1e9, hbm_bandwidth_in_GB_per_sec=card.bandwidth / 1e9,
        intra_node_bandwidth_in_GB_per_sec=card.nvlink / 1e9, intra_node_min_message_latency=8e-6,
        peak_fp16_TFLOPS=(peak or 0) / 1e12,
    )  # fmt: skip
    degrees = config.ParallelismConfig(
        tp_size=run.tp, pp_size=run.pp, dp_size=run.dp, sp_size=run.tp if run.sequence_parallel else 1
    )
    again = {None: "NONE", "selective": "SELECTIVE", "full": "FULL"}[run.checkpointing]
    stage = "NONE" if not run.zero else f"STAGE_{run.zero}"
    asked = analysis.LLMAnalysis(shape, chip, config.DtypeConfig(), degrees, flops_efficiency=EFFICIENCY)
    try:
        said = asked.training(
            batch_size_per_gpu=run.micro_batch, gradient_accumulation_steps=run.accumulation, seq_len=run.seq_len,
            activation_recomputation=analysis.ActivationRecomputation[again], ds_zero=analysis.DSZeRO[stage],
            flash_attn=run.attention != "eager", mlp_gated_linear_units=spec.gated,
        )  # fmt: skip
    except (AssertionError, AttributeError, TypeError, ValueError, ZeroDivisionError):
        return None  # it refuses layers that pipeline stages do not divide
    finally:
        logging.disable(logging.NOTSET)
    return run.global_batch * run.seq_len / run.world_size / said["latency_per_iter"]


def simumax(row: Row) -> float | None:
    """Return the tokens/s per GPU that SimuMax gives; None without it, and for what is not Megatron-LM's or refused.

    Its release notes (docs/release_v1.2.md) exclude the time of interleaved pipelines, so it is not asked for these.
    """
    if row.run.virtual_stages > 1:
        return None
    try:
        nodes = cluster(row.card, **(row.nodes or {}))
        model = megatron_peers.simumax(lab.model(row.model), row.run, lab.gpu(row.card), nodes)
        return model.analysis_cost().data["throughput_per_accelerator"] if model else None
    except (lab.NotAvailable, *megatron_peers.REFUSALS):
        return None


PEERS = {
    f"6ND at {RULE:.0%} of the peak": rule,
    f"llm-analysis 0.2.2 at {EFFICIENCY:.0%}": llm_analysis,
    "SimuMax 1.2": simumax,
}
