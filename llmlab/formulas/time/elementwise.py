"""Bytes that a training step moves outside of its products and its update: norms, activations, rotations, the loss.

Eager PyTorch writes each operator's result to memory; a compiler, and Liger's kernels, fuse those that follow one
another.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ...hardware.gpu import GPU
from ...hardware.gpu import gpu as find_gpu
from ...specs.model import ModelSpec
from ...specs.run import Precision, Training, stack_of
from ...specs.stacks import Megatron, Nanotron, Torchtitan
from ..memory.activations import FUSED, block_saved
from ..memory.float8 import converted
from ..memory.fsdp import uses_fsdp
from ..memory.precision import PRECISION
from ..memory.scores import score_elements
from ..memory.share import Share, adapted, adapter_bytes, share_of
from ..memory.states import block_parameters, states
from .products import ROW_PARALLEL

# How often element-wise operators move each byte that a block keeps for backward, forward and backward together:
# counted by the simulator on transformers' classes, one operator at a time (a test repeats the count).
# Llama-like blocks write their norms and rotations out in many operators; a LayerNorm is one.
MOVES = {"rmsnorm": 17.3, "layernorm": 5.2}
MOVES_SAME_DTYPE = {"rmsnorm": 17.3, "layernorm": 3.6}  # without autocast's copies
# A gated MLP keeps 4 tensors: SiLU and the product move 5 forward, and 9 backward.
GATED_MOVES, GATED_RECOMPUTED = 3.5, {None: 1.0, "selective": 1.2, "full": 1.36}
SCORE_MOVES = 11.0  # of eager attention's scores
RECOMPUTED = {None: 1.0, "selective": 1.3, "full": 1.6}
LORA_MOVES, QUANTIZED_MOVES = 1.1, 1.27  # casts to the adapters' fp32, and to and from the products' half precision
LOGITS_MOVES = 10.0  # of the logits in fp32, by the loss
# Fused, the loss reads the logits in half precision, for their maximum and sum and for the gradient, and writes that.
FUSED_LOGITS = 4 * 2

WITHOUT_FLASH = "T4"
AUTOCAST: dict[str, Precision] = {"fp16": "autocast-fp16", "bf16": "autocast-bf16"}


class Moved(NamedTuple):
    """Bytes of a step's element-wise operators: in blocks, and in the loss, which only the last pipeline stage has."""

    blocks: float
    loss: float


def moved(spec: ModelSpec, run: Training, card: GPU | None = None) -> Moved:
    """Return the bytes that everything but products and the update moves on one device in a step, by where.

    Norms and dropout between tensor-parallel products are divided by sequence parallelism only (arXiv 2205.05198,
    section 4.2). Of the card only counts whether it has FlashAttention, and multiplies fp8 in any layout.
    """
    any_layout = card is not None and (card.compute_capability or (0, 0)) >= ANY_LAYOUT
    return _moved(spec, run, card is None or card.supports_flash_attention_2, any_layout)


@lru_cache(maxsize=1024)
def _moved(spec: ModelSpec, run: Training, flash: bool, any_layout: bool) -> Moved:
    card = None if flash else find_gpu(WITHOUT_FLASH)
    precision = run.precision
    if run.quantization and adapter_bytes(run) == 4:  # an fp32 stream between products in half precision
        precision = AUTOCAST.get(run.compute_dtype, precision)
    plain = run
    if run.lora or run.checkpointing or precision != run.precision:  # a copy costs more than what follows
        plain = replace(run, lora=None, quantization=None, checkpointing=None, precision=precision)
    share = share_of(spec, plain, card)
    b = share.bytes
    # Autocast casts each weight down for every pass (6 bytes moved), and its gradient up.
    casts = 0 if run.quantization or b.weights == b.compute else 6 if run.lora else 12
    cast = casts * block_parameters(spec) / run.tp
    logits = LOGITS_MOVES * 4 * share.tokens * spec.vocab / share.loss_ranks
    if run.compile or run.kernels:  # Liger's norms and the like, or "fused-loss" alone
        logits = FUSED_LOGITS * share.tokens * spec.vocab / share.loss_ranks
    own = fused_block if run.compile or run.kernels == "liger" else STACKS.get(type(run.stack))
    if own:
        block = own(share, run) + cast + fp8_casts(spec, run, any_layout) / spec.layers + adapter_dropout(share, run)
        blocks = run.accumulation * spec.layers / run.pp * block + accumulated(spec, run)
        return Moved(blocks, run.accumulation * logits)
    kept = {"scores": 0.0, "mlp": 0.0, "rest": 0.0}
    for one in block_saved(share):
        divided = run.tp if one.cut == "heads" or run.sequence_parallel else 1
        kept[one.kind if one.kind in kept and (spec.gated or one.kind != "mlp") else "rest"] += one.bytes / divided
    moves = (MOVES if share.autocast else MOVES_SAME_DTYPE)[spec.norm]
    if spec.norm == "layernorm" and spec.activation not in FUSED:
        moves *= 1.2  # GELU's formula written out
    wider = QUANTIZED_MOVES if run.quantization else 1.0
    block = (
        kept["rest"] * moves * RECOMPUTED[run.checkpointing] * (LORA_MOVES if run.lora else 1.0) * wider
        + kept["mlp"] * GATED_MOVES * GATED_RECOMPUTED[run.checkpointing] * wider
        + kept["scores"] * SCORE_MOVES * wider
    )
    blocks = spec.layers / run.pp * (block + cast + adapter_dropout(share, run))
    return Moved(run.accumulation * blocks + accumulated(spec, run), run.accumulation * logits)


def adapter_dropout(share: Share, run: Training) -> float:
    """Return the bytes that LoRA's dropout moves in a block for a micro-batch: it reads and writes each adapter's
    input, in the adapter's dtype, and a byte of mask; backward its gradient likewise."""
    if not (run.lora and run.lora.dropout):
        return 0.0
    width = sum(linear.inputs * linear.count for linear in adapted(share.spec, run)) / share.spec.layers
    return (2 if run.checkpointing is None else 3) * (2 * adapter_bytes(run) + 1) * share.tokens * width


def accumulated(spec: ModelSpec, run: Training) -> float:
    """Return the bytes in which gradients of later micro-batches are added to those of the first: read both, write the
    sum. Shards of gradients, which ZeRO 2 and 3 add, are little, and Megatron-LM's products add their results to the
    gradient themselves, while they multiply (--no-gradient-accumulation-fusion is off). A buffer in fp32 takes those of
    every micro-batch: both read, the sum written."""
    if (stack := stack_of(run)) and stack.sums_in_fp32:
        whole = states(spec, run, sharded=False).trained
        return (PRECISION[run.precision].gradients + 2 * 4.0) * run.accumulation * whole
    if run.accumulation == 1 or run.zero >= 2 or isinstance(run.stack, Megatron):
        return 0.0
    gradient = adapter_bytes(run) if run.lora else PRECISION[run.precision].gradients
    return 3.0 * gradient * (run.accumulation - 1) * states(spec, run, sharded=False).trained


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
# From this capability on one scale per tensor goes with any layout: nothing is transposed (TE's
# nvte_is_non_tn_fp8_gemm_supported; pytorch/csrc/quantizer.cpp). Scales of blocks still go along rows.
ANY_LAYOUT = (10, 0)
ANY_LAYOUT_CASTS = {"delayed": EngineCasts(-1, 3, 3, 3, -1, 3), "tensorwise": EngineCasts(3, 5, 5, 5, 3, 5)}


def engine_casts(spec: ModelSpec, run: Training, any_layout: bool = False) -> float:
    """Return the bytes of Transformer Engine's casts in a micro-batch; what sequence parallelism gathers is fp8."""
    recipe, again = str(run.fp8_recipe), run.checkpointing == "full"
    each = (any_layout and ANY_LAYOUT_CASTS.get(recipe)) or ENGINE_CASTS[recipe]
    layers = converted(spec, run)
    rows = sum(linear.inputs * linear.count for linear in layers if linear.name in ROW_PARALLEL) / run.tp
    shared = {(one.part, one.inputs): one.count for one in layers if one.name not in ROW_PARALLEL}
    normed = sum(width * count for (_, width), count in shared.items()) / (run.tp if run.sequence_parallel else 1)
    outputs = sum(one.outputs * one.count / (1 if one.name in ROW_PARALLEL else run.tp) for one in layers)
    activations = normed * (each.normed + again * each.normed_again) + rows * (each.other + again * each.other_again)
    cast = 0 if run.gathers_float8 else each.weight  # those that are gathered in fp8 were cast as shards
    weights = cast * sum(linear.elements for linear in layers) / run.tp / run.accumulation
    return run.tokens / run.cp * (activations + each.gradient * outputs) + weights


def fp8_casts(spec: ModelSpec, run: Training, any_layout: bool = False) -> float:
    """Return the bytes of all casts to fp8 in a micro-batch; layers with the same input share its cast. Weights that
    FSDP2 gathers in fp8 were cast as shards, which is little."""
    if run.fp8 is None:
        return engine_casts(spec, run, any_layout) if run.fp8_recipe else 0.0
    each, again = FP8_CASTS[run.fp8], run.checkpointing == "full"
    layers = converted(spec, run)
    rows = [linear for linear in layers if linear.name in ROW_PARALLEL]
    columns = [linear for linear in layers if linear.name not in ROW_PARALLEL]
    shared = {(linear.part, linear.inputs): linear.count for linear in columns}
    inputs = float(sum(width * count for (_, width), count in shared.items()))
    inputs += sum(linear.inputs * linear.count for linear in rows) / run.tp
    outputs = sum(linear.outputs * linear.count for linear in columns) / run.tp
    outputs += sum(linear.outputs * linear.count for linear in rows)
    activations = each.activation * (inputs + outputs) + again * each.activation_again * inputs
    gathered = run.gathers_float8 and uses_fsdp(run)
    elements = 0.0 if gathered else sum(linear.elements for linear in layers) / run.tp
    return run.tokens / run.cp * activations + (each.weight + again * each.weight_again) * elements


def fused_block(share: Share, run: Training) -> float:
    """Return the bytes that a block's fused kernels move for a micro-batch, forward and backward, by the tensors that
    each reads and writes. `r`, `c`: bytes of the residual stream's elements, and of the products'.

        norm, with the sum before it    reads the stream and a branch's output, writes the stream and its own output;
                                        backward: reads the gradient of each linear layer's input, the stream and its
                                        gradient, writes that
        rotation                        reads and writes queries and keys, backward too
        activation                      gated: reads 2 f, writes f; backward: reads 3 f, writes 2 f, and f once more for
                                        the weight's gradient. Else 2 f, and 3 f
        eager attention's scores        compiled: reads them, writes what is kept; backward: reads their gradient and
                                        softmax's output, writes a gradient. Else as operator by operator
    """
    spec, T, r, c = share.spec, share.tokens, share.bytes.residual, share.bytes.compute
    linears = (1 if spec.fused_qkv else 3, 2 if spec.gated else 1)
    divided = run.tp if run.sequence_parallel else 1
    norms = [spec.hidden * (2 * (r + c)) / divided for _ in linears]
    norms_back = [spec.hidden * (3 * r + n * c) / divided for n in linears]
    rotated = 0 if spec.learned_positions else 2 * c * (spec.query_width + spec.key_width) / run.tp
    width = spec.token_mlp_width * c / run.tp
    forward = sum(norms) + rotated + (3 if spec.gated else 2) * width
    backward = sum(norms_back) + rotated + (6 if spec.gated else 3) * width
    again = {None: 0.0, "selective": 1.0, "full": 1.0}[run.checkpointing]
    kept = sum(one.bytes for one in block_saved(share) if one.kind == "scores") / run.tp
    scores = SCORE_MOVES * kept
    if run.compile and kept:
        scores = kept + score_elements(share) / run.tp * (3 * share.attention_bytes + share.softmax_bytes)
    return T * (forward * (1 + again) + backward) + scores


def titan_block(share: Share, run: Training) -> float:
    """Return the bytes that torchtitan's operators move for a micro-batch in a block, forward and backward, where
    nothing is compiled; `r`, `c` as in `fused_block` (torchtitan/models/llama3/model/model.py, torch from 2.8 on).

        norm            one operator: reads, writes; backward reads its input and a gradient, writes one
        sums            of a branch and the stream, and backward of the gradients of what two layers read
        rotation        queries and keys to fp32 and back, a complex product between; backward too
        activation      SiLU and a product: 2 f and 3 f, backward 3 f and two products of 3 f
    """
    spec, T, r, c = share.spec, share.tokens, share.bytes.residual, share.bytes.compute
    heads, width = (spec.query_width + spec.key_width) / run.tp, spec.token_mlp_width * c / run.tp
    stream = spec.hidden / (run.tp if run.sequence_parallel else 1)
    rotated = heads * (2 * c + 16)
    normed = heads if spec.qk_norm else 0.0
    forward = 2 * stream * (r + c) + 2 * 3 * stream * r + rotated + 5 * width + 2 * normed * c
    summed = 2 * 3 * stream * r + 3 * 3 * spec.hidden * c
    backward = 2 * stream * (2 * r + c) + summed + rotated + 9 * width + 3 * normed * c
    return T * (forward * (1 if run.checkpointing is None else 2) + backward)


# What blocks of other stacks move where nothing is compiled. Megatron-LM's kernels are fused, its own and Transformer
# Engine's. nanotron's are torchtitan's, but that it copies what it rotates in place: 18 bytes for torchtitan's 20.
STACKS = {Torchtitan: titan_block, Megatron: fused_block, Nanotron: titan_block}
