"""What a transformer block keeps for its backward pass, tensor by tensor.

One line a saved tensor: what autograd keeps when the Hugging Face model class runs in PyTorch. Korthikanti et al.
(arXiv 2205.05198, section 4) count Megatron-LM's fused block in half precision, 34sbh + 5as²b; `korthikanti_block` is
their formula, and a test derives it from the lines here. A Hugging Face block keeps more: its RMSNorm and its
GPT-2 GELU are written as several operators, each keeping its own.

    T  tokens on this device: micro_batch × seq_len / cp     h  hidden     f  MLP width     V  vocabulary
    Q  heads × head_dim      K  kv_heads × head_dim          S  scores: micro_batch × heads × seq_len²
    r  bytes of the residual stream's dtype                  c  bytes of the matrix products' dtype
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...hardware.gpu import GPU
from ...specs.model import ModelSpec
from ...specs.run import Inference, Run, Training
from .precision import PRECISION, Bytes

# Activation functions that are one operator of PyTorch.
FUSED = ("gelu", "gelu_pytorch_tanh", "relu", "silu")


class Saved(NamedTuple):
    """Bytes of one kind that one block keeps; `split`: tensor parallelism alone divides them."""

    kind: str
    bytes: int
    split: bool = True


def korthikanti_block(s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False) -> float:
    """Return the bytes one Megatron-LM block keeps in half precision: arXiv 2205.05198, equations 1, 2 and 4.

    s sequence length, b micro-batch, h hidden, a heads, t tensor-parallel degree.
    """
    if sequence_parallel:
        return s * b * h * (34 + 5 * a * s / h) / t
    return s * b * h * (10 + 24 / t + 5 * a * s / (h * t))


def attention_kernel(spec: ModelSpec, run: Run, gpu: GPU | None, cpu: bool) -> str:
    """Return what computes attention: "eager", or the kernel PyTorch's SDPA takes ("flash", "efficient", "math").

    FlashAttention needs compute capability 8.0 and half precision; without them the memory-efficient kernel runs. That
    one wants as many key as query heads (up to torch 2.13): transformers hands grouped ones on as they are where there
    is no mask, and the plain formula ("math") runs. The CPU's flash kernel has no dropout, so there, too, it does.
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
    if gpu is None or (gpu.supports_flash_attention_2 and not _in_fp32(run)):
        return "flash"
    return "math" if spec.kv_heads != spec.heads and unmasked_layers(spec, run) else "efficient"


def _in_fp32(run: Run) -> bool:
    if isinstance(run, Inference):
        return run.weights == "fp32"
    return run.precision == "fp32" or (run.quantization is not None and not run.precision.startswith("autocast"))


def unmasked_layers(spec: ModelSpec, run: Run) -> int:
    """Return in how many layers transformers gives SDPA no mask, and so grouped heads as they are: not where a sliding
    window is shorter than the sequence, nor for heads of more than 256 (sdpa_attention.py, use_gqa_in_sdpa)."""
    if spec.head_dim > 256:
        return 0
    tokens = run.prompt_len if isinstance(run, Inference) else run.seq_len
    return spec.layers - (spec.window_layers if spec.sliding_window and tokens >= spec.sliding_window else 0)


def keeps_scores(spec: ModelSpec, run: Training, gpu: GPU | None, cpu: bool) -> bool:
    """Return whether attention writes its scores out on a GPU, as eager attention does anywhere."""
    return run.attention == "eager" or (not cpu and attention_kernel(spec, run, gpu, cpu) == "math")


def score_widths(b: Bytes, kernel: str) -> Bytes:
    """Return the dtypes in which `kernel` computes scores: PyTorch's plain formula makes fp32 of halves, under autocast
    too (aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math)."""
    return PRECISION["fp32"] if kernel == "math" else b


def block_saved(spec: ModelSpec, run: Training, b: Bytes, gpu: GPU | None = None, cpu: bool = False) -> list[Saved]:
    """Return what one block keeps for backward, without checkpointing and before tensor parallelism.

    A dropout mask takes one byte an element on a GPU (fused dropout); on the CPU as many as the activation it masks.
    """
    kernel = attention_kernel(spec, run, gpu, cpu)
    mask_bytes = b.compute if cpu else 1
    T = run.micro_batch * run.seq_len // run.cp
    h, r, c = spec.hidden, b.residual, b.compute
    trained = run.lora is None
    autocast = r != c
    copies = 3 if autocast and not spec.fused_qkv else 1
    return [
        *_norm_saved(spec, T, r, trained),
        *_attention_saved(spec, run, T, b, trained, kernel, mask_bytes),
        # Autocast casts the input of every linear anew: q, k and v each keep a copy of the same tensor.
        *([Saved("linear inputs", T * c * h * copies, split=False)] if trained else []),
        *_mlp_saved(spec, T, c, trained, autocast, cpu),
        *(_adapter_saved(spec, run, T, r) if run.lora else []),
        *([Saved("int8 inputs", _int8_inputs(spec, run, T, r, kernel), split=False)] if run.quantization else []),
        *([Saved("dropout masks", 2 * T * h * mask_bytes, split=False)] if spec.dropout else []),
    ]


def _norm_saved(spec: ModelSpec, T: int, r: int, trained: bool) -> list[Saved]:
    if spec.norm == "layernorm":
        one = T * (r * spec.hidden + 8)  # its input; mean and 1/std in fp32
    else:
        # Written in Python: the fp32 input (a copy where the stream is half), 1/rms, and, for the weight's gradient,
        # the normalised tensor.
        one = T * (4 * spec.hidden + 4 + (r * spec.hidden if trained else 0))
    return [Saved("norms", spec.norms_per_layer * one, split=False)]


def _attention_saved(
    spec: ModelSpec, run: Training, T: int, b: Bytes, trained: bool, kernel: str, mask_bytes: int
) -> list[Saved]:
    out = b.compute  # bytes of what the output projection reads
    if run.attention == "flash":
        b = replace(b, compute=2)  # transformers casts what is wider
    b = score_widths(b, kernel)
    if kernel == "math" and mask_bytes > 1:  # a CPU's, as wide as what it masks
        mask_bytes = b.compute
    c = b.compute
    Q, K = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    if kernel != "flash" and not spec.mla:
        K = Q  # keys and values are copied to all heads, and the copies kept; "math" keeps q and k times their scale
    saved = [Saved("q, k, v", T * c * (Q + 2 * K))]
    if spec.fused_qkv and not spec.learned_positions and (kernel == "flash" or spec.kv_heads == spec.heads):
        # Rotated queries and keys are new; values are a view of what all three were projected to.
        saved = [Saved("q, k, v", T * c * (2 * Q + K + 2 * spec.kv_heads * spec.head_dim))]
    if spec.mla:
        # Queries and keys are put together from two pieces; values are a view of what both were projected to.
        up = spec.heads * (spec.mla.qk_nope_head_dim + spec.mla.v_head_dim)
        saved = [Saved("q, k, v", T * c * (2 * Q + up))]
        if trained:
            latent = 2 * (spec.mla.q_lora_rank or 0) + 2 * spec.mla.kv_lora_rank + spec.mla.qk_rope_head_dim
            saved.append(Saved("linear inputs", T * c * latent, split=False))
    if spec.qk_norm:
        saved.append(Saved("norms", T * (4 + (c if trained else 0)) * (Q + spec.kv_heads * spec.head_dim)))
    if kernel in ("eager", "math"):
        share = unmasked_layers(spec, run) if kernel == "math" else spec.layers
        saved.append(Saved("scores", score_bytes(spec, run, b, mask_bytes) * share // spec.layers))
        if kernel == "math" and spec.fused_qkv and run.micro_batch == 1:
            # The product takes scaled copies of q and k, and v itself, a view that keeps the memory of all three. With
            # a larger batch it takes copies of all, as batch and heads cannot be merged in a view.
            saved.append(Saved("q, k, v", T * c * 2 * Q))
        if trained:
            saved.append(Saved("attention output", T * out * Q))  # the output projection's input
    else:
        # FlashAttention, arXiv 2205.14135, section 3.1: the output and one log-sum-exp a row and head.
        saved.append(Saved("attention output", T * (c * Q + 4 * spec.heads)))
    return saved


def scores(spec: ModelSpec, run: Training) -> int:
    """Return S, the elements of one block's attention matrix."""
    return run.micro_batch * spec.heads * run.seq_len * (run.seq_len // run.cp)


def softmax_bytes(spec: ModelSpec, b: Bytes) -> int:
    """Return the bytes of an element of softmax's output: Llama-like classes and autocast compute it in fp32."""
    return b.compute if spec.family == "gpt2" and b.residual == b.compute else 4


def score_bytes(spec: ModelSpec, run: Training, b: Bytes, mask_bytes: int) -> int:
    """Return what eager attention keeps of the S scores: softmax's output, and what multiplies V."""
    c, p = b.compute, softmax_bytes(spec, b)
    each = p + (c + mask_bytes if spec.attention_dropout else c if p != c else 0)
    if spec.attention_softcap:
        each += c  # tanh keeps its output
    return scores(spec, run) * each


def score_backward_bytes(spec: ModelSpec, run: Training, b: Bytes) -> int:
    """Return what softmax's backward holds beside what forward kept.

    Its gradient, grad × output (aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out makes it whole) and
    the result; the copy that multiplied V is gone by then.
    """
    c, p = b.compute, softmax_bytes(spec, b)
    freed = c if p != c or spec.attention_dropout else 0
    return scores(spec, run) * (2 * p + c - freed)


def _mlp_saved(spec: ModelSpec, T: int, c: int, trained: bool, autocast: bool, cpu: bool) -> list[Saved]:
    h = spec.hidden
    if not spec.gated:
        saved = [Saved("linear inputs", T * c * h, split=False)] if trained else []
        gelu = _gelu_bytes(spec, c, autocast and not cpu)
        return [*saved, Saved("mlp", T * spec.intermediate * (gelu + (c if trained else 0)))]
    # A gated MLP keeps act's input, act's output, the other branch, and, for down_proj's gradient, their product.
    tensors = 4 if trained else 3
    copies = 2 if autocast and not spec.fused_qkv else 1
    e = 4 if autocast else c  # transformers runs the experts' grouped products outside autocast
    if not spec.experts:
        width = spec.intermediate
        inputs = [Saved("linear inputs", T * c * h * copies, split=False)] if trained else []
        return [*inputs, Saved("mlp", T * c * width * tensors)]
    # Each token is copied to its experts, and their outputs kept for the router's gradient. Averaged over the layers,
    # because the first ones can be dense.
    k, n, dense = spec.experts_per_token, spec.layers, spec.dense_layers
    shared = c * tensors * spec.shared_experts * spec.moe_intermediate
    routed = T * (e * k * (2 * h + tensors * spec.moe_intermediate) + shared)
    plain = T * c * tensors * spec.intermediate
    return [Saved("mlp", (routed * (n - dense) + plain * dense) // n)]


def _gelu_bytes(spec: ModelSpec, c: int, wide_pow: bool) -> int:
    """Return the bytes an activation function keeps an element: one tensor if it is one operator, four if it is tanh's
    formula written out (transformers' NewGELUActivation; three of them fp32 where pow is: under CUDA's autocast, not
    under the CPU's)."""
    if spec.activation in FUSED:
        return c
    return 3 * 4 + c if wide_pow else 4 * c


def _adapter_saved(spec: ModelSpec, run: Training, T: int, r: int) -> list[Saved]:
    """peft casts each adapter's input to its fp32: a copy a target where the stream is half; where it is fp32, the
    q, k and v adapters share one tensor, and the output projection's is kept by SDPA already."""
    assert run.lora is not None
    targets = [linear for linear in spec.linears if linear.name in run.lora.targets]
    total, shared = 0, set()
    for linear in targets:
        per_layer = linear.count // spec.layers or 1
        total += per_layer * T * 4 * run.lora.rank
        if r != 4:
            total += per_layer * T * 4 * linear.inputs
        elif linear.name not in ("o_proj", "c_proj") or run.attention == "eager":
            shared.add((linear.part, linear.inputs))
    total += sum(T * 4 * inputs for _, inputs in shared)
    return [Saved("adapters", total, split=False)]


def _int8_inputs(spec: ModelSpec, run: Training, T: int, r: int, kernel: str | None = None) -> int:
    """Return what bitsandbytes' int8 linears keep of a block: each its input, in its context (autograd/_functions.py,
    MatMul8bitLt) and so out of checkpointing's sight. Where nothing is checkpointed, `kernel` says which attention
    keeps its output anyhow, and adapters of q, k or v keep their input. Experts are not quantized."""
    if run.quantization != "int8" or run.lora is None:
        return 0
    of_attention = spec.hidden + spec.heads * spec.head_dim
    if kernel:
        adapted = any(linear.part == "attention" and linear.inputs == spec.hidden and linear.name in run.lora.targets
                      and linear.name not in ("o_proj", "c_proj") for linear in spec.linears)  # fmt: skip
        of_attention -= spec.hidden if adapted else 0
        of_attention -= spec.heads * spec.head_dim if kernel in ("flash", "efficient") else 0
    of_mlp = 0 if spec.experts else spec.hidden + spec.intermediate
    return T * r * (of_attention + of_mlp)


def per_device(saved: list[Saved], run: Training) -> dict[str, int]:
    """Return bytes by kind on one tensor-parallel rank (arXiv 2205.05198, section 4.2).

    Sequence parallelism gathers the input of a pair of linears, and each rank's share of the weight's gradient is a
    product with all of it. torch's parallelize_module, and chapter 14's own `shard`, keep what was gathered:
    T · c · h a pair, on however many ranks. (Megatron-LM keeps its T / tp and gathers again in backward: the paper's
    equation 4, `korthikanti_block`, and one more all-gather a pair.)
    """
    kinds: dict[str, int] = {}
    for one in saved:
        divided = run.sequence_parallel and one.kind != "linear inputs"
        divisor = run.tp if one.split or divided else 1
        kinds[one.kind] = kinds.get(one.kind, 0) + one.bytes // divisor
    return kinds


def checkpointed(spec: ModelSpec, run: Training, b: Bytes, kernel: str) -> dict[str, int]:
    """Return what one block keeps under checkpointing: its input (full, arXiv 1604.06174); selective also keeps what
    linear layers and a fused attention kernel returned, and recomputes the rest, the scores of eager attention too.

    bitsandbytes' products are none of those that selective checkpointing knows: of a quantized block it keeps what the
    adapters' products returned."""
    T = run.micro_batch * run.seq_len // run.cp
    share = run.tp if run.sequence_parallel else 1
    kept = {"block inputs": T * b.residual * spec.hidden // share}
    if inputs := _int8_inputs(spec, run, T, b.residual):
        kept["int8 inputs"] = inputs
    if run.checkpointing == "selective" and run.quantization and run.lora:
        Q = 0 if inputs else spec.heads * spec.head_dim  # the output projection's input is attention's output
        attention = b.compute * Q + 4 * spec.heads if kernel in ("flash", "efficient") else 0
        adapters = sum(b.compute * (run.lora.rank + linear.outputs) * (linear.count // spec.layers or 1)
                       for linear in spec.linears if linear.name in run.lora.targets)  # fmt: skip
        kept["matmul outputs"] = T * (attention + adapters)
    elif run.checkpointing == "selective":
        Q, K, c = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, b.compute
        width = spec.experts_per_token * spec.moe_intermediate if spec.experts else spec.intermediate
        attention = c * Q + 4 * spec.heads if kernel in ("flash", "efficient") else 0
        split = T * (c * (Q + 2 * K + width * (2 if spec.gated else 1)) + attention)
        # The last product of a pair returns a part of the sum, for all tokens, that is scattered only then.
        kept["matmul outputs"] = split // run.tp + T * c * 2 * spec.hidden
    return kept
