"""nanotron's Llama block, tensor by tensor, in src/nanotron/models/llama.py at c252843 (March 2025)."""

from __future__ import annotations

from ....specs.stacks import Nanotron
from ..share import Share
from .described import Block, Cut, Height, Kept, Loss

# parallel/tensor_parallel/functional.py: the logits' fp32 copy, and the shifted logits, which softmax and then the
# gradient overwrite. Autograd casts the gradient to 16 bits. forward returns only the loss.
LOSS = Loss(forward=(0, 2), gradient=(1, 1), head=(1, 0), after=(0, 0))

STREAM = Kept("gradient of the layer's output", "gradients", "h", "stream", "tokens")


def block(share: Share) -> Block:
    """Return the description of the block that nanotron trains."""
    spec, run = share.spec, share.run
    again = Nanotron.of(run).tp_recompute_allgather
    cut: Cut = "tokens" if again else "whole"
    # Queries are rotated in place. Without grouped heads, they are a view of qkv_proj's whole output. Keys and values
    # are copied before the rotation (CausalSelfAttention.forward; flash_attn/layers/rotary.py).
    queries = 1 if spec.kv_heads != spec.heads else 3
    saved = (
        Kept("input_layernorm: its input", "norms", "h", "stream", "tokens"),  # TritonRMSNorm, of flash-attn
        Kept("input_layernorm: 1/rms", "norms", "1", "fp32", "tokens"),
        Kept("qkv_proj: its input", "linear inputs", "h", "product", cut),
        Kept("attention: queries, and what they are a view of", "q, k, v", "Q", "product", "heads", queries),
        Kept("attention: keys, values", "q, k, v", "K", "product", "heads", 2),
        Kept("attention: output, o_proj's input", "attention output", "Q", "product", "heads"),
        Kept("attention: log-sum-exp", "attention output", "H", "fp32", "heads"),
        Kept("post_attention_layernorm: its input", "norms", "h", "stream", "tokens"),
        Kept("post_attention_layernorm: 1/rms", "norms", "1", "fp32", "tokens"),
        Kept("gate_up_proj: its input", "linear inputs", "h", "product", cut),
        Kept("split_silu_mul: gate and up", "mlp", "f", "product", "heads", 2),
        Kept("split_silu_mul: silu's output", "mlp", "f", "product", "heads"),
        Kept("down_proj: its input", "mlp", "f", "product", "heads"),
    )
    made = Kept("gradients of down_proj's input, silu and up", "temporaries", "f", "product", "heads", 3)
    return Block(
        source="https://github.com/huggingface/nanotron/blob/c252843/src/nanotron/models/llama.py",
        saved=saved,
        selective=(),
        outside=(
            Kept("final_layer_norm: its input", "norms", "h", "stream", "tokens"),
            Kept("final_layer_norm: 1/rms", "norms", "1", "fp32", "tokens"),
            Kept("lm_head: its input", "linear inputs", "h", "product", cut),
        ),
        backward=(Height(("down_proj: its input",), (STREAM, made), ("down_proj",)),),
        loss=LOSS,
        # Gathered tensors share one buffer (parallel/utils.py, MemoryBuffer).
        table=share.tokens * spec.hidden * share.bytes.compute if run.sequence_parallel and again else 0,
    )
