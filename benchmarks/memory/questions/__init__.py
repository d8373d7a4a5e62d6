"""Ask each peer for a run's memory in the way that its documentation describes, offline.

A peer is imported inside the function that asks it, so that one that is not installed only leaves its own column empty.
Each function takes a model and a training step and returns bytes, or None if the peer cannot be asked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import llmlab as lab
from llmlab import ModelSpec, Training, estimate
from llmlab.base.units import MiB

from .mem_tracker import mem_tracker_peak


def llmlab_estimate(spec: ModelSpec, run: Training) -> int | None:
    return estimate(spec, run, "T4").peak_allocated


@cache
def simulated(spec: ModelSpec, run: Training) -> lab.Report:
    """Return llmlab's simulation on a T4, once per run."""
    return lab.simulate(spec, run, "T4")


def llmlab_verdict(spec: ModelSpec, run: Training) -> str:
    return estimate(spec, run, "T4").outcome


def simulated_verdict(spec: ModelSpec, run: Training) -> str:
    return simulated(spec, run).outcome


def simulated_allocated(spec: ModelSpec, run: Training) -> int | None:
    return simulated(spec, run).peak_allocated


def simulated_reserved(spec: ModelSpec, run: Training) -> int | None:
    return simulated(spec, run).peak_reserved


@cache
def _fitcheck(spec: ModelSpec, run: Training):
    """Return fitcheck's MemoryReport (its README, "What the output means"), or None for what it does not model."""
    import fitcheck

    lora = run.lora
    plain = run.precision in ("fp32", "fp16", "bf16") and run.optimizer in ("adamw", "sgd")
    if not plain or run.checkpointing == "selective" or run.world_size > 1 or spec.experts:
        return None
    config = fitcheck.ModelConfig(  # what fetch_model_config reads from the hub's config.json and parameter count
        name=spec.name,
        num_params=spec.parameters,
        hidden_size=spec.hidden,
        num_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_kv_heads=spec.kv_heads,
        intermediate_size=spec.intermediate,
        vocab_size=spec.vocab,
        head_dim=spec.head_dim,
        tie_word_embeddings=spec.tied,
    )
    training = fitcheck.TrainingConfig(
        precision=run.precision,
        quantization=run.quantization or "none",
        optimizer=run.optimizer,
        batch_size=run.micro_batch,
        seq_len=run.seq_len,
        lora_rank=lora.rank if lora else None,
        lora_targets=list(lora.targets) if lora else [],
        grad_checkpoint=run.checkpointing == "full",
        flash_attn=run.attention != "eager",
    )
    return fitcheck.estimate(config, training, fitcheck.get_gpu("t4"))


def fitcheck_tensors(spec: ModelSpec, run: Training) -> int | None:
    report = _fitcheck(spec, run)
    return None if report is None else round((report.total_mib - report.overhead_mib) * MiB)


def fitcheck_total(spec: ModelSpec, run: Training) -> int | None:
    report = _fitcheck(spec, run)
    return None if report is None else round(report.total_mib * MiB)


def fitcheck_verdict(spec: ModelSpec, run: Training) -> str | None:
    report = _fitcheck(spec, run)
    return None if report is None else report.verdict


@cache
def _accelerate_size(spec: ModelSpec) -> int:
    """Return the fp32 bytes `accelerate estimate-memory` counts: AutoModel without storage, as its gather_data does."""
    import torch
    from accelerate import init_empty_weights
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoConfig, AutoModel

    with init_empty_weights():
        model = AutoModel.from_config(AutoConfig.for_model(**spec.config), dtype=torch.float32)
    return calculate_maximum_sizes(model)[0]


def accelerate_training(spec: ModelSpec, run: Training) -> int:
    """Return the column "Training using Adam" of dtype float16; int4's says N/A."""
    from accelerate.commands.estimate import estimate_training_usage

    return max(estimate_training_usage(_accelerate_size(spec), "float16").values())


def accelerate_loading(spec: ModelSpec, run: Training) -> int:
    """Return the column "Total Size" of dtype int4 for a 4-bit base, else of float16."""
    return _accelerate_size(spec) // (8 if run.quantization else 2)


def deepspeed_zero2(spec: ModelSpec, run: Training) -> int:
    """Return the line offload_optimizer=none of estimate_zero2_model_states_mem_needs_all_cold, one GPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise its import looks for a device
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    return estimate_zero2_model_states_mem_needs(spec.parameters, num_gpus_per_node=1, cpu_offload=False)[1]


def deepspeed_zero3(spec: ModelSpec, run: Training) -> int:
    """Return the line with nothing offloaded of estimate_zero3_model_states_mem_needs_all_cold, one GPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    largest = max(spec.vocab * spec.hidden, *(linear.parameters // linear.count for linear in spec.linears))
    return estimate_zero3_model_states_mem_needs(
        spec.parameters, largest, num_gpus_per_node=1, cpu_offload=False, cpu_offload_params=False
    )[1]


@dataclass(frozen=True)
class Tool:
    """One column: a package, what it is asked, and the measured quantity (a field of Report) to compare with."""

    name: str
    package: str
    predict: Callable[[ModelSpec, Training], int | None]
    asked: str  # the run itself, or the nearest thing that the package has words for
    truth: str
    note: str


TOOLS = (
    Tool("llmlab", "llmlab", llmlab_estimate, "the run", "peak_allocated", "lab.estimate(model, run, 'T4')."),
    Tool(
        "llmlab simulate", "llmlab", simulated_allocated, "the run", "peak_allocated", "lab.simulate(model, run, 'T4')."
    ),
    Tool(
        "llmlab simulate, reserved", "llmlab", simulated_reserved, "the run", "peak_reserved",
        "The same simulation, compared with the reserved bytes. No other tool here predicts reserved bytes alone.",
    ),
    Tool(
        "fitcheck tensors", "fitcheck-llm", fitcheck_tensors, "the run", "peak_allocated",
        "fitcheck.estimate(): its total without C_overhead, which its README calls the five physical formulas. "
        "For rows with *efficient* attention we pass flash_attn=True, by which fitcheck means SDPA's memory-efficient "
        "backend on a T4.",
    ),
    Tool(
        "fitcheck total", "fitcheck-llm", fitcheck_total, "the run", "process",
        "fitcheck.estimate(): the total it prints. It predicts what the driver shows, so we compare it with the "
        "reserved bytes plus the CUDA context.",
    ),
    Tool(
        "MemTracker", "torch", mem_tracker_peak, "the run, by its tensors", "peak_allocated",
        "torch.distributed._tools' MemTracker: the same step on fake CPU tensors. We add the bytes of frozen "
        "parameters, because torch refuses hooks on them. MemTracker does not model the allocator, and it cannot run "
        "models in NF4, because their parameters cannot be fake tensors. Its errors are largest where the peak is in "
        "the backward pass of eager attention's softmax, which needs less memory on a CPU than on CUDA.",
    ),
    Tool(
        "accelerate training", "accelerate", accelerate_training, "full fine-tuning, batch 1", "peak_allocated",
        "accelerate estimate-memory, \"Training using Adam\" at float16 (for int4 it says N/A): full fine-tuning at "
        "batch 1. It has no way to ask for LoRA, sequence length, batch or checkpointing.",
    ),
    Tool(
        "accelerate loading", "accelerate", accelerate_loading, "the weights", "peak_allocated",
        "accelerate estimate-memory, \"Total Size\" at float16, or int4 where the base is NF4: the weights alone, and "
        "of AutoModel, so an untied lm_head is missing.",
    ),
    Tool(
        "DeepSpeed ZeRO-2", "deepspeed", deepspeed_zero2, "model states", "peak_allocated",
        "DeepSpeed's estimate_zero2_model_states_mem_needs, one GPU, no offload: model states of full mixed-precision "
        "training with Adam. It leaves out activations by design and counts frozen parameters as trained.",
    ),
    Tool(
        "DeepSpeed ZeRO-3", "deepspeed", deepspeed_zero3, "model states", "peak_allocated",
        "DeepSpeed's estimate_zero3_model_states_mem_needs, the same, with one gathered layer.",
    ),
)  # fmt: skip


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    if package == "llmlab":
        return lab.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return None
