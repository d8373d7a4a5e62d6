"""Megatron-LM's kernels, and the CPU time of its updates."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from ....specs.model import ModelSpec
from ....specs.parameters import ROW_PARALLEL
from ....specs.run import Training, stack_of
from ....specs.stacks import Megatron
from ...again import module_again, whole_again
from ...memory.share import Share
from ...memory.stacks.megatron import fused_softmax
from ..traffic import Pass, cast

# Operators that take as long as the work of a step outside its micro-batches (85 to 155): reducing gradients, computing
# and clipping their norm, and communication among ranks. In addition, per parameter, setting its gradient to zero (0.15
# to 0.27), and per updated parameter, the optimizer of 16-bit weights (2.5 to 3.0) or the distributed optimizer (3.2 to
# 4.0): lists of it for the norm, for clipping and for Adam, and copies from its gradient and back to its 16-bit weight
# (benchmarks/time/megatron_host.py).
STEPPED, CLEARED, MASTERED = 110, 0.2, {0: 2.6, 1: 3.5}
# Reads and writes of unfused operators, in widths of the result. transformer/mlp.py: SiLU, the other half plus an
# offset, a multiplication; the backward pass has two multiplications, SiLU's gradient, and a copy of both gradients.
# models/common/embeddings/rope_utils.py: two multiplications, the negation of one half, two copies and a sum; the
# backward pass repeats all but one copy, and adds the zeros of the part that is not rotated.
UNFUSED_SWIGLU, UNFUSED_ROTATION = Pass(7, 13), Pass(12, 14)
# Bytes that the biases of gpt-oss's experts move per element of their output. Their product with the router's fp32
# probability is added in fp32, concatenated and cast back (transformer/moe/experts.py, _apply_bias); the backward pass
# repeats this, and sums the gradients of biases and probabilities. With fused operators, it reads the gradient again.
EXPERT_BIASES, FUSED_BIASES = Pass(4 + 10 + 8 + 6, 6 + 6 + 4 + 12 + 12), Pass(0, 2)
# Reads and writes, in widths of the result, that clamp both halves of the activation's input and concatenate them
# (fusions/fused_bias_geglu.py, weighted_bias_quick_geglu_impl).
CLAMPED = Pass(8, 10)
TILE = 128  # rows of queries, and of keys, that a kernel of attention multiplies together


def block(share: Share) -> float:
    """Return the bytes that Megatron-LM's kernels move for a micro-batch in a block, forward and backward
    (megatron-core, transformer/transformer_layer.py); `r`, `c` as in `fused_block`.

        norm            one kernel: reads, writes; backward reads its input and a gradient, writes one
        sums            one kernel for bias, dropout and the stream (fusions/fused_bias_dropout.py), with a mask;
                        backward of dropout reads a gradient and the mask, writes one; the gradients of the stream's
                        two readers are added
        biases          backward sums gradients over all tokens, which reads them
        activation      with its bias (fused_bias_gelu.py, fused_bias_swiglu.py): reads 1 or 2 f, writes f; backward
                        reads as much and a gradient, writes as much; or `UNFUSED_SWIGLU`, and the sum with its bias
        rotation        reads and writes queries and keys, also in the backward pass, or `UNFUSED_ROTATION`; then the
                        gradients of queries, keys and values are concatenated, which Transformer Engine's attention
                        does not need if nothing is rotated
            norms of heads  queries and keys: read and written, and contiguous copies of keys before
        experts         see `routed`; with shared experts, the sum of both outputs, and of both gradients of the input
        latents         their norms; queries are rotated in place, and keys and values copied out of one tensor while
                        keys are rotated (fusions/fused_mla_yarn_rope_apply.py); the backward pass repeats this, and
                        adds the gradients of both down projections' input
        gpt-oss         biases and clamps of experts, see `EXPERT_BIASES`; the bias of attention's output is added by an
                        operator of its own (bias_dropout_fusion is off), and no fused kernel rotates with YaRN's scale
                        (rope_utils.py, mscale)
        modules         of `recompute_modules` run once more: see `Megatron`
        eager attention's scores        see `softmax`, and a copy that reorders attention's output
    """
    spec, run, T, r, c = share.spec, share.run, share.tokens, share.bytes.residual, share.bytes.compute
    stack, Q, K = Megatron.of(run), spec.query_width, spec.key_width
    dropped = Pass(1, 2 * c + 1) if spec.dropout else Pass(0, 0)
    norms = spec.norms_per_layer
    biased = [linear for linear in spec.block_linears if linear.bias]
    rows, columns = (
        c * sum(linear.outputs * linear.count for linear in biased if (linear.name in ROW_PARALLEL) is row)
        / spec.layers
        for row in (True, False)
    )
    width, turned = float(share.mlp_width * c), c * (Q + K)
    inputs = 2 if spec.gated or spec.experts else 1
    others = 0.0  # the width of dense MLPs and shared experts among layers with experts
    if spec.experts:
        width *= spec.moe_layers / spec.layers
        others = c * (spec.shared_experts * spec.moe_intermediate * spec.moe_layers
                      + spec.intermediate * spec.dense_layers) / spec.layers  # fmt: skip
    activated = Pass((inputs + 1) * width, (2 * inputs + 1) * width)
    if spec.gated and not stack.bias_swiglu_fusion:
        biases = 2 * inputs if spec.mlp_bias else 0
        activated = Pass((UNFUSED_SWIGLU.forward + biases) * width, UNFUSED_SWIGLU.backward * width)
    if stack.use_transformer_engine_op_fuser:
        activated = Pass(0, 0)
    of_biases = rest = Pass(0, 0)
    if spec.family == "gpt_oss":
        fused = stack.use_transformer_engine_op_fuser
        activated = activated if fused else Pass(*(a + b * width for a, b in zip(activated, CLAMPED, strict=True)))
        of_biases = FUSED_BIASES if fused else EXPERT_BIASES
        rest = Pass(2 * c * spec.hidden, c * (spec.hidden + Q + 2 * K))
    of_experts = activated.forward
    activated = Pass(of_experts + (inputs + 1) * others, activated.backward + (2 * inputs + 1) * others)
    rotation = Pass(0, 0) if spec.learned_positions else Pass(2, 2) if stack.rotates_at_once else UNFUSED_ROTATION
    rotation = UNFUSED_ROTATION if spec.family == "gpt_oss" else rotation
    joined = 0 if spec.learned_positions and stack.transformer_engine else 2 * c * (Q + 2 * K)
    up = 0.0
    if m := spec.mla:
        up = c * (2 * (m.kv_lora_rank + (m.q_lora_rank or 0)) + spec.heads * (
            3 * m.qk_rope_head_dim + 2 * (m.qk_nope_head_dim + m.v_head_dim)))  # fmt: skip
        rotation, joined = Pass(0, 0), 3 * c * spec.hidden + up + c * (m.kv_lora_rank + (m.q_lora_rank or 0))
    forward = spec.hidden * (norms * (r + c) + 2 * (2 * r + c + dropped.forward))
    backward = spec.hidden * (norms * (2 * r + c) + 2 * (3 * r + dropped.backward)) + rows
    if spec.experts:
        moved = routed(share) + 3 * c * spec.hidden * bool(spec.shared_experts) * spec.moe_layers / spec.layers
        forward += moved + share.received_width * of_biases.forward + rest.forward
        backward += moved + share.received_width * of_biases.backward + rest.backward
    headed = Pass(c * (2 * Q + 4 * K), 3 * c * (Q + K)) if spec.qk_norm else Pass(0, 0)
    divided = run.tp if run.sequence_parallel else 1
    forward = forward / divided + (rotation.forward * turned + up + headed.forward + activated.forward) / run.tp
    backward = backward / divided
    backward += (rotation.backward * turned + headed.backward + joined + activated.backward + columns) / run.tp
    again = whole_again(spec, run)
    repeated, scores = again * forward, 0.0
    if module_again(run, "mlp"):
        repeated = activated.forward / run.tp
    of_norm = (1 + bool(spec.mla)) * spec.hidden * (r + c) / divided
    for module, moves in (("layernorm", of_norm), ("moe_act", of_experts), ("mla_up_proj", up)):
        repeated += moves * module_again(run, module)
    if module_again(run, "core_attn"):
        again = 1.0
    if share.kernel == "eager":
        one = softmax(share)
        scores = ((one.forward + 2 * c * Q) * (1 + again) + one.backward) / run.tp
    return T * (forward + repeated + backward + scores)


def token_copies(spec: ModelSpec, run: Training, destinations: int) -> float:
    """Return how often a token is sent to experts that are spread evenly over `destinations` ranks or nodes: once to
    each expert, or with a flexible dispatcher once to each destination that has at least one of them."""
    if stack_of(run).moe_flex_dispatcher_backend is None:
        return spec.experts_per_token
    return float(destinations * (1 - (1 - 1 / destinations) ** spec.experts_per_token))


def routed(share: Share) -> float:
    """Return the bytes per token that kernels move in a pass to order tokens by experts and to sum the experts' outputs
    (transformer/moe/token_dispatcher.py). The backward pass moves as many.

        all-to-all      permute: reads a token, writes its copies; sort by expert, on arrival and before the return;
                        unpermute: reads the copies, writes their sum; in fp8, copies with padding, and without it again
                        (experts.py, quantization_padding)
        flexible        permute: reads what arrived, writes the copies, padded if necessary; unpermute: the reverse
    """
    spec, run = share.spec, share.run
    copies = spec.experts_per_token * run.expert_imbalance
    if Megatron.of(run).moe_flex_dispatcher_backend:
        moves = 2 * (run.expert_imbalance * token_copies(spec, run, run.ep) + copies)
    else:
        moves = 2 * (1 + copies) + 4 * copies * (run.ep > 1) + 4 * copies * bool(run.fp8_recipe)
    return moves * spec.hidden * share.bytes.compute * spec.moe_layers / spec.layers


@lru_cache(maxsize=256)
def window_share(spec: ModelSpec, length: int) -> float:
    """Return the share of the causal scores of sequences of `length` tokens, in tiles, that attention computes if it
    skips tiles outside the sliding windows, averaged over the layers."""
    window, layers = spec.sliding_window, spec.window_layers
    if not spec.has_formulas:  # sizes of a plain transformer have no windows
        window = spec.config.get("sliding_window")
        layers = list(spec.config.get("layer_types") or ()).count("sliding_attention")
    if not window:
        return 1.0
    tiles = ceil(length / TILE)
    computed = sum(min(tile + 1, ceil((window - 1) / TILE) + 1) for tile in range(tiles))
    return 1 - layers / spec.layers * (1 - computed / (tiles * (tiles + 1) / 2))


def softmax(share: Share) -> Pass:
    """Return the bytes per token of Megatron-LM's softmax and dropout of scores. Softmax, scale and mask are one kernel
    in 16 bits (fusions/fused_softmax.py), or the mask and softmax run in fp32, one after the other."""
    c, S = share.attention_bytes, share.spec.heads * share.run.seq_len
    dropped = 2 * c + 1 if share.spec.attention_dropout else 0
    forward, backward = (2 * c, 3 * c) if fused_softmax(share) else (2 * cast(c, 4) + 16, 2 * cast(c, 4) + 32)
    return Pass((forward + dropped) * S, (backward + dropped) * S)


def update(spec: ModelSpec, run: Training, tensors: float) -> float:
    """Return the number of operators that take as long as everything that a step does outside its passes, with
    `tensors` trained tensors."""
    return STEPPED + CLEARED * tensors / run.pp + MASTERED[run.zero] * mastered(spec, run, tensors)


def mastered(spec: ModelSpec, run: Training, tensors: float) -> float:
    """Return how many of the `tensors` trained tensors a rank updates: all of its own, or with the distributed
    optimizer those in its share of each bucket of gradients, and at least a part of one per bucket. Buckets have 40
    million elements, or a million per rank if that is more. Without overlapped reduction there is one bucket
    (core/distributed/distributed_data_parallel.py)."""
    local, ranks = tensors / run.pp, run.dp * run.cp
    if not run.zero:
        return local
    size = max(40e6, 1e6 * ranks)
    buckets = ceil(spec.parameters / run.tp / run.pp / size) if Megatron.of(run).overlap_grad_reduce else 1
    return min(local, local / ranks + buckets)
