"""One rank's share of a training step: its tokens, the bytes of its tensors, and the kernel that computes attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...hardware.gpu import GPU
from ...specs.model import ModelSpec
from ...specs.parameters import Linear
from ...specs.run import Inference, Run, Training, stack_of
from ...specs.stages import layers_of
from .precision import PRECISION, Bytes

# With a model that bitsandbytes quantized peft keeps in fp32 what is not, and each quantized linear returns fp32.
AROUND_QUANTIZED = {
    name: b if name.startswith("autocast") else replace(b, residual=4, compute=4) for name, b in PRECISION.items()
}


@dataclass(frozen=True)
class Share:
    """What one rank computes of a micro-batch; made once per estimate by `share_of`, and read by all formulas."""

    spec: ModelSpec
    run: Training
    gpu: GPU | None  # None: any recent one, or the CPU
    cpu: bool
    stage: int  # of the pipeline, from 0
    first: bool  # whether it is the pipeline's first stage, which has the embedding
    last: bool  # whether it is the last stage, which has the final norm, the head and the loss
    layers: int  # of the stage
    tokens: int  # T: the micro-batch's tokens after context parallelism has divided them
    chunk: int | None  # the virtual stage that runs, of several that are counted one by one
    first_chunk_in_backward: int  # then the first virtual stage with a backward pass done; virtual_stages: none has
    backward_passes_done: int  # before the step's highest moments; after one, all gradients exist
    loss_ranks: int  # over how many ranks the loss divides the vocabulary
    sequence_ranks: int  # over how many ranks sequence parallelism divides the tokens of what lies between products
    bytes: Bytes  # per element of each kind of tensor
    autocast: bool  # whether products are computed in a narrower dtype than that of the residual stream
    kernel: str  # what computes attention: see `attention_kernel`
    fused: bool  # whether that kernel keeps no scores
    writes_scores: bool  # whether it holds whole matrices of scores: "eager" does anywhere, "math" on a GPU
    attention_bytes: int  # per element of queries, keys, values and scores
    softmax_bytes: int  # per element of softmax's output
    mask_bytes: int  # per element of a dropout mask

    @property
    def linear_bytes(self) -> int:
        """Bytes per element of what a block's linear returns: quantized ones return their input's dtype, under autocast
        too (bitsandbytes, nn/modules.py, Linear4bit.forward; auto_gptq, QuantLinear.forward)."""
        by_input = by_bitsandbytes(self.run) and not _half_adapters(self.run)
        return self.bytes.residual if by_input or self.run.quantization == "gptq" else self.bytes.compute

    @property
    def recomputes_last(self) -> bool:
        """Whether the rank's last block is recomputed: torchtitan can recompute one of `every` alone."""
        return self.run.checkpointing is not None and self.layers % (stack_of(self.run).recomputes_one_in or 1) == 0

    @property
    def compiled(self) -> bool:
        """Whether what a compiler keeps is counted: of transformers' dense classes. Other compiled steps of
        transformers are counted as eager ones."""
        return _compiled(self.spec, self.run)

    @property
    def blocks_compiled(self) -> bool:
        """Whether blocks are compiled too: of those that are recomputed Dynamo leaves out what breaks a graph, as
        transformers' call of flash-attn does."""
        return self.compiled and not (self.run.checkpointing and self.run.attention == "flash")

    @property
    def fuses(self) -> bool:
        """Whether norms and activations are one kernel each, which keeps its input: compiled, or Liger's
        (src/liger_kernel/ops/rms_norm.py, swiglu.py)."""
        liger = self.run.kernels == "liger" and self.spec.gated and not self.spec.experts
        return self.blocks_compiled or liger

    @property
    def pads_rows(self) -> bool:
        """Whether rows of logits are not whole 16 bytes, which a compiler pads for products."""
        return self.bytes.compute == 2 and self.spec.vocab % 8 > 0

    @property
    def delays_head(self) -> bool:
        """Whether the gradient of a tied head's weight is made last, with the embedding's, to which it is added, and
        the logits' gradient stays till then: where one graph has both, product and sum are one operator (torch/
        _inductor/fx_passes/post_grad.py, addmm), unless autocast casts the head's at once, or it is cut out of a padded
        product's."""
        run, whole = self.run, self.first and self.last and self.run.world_size == 1
        at_once = self.autocast or self.pads_rows or run.lora or run.kernels
        return self.compiled and self.spec.tied and whole and not at_once

    @property
    def masked(self) -> bool:
        """Whether transformers gives SDPA a causal mask: where it is compiled (masking_utils.py, with torch before
        2.14)."""
        return self.compiled and self.run.attention in ("sdpa", "efficient")

    @property
    def windows(self) -> int:
        """In how many layers SDPA is given a mask where it is not compiled: a sliding window's."""
        return 0 if self.run.compile else masked_layers(self.spec, self.run)

    @property
    def remade_masks(self) -> int:
        """How many heads' masks are made again in backward where forward keeps none: before Hopper one, and all that it
        is written out for, once in a graph (torch/_inductor/lowering.py, sdpa_constraint, leaves dimensions expanded in
        forward alone).
        From Hopper on SDPA takes cuDNN's kernel first, which is given one, and keeps it but in selective recomputation.
        """
        run = self.run
        if not self.masked or run.checkpointing is None:
            return 0
        if self.gpu and self.gpu.prefers_cudnn_attention and run.attention == "sdpa":
            return int(run.checkpointing == "selective")
        return 1 + self.spec.heads


def share_of(spec: ModelSpec, run: Training, gpu: GPU | None = None, cpu: bool = False, stage: int = 0) -> Share:
    """Return the share of a rank of pipeline stage `stage`; where tensors are cut unevenly, of rank 0."""
    b, kernel = bytes_of(run), attention_kernel(spec, run, gpu, cpu)
    if _compiled(spec, run) and run.attention == "sdpa" and not cpu:
        kernel = "efficient"  # with a mask there is no FlashAttention
    autocast = b.residual != b.compute
    # PyTorch's plain formula makes fp32 of halves, under autocast too (_scaled_dot_product_attention_math in
    # aten/src/ATen/native/transformers/attention.cpp); for "flash", transformers casts what is wider than half.
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
        mask_bytes=b.compute if cpu else 1,  # fused dropout on a GPU; the CPU's masks are as wide as what they mask
    )


def _compiled(spec: ModelSpec, run: Training) -> bool:
    plain = run.quantization is None and not spec.experts and not spec.mla
    return run.compile and plain and not stack_of(run).own_program


def by_bitsandbytes(run: Training) -> bool:
    """Whether bitsandbytes multiplies by quantized weights, or torchao by torchtune's; GPTQ's are unpacked by operators
    of PyTorch, whose results are weights like others, and peft casts nothing to fp32 beside them
    (utils/other.py, prepare_model_for_kbit_training)."""
    return run.quantization in ("nf4", "int8")


def bytes_of(run: Training) -> Bytes:
    """Return the bytes of one element of each kind of tensor of `run`."""
    in_fp32 = by_bitsandbytes(run) and not _half_adapters(run)
    return (AROUND_QUANTIZED if in_fp32 else PRECISION)[run.precision]


def unpacked_bytes(run: Training) -> tuple[int, int]:
    """Return the bytes of an element of what GPTQ's layers unpack, in the dtype that their scales were loaded in, and
    of what their products read."""
    return PRECISION[run.precision].weights, PRECISION[run.precision].compute


def adapter_bytes(run: Training) -> int:
    """Return the bytes of an element of LoRA's weights, their gradients and their states: peft keeps half ones in fp32
    unless told not to, torchtune trains them in the run's dtype."""
    return PRECISION[run.precision].weights if _half_adapters(run) else 4


def _half_adapters(run: Training) -> bool:
    return stack_of(run).half_adapters or (run.lora is not None and not run.lora.autocast_adapter_dtype)


def adapted(spec: ModelSpec, run: Training) -> list[Linear]:
    """Return the linears that have a LoRA adapter."""
    return [linear for linear in spec.linears if linear.name in run.lora.targets] if run.lora else []


def attention_kernel(spec: ModelSpec, run: Run, gpu: GPU | None, cpu: bool = False) -> str:
    """Return what computes attention: "eager", or the kernel that SDPA chooses ("flash", "efficient", "math").

    FlashAttention needs compute capability 8.0 and half precision; without them the memory-efficient kernel runs. That
    one needs as many key heads as query heads (up to torch 2.13): where there is no mask, transformers passes grouped
    heads on unchanged, and the plain formula ("math") runs. The CPU's flash kernel has no dropout: with dropout, "math"
    runs there too.
    """
    if run.attention == "eager":
        return "eager"
    if cpu:
        return "math" if spec.attention_dropout or spec.mla else "flash"
    if run.attention != "sdpa":
        return run.attention
    # FlashAttention needs values as wide as keys, which latent attention's are not.
    if spec.mla:
        return "efficient"
    in_fp32 = run.weights == "fp32" if isinstance(run, Inference) else bytes_of(run).compute == 4
    if gpu is None or (gpu.supports_flash_attention_2 and not in_fp32):
        return "flash"
    if in_fp32 and stack_of(run).lists_kernels:
        return "math"
    return "math" if spec.kv_heads != spec.heads and unmasked_layers(spec, run) else "efficient"


def unmasked_layers(spec: ModelSpec, run: Run) -> int:
    """Return in how many layers transformers gives SDPA no mask, and so grouped heads unchanged: not where a sliding
    window is shorter than the sequence, nor for heads of more than 256 (sdpa_attention.py, use_gqa_in_sdpa)."""
    return 0 if spec.head_dim > 256 else spec.layers - _windows(spec, run)


def masked_layers(spec: ModelSpec, run: Training) -> int:
    """Return in how many layers transformers gives SDPA a mask, where it is causal for others: where a sliding window
    is shorter than the sequence, and in all of a compiled step, which is traced (masking_utils.py,
    _ignore_causal_mask_sdpa), whichever of its kernels it is pinned to."""
    if stack_of(run).own_model or run.attention not in ("sdpa", "efficient"):
        return 0
    return spec.layers if run.compile else _windows(spec, run)


def _windows(spec: ModelSpec, run: Run) -> int:
    """Return how many layers have a window shorter than the sequence."""
    tokens = run.prompt_len if isinstance(run, Inference) else run.seq_len
    return spec.window_layers if spec.sliding_window and tokens >= spec.sliding_window else 0
