"""Megatron-LM's GPT block, tensor by tensor, in megatron-core 0.16, with Transformer Engine's layers or its own.

The lines follow megatron/core/transformer/transformer_layer.py in the order of execution; comments name other files, of
megatron/core or of Transformer Engine (TE). With biases and dropout they add up to Korthikanti et al.'s 34sbh + 5as²b
(arXiv 2205.05198).
"""

from __future__ import annotations

from typing import Literal

from ....specs.parameters import ROW_PARALLEL
from ....specs.stacks import Megatron
from ...again import module_again
from ..float8 import ACTIVATION
from ..share import Share, adapted
from .described import Block, Cut, Height, Kept, Loss

# By module of --recompute-modules: the kind of tensors that it recomputes.
MODULES = {"core_attn": "scores", "mlp": "mlp", "layernorm": "norm outputs", "moe_act": "activation outputs",
           "mla_up_proj": "q, k, v"}  # fmt: skip

# By --cross-entropy-fusion-impl. tensor_parallel/cross_entropy.py: softmax overwrites the logits' fp32 copy, and the
# gradient overwrites softmax. Autograd casts the gradient to 16 bits, and nothing refers to the logits. If the
# functions are compiled one by one (fusions/fused_cross_entropy.py), they write into their inputs only at the end:
# Inductor allocates another fp32 copy for exp, and for the scatter into the gradient. TE (v2.8,
# pytorch/triton/cross_entropy.py) writes the gradient over the logits.
LOSSES: dict[str | None, Loss] = {
    None: Loss(forward=(1, 1), gradient=(1, 1), head=(1, 0), after=(0, 0)),
    "native": Loss(forward=(1, 2), gradient=(1, 2), head=(1, 0), after=(0, 0)),
    "te": Loss(forward=(1, 0), gradient=(1, 0), head=(1, 0), after=(0, 0)),
}


def block(share: Share) -> Block:
    """Return the description of the block that Megatron-LM trains."""
    rows, stack = _saved(share), Megatron.of(share.run)
    made_again = {MODULES[module] for module in stack.recompute_modules}
    return Block(
        source="https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/transformer_layer.py",
        saved=rows,
        # They include the block's input.
        selective=tuple(row for row in rows if row.kind not in made_again),
        outside=(
            Kept("final_layernorm: its input", "norms", "h", "product", "tokens"),
            Kept("output_layer: its input", "linear inputs", "h", "product", "tokens", share.run.lora is None),
        ),
        backward=(Height((), (
            # The output of each expert, and all of them concatenated; with experts on several ranks, also the tensors
            # that were sent and received.
            Kept("experts: on their way", "temporaries", "h", "product", "tokens",
                 routed(share) * (4 if share.run.ep > 1 else 2))
            if share.spec.experts else
            Kept("activation: its gradient", "temporaries", "f", "product", "heads", 2 if share.spec.gated else 1),
        )),),
        loss=LOSSES[stack.cross_entropy_fusion_impl],
    )


def fused_softmax(share: Share) -> bool:
    """Whether one kernel computes the softmax of unfused attention: Transformer Engine's, or Apex's, which supports
    only certain shapes (fusions/fused_softmax.py, is_kernel_available)."""
    run, stack = share.run, Megatron.of(share.run)
    shapes = 16 < run.seq_len <= 4096 and run.seq_len % 4 == 0 == run.micro_batch * (share.spec.heads // run.tp) % 4
    return stack.transformer_engine or (stack.apex and stack.masked_softmax_fusion and shapes)


def after_attention(rows: tuple[Kept, ...]) -> tuple[Kept, ...]:
    """Return the lines of a block that follow the input of attention's output projection."""
    last = next(number for number, row in enumerate(rows) if row.operator.startswith("linear_proj"))
    return rows[last + 1 :]


def _saved(share: Share) -> tuple[Kept, ...]:
    """Return the tensors that one block saves for the backward pass, in the order of its operators."""
    spec = share.spec
    statistics = 2 if spec.norm == "layernorm" else 1  # mean and 1/std, or 1/rms: TE module/layernorm_linear.py
    masks = 1 if spec.dropout else 0  # fusions/fused_bias_dropout.py
    recipe, stack = share.run.fp8_recipe, Megatron.of(share.run)
    # transformer/mlp.py, glu: SiLU of one half, times the other with glu_linear_offset added
    unfused = spec.gated and not stack.bias_swiglu_fusion
    inner, gates = ("m", 2) if spec.experts else ("f", 2 if spec.gated else 1)
    storage: Literal["product", "byte"] = "byte" if recipe else "product"  # of a linear layer's input
    once = ACTIVATION[recipe] if recipe else 1
    sent = wide = routed(share)
    if spec.experts:  # the average of layers with experts, which may have shared ones, and of dense layers
        shares = spec.moe_layers / spec.layers, spec.dense_layers / spec.layers
        wide = shares[0] * (sent + spec.shared_experts) + shares[1] * spec.intermediate / spec.moe_intermediate
        sent = shares[0] * (sent + bool(spec.shared_experts)) + shares[1]
    values = spec.mla.v_head_dim / spec.head_dim if spec.mla else 1
    # A frozen layer of TE saves no input (module/linear.py, backward_needs_input); its adapter does, in 16 bits.
    frozen = share.run.lora is not None
    read_by_adapters = {(linear.part, linear.name in ROW_PARALLEL) for linear in adapted(spec, share.run)}

    def read(operator: str, kind: str, width: str, cut: Cut, times: float, part: str, row: bool) -> Kept:
        if frozen:
            return Kept(operator, kind, width, "product", cut, (part, row) in read_by_adapters)
        return Kept(operator, kind, width, storage, cut, times)

    stays = share.run.attention != "eager" or not frozen or ("attention", True) in read_by_adapters
    # linear_qkv and linear_fc1 save only their rank's part of the input that sequence parallelism gathers, and the
    # backward pass gathers it again: tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication; TE
    # module/layernorm_linear.py.
    return (
        Kept("input_layernorm: its input", "norms", "h", "product", "tokens"),
        Kept("input_layernorm: statistics", "norms", "1", "fp32", "tokens", statistics),
        read("linear_qkv: its input", "linear inputs", "h", "tokens", once, "attention", False),
        *_attention(share),
        # Fused attention also saves its output, which in 16 bits is the same tensor.
        Kept("linear_proj: its input", "attention output", "Q", "product", "heads", values * stays),
        Kept("linear_proj: its input in fp8", "attention output", "Q", "byte", "heads",
             values * once if recipe and not frozen else 0),
        Kept("self_attn_bda: mask of dropout", "dropout masks", "h", "byte", "tokens", masks),
        Kept("pre_mlp_layernorm: its input", "norms", "h", "product", "tokens"),
        Kept("pre_mlp_layernorm: statistics", "norms", "1", "fp32", "tokens", statistics),
        *(_routing(share) if spec.experts else ()),
        read("linear_fc1: its input", "linear inputs", "h", "tokens", sent * once, "mlp", False),
        # fusions/fused_bias_gelu.py, fused_bias_swiglu.py
        Kept("activation: its input", "mlp", inner, "product", "heads", wide * gates),
        Kept("activation: what SiLU and the offset's sum made", "mlp", inner, "product", "heads", 2 if unfused else 0),
        read("linear_fc2: its input", "activation outputs" if module_again(share.run, "moe_act") else "mlp", inner,
             "heads", wide * once, "mlp", True),
        Kept("mlp_bda: mask of dropout", "dropout masks", "h", "byte", "tokens", masks),
    )  # fmt: skip


def routed(share: Share) -> float:
    """Return how many rows the experts of the busiest rank compute for each of its tokens. With a capacity
    (--moe-expert-capacity-factor, --moe-pad-expert-input-to-capacity) this includes padding. It is 1 without
    experts."""
    stack, spec = Megatron.of(share.run), share.spec
    factor = stack.moe_expert_capacity_factor or share.run.expert_imbalance
    return spec.experts_per_token * factor if spec.experts else 1


def _routing(share: Share) -> tuple[Kept, ...]:
    """Return the lines between the norm and the experts: transformer/moe/router.py, moe_utils.py, and
    token_dispatcher.py with all-to-all."""
    spec, sent = share.spec, routed(share)
    # The top experts and their softmax in fp32; for each expert, its probability and whether it is chosen; for each
    # chosen token, its position, twice, and its probability.
    chosen, places = (8 + 4) * spec.experts_per_token + (2 + 1) * spec.experts, (8 + 8 + 2) * sent
    return (
        Kept("router: its input", "norm outputs" if module_again(share.run, "layernorm") else "linear inputs", "h",
             "product", "tokens"),
        Kept("router: who goes where", "router", "1", "byte", "tokens", chosen + places),
    )


def _attention(share: Share) -> tuple[Kept, ...]:
    spec, run, stack = share.spec, share.run, Megatron.of(share.run)
    grouped, rotated = spec.kv_heads != spec.heads, not spec.learned_positions
    unfused, own = run.attention == "eager", not stack.transformer_engine
    if m := spec.mla:  # transformer/multi_latent_attention.py
        latents = m.kv_lora_rank + (m.q_lora_rank or 0)
        return (
            Kept("latents", "norms", "1", "product", "tokens", latents),
            Kept("linear_q_up_proj, linear_kv_up_proj: their inputs", "linear inputs", "1",
                 "byte" if run.fp8_recipe else "product", "tokens", latents),
            Kept("core_attention: queries, keys", "q, k, v", "Q", "product", "heads", 2),
            Kept("core_attention: values", "q, k, v", "1", "product", "heads", spec.heads * m.v_head_dim),
            Kept("core_attention: log-sum-exp", "attention output", "H", "fp32", "heads"),
        )  # fmt: skip
    # TE needs queries, keys and values as views of the matmul's output, or copies of all three
    # (dot_product_attention/utils.py, get_qkv_layout). Megatron's own unfused attention accepts views. If queries and
    # keys are rotated, they are additional tensors, because the values are a view of the matmul's output. Grouped keys
    # and values are copied to all heads. Each layer has its own cosines and sines, for queries and for keys
    # (models/common/embeddings/rope_utils.py).
    rows = [
        Kept("core_attention: queries", "q, k, v", "Q", "product", "heads"),
        Kept("core_attention: keys, values", "q, k, v", "Q" if grouped and unfused else "K", "product", "heads", 2),
    ]
    if own and grouped and spec.qk_norm and module_again(run, "core_attn"):  # its inputs are those before the copies
        rows[1:] = (
            Kept("core_attention: keys", "q, k, v", "K", "product", "heads"),
            Kept("core_attention: keys, values, of all heads", "scores", "Q", "product", "heads", 2),
        )
    if spec.qk_norm:
        # Each norm's output is a new tensor, and its input stays. TE's norms save a copy of it (ops/basic/rmsnorm.py).
        # PyTorch's save the matmul's whole output (keys are a view of it), and a copy of grouped queries.
        times = 0 if own and not grouped else 2 if own else 1
        rows.append(Kept("q_layernorm: its input", "q, k, v", "Q", "product", "heads", times))
        rows.append(Kept("k_layernorm: its input", "q, k, v", "K", "product", "heads", times))
        rows.append(Kept("q_layernorm: statistics", "norms", "H", "fp32", "heads"))
        rows.append(Kept("k_layernorm: statistics", "norms", "G", "fp32", "heads"))
    if own and rotated and not grouped:
        rows.append(Kept("core_attention: queries, rotated", "q, k, v", "Q", "product", "heads"))
        rows.append(Kept("core_attention: keys, rotated", "q, k, v", "K", "product", "heads"))
    if rotated and not stack.rotates_at_once:
        rows.append(Kept("rotation: cosines, sines", "q, k, v", "D", "product", "whole", 4 / run.micro_batch))
    if not unfused:  # FlashAttention, cuDNN
        return (*rows, Kept("core_attention: log-sum-exp", "attention output", "H", "fp32", "heads"))
    # transformer/dot_product_attention.py; fusions/fused_softmax.py in 16 bits, PyTorch's in fp32
    softmax: Literal["product", "fp32"] = "product" if fused_softmax(share) else "fp32"
    rows.append(Kept("core_attention: softmax", "scores", "S", softmax, "heads"))
    if spec.attention_dropout:
        rows.append(Kept("core_attention: mask of dropout", "scores", "S", "byte", "heads"))
    if spec.attention_dropout or softmax == "fp32":
        rows.append(Kept("core_attention: what multiplies values", "scores", "S", "product", "heads"))
    return tuple(rows)
