"""One rank's share of a training step: its tokens, the bytes of its tensors, and the kernel that computes attention."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache

from ...hardware.gpu import GPU
from ...specs.check import ALL_LINEAR
from ...specs.model import ModelSpec
from ...specs.parameters import Linear
from ...specs.run import Inference, Run, Training, stack_of
from ...specs.stages import layers_of
from .precision import PRECISION, Bytes

# With a model that bitsandbytes has quantized, peft casts the other weights to fp32, and quantized layers return fp32.
AROUND_QUANTIZED = {
    name: b if name.startswith("autocast") else replace(b, residual=4, compute=4) for name, b in PRECISION.items()
}


@dataclass(frozen=True)
class Share:
    """What one rank computes of a micro-batch. `share_of` creates it once per estimate, and all formulas read it."""

    spec: ModelSpec
    run: Training
    gpu: GPU | None  # None: any recent GPU, or the CPU
    cpu: bool
    stage: int  # of the pipeline, from 0
    first: bool  # whether it is the pipeline's first stage, which has the embedding
    last: bool  # whether it is the last stage, which has the final norm, the head and the loss
    layers: int  # of the stage
    tokens: int  # T: the micro-batch's tokens after context parallelism has divided them
    chunk: int | None  # the virtual stage that runs, if virtual stages are counted one by one
    first_chunk_in_backward: int  # the first virtual stage that has done a backward pass; virtual_stages if none has
    backward_passes_done: int  # before the peak of the step; after one of them, all gradients exist
    loss_ranks: int  # the number of ranks among which the loss divides the vocabulary
    sequence_ranks: int  # the number of ranks among which sequence parallelism divides tokens between matmuls
    bytes: Bytes  # per element of each kind of tensor
    autocast: bool  # whether matmuls run in a narrower dtype than that of the residual stream
    kernel: str  # the attention kernel: see `attention_kernel`
    fused: bool  # whether this kernel saves no scores
    writes_scores: bool  # whether it allocates whole matrices of scores: "eager" everywhere, "math" on a GPU
    attention_bytes: int  # per element of queries, keys, values and scores
    softmax_bytes: int  # per element of the output of softmax
    mask_bytes: int  # per element of a dropout mask

    @property
    def scores_vocabulary(self) -> bool:
        """Whether the rank has the head of a language model; a classifier's head is a few rows, and counts as none."""
        return self.last and not self.run.num_labels

    @property
    def ties_head(self) -> bool:
        """Whether one weight is the embedding and the head of a language model."""
        return self.spec.tied and not self.run.num_labels

    @property
    def linear_bytes(self) -> int:
        """Bytes per element of the output of a block's linear layer. A quantized layer returns the dtype of its input,
        even under autocast (bitsandbytes, nn/modules.py, Linear4bit.forward; auto_gptq, QuantLinear.forward)."""
        by_input = by_bitsandbytes(self.run) and not _half_adapters(self.run)
        return self.bytes.residual if by_input or self.run.quantization == "gptq" else self.bytes.compute

    @property
    def expert_bytes(self) -> int:
        """Bytes per element of the inputs and outputs of the experts' matmuls."""
        return expert_bytes(self.run)

    @property
    def mlp_width(self) -> int:
        """The width of all MLPs that the rank computes, per token of its own; that of the busiest expert-parallel
        rank."""
        return round(self.spec.token_mlp_width * self.run.expert_imbalance)

    @property
    def received_width(self) -> int:
        """The elements of the rows that the rank's experts receive, per token of its own; those of the busiest rank."""
        return round(self.spec.experts_per_token * self.spec.hidden * self.run.expert_imbalance)

    @property
    def recomputes_last(self) -> bool:
        """Whether the rank's last block is recomputed. torchtitan can recompute only every n-th block."""
        return self.run.checkpointing is not None and self.layers % (stack_of(self.run).recomputes_one_in or 1) == 0

    @property
    def compiled(self) -> bool:
        """Whether the step is counted as compiled. Of transformers, only dense classes are; other compiled steps of
        transformers are counted as eager ones."""
        return _compiled(self.spec, self.run)

    @property
    def blocks_compiled(self) -> bool:
        """Whether blocks are compiled too. Dynamo does not compile a checkpointed block with a graph break, and
        transformers' call of flash-attn breaks the graph."""
        return self.compiled and not (self.run.checkpointing and self.run.attention == "flash")

    @property
    def fuses(self) -> bool:
        """Whether each norm and each activation function is one kernel that saves its input: a compiled one, or Liger's
        (src/liger_kernel/ops/rms_norm.py, swiglu.py)."""
        liger = self.run.kernels == "liger" and self.spec.gated and not self.spec.experts
        return self.blocks_compiled or liger

    @property
    def pads_rows(self) -> bool:
        """Whether a row of logits is no multiple of 16 bytes. Compiled code pads such rows before a matmul."""
        return self.bytes.compute == 2 and self.spec.vocab % 8 > 0

    @property
    def delays_head(self) -> bool:
        """Whether the head's gradient is computed last, together with the embedding's, so that the gradient of the
        logits stays until then. This happens to a tied weight if one compiled graph contains both: the matmul and the
        sum become one operator (torch/_inductor/fx_passes/post_grad.py, addmm), unless autocast casts the head's
        gradient first, or it is a slice of a padded matmul. transformers' call of flash-attn breaks the graph."""
        run, whole = self.run, self.first and self.last and self.run.world_size == 1
        at_once = self.autocast or self.pads_rows or run.lora or run.kernels or run.attention == "flash"
        return self.compiled and self.ties_head and whole and not at_once

    @property
    def masked(self) -> bool:
        """Whether transformers passes SDPA a causal mask, as it does in compiled code (masking_utils.py, with torch
        before 2.14)."""
        return self.compiled and self.run.attention in ("sdpa", "efficient")

    @property
    def windows(self) -> int:
        """The number of layers in which eager code passes SDPA a mask, because they have a sliding window."""
        return 0 if self.run.compile else masked_layers(self.spec, self.run)

    @property
    def prefers_cudnn(self) -> bool:
        """Whether SDPA prefers cuDNN's kernel on the GPU, if there is one."""
        spec = self.spec
        value_size = spec.mla.v_head_dim if spec.mla else spec.head_dim
        return bool(self.gpu and self.gpu.prefers_cudnn_attention(spec.head_dim, value_size, spec.attention_dropout))

    @property
    def remade_masks(self) -> int:
        """The number of masks, counted in heads, that the backward pass creates again because the forward pass saves
        none.

        Before Hopper, it creates one mask, and once per graph a copy for all heads (torch/_inductor/lowering.py,
        sdpa_constraint, leaves expanded dimensions as they are only in the forward pass). From Hopper on, SDPA prefers
        cuDNN's kernel, which saves its mask, except with selective checkpointing.
        """
        run = self.run
        if not self.masked or run.checkpointing is None:
            return 0
        if self.prefers_cudnn and run.attention == "sdpa":
            return int(run.checkpointing == "selective")
        return 1 + self.spec.heads


def share_of(spec: ModelSpec, run: Training, gpu: GPU | None = None, cpu: bool = False, stage: int = 0) -> Share:
    """Return the share of a rank of pipeline stage `stage`; if tensors are divided unevenly, that of rank 0."""
    if run.num_labels:
        spec = _without_head(spec)
    b, kernel = bytes_of(run), attention_kernel(spec, run, gpu, cpu)
    if _compiled(spec, run) and run.attention == "sdpa" and not cpu:
        kernel = "efficient"  # FlashAttention accepts no mask
    autocast = b.residual != b.compute
    # PyTorch's "math" kernel casts 16-bit inputs to fp32, even under autocast (_scaled_dot_product_attention_math in
    # aten/src/ATen/native/transformers/attention.cpp). For "flash", transformers casts fp32 inputs to 16 bits.
    attention_bytes = 4 if kernel == "math" else 2 if run.attention == "flash" else b.compute
    return Share(
        spec=spec,
        run=run,
        gpu=gpu,
        cpu=cpu,
        stage=stage,
        first=stage == 0,
        last=stage == run.pp - 1,
        layers=layers_of(spec, run)[stage],
        tokens=run.tokens // run.cp,
        chunk=None,
        first_chunk_in_backward=0,
        backward_passes_done=min(1, run.accumulation - 1),
        loss_ranks=run.tp if run.loss_parallel else 1,
        sequence_ranks=run.tp if run.sequence_parallel else 1,
        bytes=b,
        autocast=autocast,
        kernel=kernel,
        fused=kernel in ("flash", "efficient"),
        writes_scores=kernel == "eager" or (kernel == "math" and not cpu),
        attention_bytes=attention_bytes,
        # Llama-like classes and autocast compute softmax in fp32.
        softmax_bytes=attention_bytes if spec.family == "gpt2" and not autocast else 4,
        mask_bytes=b.compute if cpu else 1,  # fused dropout on a GPU; a CPU's mask has the dtype of its tensor
    )


@cache
def _without_head(spec: ModelSpec) -> ModelSpec:
    """Return the model without the weight of its head, for a classifier, whose own head is a few rows."""
    return replace(spec, config_json=json.dumps({**spec.config, "tie_word_embeddings": True}))


def _compiled(spec: ModelSpec, run: Training) -> bool:
    plain = run.quantization is None and not spec.experts and not spec.mla
    return run.compile and plain and not stack_of(run).own_program


def by_bitsandbytes(run: Training) -> bool:
    """Whether bitsandbytes (or torchao, for torchtune) runs matmuls with quantized weights. GPTQ's weights are unpacked
    by PyTorch operators into ordinary weights, and peft casts no other weights to fp32 for them (utils/other.py,
    prepare_model_for_kbit_training)."""
    return run.quantization in ("nf4", "int8")


def frozen_in_half(run: Training) -> bool:
    """Whether all weights that autocast meets are half, so that it casts nothing but adapters."""
    return run.half_layers == "all"


def stored_in(run: Training) -> Bytes:
    """Return the bytes of one element of each kind of tensor of `run`, before peft prepares a quantized model."""
    return PRECISION[run.compute_dtype if frozen_in_half(run) else run.precision]


def bytes_of(run: Training) -> Bytes:
    """Return the bytes of one element of each kind of tensor of `run`."""
    in_fp32 = by_bitsandbytes(run) and not (_half_adapters(run) or frozen_in_half(run))
    return AROUND_QUANTIZED[run.precision] if in_fp32 else stored_in(run)


def expert_bytes(run: Training) -> int:
    """Return the bytes per element with which experts are multiplied. Autocast does not cast for grouped matmuls, so
    transformers casts their inputs to the dtype of the weights (integrations/moe.py, _grouped_mm)."""
    b = bytes_of(run)
    return b.weights if run.precision.startswith("autocast") and not stack_of(run).own_model else b.compute


def unpacked_bytes(run: Training) -> tuple[int, int]:
    """Return the bytes per element of a weight that GPTQ's layers unpack, which has the dtype of the loaded scales, and
    of the inputs of their matmuls."""
    return PRECISION[run.precision].weights, PRECISION[run.precision].compute


def adapter_bytes(run: Training) -> int:
    """Return the bytes per element of LoRA's weights, gradients and optimizer states. peft casts 16-bit adapters to
    fp32 by default, and torchtune trains them in the run's dtype."""
    return PRECISION[run.precision].weights if _half_adapters(run) else 4


def _half_adapters(run: Training) -> bool:
    return stack_of(run).half_adapters or (run.lora is not None and not run.lora.autocast_adapter_dtype)


def adapted(spec: ModelSpec, run: Training) -> list[Linear]:
    """Return the linear layers that have a LoRA adapter."""
    if run.lora and run.lora.targets == ALL_LINEAR:  # of a family without formulas: `check` has replaced it for others
        return list(spec.block_linears)
    return [linear for linear in spec.linears if linear.name in run.lora.targets] if run.lora else []


def attention_kernel(spec: ModelSpec, run: Run, gpu: GPU | None, cpu: bool = False) -> str:
    """Return the attention kernel: "eager", or the kernel that SDPA chooses ("flash", "efficient", "math").

    FlashAttention needs compute capability 8.0 and half precision. Without them, the memory-efficient kernel runs, if
    there are as many key heads as query heads (up to torch 2.13). Without a mask, transformers passes grouped heads
    unchanged, and then "math" runs. The CPU's flash kernel has no dropout, so with dropout "math" runs on a CPU, too.
    """
    if run.attention == "eager":
        return "eager"
    if cpu:
        return "math" if spec.attention_dropout or spec.mla else "flash"
    if run.attention != "sdpa":
        return run.attention
    # torch's FlashAttention needs values as wide as keys. Those of latent attention are narrower.
    if spec.mla and not stack_of(run).own_kernels:
        return "efficient"
    in_fp32 = run.weights == "fp32" if isinstance(run, Inference) else bytes_of(run).compute == 4
    if gpu is None or (gpu.supports_flash_attention_2 and not in_fp32):
        return "flash"
    if in_fp32 and stack_of(run).lists_kernels:
        return "math"
    return "math" if spec.kv_heads != spec.heads and unmasked_layers(spec, run) else "efficient"


def unmasked_layers(spec: ModelSpec, run: Run) -> int:
    """Return the number of layers in which transformers passes SDPA no mask, and therefore grouped heads unchanged:
    those whose sliding window is not shorter than the sequence, with heads of at most 256 (sdpa_attention.py,
    use_gqa_in_sdpa)."""
    return 0 if spec.head_dim > 256 else spec.layers - _windows(spec, run)


def masked_layers(spec: ModelSpec, run: Training) -> int:
    """Return the number of layers in which transformers passes SDPA a mask instead of is_causal: those whose sliding
    window is shorter than the sequence, and all layers of a compiled step (masking_utils.py,
    _ignore_causal_mask_sdpa), whichever kernel SDPA is pinned to."""
    if stack_of(run).own_model or run.attention not in ("sdpa", "efficient"):
        return 0
    return spec.layers if run.compile else _windows(spec, run)


def _windows(spec: ModelSpec, run: Run) -> int:
    """Return the number of layers whose window is shorter than the sequence."""
    tokens = run.prompt_len if isinstance(run, Inference) else run.seq_len
    return spec.window_layers if spec.sliding_window and tokens >= spec.sliding_window else 0
