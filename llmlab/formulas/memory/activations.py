"""What a transformer block keeps for its backward pass, tensor by tensor.

One line per saved tensor: what autograd keeps when the Hugging Face model class runs in PyTorch. Korthikanti et al.
(arXiv 2205.05198, section 4) count Megatron-LM's fused block in half precision, 34sbh + 5as²b; `korthikanti_block` is
their formula, and a test derives it from the lines here. A Hugging Face block keeps more: its RMSNorm and its
GPT-2 GELU are written as several operators, each of which keeps tensors of its own.

    T  tokens on this device: micro_batch × seq_len / cp     h  hidden     f  MLP width
    Q  heads × head_dim      K  kv_heads × head_dim          S  scores (scores.py)
    r  bytes of the residual stream's dtype                  c  bytes of the matrix products' dtype
"""

from __future__ import annotations

from ...specs.parameters import Linear
from ...specs.run import Training, stack_of
from .fsdp import uses_fsdp
from .scores import kept_scores
from .share import Share, adapted, adapter_bytes, by_bitsandbytes
from .stacks.blocks import block_of
from .stacks.described import Saved, before_adapters, by_kind, saved

FUSED = ("gelu", "gelu_pytorch_tanh", "relu", "silu")  # activation functions that are one operator of PyTorch


def korthikanti_block(s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False) -> float:
    """Return the bytes one Megatron-LM block keeps in half precision: arXiv 2205.05198, equations 1, 2 and 4.

    s sequence length, b micro-batch, h hidden, a heads, t tensor-parallel degree.
    """
    if sequence_parallel:
        return s * b * h * (34 + 5 * a * s / h) / t
    return s * b * h * (10 + 24 / t + 5 * a * s / (h * t))


def block_saved(share: Share) -> list[Saved]:
    """Return what one block keeps for backward, without checkpointing and before tensor parallelism."""
    if block := block_of(share):
        return saved(block.saved, share)
    spec, run, T = share.spec, share.run, share.tokens
    kept = [_norms(share), *_attention(share)]
    if run.lora is None:
        # Autocast casts the input of every linear anew: q, k and v each keep a copy of the same tensor.
        copies = 3 if share.autocast and not spec.fused_qkv and not share.blocks_compiled else 1
        kept.append(Saved("linear inputs", T * share.bytes.compute * spec.hidden * copies, "whole"))
    kept += _mlp(share)
    if run.lora:
        kept.append(Saved("adapters", _adapters(share, adapted(spec, run)), "tokens"))
    if run.quantization:
        kept.append(Saved("int8 inputs", int8_inputs(share, alone=True), "tokens"))
    if spec.dropout:
        kept.append(Saved("dropout masks", 2 * T * spec.hidden * share.mask_bytes, "tokens"))
    return kept


def mlp_saved(share: Share) -> list[Saved]:
    """Return what of `block_saved` an eager block's MLP and the norms around it keep: free when attention's backward
    begins."""
    spec, run = share.spec, share.run
    norms = _norms(share)
    kept = [Saved("norms", norms.bytes // 2, norms.cut), *_mlp(share)]
    linears = [linear for linear in adapted(spec, run) if linear.part == "mlp"]
    return [*kept, Saved("adapters", _adapters(share, linears), "tokens")] if linears else kept


def without_gradient(share: Share) -> list[Saved]:
    """Return what of `block_saved` the first block does not keep: where adapters alone are trained, nothing that is
    before its first one has a gradient, unless checkpointing makes its input a leaf."""
    spec, run = share.spec, share.run
    first = reached(share)
    if block := block_of(share):
        return saved(before_adapters(block), share) if first == 0 else []
    if first is None:
        return []
    norms = _norms(share)
    before = 1 if first < 2 else spec.norms_per_layer - (spec.norms_per_layer == 4)  # Gemma's last is behind the MLP
    gone = [Saved("norms", norms.bytes * before // spec.norms_per_layer, norms.cut)]
    gone += _attention(share) if first else []
    if first == 1 and share.fused and share.bytes.residual == adapters_stream(share):
        # It reads what the kernel returned, uncast.
        gone.append(Saved("attention output", -share.tokens * share.attention_bytes * spec.query_width))
    if first == 2 and not spec.fused_qkv and spec.gated:  # of branches that have no gradient the product keeps less
        names, f = {linear.name for linear in adapted(spec, run)}, share.tokens * share.linear_bytes * spec.intermediate
        only_up, only_gate = "gate_proj" not in names, "up_proj" not in names
        gone.append(Saved("mlp", f * (2 - share.fuses) if only_up else f * (not share.fuses) if only_gate else 0))
    read = [linear for linear in adapted(spec, run) if _place(linear) == first]
    gone.append(Saved("adapters", share.tokens * _masks(share, read), "tokens"))
    inputs = int8_inputs(share, alone=True) - int8_inputs(share, first + 1, alone=True)
    gone.append(Saved("int8 inputs", inputs, "tokens"))
    return gone + (_mlp(share) if first == 3 else [])


def casts_without_gradient(share: Share) -> int:
    """Return the elements of frozen weights whose half copies the first block does not keep: what they read has no
    gradient."""
    first = reached(share)
    if first is None:
        return 0
    return sum(each.elements // share.spec.layers for each in share.spec.block_linears if _place(each) <= first)


def reached(share: Share) -> int | None:
    """Return the `_place` of the first block's first adapter; None where gradients go through all of it."""
    linears = [each for each in adapted(share.spec, share.run) if each.part != "head"]
    if not linears or not share.first or share.run.checkpointing or share.spec.experts:
        return None
    return min(map(_place, linears))


def _place(linear: Linear) -> int:
    """Return where in a block a linear is: 0 before attention, 1 behind it, 2 before and 3 behind the activation."""
    return 2 * (linear.part == "mlp") + (linear.name in ("o_proj", "c_proj", "down_proj"))


def _norms(share: Share) -> Saved:
    spec, r = share.spec, share.bytes.residual
    if spec.norm == "layernorm" or share.fuses or share.run.kernels == "fused-norm":
        token = r * spec.hidden + 8  # its input; mean and 1/std in fp32; of RMSNorm only that
    else:
        # Written in Python: the fp32 input (a copy where the stream is half), 1/rms, and, for the weight's gradient,
        # the normalised tensor.
        token = 4 * spec.hidden + 4 + (r * spec.hidden if share.run.lora is None else 0)
    return Saved("norms", spec.norms_per_layer * share.tokens * token, "tokens")


def _attention(share: Share) -> list[Saved]:
    spec, T, c = share.spec, share.tokens, share.attention_bytes
    Q, trained = spec.query_width, share.run.lora is None
    windows = share.windows
    width = _qkv_width(share, share.kernel) * (spec.layers - windows)
    if windows:
        width += _qkv_width(share, "efficient") * windows
    kept = [Saved("q, k, v", T * c * width // spec.layers)]
    if spec.mla and trained:
        latent = 2 * (spec.mla.q_lora_rank or 0) + 2 * spec.mla.kv_lora_rank + spec.mla.qk_rope_head_dim
        kept.append(Saved("linear inputs", T * c * latent, "whole"))
    if spec.qk_norm and share.fuses:
        kept.append(Saved("norms", T * (c * (Q + spec.key_width) + 4 * (spec.heads + spec.kv_heads))))
    elif spec.qk_norm:
        kept.append(Saved("norms", T * (4 + (share.bytes.compute if trained else 0)) * (Q + spec.key_width)))
    if share.fused:
        # FlashAttention, arXiv 2205.14135, section 3.1: the output and one log-sum-exp per row and head.
        kept.append(Saved("attention output", T * (c * Q + 4 * spec.heads)))
        if trained and (copied := _outputs_copied(share)):
            kept.append(Saved("attention output", T * c * Q * copied // spec.layers))
        if windows:  # each layer's SDPA makes numbers of the booleans that it is given, and keeps them
            elements = share.run.sequences * share.run.seq_len**2 // share.run.cp
            kept.append(Saved("attention mask", c * elements * windows // spec.layers, "whole"))
        return kept
    kept.append(Saved("scores", kept_scores(share)))
    if trained:
        kept.append(Saved("attention output", T * share.bytes.compute * Q))  # the output projection's input
    return kept


def _outputs_copied(share: Share) -> int:
    """Return in how many layers the output projection reads a copy of what attention returned: where rotated queries
    are new, put together from two pieces, with a head's tokens side by side, and the kernel returns what is laid out as
    they are. The memory-efficient one puts a token's heads side by side."""
    spec = share.spec
    if not spec.fused_qkv or spec.learned_positions or share.kernel != "flash":
        return 0
    cudnn = share.gpu is not None and share.gpu.prefers_cudnn_attention
    return spec.layers - (0 if share.cpu or cudnn else share.windows)


def _qkv_width(share: Share, kernel: str) -> int:
    """Return the elements per token of the queries, keys and values that are kept."""
    spec, Q, K = share.spec, share.spec.query_width, share.spec.key_width
    if spec.mla:
        # Queries and keys are put together from two pieces; values are a view of what both were projected to.
        return 2 * Q + spec.heads * (spec.mla.qk_nope_head_dim + spec.mla.v_head_dim)
    uncast = share.linear_bytes == share.attention_bytes
    # Eager attention's product takes a copy of values, as batch and heads cannot be merged in a view of them.
    viewed = kernel == "flash" or (spec.kv_heads == spec.heads and (kernel != "eager" or share.run.micro_batch == 1))
    if spec.fused_qkv and not spec.learned_positions and uncast and viewed:
        # Rotated queries and keys are new; values are a view of what all three were projected to.
        width = 2 * Q + 3 * K
    else:
        # But for "flash", keys and values are copied to all heads, and the copies kept; "math" keeps q and k times
        # their scale.
        width = Q + 2 * (K if kernel == "flash" else Q)
    if kernel == "math" and spec.fused_qkv and share.run.micro_batch == 1:
        # The product takes scaled copies of q and k, and v itself, a view that keeps the memory of all three. With
        # a larger batch it takes copies of all, as batch and heads cannot be merged in a view.
        width += 2 * Q
    return width


def _mlp(share: Share) -> list[Saved]:
    spec, T, c, trained = share.spec, share.tokens, share.linear_bytes, share.run.lora is None
    inputs = T * c * spec.hidden if trained else 0
    if not spec.gated:
        width = _activation_bytes(share) + (c if trained else 0)
        return [Saved("linear inputs", inputs, "whole"), Saved("mlp", T * spec.intermediate * width)]
    # A gated MLP keeps act's input, act's output (fused, it is made again), the other branch, and, for down_proj's
    # gradient, their product.
    tensors = (4 if trained else 3) - share.fuses
    dense = T * c * tensors * spec.intermediate
    if not spec.experts:
        copies = 2 if share.autocast and not spec.fused_qkv and not share.blocks_compiled else 1
        return [Saved("linear inputs", inputs * copies, "whole"), Saved("mlp", dense)]
    # Each token is copied to its experts, and their outputs kept for the router's gradient. Averaged over the layers,
    # because the first ones can be dense.
    e = 4 if share.autocast else c  # transformers runs the experts' grouped products outside autocast
    routed = e * (2 * spec.experts_per_token * spec.hidden + tensors * spec.token_mlp_width)
    moe = T * (routed + c * tensors * spec.shared_experts * spec.moe_intermediate)
    return [Saved("mlp", (moe * spec.moe_layers + dense * spec.dense_layers) // spec.layers)]


def _activation_bytes(share: Share) -> int:
    """Return the bytes per element that an activation function keeps: one tensor if it is one operator, four if it is
    tanh's formula written out (transformers' NewGELUActivation; three of them in fp32 where pow is: under CUDA's
    autocast, not under the CPU's)."""
    o = share.linear_bytes
    if share.spec.activation in FUSED or share.blocks_compiled:
        return o
    return 3 * 4 + o if share.autocast and not share.cpu else 4 * o


def _adapters(share: Share, linears: list[Linear]) -> int:
    """peft casts each adapter's input to its dtype: one copy per target where the stream has another; where it has the
    same, the q, k and v adapters share one tensor, and SDPA already keeps the output projection's. Autocast makes a
    half copy of each for its product, and that is what is kept. Compiled, equal copies are one. With dropout each
    target has what that returned, and its mask."""
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
    """Whether adapters at a `_place` read a cast copy of the block's tensor. Of bitsandbytes' linears peft leaves
    casting to autocast (tuners/lora/bnb.py), which what attention returned needs no more."""
    given = share.bytes.compute if place == 1 and by_bitsandbytes(share.run) else share.bytes.residual
    return given != adapters_stream(share)


def adapters_drop(share: Share) -> bool:
    """Whether adapters' dropout is counted: compiled it may be made again, as Inductor has its seed."""
    return share.run.lora is not None and share.run.lora.dropout > 0 and not share.blocks_compiled


def _masks(share: Share, linears: list[Linear]) -> int:
    """Return the bytes, for a token, of the masks that dropout before these linears' adapters keeps in a block."""
    inputs = sum(linear.inputs * (linear.count // share.spec.layers or 1) for linear in linears)
    return share.mask_bytes * inputs if adapters_drop(share) else 0


def adapters_stream(share: Share) -> int:
    """Return the bytes of an element of what adapters compute: autocast and FSDP2's policy have half copies of them."""
    half = share.autocast or (share.run.precision.startswith("mixed") and uses_fsdp(share.run))
    return share.bytes.compute if half else adapter_bytes(share.run)


def _adapter_results(share: Share) -> int:
    """Return the elements, for a token, that the two products of a block's adapters return."""
    spec, rank = share.spec, share.run.lora.rank if share.run.lora else 0
    return sum((rank + linear.outputs) * (linear.count // spec.layers or 1) for linear in adapted(spec, share.run))


def int8_inputs(share: Share, from_place: int = 0, alone: bool = False) -> int:
    """Return the bytes that bitsandbytes' int8 linears keep of a block, from a `_place` on: each its input, in its
    context (autograd/_functions.py, MatMul8bitLt, ctx.tensors), and so out of checkpointing's sight, and until nothing
    names the loss. With `alone` those that nothing else keeps where nothing is checkpointed: not what attention's
    kernel returned and keeps, nor what adapters read as it is. Experts are not quantized."""
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

    Sequence parallelism gathers the input of a pair of linears, and each rank's share of the weight's gradient is a
    product with all of it. torch's parallelize_module, and chapter 14's own `shard`, keep what was gathered:
    T · c · h per pair, on however many ranks. (Megatron-LM keeps its T / tp and gathers again in backward: the paper's
    equation 4, `korthikanti_block`, and one more all-gather per pair.)
    """
    return by_kind(rows, run.tp, run.sequence_parallel)


def checkpointed(share: Share) -> dict[str, int]:
    """Return the bytes by kind that one block keeps under checkpointing: its input (full, arXiv 1604.06174); selective
    also keeps what linear layers and a fused attention kernel returned, and recomputes the rest, the scores of eager
    attention too.

    Selective checkpointing does not know bitsandbytes' products: of a quantized block it keeps what the adapters'
    products returned."""
    spec, run, T, c = share.spec, share.run, share.tokens, share.bytes.compute
    kept = block_inputs(share)
    if share.blocks_compiled and run.checkpointing == "selective":
        kept = {"block inputs": 0}  # the partitioner keeps the first block's, and sums up the others from outputs
    if block := block_of(share):
        if run.checkpointing == "full":
            return kept
        if every := stack_of(run).recomputes_one_in:
            return _some_layers(share, kept, every)
        return kept | per_device(saved(block.selective, share), run)
    if inputs := int8_inputs(share):
        kept["int8 inputs"] = inputs
    if run.checkpointing != "selective":
        return kept
    attention = c * spec.query_width + 4 * spec.heads if share.fused else 0
    if by_bitsandbytes(run) and run.lora:
        if inputs and share.fused:
            attention = 4 * spec.heads  # its output is the output projection's input
        kept["matmul outputs"] = T * (attention + c * _adapter_results(share))
    else:
        mlp = spec.token_mlp_width * (2 if spec.gated else 1)
        attention += adapters_stream(share) * _adapter_results(share)
        split = T * (c * (spec.query_width + 2 * spec.key_width + mlp) + attention)
        # The last product of a pair returns a part of the sum, for all tokens, that is scattered only then.
        kept["matmul outputs"] = split // run.tp + T * c * 2 * spec.hidden
    return kept


def block_inputs(share: Share) -> dict[str, int]:
    """Return the bytes by kind of what a block is given, which all checkpointing keeps."""
    stream = share.tokens * share.bytes.residual * share.spec.hidden // share.sequence_ranks
    block = block_of(share)
    return {"block inputs": stream} | (per_device(saved(block.given, share), share.run) if block else {})


def _some_layers(share: Share, kept: dict[str, int], every: int) -> dict[str, int]:
    """Return what a block keeps on average where one of `every` is recomputed, and keeps no more than `kept`."""
    recomputed = share.layers // every  # the last of each (distributed/activation_checkpoint.py, _apply_layer_sac)
    whole = per_device(block_saved(share), share.run)
    others = share.layers - recomputed
    return {
        kind: (whole.get(kind, 0) * others + kept.get(kind, 0) * recomputed) // share.layers for kind in whole | kept
    }
