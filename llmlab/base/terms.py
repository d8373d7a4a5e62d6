"""The words of the whole project: values of a run's fields, parts of the peak, phases, sources, outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

# fp16, bf16: weights, gradients and optimizer states all in it. autocast-*: fp32 weights, gradients and states, the
# operators cast as torch.autocast decides. mixed-*: half weights and gradients, fp32 master copy and states, as
# DeepSpeed and Megatron-LM do.
Precision = Literal["fp32", "fp16", "bf16", "autocast-fp16", "autocast-bf16", "mixed-fp16", "mixed-bf16"]
# adamw: torch's default, on a GPU lists of tensors (foreach). adamw-fused: its one kernel (fused=True).
OptimizerName = Literal["sgd", "adamw", "adamw-fused", "adamw-8bit", "adafactor", "lion", "muon"]
Checkpointing = Literal["selective", "full"]
# eager: the formula, in transformers' Python. sdpa: the kernel that torch takes. flash: the package flash-attn.
# efficient: torch's SDPA pinned to its memory-efficient kernel, keys and values repeated to all heads before.
Attention = Literal["eager", "sdpa", "flash", "efficient"]
# nf4, int8: bitsandbytes' (with stack="torchtune" torchao's nf4). gptq: a checkpoint's 4 bits in groups of 128, which
# PyTorch's operators unpack in AutoGPTQ's layer (formulas/gptq.py).
Quantization = Literal["nf4", "int8", "gptq"]
# Frozen weights that stay in 16 bits under autocast-*: all that are not quantized, or only the embedding and the head.
HalfLayers = Literal["embeddings", "all"]
Offload = Literal["optimizer", "optimizer+parameters"]
# liger: Liger's, the loss in chunks among them. fused-loss: flash-attn's cross entropy alone, of logits as they are.
# fused-norm: RMSNorm as one kernel (torch's rms_norm, flash-attn's, Apex's), and nothing else.
Kernels = Literal["liger", "fused-loss", "fused-norm"]
# Of a pipeline (course/techniques/pipeline_schedules.py); 1f1b is interleaved with virtual_stages > 1. A zero-bubble
# one keeps what its deferred weight gradients need, which is not described.
Schedule = Literal["1f1b", "gpipe"]
ReduceDtype = Literal["fp32", "fp16", "bf16"]  # of the gradients that FSDP reduces
FP8 = Literal["tensorwise", "rowwise"]  # torchao's recipes: one scale per tensor, or per row
Weights = Literal["fp32", "fp16", "bf16", "int8", "nf4"]
KVDtype = Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
CHECKPOINTING: tuple[Checkpointing | None, ...] = (None, *get_args(Checkpointing))
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
QUANTIZATIONS: tuple[Quantization | None, ...] = (None, *get_args(Quantization))
HALF_LAYERS: tuple[HalfLayers | None, ...] = (None, *get_args(HalfLayers))
OFFLOADS: tuple[Offload | None, ...] = (None, *get_args(Offload))
KERNELS: tuple[Kernels | None, ...] = (None, *get_args(Kernels))
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
REDUCE_DTYPES: tuple[ReduceDtype, ...] = get_args(ReduceDtype)
FP8_RECIPES: tuple[FP8 | None, ...] = (None, *get_args(FP8))
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
KV_DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)

Source = Literal["estimated", "simulated", "measured", "published"]
Outcome = Literal["fits", "out of memory", "unknown"]
SOURCES: tuple[Source, ...] = get_args(Source)
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

# What the peak consists of. "activations" are kept for backward, autocast's half copies of the weights among them;
# "other" is what is alive at the peak and none of the rest: temporaries of the operator that runs, the input.
PHASES = {  # in a sentence
    "load": "loading", "generate": "generation", "forward": "the forward pass", "backward": "the backward pass",
    "optimizer": "the optimizer step", "prefill": "prefill", "decode": "decoding",
    "no-grad": "forward passes without gradients", "saving": "checkpoint saving",
}  # fmt: skip
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "kv_cache", "workspace", "other")
TRAINING_PHASES = ("load", "generate", "forward", "backward", "optimizer")
INFERENCE_PHASES = ("load", "prefill", "decode")

# A timeline point: the phase, and the live bytes of each part at that moment.
TimelinePoint = tuple[str, Mapping[str, int]]

# Inputs that share a scale and a zero in a GPTQ checkpoint: what AutoGPTQ's README recommends, and optimum's default
# (optimum/gptq/quantizer.py, GPTQQuantizer).
GPTQ_GROUP = 128

# An embedding's gradient, from so many tokens on, is summed by word, of up to so many rows at a time
# (aten/src/ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda; EmbeddingBackwardKernel.cu, NROWS_PER_THREAD).
SORTS_ABOVE, ROWS_PER_PARTIAL = 3072, 10
