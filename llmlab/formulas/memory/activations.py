"""The activations that a transformer block saves for its backward pass, tensor by tensor.

There is one row per tensor that autograd saves when the Hugging Face model class runs in PyTorch. Korthikanti et al.
(arXiv 2205.05198, section 4) count Megatron-LM's fused block in half precision, 34sbh + 5as²b. `korthikanti_block` is
their formula, and a test derives it from the rows here. A Hugging Face block saves more: its RMSNorm and its GPT-2 GELU
consist of several operators, and each of them saves tensors.

    T  tokens on this device: micro_batch × seq_len / cp     h  hidden     f  MLP width
    Q  heads × head_dim      K  kv_heads × head_dim          S  scores (scores.py)
    r  bytes of the residual stream's dtype                  c  bytes of the matmuls' dtype
"""

from __future__ import annotations

from ...specs.parameters import Linear
from ...specs.run import Training, stack_of
from .fsdp import uses_fsdp
from .scores import kept_scores
from .share import Share, adapted, adapter_bytes, by_bitsandbytes, frozen_in_half
from .stacks.blocks import block_of
from .stacks.described import Saved, before_adapters, by_kind, saved

FUSED = ("gelu", "gelu_pytorch_tanh", "relu", "silu")  # activation functions that are one operator of PyTorch


def korthikanti_block(s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False) -> float:
    """Return the bytes that one Megatron-LM block saves in half precision: arXiv 2205.05198, equations 1, 2 and 4.

    s sequence length, b micro-batch, h hidden, a heads, t tensor-parallel degree.
    """
    if sequence_parallel:
        return s * b * h * (34 + 5 * a * s / h) / t
    return s * b * h * (10 + 24 / t + 5 * a * s / (h * t))


def block_saved(share: Share) -> list[Saved]:
    """Return the tensors that one block saves without checkpointing, before tensor parallelism divides them."""
    if block := block_of(share):
        return saved(block.saved, share)
    spec, run, T = share.spec, share.run, share.tokens
    rows = [_norms(share), *_attention(share)]
    if run.lora is None:
        # Autocast casts the input of every linear layer again, so q, k and v each save a copy of the same tensor.
        copies = 3 if share.autocast and not spec.fused_qkv and not share.blocks_compiled else 1
        copies = 0 if casts_again(share) else copies
        rows.append(Saved("linear inputs", T * share.bytes.compute * spec.hidden * copies, "whole"))
    rows += _mlp(share)
    if run.lora:
        rows.append(Saved("adapters", _adapters(share, adapted(spec, run)), "tokens"))
    if run.quantization:
        rows.append(Saved("int8 inputs", int8_inputs(share, alone=True), "tokens"))
    if spec.dropout:
        rows.append(Saved("dropout masks", 2 * T * spec.hidden * share.mask_bytes, "tokens"))
    return rows


def mlp_saved(share: Share) -> list[Saved]:
    """Return those tensors of `block_saved` that an eager block's MLP and the norms around it save. They are freed
    before attention's backward pass begins."""
    spec, run = share.spec, share.run
    norms = _norms(share)
    rows = [Saved("norms", norms.bytes // 2, norms.cut), *_mlp(share)]
    linears = [linear for linear in adapted(spec, run) if linear.part == "mlp"]
    return [*rows, Saved("adapters", _adapters(share, linears), "tokens")] if linears else rows


def without_gradient(share: Share) -> list[Saved]:
    """Return those tensors of `block_saved` that the first block does not save. If only adapters are trained, tensors
    before the first adapter need no gradient, unless checkpointing turns the block's input into a leaf."""
    spec, run = share.spec, share.run
    first = reached(share)
    if block := block_of(share):
        return saved(before_adapters(block), share) if first == 0 else []
    if first is None:
        return []
    norms = _norms(share)
    before = 1 if first < 2 else spec.norms_per_layer - (spec.norms_per_layer == 4)  # Gemma's last is after the MLP
    gone = [Saved("norms", norms.bytes * before // spec.norms_per_layer, norms.cut)]
    gone += _attention(share) if first else []
    if first == 1 and share.fused and share.bytes.residual == adapters_stream(share):
        # The adapter reads the output of the attention kernel without a cast.
        gone.append(Saved("attention output", -share.tokens * share.attention_bytes * spec.query_width))
    if first == 2 and not spec.fused_qkv and spec.gated:  # the product saves less of branches without a gradient
        names, f = {linear.name for linear in adapted(spec, run)}, share.tokens * share.linear_bytes * spec.intermediate
        only_up, only_gate = "gate_proj" not in names, "up_proj" not in names
        gone.append(Saved("mlp", f * (2 - share.fuses) if only_up else f * (not share.fuses) if only_gate else 0))
    read = [linear for linear in adapted(spec, run) if _place(linear) == first]
    gone.append(Saved("adapters", share.tokens * _masks(share, read), "tokens"))
    inputs = int8_inputs(share, alone=True) - int8_inputs(share, first + 1, alone=True)
    gone.append(Saved("int8 inputs", inputs, "tokens"))
    return gone + (_mlp(share) if first == 3 else [])


def casts_without_gradient(share: Share) -> int:
    """Return the elements of frozen weights whose 16-bit copies the first block does not save, because their inputs
    need no gradient."""
    first = reached(share)
    if first is None:
        return 0
    return sum(linear.elements // share.spec.layers for linear in share.spec.block_linears if _place(linear) <= first)


def reached(share: Share) -> int | None:
    """Return the `_place` of the first adapter in the first block; None if gradients flow through the whole block."""
    linears = [linear for linear in adapted(share.spec, share.run) if linear.part != "head"]
    if not linears or not share.first or share.run.checkpointing or share.spec.experts:
        return None
    return min(map(_place, linears))


def _place(linear: Linear) -> int:
    """Return the place of a linear layer in a block: 0 before attention, 1 after it, 2 before and 3 after the
    activation function."""
    return 2 * (linear.part == "mlp") + (linear.name in ("o_proj", "c_proj", "down_proj"))


def _norms(share: Share) -> Saved:
    spec, r = share.spec, share.bytes.residual
    if spec.norm == "layernorm" or share.fuses or share.run.kernels == "fused-norm":
        token = r * spec.hidden + 8  # the input, and the mean (not for RMSNorm) and 1/std in fp32
    else:
        # Several operators in Python save the fp32 input (a copy if the stream is in 16 bits), 1/rms, and for the
        # weight's gradient the normalized tensor.
        token = 4 * spec.hidden + 4 + (r * spec.hidden if share.run.lora is None else 0)
    return Saved("norms", spec.norms_per_layer * share.tokens * token, "tokens")


def _attention(share: Share) -> list[Saved]:
    spec, T, c = share.spec, share.tokens, share.attention_bytes
    Q, trained = spec.query_width, share.run.lora is None
    windows = share.windows
    width = _qkv_width(share, share.kernel) * (spec.layers - windows)
    if windows:
        width += _qkv_width(share, "efficient") * windows
    rows = [Saved("q, k, v", T * c * width // spec.layers)]
    if spec.mla and trained:
        latent = 2 * (spec.mla.q_lora_rank or 0) + 2 * spec.mla.kv_lora_rank + spec.mla.qk_rope_head_dim
        rows.append(Saved("linear inputs", T * c * latent, "whole"))
    if spec.qk_norm and share.fuses:
        rows.append(Saved("norms", T * (c * (Q + spec.key_width) + 4 * (spec.heads + spec.kv_heads))))
    elif spec.qk_norm:
        rows.append(Saved("norms", T * (4 + (share.bytes.compute if trained else 0)) * (Q + spec.key_width)))
    if share.fused:
        # FlashAttention, arXiv 2205.14135, section 3.1: the output and one log-sum-exp per row and head.
        rows.append(Saved("attention output", T * (c * Q + 4 * spec.heads)))
        if trained and (copied := _outputs_copied(share)):
            rows.append(Saved("attention output", T * c * Q * copied // spec.layers))
        if windows:  # SDPA converts each layer's boolean mask to numbers, and saves these
            elements = share.run.sequences * share.run.seq_len**2 // share.run.cp
            rows.append(Saved("attention mask", c * elements * windows // spec.layers, "whole"))
        return rows
    rows.append(Saved("scores", kept_scores(share)))
    if trained:
        rows.append(Saved("attention output", T * share.bytes.compute * Q))  # the output projection's input
    return rows


def _outputs_copied(share: Share) -> int:
    """Return the number of layers in which the output projection reads a copy of the attention output.

    Rotated queries that are concatenated from two pieces have the tokens of a head side by side. A kernel that returns
    its output in the layout of the queries then needs a copy. The memory-efficient kernel returns the heads of a token
    side by side, which needs none.
    """
    spec = share.spec
    if not spec.fused_qkv or spec.learned_positions or share.kernel != "flash":
        return 0
    return spec.layers - (0 if share.cpu or share.prefers_cudnn else share.windows)


def _qkv_width(share: Share, kernel: str) -> int:
    """Return the elements per token of the saved queries, keys and values."""
    spec, Q, K = share.spec, share.spec.query_width, share.spec.key_width
    if spec.mla:
        # Queries and keys are concatenated from two pieces. Values are a view of the projection's output.
        return 2 * Q + spec.heads * (spec.mla.qk_nope_head_dim + spec.mla.v_head_dim)
    uncast = share.linear_bytes == share.attention_bytes
    # The matmul of eager attention copies the values, because a view of them cannot merge batch and heads.
    viewed = kernel == "flash" or (spec.kv_heads == spec.heads and (kernel != "eager" or share.run.sequences == 1))
    if spec.fused_qkv and not spec.learned_positions and uncast and viewed:
        # Rotated queries and keys are new tensors. Values are a view of the projection's output.
        width = 2 * Q + 3 * K
    else:
        # Kernels other than "flash" need a copy of keys and values for every head, which is saved. "math" saves scaled
        # q and k.
        width = Q + 2 * (K if kernel == "flash" else Q)
    if kernel == "math" and spec.fused_qkv and share.run.sequences == 1:
        # The matmuls read scaled copies of q and k, and v itself, a view that keeps the memory of all three alive. With
        # a larger batch they read copies of all three, because a view cannot merge batch and heads.
        width += 2 * Q
    return width


def _mlp(share: Share) -> list[Saved]:
    spec, T, c, trained = share.spec, share.tokens, share.linear_bytes, share.run.lora is None
    again = casts_again(share)
    inputs = T * c * spec.hidden if trained and not again else 0
    if not spec.gated:
        width = _activation_bytes(share) + (c if trained and not again else 0)
        return [Saved("linear inputs", inputs, "whole"), Saved("mlp", T * spec.intermediate * width)]
    # A gated MLP saves the activation function's input and its output (fused kernels compute the output again), the
    # other branch, and for down_proj's gradient the product of both.
    tensors = (4 if trained else 3) - share.fuses
    dense = T * c * (tensors - again) * spec.intermediate
    if not spec.experts:
        copies = 2 if share.autocast and not spec.fused_qkv and not share.blocks_compiled else 1
        return [Saved("linear inputs", inputs * copies, "whole"), Saved("mlp", dense)]
    # Each token is copied to its experts, and their outputs are saved for the router's gradient. The sum is averaged
    # over the layers, because the first ones can be dense.
    own, received = spec.experts_per_token * spec.hidden, share.received_width
    routed = share.expert_bytes * (own + trained * received + tensors * share.mlp_width)
    moe = T * (routed + c * tensors * spec.shared_experts * spec.moe_intermediate)
    mlps = Saved("mlp", (moe * spec.moe_layers + dense * spec.dense_layers) // spec.layers)
    return [Saved("linear inputs", inputs, "whole"), mlps]  # the router's


def casts_again(share: Share) -> bool:
    """Whether the backward pass computes the inputs of fp8 matmuls again instead of loading them.

    The compiler's partitioner saves a tensor that a backward matmul loads as it is. In torchao's fp8 layers a cast
    comes between them, so it computes the tensor again from the norm's or the activation function's input
    (torch/_functorch/partitioners.py, is_materialized_backwards). It does not repeat the all-gather of tensor
    parallelism, and a checkpointed block stores none of these inputs anyway.
    """
    run = share.run
    return run.fp8 is not None and share.blocks_compiled and run.tp == 1 and not run.checkpointing


def _activation_bytes(share: Share) -> int:
    """Return the bytes per element that an activation function saves: of one tensor if it is one operator, of four if
    it is the tanh formula in several operators (transformers' NewGELUActivation). Under CUDA's autocast, but not under
    the CPU's, pow runs in fp32, and so three of the four are in fp32."""
    o = share.linear_bytes
    if share.spec.activation in FUSED or share.blocks_compiled:
        return o
    return 3 * 4 + o if share.autocast and not share.cpu else 4 * o


def _adapters(share: Share, linears: list[Linear]) -> int:
    """Return the bytes that the adapters of `linears` save in a block.

    peft casts each adapter's input to the adapter's dtype. If the stream has another dtype, every adapter saves a copy;
    otherwise the q, k and v adapters share one tensor, and SDPA already saves the input of the output projection. Under
    autocast, the 16-bit copy for the matmul is saved. Compiled code computes equal copies once. With dropout, each
    adapter saves the output of its dropout and the mask.
    """
    spec, run = share.spec, share.run
    assert run.lora is not None
    element, width, shared = adapters_stream(share), 0, set()
    for linear in linears:
        per_layer, place = linear.count // spec.layers or 1, _place(linear)
        width += per_layer * run.lora.rank
        copied = copies_input(share, place)
        if adapters_drop(share) or (copied and not share.blocks_compiled):
            width += per_layer * linear.inputs
        elif copied or place != 1 or not share.fused:
            shared.add((place, linear.inputs))
    width += sum(inputs for _, inputs in shared)
    return share.tokens * (element * width + _masks(share, linears))


def copies_input(share: Share, place: int) -> bool:
    """Whether adapters at a `_place` read a cast copy of the block's tensor. For bitsandbytes' layers, peft leaves the
    cast to autocast (tuners/lora/bnb.py), and the attention output already has autocast's dtype. For other layers, peft
    casts 16-bit inputs to fp32, and autocast casts them back."""
    if frozen_in_half(share.run) and not by_bitsandbytes(share.run):
        return True
    width = share.bytes.compute if place == 1 and by_bitsandbytes(share.run) else share.bytes.residual
    return width != adapters_stream(share)


def adapters_drop(share: Share) -> bool:
    """Whether the adapters' dropout is counted. Compiled code can compute it again, because Inductor saves the seed."""
    return share.run.lora is not None and share.run.lora.dropout > 0 and not share.blocks_compiled


def _masks(share: Share, linears: list[Linear]) -> int:
    """Return the bytes per token of the dropout masks that the adapters of `linears` save in a block."""
    inputs = sum(linear.inputs * (linear.count // share.spec.layers or 1) for linear in linears)
    return share.mask_bytes * inputs if adapters_drop(share) else 0


def adapters_stream(share: Share) -> int:
    """Return the bytes per element of the adapters' inputs and outputs. Autocast and FSDP2's mixed precision run
    adapters in 16 bits."""
    by_policy = share.run.precision.startswith("mixed") and uses_fsdp(share.run)
    half = share.autocast or frozen_in_half(share.run) or by_policy
    return share.bytes.compute if half else adapter_bytes(share.run)


def _adapter_results(share: Share) -> int:
    """Return the elements per token of the outputs of both matmuls of a block's adapters."""
    spec, rank = share.spec, share.run.lora.rank if share.run.lora else 0
    return sum((rank + linear.outputs) * (linear.count // spec.layers or 1) for linear in adapted(spec, share.run))


def int8_inputs(share: Share, from_place: int = 0, alone: bool = False) -> int:
    """Return the bytes that bitsandbytes' int8 layers of a block save, from a `_place` on.

    Each layer keeps its input in its context (autograd/_functions.py, MatMul8bitLt, ctx.tensors). Checkpointing does
    not see it there, and it lives as long as a variable refers to the loss. With `alone`, only inputs count that
    nothing else saves without checkpointing, so neither the output of the attention kernel nor inputs that adapters
    read without a cast. Experts are not quantized. """
    spec, run, r = share.spec, share.run, share.bytes.residual
    if run.quantization != "int8" or run.lora is None:
        return 0
    mlp = 0 if spec.experts else r
    inputs = [r * spec.hidden, share.bytes.compute * spec.query_width, mlp * spec.hidden, mlp * spec.intermediate]
    if alone:
        inputs[1] *= not share.fused
        for place in {_place(linear) for linear in adapted(spec, run)}:
            inputs[place] *= adapters_drop(share) or copies_input(share, place)
    return share.tokens * sum(inputs[from_place:])


def per_device(rows: list[Saved], run: Training) -> dict[str, int]:
    """Return bytes by kind on one tensor-parallel rank (arXiv 2205.05198, section 4.2).

    Sequence parallelism gathers the input of a pair of linear layers, and each rank needs all of it for its part of the
    weight's gradient. torch's parallelize_module and chapter 14's own `shard` save the gathered input, T · c · h per
    pair, whatever the number of ranks. Megatron-LM saves its T / tp and gathers again in the backward pass: the paper's
    equation 4, `korthikanti_block`, with one more all-gather per pair.
    """
    return by_kind(rows, run.tp, run.sequence_parallel)


def checkpointed(share: Share) -> dict[str, int]:
    """Return the bytes by kind that one block saves under checkpointing.

    Full checkpointing saves the block's input (arXiv 1604.06174). Selective checkpointing also saves the outputs of
    linear layers and of a fused attention kernel, and recomputes the rest, including the scores of eager attention. It
    does not recognize bitsandbytes' matmuls, so it saves only the outputs of the adapters' matmuls of a quantized
    block. """
    spec, run, T, c = share.spec, share.run, share.tokens, share.bytes.compute
    saved_by_kind = block_inputs(share)
    if share.blocks_compiled and run.checkpointing == "selective":
        # The partitioner saves the first block's input, and computes the others from the outputs of matmuls.
        saved_by_kind = {"block inputs": 0}
    if block := block_of(share):
        if run.checkpointing == "full":
            return saved_by_kind
        if every := stack_of(run).recomputes_one_in:
            return _some_layers(share, saved_by_kind, every)
        return saved_by_kind | per_device(saved(block.selective, share), run)
    if inputs := int8_inputs(share):
        saved_by_kind["int8 inputs"] = inputs
    if run.checkpointing != "selective":
        return saved_by_kind
    attention = c * spec.query_width + 4 * spec.heads if share.fused else 0
    if by_bitsandbytes(run) and run.lora:
        if inputs and share.fused:
            attention = 4 * spec.heads  # its output is the output projection's input
        saved_by_kind["matmul outputs"] = T * (attention + c * _adapter_results(share))
    else:
        # The router returns a number for each expert, and each expert that a token is sent to an output.
        element = share.expert_bytes if spec.experts else c
        sent = share.received_width if spec.experts else spec.hidden
        mlp = element * share.mlp_width * (2 if spec.gated else 1) + c * spec.experts
        attention += adapters_stream(share) * _adapter_results(share)
        split = T * (c * (spec.query_width + 2 * spec.key_width) + mlp + attention)
        # The last matmul of a pair returns a partial sum for all tokens, which is reduce-scattered afterwards.
        saved_by_kind["matmul outputs"] = split // run.tp + T * (spec.hidden * c + element * sent)
    return saved_by_kind


def block_inputs(share: Share) -> dict[str, int]:
    """Return the bytes by kind of a block's inputs, which every kind of checkpointing saves."""
    stream = share.tokens * share.bytes.residual * share.spec.hidden // share.sequence_ranks
    block = block_of(share)
    return {"block inputs": stream} | (per_device(saved(block.arguments, share), share.run) if block else {})


def _some_layers(share: Share, saved_by_kind: dict[str, int], every: int) -> dict[str, int]:
    """Return the bytes that a block saves on average if one of `every` is recomputed and saves only `saved_by_kind`."""
    recomputed = share.layers // every  # every n-th (distributed/activation_checkpoint.py, _apply_layer_sac)
    whole = per_device(block_saved(share), share.run)
    not_recomputed = share.layers - recomputed
    return {
        kind: (whole.get(kind, 0) * not_recomputed + saved_by_kind.get(kind, 0) * recomputed) // share.layers
        for kind in whole | saved_by_kind
    }
