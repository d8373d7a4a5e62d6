"""Bytes that a training step moves outside its matmuls and its update: norms, activations, rotations, the loss.

In eager PyTorch, each operator writes its result to memory. A compiler, and Liger's kernels, fuse consecutive
operators.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

from ...hardware.gpu import GPU
from ...hardware.gpu import gpu as find_gpu
from ...specs.model import ModelSpec
from ...specs.parameters import ROW_PARALLEL, Linear
from ...specs.run import Training, stack_of
from ..again import module_again, share_again, whole_again
from ..memory.activations import FUSED
from ..memory.float8 import converted, takes_either_layout
from ..memory.fsdp import reduced_bytes, uses_fsdp
from ..memory.gradients import bucket_bytes
from ..memory.precision import PRECISION
from ..memory.scores import score_elements, softmax_element
from ..memory.share import Share, adapted, adapter_bytes, by_bitsandbytes, share_of
from ..memory.states import block_parameters, states
from ..memory.temporaries import adds_apart, loss_chunk
from .products import is_last, multiplied_wide
from .stacks import megatron, torchtitan
from .traffic import Pass, cast, rmsnorm, transposed_norm

# Reads and writes of each fp32 logit by the loss: log_softmax 2, its backward pass 3, and zeros as the gradient of its
# output. Both passes read rows that do not fit in the cache again, 2 and 1 times (cuda/SoftMax.cu).
LOGITS_MOVES, LOGITS_AGAIN = 6, 3
# A compiled loss reads the 16-bit logits for their maximum, for their sum and for the gradient, which it writes.
# Liger's reads them once for maximum and sum (liger_kernel 0.8.5, ops/cross_entropy.py).
FUSED_LOGITS, LIGER_LOGITS = 4 * 2, 3 * 2
# Reads and writes of each logit by the losses of formulas/memory/methods.py, counted from step/methods.py.
METHOD_LOGITS = {"chunked": 4, "whole": 14, "teacher": 36}
# A compiled model also returns its logits. Therefore the backward pass writes and reads zeros as their gradient, and
# pads rows that are no multiple of 16 bytes with a copy (temporaries.loss_bytes). For Llama-3.2-1B the loss took an
# H200 3.8 ms, which at its bandwidth is 12 bytes for each of 1.05e9 logits (4 × 2,048 tokens, bf16, torch 2.11,
# 2026-11-26).
RETURNED_LOGITS, PADDED_LOGITS = 2 * 2, 2
# Bytes per logit for stacks with a loss of their own, forward and backward. Megatron-LM's loss
# (tensor_parallel/cross_entropy.py) depends on --cross-entropy-fusion-impl. Without it, the forward pass casts to fp32,
# takes the maximum, subtracts it, computes exp and the sum, and divides; the backward pass multiplies by the gradient
# and casts to 16 bits. If its functions are compiled one by one ("native"), the maximum is computed while the copy is
# written, and exp and the sum during the subtraction.
OWN_LOGITS: dict[str, dict[str | None, tuple[int, int]]] = {
    "megatron": {None: (6 + 4 + 8 + 8 + 4 + 8, 8 + 6), "native": (6 + 4 + 4 + 4 + 8, 8 + 6),
                 "te": (FUSED_LOGITS - 2, 2)},
}  # fmt: skip
# Bytes that the blocks of other stacks move in eager code. Megatron-LM uses fused kernels, its own and Transformer
# Engine's. nanotron's operators move the same as torchtitan's, except that it rotates a copy in place: 18 bytes instead
# of torchtitan's 20.
BLOCKS = {"torchtitan": torchtitan.block, "megatron": megatron.block, "nanotron": torchtitan.block}

# From Hopper on, a matmul's kernel is persistent: some of its warps write a tile while others multiply the next one
# (CUTLASS, media/docs/efficient_gemm.md, warp-specialized persistent ping-pong).
WRITES_BEHIND = (9, 0)
CARDS = {True: "A100", False: "T4"}  # with FlashAttention, and without


class Moved(NamedTuple):
    """Bytes that a step's element-wise operators move: in blocks; in the loss, which only the last pipeline stage
    computes; and `strided`, the part of `blocks` in tensors with gaps between their elements, which are slower to move
    (`Efficiency.strided`). The loss moves `again` more bytes if its rows, of `row` bytes, do not fit in the cache."""

    blocks: float
    loss: float
    strided: float
    again: float = 0.0
    row: float = 0.0


def moved(spec: ModelSpec, run: Training, gpu: GPU | None = None) -> Moved:
    """Return the bytes that a step moves on one device outside its matmuls and its update, by place.

    Norms and dropout between tensor-parallel matmuls are divided among ranks only by sequence parallelism (arXiv
    2205.05198, section 4.2). Of the GPU, three properties matter: whether it supports FlashAttention, whether it
    multiplies fp8 in any layout, and whether it multiplies while it writes.
    """
    flash = gpu is None or gpu.supports_flash_attention_2
    behind = gpu is None or (gpu.compute_capability or (0, 0)) >= WRITES_BEHIND
    return _moved(spec, run, flash, takes_either_layout(gpu), behind)


@lru_cache(maxsize=1024)
def _moved(spec: ModelSpec, run: Training, flash: bool, any_layout: bool, behind: bool) -> Moved:
    share, stack = share_of(spec, run, find_gpu(CARDS[flash])), stack_of(run)
    b, again = share.bytes.compute, LOGITS_AGAIN * 4.0
    moves: float = LOGITS_MOVES * 4 + 2 * cast(b, 4) + bool(spec.logit_softcap) * sum(capped(b))
    if own := OWN_LOGITS.get(stack.name):
        moves, again = sum(own[stack.cross_entropy_fusion_impl]), 0.0
    elif (run.compile and stack.compile_loss) or run.kernels in ("liger", "fused-loss"):
        moves, again = LIGER_LOGITS if run.kernels in ("liger", "fused-loss") else FUSED_LOGITS, 0.0
        if share.compiled and run.kernels is None:
            moves += RETURNED_LOGITS + (PADDED_LOGITS if share.pads_rows else 0)
    if read := METHOD_LOGITS.get(run.objective.loss):
        moves, again = read * b, 0.0
    row = spec.vocab / share.loss_ranks
    logits = moves * (1 + stack.mtp_layers) * run.scored // run.cp * row
    if run.kernels == "liger":
        logits += head_casts(share)
    fused = run.compile or run.kernels == "liger"
    block = (fused_block if fused else BLOCKS.get(stack.name, plain_block))(share)
    block += weight_casts(share) + fp8_casts(spec, run, any_layout) / spec.layers + adapters(share) + biases(share)
    blocks = run.accumulation * spec.layers / run.pp * block + accumulated(spec, run, behind)
    if not stack.own_sums:  # DDP copies each gradient into its bucket and back, once per step (c10d/reducer.cpp)
        blocks += 2 * 2 * bucket_bytes(share, states(spec, run))
    turned = 0.0
    if not fused and stack.name not in BLOCKS and not spec.learned_positions:
        _, turn = rotation(share)
        halved = halves(share)
        once, back = turn.forward + halved.forward, turn.backward + halved.backward
        if spec.qk_norm:
            back += transposed_norm(share.linear_bytes) * (spec.query_width + spec.key_width)
        turned = share.tokens / run.tp * (once * (1 + share_again(spec, run)) + back)
    again *= run.accumulation * run.scored // run.cp * row
    return Moved(blocks, run.accumulation * logits, run.accumulation * spec.layers / run.pp * turned, again, 4 * row)


def weight_casts(share: Share) -> float:
    """Return the bytes that autocast moves to cast a block's weights to 16 bits in each forward pass, recomputation
    included, and to cast their gradients back. Frozen weights have no gradients to cast. Quantized weights are not
    cast, or the cast is part of unpacking them (`gptq.moved`)."""
    spec, run, b = share.spec, share.run, share.bytes
    if run.quantization or b.weights == b.compute:
        return 0.0
    passes = 1 + share_again(spec, run) + (run.lora is None)
    uncast = spec.parameters_by_component["experts"] / spec.layers if share.expert_bytes == b.weights else 0
    return passes * cast(b.weights, b.compute) * (block_parameters(spec) - uncast) / run.tp


def biases(share: Share) -> float:
    """Return the bytes that GPTQ's layers of a block move to add their biases, in the forward pass and its
    recomputation. They need an operator for this; in other layers, the matmul adds the bias."""
    spec, run, m = share.spec, share.run, share.linear_bytes
    if run.quantization != "gptq":
        return 0.0
    names = {linear.name for linear in adapted(spec, run)}
    widths = 0
    for linear in spec.block_linears:
        ends = is_last(spec, linear) and linear.name not in names  # recomputation stops before the block's output
        widths += linear.bias * linear.count * linear.outputs * (2 if run.checkpointing and not ends else 1)
    return 2 * m * share.tokens * widths / spec.layers


def head_casts(share: Share) -> float:
    """Return the bytes that the chunks of Liger's loss move under autocast, in addition to their logits.

    Each chunk casts the head's weight to 16 bits to multiply by its transpose, a view whose cast is not cached. It
    casts the weight again for the input's gradient, and this cast is cached if the weight is trained. GPUs before
    compute capability 8.0 also convert each chunk's gradient of the weight to fp32 and add it to the sum, with two
    kernels of their own; on later ones the matmul itself adds to the sum (liger_kernel 0.8.5,
    ops/fused_linear_cross_entropy.py).
    """
    spec, run, b = share.spec, share.run, share.bytes
    if not share.autocast:
        return 0.0
    chunks = -(-share.tokens // loss_chunk(spec, share.tokens))
    per_weight = cast(b.weights, b.compute)
    moves: float = 2 * chunks * per_weight if run.lora else (chunks + 1) * per_weight
    if not run.lora and adds_apart(share.gpu):
        moves += chunks * (cast(b.compute, 4) + 3 * 4)
    return moves * spec.vocab * spec.hidden / run.tp


def plain_block(share: Share) -> float:
    """Return the bytes that transformers' operators move for a micro-batch in a block, one at a time, forward and
    backward. They are counted in the order in which the class runs them (models/llama, gpt2, mixtral), including
    autograd's sums of gradients. `r`, `m`, `c`: bytes per element of the residual stream, of the output of linear
    layers, and of attention.

        norm         LayerNorm is one operator, and so is RMSNorm with kernels="fused-norm". Otherwise RMSNorm is
                     several operators: cast to fp32, square, mean, times 1/rms, cast back, times its weight
        sums         a branch plus the stream; in the backward pass, the gradients from all readers of one tensor
        casts        autocast's casts of the inputs of layers and of their gradients; with bitsandbytes also of outputs
        rotation     x · cos + rotated x · sin, with one half negated; in fp32 under autocast
        activation   SiLU and a multiplication; or one operator; or GELU's formula (under autocast its power is fp32)
    """
    spec, run, r, m, c = share.spec, share.run, share.bytes.residual, share.linear_bytes, share.attention_bytes
    h, Q, K = spec.hidden, spec.query_width, spec.key_width
    trained = run.lora is None
    written_out = spec.norm == "rmsnorm" and run.kernels != "fused-norm"
    norm = rmsnorm(r, trained, spec.family == "gemma2") if written_out else Pass(2 * r, 3 * r)
    readers = (0 if spec.fused_qkv else 2) + (spec.gated and not spec.fused_qkv)
    dropped = 2 * (2 * m + 1) if spec.dropout else 0
    # Between matmuls: forward, backward, and `last`, which checkpointing does not recompute. `o`: bytes per element of
    # the output of attention's last layer. A bitsandbytes layer returns the dtype of its input.
    o = c if run.quantization and c < m else m
    forward = float(h * (spec.norms_per_layer * norm.forward + 4 * r + m + o + dropped))
    backward = h * (spec.norms_per_layer * norm.backward + cast(r, m) + cast(r, o) + (2 + readers) * 3 * r + dropped)
    last = h * (2 * r + m)
    divided = run.tp if run.sequence_parallel else 1
    once, back = forward / divided, backward / divided
    # The part that tensor parallelism divides.
    of_experts = expert_width(spec)
    forward, backward = mlp(share, spec.token_mlp_width - of_experts, m)
    if of_experts:
        one_mlp = mlp(share, run.expert_imbalance * of_experts, share.expert_bytes)
        forward, backward = forward + one_mlp.forward, backward + one_mlp.backward
    backward += 4 * joined_bytes(share)  # the gradients of both halves are concatenated
    if share.autocast or run.quantization:
        copied = sum(map(partial(linear_casts, share), spec.block_linears)) / spec.layers
        forward, backward = forward + copied, backward + copied
    if spec.mla:
        latent, put = rmsnorm(c, trained), 4 * c * Q  # queries and keys are concatenated from pieces
        width = (spec.mla.q_lora_rank or 0) + spec.mla.kv_lora_rank
        forward, backward = forward + latent.forward * width + put, backward + latent.backward * width + 2.5 * put
    if spec.qk_norm:
        one_norm = rmsnorm(m, trained)
        if share.autocast and m < r:  # the weight is in fp32, and so is the output, whose gradient is cast
            one_norm = Pass(one_norm.forward + r - m, one_norm.backward + 5 * (r - m) + cast(m, r))
        forward, backward = forward + one_norm.forward * (Q + K), backward + one_norm.backward * (Q + K)
    if not spec.learned_positions:
        turn, _ = rotation(share)
        forward, backward = forward + turn.forward, backward + turn.backward
    if c < m:  # tensors that are not rotated are cast for attention, and so are their gradients
        narrowed = cast(m, c) * (K + (Q + K if spec.learned_positions else 0))
        forward, backward = forward + narrowed, backward + narrowed
    if spec.fused_qkv:
        backward += (2 if spec.learned_positions else 13) * m * (Q + 2 * K)  # for a split, or for three slices
    if trained:
        backward += m * sum(linear.outputs * linear.count for linear in spec.block_linears if linear.bias) / spec.layers
    attention = attend(share)
    once += (forward + attention.forward) / run.tp
    back += (backward + attention.backward) / run.tp
    if spec.experts:
        sent = routed(share)
        once, back = once + sent.forward, back + sent.backward
    return share.tokens * (once + back + share_again(spec, run) * (once - last))


def rotation(share: Share) -> tuple[Pass, Pass]:
    """Return the bytes per token that the rotation of queries and keys moves, and the part of these in tensors with
    gaps: transposed heads, or halves of heads. In the forward pass, only the multiplication of the concatenated halves
    by the sine reads none."""
    spec, r, m, c = share.spec, share.bytes.residual, share.linear_bytes, share.attention_bytes
    m = r if spec.qk_norm and share.autocast else m  # the norm's weight is in fp32, and so is its output
    turned = (spec.heads + 1) * spec.mla.qk_rope_head_dim if spec.mla else spec.query_width + spec.key_width
    forward = turned * (2 * (m + r) + 3 * m + 3 * r + cast(r, c))
    backward = turned * (cast(r, c) + 4 * r + 2 * cast(r, m) + 13 * m)
    if not spec.fused_qkv:
        return Pass(forward, backward), Pass(forward - turned * (m + r), backward)
    # phi3 concatenates the rotated part of each head with the rest. Its queries and keys are slices of one tensor, and
    # most of their gradients are contiguous.
    forward, backward = forward + 2 * m * turned, backward + 2 * m * turned
    return Pass(forward, backward), Pass(forward + turned * (m - r), 7 * m * turned)


def linear_casts(share: Share, linear: Linear) -> float:
    """Return the bytes per token of the casts around all linear layers with this name."""
    run, m = share.run, share.linear_bytes
    if linear.name in ROW_PARALLEL:
        input_bytes = share.attention_bytes if linear.part == "attention" else m
    else:
        input_bytes = share.bytes.residual
    half = 2 if run.quantization == "int8" else PRECISION[run.precision].compute
    out = cast(half, input_bytes) * linear.outputs if run.quantization and adapter_bytes(run) == 4 else 0
    return linear.count * (cast(input_bytes, half) * linear.inputs + out)


def mlp(share: Share, width: float, m: int) -> Pass:
    """Return the bytes per token of the MLP's activation function, `width` elements of `m` bytes wide."""
    spec = share.spec
    if spec.gated:
        return Pass(5 * m * width, 9 * m * width)
    if spec.activation in FUSED:
        return Pass(2 * m * width, 3 * m * width)
    w = 4 if share.autocast and not share.cpu else m
    forward = cast(m, w) + 14 * w + 4 * m + cast(w, share.bytes.compute)
    backward = 3 * cast(w, m) + cast(w, share.bytes.compute) + 19 * w + 9 * m
    return Pass(forward * width, backward * width)


def expert_width(spec: ModelSpec) -> float:
    """Return the width of the experts' MLPs per token, averaged over the layers."""
    return spec.experts_per_token * spec.moe_intermediate * spec.moe_layers / spec.layers if spec.experts else 0.0


def joined_bytes(share: Share) -> float:
    """Return the bytes per token and layer of a gate branch that shares a tensor with its up branch, as in experts and
    in phi3; 0 if each branch has its own tensor."""
    spec = share.spec
    if spec.fused_qkv and spec.gated:
        return share.linear_bytes * spec.token_mlp_width
    return share.expert_bytes * expert_width(spec) * share.run.expert_imbalance


def halves(share: Share) -> Pass:
    """Return the bytes per token that operators on such a branch move: SiLU reads it and writes, and a multiplication
    reads two tensors and writes one. Backward, the gradients of both read two tensors and write one."""
    joined = joined_bytes(share)
    return Pass(5 * joined, 6 * joined)


def attend(share: Share) -> Pass:
    """Return the bytes per token that attention moves outside its matmuls: stored scores, their mask, softmax and
    dropout, and copies where a view does not suffice."""
    spec, c, p = share.spec, share.attention_bytes, share.softmax_bytes
    Q, K = spec.query_width, spec.key_width
    grouped = Q != K
    if share.kernel == "flash":
        return Pass(0.0, 0.0)
    if share.kernel == "efficient":
        return Pass(2 * c * (K + Q), 2 * c * (K + Q)) if grouped else Pass(0.0, 0.0)
    S = spec.heads * share.run.seq_len
    copies = Pass(2 * c * (3 * Q + K), 2 * c * (Q + K) * (1 + grouped))
    if share.kernel == "math":
        narrow = cast(share.bytes.compute, 4) * (Q + 2 * K)
        scaled = 16 * Q
        return Pass(16 * S + copies.forward + scaled + narrow, 24 * S + copies.backward + scaled + narrow)
    dropped = 2 * c + 1 if spec.attention_dropout else 0
    cap = capped(c) if spec.attention_softcap else Pass(0, 0)
    masked = (c + 4 if share.autocast else 2 * c + cast(c, p)) + share.bytes.residual / spec.heads
    forward = 2 * c + masked + 2 * p + cast(p, c) + dropped + cap.forward
    backward = 6 * p + 2 * cast(p, c) + 2 * c + dropped + cap.backward
    return Pass(forward * S + copies.forward, backward * S + copies.backward)


def capped(b: int) -> Pass:
    """Return the bytes per element of a softcap: a division, tanh and a multiplication."""
    return Pass(6 * b, 7 * b)


def routed(share: Share) -> Pass:
    """Return the bytes per token that transformers moves to send tokens to their experts and to sum the experts'
    outputs (integrations/moe.py, grouped_mm_experts_forward), averaged over the layers."""
    spec, c = share.spec, share.expert_bytes
    h, sent = spec.hidden, spec.experts_per_token * spec.hidden
    forward = sent * (2 * c + (c + 4) + 8 + 4) + h * (4 + cast(4, c))
    backward = sent * (12 + 8 + 10 + 8 + 4 + (4 + c) + cast(4, c) + 2 * c) + h * (cast(4, c) + 3 * c)
    return Pass(*(moves * spec.moe_layers / spec.layers for moves in (forward, backward)))


def adapters(share: Share) -> float:
    """Return the bytes that a block's adapters move for a micro-batch in peft's implementation (tuners/lora/layer.py).

    The input is cast to the adapters' dtype, by autocast to that of the matmuls, and dropped out. The adapter's output
    is scaled, added to the output of the layer, and cast to the dtype of that output. The backward pass reverses these
    steps and adds the gradient of the adapter's input to that of the layer's. A compiler fuses the sum with its next
    reader, and the scaling with the sum.
    """
    spec, run = share.spec, share.run
    if run.lora is None:
        return 0.0
    stream, made = share.bytes.residual, share.linear_bytes
    width = adapter_bytes(run)
    computed = width if multiplied_wide(run) else share.bytes.compute
    wide = max(made, computed)
    dropped = 2 * width + 1 if run.lora.dropout else 0
    bottom = 2 * computed + made + computed + wide + cast(wide, made)
    bottom_back = 2 * computed + cast(wide, made) * 2 + cast(wide, computed)
    if run.compile:
        bottom, bottom_back = computed, 2 * computed
    copied = 2 * made if by_bitsandbytes(run) and width == 4 and not run.compile else 0  # peft clones the result
    # For bitsandbytes' layers, peft leaves the cast to autocast (tuners/lora/bnb.py).
    once = run.compile or (by_bitsandbytes(run) and run.precision.startswith("autocast"))
    forward = backward = last = 0.0
    for linear in adapted(spec, run):
        per_layer, row = linear.count / spec.layers, linear.name in ROW_PARALLEL
        input_bytes = made if row else stream
        casts = cast(input_bytes, computed) if once else cast(input_bytes, width) + cast(width, computed)
        casts += dropped
        down = per_layer * linear.inputs / (run.tp if row else 1)
        up = per_layer * linear.outputs / (1 if row else run.tp)
        forward += casts * down + (bottom + copied) * up
        backward += (casts + (computed if run.compile else 3 * input_bytes)) * down + bottom_back * up
        last += bottom * up if is_last(spec, linear) else 0.0
    again = share_again(spec, run) * (forward - last)
    return share.tokens * (forward + again + backward)


def accumulated(spec: ModelSpec, run: Training, behind: bool = True) -> float:
    """Return the bytes for adding gradients of later micro-batches to those of earlier ones: both are read, and the sum
    is written. ZeRO 2 and 3 add shards of gradients, which are small and count as nothing.

    nanotron adds the gradients of every micro-batch, also of the first, to a buffer in fp32. Megatron-LM's matmuls add
    their results to such a buffer themselves (gradient_accumulation_fusion). `behind`: they do so while they multiply
    the next tile, which costs nothing. On GPUs before Hopper they do it afterwards: they read and write the sum,
    whereas the matmuls that were measured write 16 bits. Without sync_each_batch, each rank adds whole gradients, and
    FSDP2 may add 16-bit gradients to sums in fp32, which begin as a cast of the first
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
    """
    if (stack := stack_of(run)).sums_in_fp32:
        whole = states(spec, run, sharded=False).trained
        return (PRECISION[run.precision].gradients + 2 * 4.0) * run.accumulation * whole
    if stack.own_kernels:
        summed = 2 * (4 if stack.accumulates_in_fp32(run.compute_dtype) else 2)
        more = 2 + summed if not stack.gradient_accumulation_fusion else 0 if behind else summed - 2
        return float(more * run.accumulation * states(spec, run, sharded=False).trained)
    if run.accumulation == 1 or (run.zero >= 2 and run.sync_each_batch):
        return 0.0
    b = PRECISION[run.precision]
    gradient = adapter_bytes(run) if run.lora else b.gradients
    total = reduced_bytes(run, b) if run.zero >= 2 and not run.lora else gradient
    first = gradient + total if total > gradient else 0
    per_parameter = first + (run.accumulation - 1) * (gradient + 2.0 * total)
    return per_parameter * states(spec, run, sharded=False).trained


class Casts(NamedTuple):
    """Bytes per element that torchao moves to convert the tensors of a linear layer to fp8, forward and backward; and
    in recomputation."""

    activation: int  # the layer's input, or its output's gradient
    weight: int
    activation_again: int
    weight_again: int


# From torchao's roofline model (torchao/testing/training/roofline_utils.py), in which no cast is fused with the
# operator before it. Tensorwise scaling reads for the maximum, reads again, and writes fp8 in the two layouts that
# matmuls need (for weights once per pass). Rowwise scaling reads for one layout and writes it together with a
# transposed bf16 copy, from which it computes the other layout.
FP8_CASTS = {"tensorwise": Casts(2 + 2 + 2, 2 + 3 + 3, 2 + 3, 3), "rowwise": Casts(5 + 3, 3 + 4 + 3, 3, 3)}


class EngineCasts(NamedTuple):
    """Bytes per element that Transformer Engine moves in addition to a bf16 layer: for an input that is the output of a
    norm, for another input, for the gradient of an output, and for a weight (once per step); and for both kinds of
    input in recomputation, which needs only one layout."""

    normed: int
    other: int
    gradient: int
    weight: int
    normed_again: int
    other_again: int


# TE casts into the layouts for the forward and for the backward matmul in one pass: 2 bytes read, 2 written. If scales
# are known in advance ("delayed"), the norm's own kernel casts its output. In MXFP8, cuDNN's norm would do so, but it
# is off unless NVTE_NORM_FWD_USE_CUDNN is set (pytorch/csrc/extensions/normalization.cpp at v2.9). "delayed" transposes
# the norm's output for the backward pass, because Hopper's fp8 matmuls accept only one layout. "tensorwise" also reads
# for the maximum, unless the norm's kernel computes it.
ENGINE_CASTS = {
    "delayed": EngineCasts(1, 4, 4, 4, -1, 3),
    "tensorwise": EngineCasts(4, 6, 6, 6, 3, 5),
    "blockwise": EngineCasts(4, 4, 4, 4, 3, 3),
    "mxfp8": EngineCasts(4, 4, 4, 4, 3, 3),
}
# If fp8 matmuls with one scale per tensor accept either layout, nothing is transposed (memory/float8.py,
# takes_either_layout). Scales of blocks still follow the rows.
ANY_LAYOUT_CASTS = {"delayed": EngineCasts(-1, 3, 3, 3, -1, 3), "tensorwise": EngineCasts(3, 5, 5, 5, 3, 5)}


def engine_casts(spec: ModelSpec, run: Training, any_layout: bool = False) -> float:
    """Return the bytes of Transformer Engine's casts in a micro-batch. With sequence parallelism, each rank casts its
    tokens before they are gathered in fp8."""
    recipe = str(run.fp8_recipe)
    casts = (any_layout and ANY_LAYOUT_CASTS.get(recipe)) or ENGINE_CASTS[recipe]
    if run.lora:  # only gradients of weights need a second layout of inputs and of outputs' gradients
        casts = casts._replace(normed=casts.normed_again, other=casts.other_again, gradient=casts.gradient - 1)
    layers, divided = converted(spec, run), run.tp if run.sequence_parallel else 1
    outputs = sum(one.outputs * one.count / (1 if one.name in ROW_PARALLEL else run.tp) for one in layers)
    activations = 0.0
    for part in ("attention", "mlp"):
        again = 1.0 if part == "mlp" and module_again(run, "mlp") else whole_again(spec, run)
        rows = sum(one.inputs * one.count for one in layers if one.name in ROW_PARALLEL and one.part == part) / run.tp
        shared = {(one.inputs, one.count) for one in layers if one.name not in ROW_PARALLEL and one.part == part}
        normed = sum(width * count for width, count in shared) / divided
        activations += normed * (casts.normed + again * casts.normed_again)
        activations += rows * (casts.other + again * casts.other_again)
    elements = sum(linear.elements for linear in layers) / run.tp
    if spec.experts:
        sent = spec.moe_layers * spec.experts_per_token * run.expert_imbalance / run.tp
        once = casts.other + whole_again(spec, run) * casts.other_again
        inner = 0 if stack_of(run).use_transformer_engine_op_fuser else spec.moe_intermediate
        activations += sent * (spec.hidden + inner) * once
        outputs += sent * (2 * inner + spec.hidden)
        elements += spec.parameters_by_component["experts"] / (run.expert_tp * run.ep)
    cast = 0 if run.gathers_float8 else casts.weight  # weights that are gathered in fp8 were cast as shards
    weights = cast * elements / run.accumulation
    return run.tokens / run.cp * (activations + casts.gradient * outputs) + weights


def fp8_casts(spec: ModelSpec, run: Training, any_layout: bool = False) -> float:
    """Return the bytes of all casts to fp8 in a micro-batch. Layers with the same input share its cast. Weights that
    FSDP2 gathers in fp8 are cast as shards, which is little and not counted. With one scale per tensor, torchao casts a
    rank's tokens before sequence parallelism gathers them, and then writes the second layout of the gathered tensor
    (float8/float8_tensor_parallel.py)."""
    if run.fp8 is None:
        return engine_casts(spec, run, any_layout) if run.fp8_recipe else 0.0
    casts, again = FP8_CASTS[run.fp8], whole_again(spec, run)
    layers = converted(spec, run)
    rows = [linear for linear in layers if linear.name in ROW_PARALLEL]
    columns = [linear for linear in layers if linear.name not in ROW_PARALLEL]
    shared = {(linear.part, linear.inputs): linear.count for linear in columns}
    inputs = float(sum(width * count for (_, width), count in shared.items()))
    outputs = sum(linear.outputs * linear.count for linear in rows)
    cut = sum(linear.inputs * linear.count for linear in rows) / run.tp
    cut_outputs = sum(linear.outputs * linear.count for linear in columns) / run.tp
    parts = run.tp if run.fp8 == "tensorwise" and run.sequence_parallel else 1
    # Of a gathered tensor, only the second layout is written for all tokens, one byte per element, after a byte is
    # read.
    whole = casts.activation if parts == 1 else (casts.activation - 1) / parts + 2
    activations = whole * (inputs + outputs) + casts.activation * (cut + cut_outputs)
    activations += again * casts.activation_again * (inputs / parts + cut)
    gathered = run.gathers_float8 and uses_fsdp(run)
    elements = 0.0 if gathered else sum(linear.elements for linear in layers) / run.tp
    return run.tokens / run.cp * activations + (casts.weight + again * casts.weight_again) * elements


def fused_block(share: Share) -> float:
    """Return the bytes that a block's fused kernels move for a micro-batch, forward and backward, counted by the
    tensors that each kernel reads and writes. `r`, `c`: bytes per element of the residual stream, and of the tensors
    that matmuls read.

        norm, with the sum before it    reads the stream and a branch's output, writes the stream and its own output;
                                        backward: reads the gradient of each linear layer's input, the stream and its
                                        gradient, writes the latter, if r != c also in the dtype of matmuls; with
                                        dropout also its mask
        biases                          backward reads the gradients of all tokens to sum them; if one layer computes
                                        queries, keys and values, their gradients are concatenated
        rotation                        reads and writes queries and keys, also in the backward pass
        activation                      gated: reads 2 f, writes f; backward: reads 3 f, writes 2 f, and f once more for
                                        the gradient of the weight. Otherwise 2 f, and 3 f
        attention                       compiled eager scores: reads them, writes the saved tensors; backward: reads
                                        their gradient and the output of softmax, writes a gradient. Without a compiler
                                        operator by operator
    """
    spec, run, T, r, c = share.spec, share.run, share.tokens, share.bytes.residual, share.bytes.compute
    linears = (1 if spec.fused_qkv else 3, 2 if spec.gated else 1)
    divided = run.tp if run.sequence_parallel else 1
    mask = 1 if spec.dropout else 0
    narrow = c if r != c else 0
    norms = [spec.hidden * (2 * (r + c) + mask) / divided for _ in linears]
    norms_back = [spec.hidden * (3 * r + n * c + narrow + mask) / divided for n in linears]
    biases = 0.0 if run.lora else c * sum(linear.outputs * linear.count for linear in spec.block_linears if linear.bias)
    joined = 2 * c * (spec.query_width + 2 * spec.key_width) if spec.fused_qkv else 0
    rotated = 0 if spec.learned_positions else 2 * c * (spec.query_width + spec.key_width) / run.tp
    width = share.mlp_width * c / run.tp
    activated = (3 if spec.gated else 2) * width
    forward = sum(norms) + rotated + activated
    backward = sum(norms_back) + rotated + (6 if spec.gated else 3) * width
    backward += (biases / spec.layers + joined) / run.tp
    again = share_again(spec, run)
    repeated, scores = again * forward, 0.0
    if share.kernel == "eager" and run.compile:
        scores = score_elements(share) * (softmax_element(share) + 3 * share.attention_bytes + share.softmax_bytes)
    elif not run.compile:
        one = attend(share)
        scores = T * (one.forward * (1 + again) + one.backward)
    scores /= run.tp
    return T * (forward + repeated + backward) + scores
