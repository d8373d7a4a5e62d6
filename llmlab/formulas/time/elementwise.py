"""Bytes that a training step moves outside of its products and its update: norms, activations, rotations, the loss.

Eager PyTorch writes each operator's result to memory; a compiler, and Liger's kernels, fuse those that follow one
another.
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
from ..memory.precision import PRECISION
from ..memory.scores import score_elements, softmax_element
from ..memory.share import Share, adapted, adapter_bytes, by_bitsandbytes, share_of
from ..memory.states import block_parameters, states
from ..memory.temporaries import adds_apart, loss_chunk
from .products import is_last, multiplied_wide
from .stacks import megatron, torchtitan
from .traffic import Pass, cast, rmsnorm

LOGITS_MOVES = 10.0  # of the logits in fp32, by the loss
# Fused, the loss reads the logits in half precision, for their maximum and sum and for the gradient, and writes that.
FUSED_LOGITS = 4 * 2
# Reads and writes of each logit by the losses of formulas/memory/methods.py, counted from step/methods.py.
METHOD_LOGITS = {"chunked": 4, "whole": 14, "teacher": 36}
# A compiled model returns its logits too: backward starts from zeros for their gradient, written and read, and pads
# rows of no whole 16 bytes by a copy (temporaries.loss_bytes). Of Llama-3.2-1B the loss took an H200 3.8 ms, at its
# bandwidth 12 bytes of each of 1.05e9 logits (4 × 2,048 tokens, bf16, torch 2.11, 2026-11-26).
RETURNED_LOGITS, PADDED_LOGITS = 2 * 2, 2
# Of stacks with a loss of their own, in forward and in backward. Megatron-LM's (tensor_parallel/cross_entropy.py), by
# --cross-entropy-fusion-impl: to fp32, the maximum, minus that, exp, the sum, over that; backward times the gradient,
# to half. Compiled function by function, the maximum is taken as the copy is made, exp and the sum as it is subtracted.
OWN_LOGITS: dict[str, dict[str | None, tuple[int, int]]] = {
    "megatron": {None: (6 + 4 + 8 + 8 + 4 + 8, 8 + 6), "native": (6 + 4 + 4 + 4 + 8, 8 + 6),
                 "te": (FUSED_LOGITS - 2, 2)},
}  # fmt: skip
# What blocks of other stacks move where nothing is compiled. Megatron-LM's kernels are fused, its own and Transformer
# Engine's. nanotron's are torchtitan's, but that it copies what it rotates in place: 18 bytes for torchtitan's 20.
BLOCKS = {"torchtitan": torchtitan.block, "megatron": megatron.block, "nanotron": torchtitan.block}

# From Hopper on a product's kernel stays on its multiprocessor, and some of its warps write a tile while others
# multiply the next (CUTLASS, media/docs/efficient_gemm.md, warp-specialized persistent ping-pong).
WRITES_BEHIND = (9, 0)
CARDS = {True: "A100", False: "T4"}  # with FlashAttention, and without


class Moved(NamedTuple):
    """Bytes of a step's element-wise operators: in blocks, and in the loss, which only the last pipeline stage has; and
    of those in blocks the ones of tensors with gaps between their elements, which go slower (`Efficiency.strided`)."""

    blocks: float
    loss: float
    strided: float


def moved(spec: ModelSpec, run: Training, card: GPU | None = None) -> Moved:
    """Return the bytes that everything but products and the update moves on one device in a step, by where.

    Norms and dropout between tensor-parallel products are divided by sequence parallelism only (arXiv 2205.05198,
    section 4.2). Of the card only counts whether it has FlashAttention, multiplies fp8 in any layout, and multiplies
    while it writes.
    """
    flash = card is None or card.supports_flash_attention_2
    behind = card is None or (card.compute_capability or (0, 0)) >= WRITES_BEHIND
    return _moved(spec, run, flash, takes_either_layout(card), behind)


@lru_cache(maxsize=1024)
def _moved(spec: ModelSpec, run: Training, flash: bool, any_layout: bool, behind: bool) -> Moved:
    share, stack = share_of(spec, run, find_gpu(CARDS[flash])), stack_of(run)
    moves: float = LOGITS_MOVES * 4
    if own := OWN_LOGITS.get(stack.name):
        moves = sum(own[stack.cross_entropy_fusion_impl])
    elif (run.compile and stack.compile_loss) or run.kernels in ("liger", "fused-loss"):
        moves = FUSED_LOGITS
        if share.compiled and run.kernels is None:
            moves += RETURNED_LOGITS + (PADDED_LOGITS if share.pads_rows else 0)
    if read := METHOD_LOGITS.get(run.objective.loss):
        moves = read * share.bytes.compute
    logits = moves * run.scored // run.cp * spec.vocab / share.loss_ranks
    if run.kernels == "liger":
        logits += head_casts(share)
    fused = run.compile or run.kernels == "liger"
    block = (fused_block if fused else BLOCKS.get(stack.name, plain_block))(share)
    block += weight_casts(share) + fp8_casts(spec, run, any_layout) / spec.layers + adapters(share) + biases(share)
    blocks = run.accumulation * spec.layers / run.pp * block + accumulated(spec, run, behind)
    turned = 0.0
    if not fused and stack.name not in BLOCKS and not spec.learned_positions:
        _, turn = rotation(share)
        turned = share.tokens / run.tp * (turn.forward * (1 + share_again(spec, run)) + turn.backward)
    return Moved(blocks, run.accumulation * logits, run.accumulation * spec.layers / run.pp * turned)


def weight_casts(share: Share) -> float:
    """Return the bytes in which autocast casts a block's weights down, for every pass that multiplies by them, and
    their gradients up. Frozen weights' casts are not cached, and backward has no need of them; quantized weights have
    none, or it is a part of unpacking them (`gptq.moved`)."""
    spec, run, b = share.spec, share.run, share.bytes
    if run.quantization or b.weights == b.compute:
        return 0.0
    passes = 1 + share_again(spec, run) + (run.lora is None)
    return passes * cast(b.weights, b.compute) * block_parameters(spec) / run.tp


def biases(share: Share) -> float:
    """Return the bytes in which GPTQ's layers of a block add their biases, forward and again, an operator of its own;
    other layers' products add them."""
    spec, run, m = share.spec, share.run, share.linear_bytes
    if run.quantization != "gptq":
        return 0.0
    names = {linear.name for linear in adapted(spec, run)}
    widths = 0
    for linear in spec.block_linears:
        ends = is_last(spec, linear) and linear.name not in names  # the block: nothing reads it again
        widths += linear.bias * linear.count * linear.outputs * (2 if run.checkpointing and not ends else 1)
    return 2 * m * share.tokens * widths / spec.layers


def head_casts(share: Share) -> float:
    """Return the bytes that the chunks of Liger's loss move under autocast, in addition to their logits.

    Each chunk casts the head's weight down to multiply by its transpose, which is a view and not cached, and once for
    the input's gradient, cached where it is trained. GPUs before compute capability 8.0 also convert each chunk's
    gradient of the weight to fp32 and add it to the sum, with two kernels of their own; on later ones the matmul itself
    adds to the sum (liger_kernel 0.8.5, ops/fused_linear_cross_entropy.py).
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
    backward; what they move per element is counted as the class runs (models/llama, gpt2, mixtral), with autograd's
    sums of gradients. `r`, `m`, `c`: bytes of the residual stream's elements, of what linear layers return, and of
    attention's.

        norm         LayerNorm is one operator, as kernels="fused-norm" is. RMSNorm is written out in fp32: to fp32,
                     square, mean, times 1/rms, and back, times its weight
        sums         a branch and the stream; backward of the gradients of all that read one tensor
        casts        autocast's of the inputs of layers, and of their gradients; bitsandbytes' of outputs too
        rotation     x · cos + rotated x · sin, of which the half is negated; in fp32 under autocast
        activation   SiLU and a product; one operator; or GELU's formula, whose power autocast computes in fp32
    """
    spec, run, r, m, c = share.spec, share.run, share.bytes.residual, share.linear_bytes, share.attention_bytes
    h, Q, K = spec.hidden, spec.query_width, spec.key_width
    trained = run.lora is None
    written_out = spec.norm == "rmsnorm" and run.kernels != "fused-norm"
    norm = rmsnorm(r, trained) if written_out else Pass(2 * r, 3 * r)
    readers = (0 if spec.fused_qkv else 2) + (spec.gated and not spec.fused_qkv)
    dropped = 2 * (2 * m + 1) if spec.dropout else 0
    # Of what lies between products: forward, backward, and what checkpointing does not compute again.
    # What attention's last layer returns: bitsandbytes' the dtype that it is given.
    o = c if run.quantization and c < m else m
    forward = float(h * (spec.norms_per_layer * norm.forward + 4 * r + m + o + dropped))
    backward = h * (spec.norms_per_layer * norm.backward + cast(r, m) + cast(r, o) + (2 + readers) * 3 * r + dropped)
    last = h * (2 * r + m)
    divided = run.tp if run.sequence_parallel else 1
    once, back = forward / divided, backward / divided
    # Of what tensor parallelism divides.
    forward, backward = mlp(share, spec.token_mlp_width)
    if share.autocast or run.quantization:
        copied = sum(map(partial(linear_casts, share), spec.block_linears)) / spec.layers
        forward, backward = forward + copied, backward + copied
    if spec.mla:
        latent, put = rmsnorm(c, trained), 4 * c * Q  # queries and keys are put together from pieces
        width = (spec.mla.q_lora_rank or 0) + spec.mla.kv_lora_rank
        forward, backward = forward + latent.forward * width + put, backward + latent.backward * width + 2.5 * put
    if spec.qk_norm:
        one_norm = rmsnorm(m, trained)
        forward, backward = forward + one_norm.forward * (Q + K), backward + one_norm.backward * (Q + K)
    if not spec.learned_positions:
        turn, _ = rotation(share)
        forward, backward = forward + turn.forward, backward + turn.backward
    if c < m:  # what is not rotated is cast for attention, and its gradients
        narrowed = cast(m, c) * (K + (Q + K if spec.learned_positions else 0))
        forward, backward = forward + narrowed, backward + narrowed
    if spec.fused_qkv:
        backward += (2 if spec.learned_positions else 11) * m * (Q + 2 * K)  # of a split; of three slices
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
    """Return the bytes per token in which queries and keys are rotated; and those of heads in another order than they
    were made in, or of halves of them: all but the product of the halves that were put together, and its sine."""
    spec, r, m, c = share.spec, share.bytes.residual, share.linear_bytes, share.attention_bytes
    turned = (spec.heads + 1) * spec.mla.qk_rope_head_dim if spec.mla else spec.query_width + spec.key_width
    forward = turned * (2 * (m + r) + 3 * m + 3 * r + cast(r, c))
    backward = turned * (cast(r, c) + 4 * r + 2 * cast(r, m) + 13 * m)
    return Pass(forward, backward), Pass(forward - turned * (m + r), backward)


def linear_casts(share: Share, linear: Linear) -> float:
    """Return the bytes per token of the casts around the linear layers of this name, all layers together."""
    run, m = share.run, share.linear_bytes
    if linear.name in ROW_PARALLEL:
        input_bytes = share.attention_bytes if linear.part == "attention" else m
    else:
        input_bytes = share.bytes.residual
    half = 2 if run.quantization == "int8" else PRECISION[run.precision].compute
    out = cast(half, input_bytes) * linear.outputs if run.quantization and adapter_bytes(run) == 4 else 0
    return linear.count * (cast(input_bytes, half) * linear.inputs + out)


def mlp(share: Share, width: float) -> Pass:
    """Return the bytes per token of the MLP's activation, `width` elements wide."""
    spec, m = share.spec, share.linear_bytes
    if spec.gated:
        return Pass(5 * m * width, (9 + (4 if spec.fused_qkv else 0)) * m * width)
    if spec.activation in FUSED:
        return Pass(2 * m * width, 3 * m * width)
    w = 4 if share.autocast and not share.cpu else m
    forward = cast(m, w) + 14 * w + 4 * m + cast(w, share.bytes.compute)
    backward = 3 * cast(w, m) + cast(w, share.bytes.compute) + 19 * w + 9 * m
    return Pass(forward * width, backward * width)


def attend(share: Share) -> Pass:
    """Return the bytes per token of attention beside its products: scores that are written out, their mask, softmax
    and dropout, and copies of what views are not enough for."""
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
    capped = (6 * c, 7 * c) if spec.attention_softcap else (0, 0)
    masked = (c + 4 if share.autocast else 2 * c + cast(c, p)) + share.bytes.residual / spec.heads
    forward = 2 * c + masked + 2 * p + cast(p, c) + dropped + capped[0]
    backward = 6 * p + 2 * cast(p, c) + 2 * c + dropped + capped[1]
    return Pass(forward * S + copies.forward, backward * S + copies.backward)


def routed(share: Share) -> Pass:
    """Return the bytes per token with which transformers sends tokens to their experts, and sums what these return
    (integrations/moe.py, grouped_mm_experts_forward), averaged over the layers."""
    spec, c = share.spec, share.bytes.compute
    h, sent = spec.hidden, spec.experts_per_token * spec.hidden
    forward = sent * (2 * c + (c + 4) + 8 + 4) + h * (4 + cast(4, c))
    backward = sent * (12 + 8 + 10 + 8 + 4 + (4 + c) + cast(4, c) + 2 * c) + h * (cast(4, c) + 3 * c)
    return Pass(*(moves * spec.moe_layers / spec.layers for moves in (forward, backward)))


def adapters(share: Share) -> float:
    """Return the bytes that a block's adapters move for a micro-batch, as peft runs them (tuners/lora/layer.py): the
    input is cast to their dtype, and for their products by autocast, and dropped out; what they return is scaled, added
    to what the layer returned, and cast to its dtype. Backward goes the same way, and adds the input's gradient to that
    of the layer. A compiler fuses the sum with what reads it next, and the scale with the sum.
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
    copied = 2 * made if by_bitsandbytes(run) and width == 4 and not run.compile else 0  # bitsandbytes' result, cloned
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
    """Return the bytes in which gradients of later micro-batches are added to those of the first: read both, write the
    sum. Shards of gradients, which ZeRO 2 and 3 add, are little. A buffer in fp32 takes those of every micro-batch:
    both read, the sum written. Megatron-LM's products add their results to that buffer themselves
    (gradient_accumulation_fusion), `behind` the next tile's product or, on chips before Hopper, after their own: they
    read and write what is summed, where those that were measured write a half. Without sync_each_batch each rank adds
    whole ones, and FSDP2's policy those in half to sums in fp32, the first cast
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py)."""
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
    """Bytes moved per element of a converted layer's operands, forward and backward; and when forward is run again."""

    activation: int  # of its input, and of its output's gradient
    weight: int
    activation_again: int
    weight_again: int


# torchao's own account (torchao/testing/training/roofline_utils.py), no cast fused with what comes before: tensorwise
# reads for the maximum, reads again, and writes fp8 in both layouts that products want, of weights once per pass;
# rowwise reads for one layout and writes that and a transposed bf16 copy, from which it makes the other.
FP8_CASTS = {"tensorwise": Casts(2 + 2 + 2, 2 + 3 + 3, 2 + 3, 3), "rowwise": Casts(5 + 3, 3 + 4 + 3, 3, 3)}


class EngineCasts(NamedTuple):
    """Bytes that Transformer Engine moves per element beyond those in bf16: of an input that a norm made, of another,
    of an output's gradient, and of a weight, once per step; and when forward is run again, which wants one layout."""

    normed: int
    other: int
    gradient: int
    weight: int
    normed_again: int
    other_again: int


# TE casts into the layouts that forward and backward multiply in one pass, 2 bytes read and 2 written; the norm's own
# kernel casts what it makes where scales are known ("delayed"); in MXFP8 cuDNN's would, which is off unless
# NVTE_NORM_FWD_USE_CUDNN is set (pytorch/csrc/extensions/normalization.cpp at v2.9). "delayed" transposes that for
# backward (Hopper multiplies fp8 by rows alone); "tensorwise" reads for the maximum, which the norm's kernel finds.
ENGINE_CASTS = {
    "delayed": EngineCasts(1, 4, 4, 4, -1, 3),
    "tensorwise": EngineCasts(4, 6, 6, 6, 3, 5),
    "blockwise": EngineCasts(4, 4, 4, 4, 3, 3),
    "mxfp8": EngineCasts(4, 4, 4, 4, 3, 3),
}
# Where one scale per tensor goes with either layout nothing is transposed (memory/float8.py, takes_either_layout).
# Scales of blocks still go along rows.
ANY_LAYOUT_CASTS = {"delayed": EngineCasts(-1, 3, 3, 3, -1, 3), "tensorwise": EngineCasts(3, 5, 5, 5, 3, 5)}


def engine_casts(spec: ModelSpec, run: Training, any_layout: bool = False) -> float:
    """Return the bytes of Transformer Engine's casts in a micro-batch; what sequence parallelism gathers is fp8."""
    recipe = str(run.fp8_recipe)
    casts = (any_layout and ANY_LAYOUT_CASTS.get(recipe)) or ENGINE_CASTS[recipe]
    if run.lora:  # frozen weights have no gradient, for which inputs and outputs' gradients take a second layout
        casts = casts._replace(normed=casts.normed_again, other=casts.other_again, gradient=casts.gradient - 1)
    layers, divided = converted(spec, run), run.tp if run.sequence_parallel else 1
    outputs = sum(one.outputs * one.count / (1 if one.name in ROW_PARALLEL else run.tp) for one in layers)
    activations = 0.0
    for part in ("attention", "mlp"):
        again = 1.0 if part == "mlp" and module_again(run, "mlp") else whole_again(spec, run)
        rows = sum(one.inputs * one.count for one in layers if one.name in ROW_PARALLEL and one.part == part) / run.tp
        shared = {one.inputs: one.count for one in layers if one.name not in ROW_PARALLEL and one.part == part}
        normed = sum(width * count for width, count in shared.items()) / divided
        activations += normed * (casts.normed + again * casts.normed_again)
        activations += rows * (casts.other + again * casts.other_again)
    cast = 0 if run.gathers_float8 else casts.weight  # those that are gathered in fp8 were cast as shards
    weights = cast * sum(linear.elements for linear in layers) / run.tp / run.accumulation
    return run.tokens / run.cp * (activations + casts.gradient * outputs) + weights


def fp8_casts(spec: ModelSpec, run: Training, any_layout: bool = False) -> float:
    """Return the bytes of all casts to fp8 in a micro-batch; layers with the same input share its cast. Weights that
    FSDP2 gathers in fp8 were cast as shards, which is little. By tensor, torchao casts its part of what sequence
    parallelism gathers, and gives what was gathered its other layout (float8/float8_tensor_parallel.py)."""
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
    # Of what is gathered only the last byte, the other layout's, is written of all of it, after it is read.
    whole = casts.activation if parts == 1 else (casts.activation - 1) / parts + 2
    activations = whole * (inputs + outputs) + casts.activation * (cut + cut_outputs)
    activations += again * casts.activation_again * (inputs / parts + cut)
    gathered = run.gathers_float8 and uses_fsdp(run)
    elements = 0.0 if gathered else sum(linear.elements for linear in layers) / run.tp
    return run.tokens / run.cp * activations + (casts.weight + again * casts.weight_again) * elements


def fused_block(share: Share) -> float:
    """Return the bytes that a block's fused kernels move for a micro-batch, forward and backward, by the tensors that
    each reads and writes. `r`, `c`: bytes of the residual stream's elements, and of the products'.

        norm, with the sum before it    reads the stream and a branch's output, writes the stream and its own output;
                                        backward: reads the gradient of each linear layer's input, the stream and its
                                        gradient, writes that, and again as products need it; with dropout its mask
        biases                          backward reads gradients of all tokens to sum them; those of queries, keys and
                                        values, which one layer made, are put together
        rotation                        reads and writes queries and keys, backward too
        activation                      gated: reads 2 f, writes f; backward: reads 3 f, writes 2 f, and f once more for
                                        the weight's gradient. Else 2 f, and 3 f
        eager attention's scores        compiled: reads them, writes what is kept; backward: reads their gradient and
                                        softmax's output, writes a gradient. Else operator by operator
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
    width = spec.token_mlp_width * c / run.tp
    activated = (3 if spec.gated else 2) * width
    forward = sum(norms) + rotated + activated
    backward = sum(norms_back) + rotated + (6 if spec.gated else 3) * width
    backward += (biases / spec.layers + joined) / run.tp
    again = share_again(spec, run)
    repeated, scores = again * forward, 0.0
    if share.kernel == "eager" and run.compile:
        scores = score_elements(share) * (softmax_element(share) + 3 * share.attention_bytes + share.softmax_bytes)
    elif share.kernel == "eager":
        one = attend(share)
        scores = T * (one.forward * (1 + again) + one.backward)
    scores /= run.tp
    return T * (forward + repeated + backward) + scores
