"""LitGPT's Llama block, tensor by tensor, in its release 0.5.13, trained whole or by LoRA."""

from __future__ import annotations

from ....specs.stacks.litgpt import CHUNK
from ..segments import granted
from ..share import Share, adapted
from .described import Block, Height, Kept, Loss, read

QKV = {"q_proj", "k_proj", "v_proj"}
MLP = ("gate_proj", "up_proj", "down_proj")


def block(share: Share) -> Block:
    """Return the description of the block that LitGPT trains."""
    spec, run = share.spec, share.run
    trained = run.lora is None
    names = {linear.name for linear in adapted(spec, run)}
    padded = names & QKV if not names >= QKV else set()
    grouped = spec.kv_heads != spec.heads
    saved = (
        *_norm("norm_1", trained),
        *read(share, "qkv: its input", "linear inputs", "h", "q_proj", "k_proj", "v_proj", calls=1),
        # lora.py, zero_pad: if not all three layers have adapters, the tensors that are copied into zeros stay.
        Kept("zero_pad: q", "adapters", "Q", "product", "heads", "q_proj" in padded),
        Kept("zero_pad: k and v", "adapters", "K", "product", "heads", len(padded - {"q_proj"})),
        Kept("attention: q, rotated", "q, k, v", "Q", "product", "heads"),
        # Grouped keys and values are copied to all heads. Otherwise the values are a view, so all of qkv's output
        # stays.
        Kept("attention: k of all heads", "q, k, v", "Q" if grouped else "K", "product", "heads"),
        Kept("attention: v of all heads", "q, k, v", "Q", "product", "heads", 1 if grouped else 3),
        Kept("attention: output", "attention output", "Q", "product", "heads"),
        Kept("attention: log-sum-exp", "attention output", "H", "fp32", "heads"),
        *read(share, "proj: its input, by token", "attention output", "Q", "o_proj"),
        *_norm("norm_2", trained),
        *read(share, "fc_1, fc_2: their input", "linear inputs", "h", "gate_proj", "up_proj"),
        Kept("silu: fc_1's output", "mlp", "f", "product", "heads"),
        Kept("mul: silu's output", "mlp", "f", "product", "heads"),
        Kept("mul: fc_2's output", "mlp", "f", "product", "heads"),
        *read(share, "proj: its input", "mlp", "f", "down_proj"),
        Kept("lora_B: its input", "adapters", "1", "product", "heads", run.lora.rank * len(names) if run.lora else 0),
    )  # fmt: skip
    stream = Kept("gradient of the block's output", "gradients", "h", "product", "tokens")
    # Checkpointing saves the block's input, and norm_1 saves a cast of it.
    around = (stream, Kept("the block's input", "block inputs", "h", "product", "tokens", bool(run.checkpointing)))
    mlp = tuple(row.operator for row in saved if row.kind == "mlp")
    norm = tuple(row.operator for row in saved if row.operator.startswith(("norm_2", "fc_1, fc_2")))
    return Block(
        source="https://github.com/Lightning-AI/litgpt/blob/v0.5.13/litgpt/model.py",
        saved=saved,
        selective=(),
        outside=(
            *_norm("ln_f", trained),
            Kept("lm_head: its input", "linear inputs", "h", "product", "whole", trained),
        ),
        backward=(
            Height(("proj: its input",), (*around, _of("proj's input, silu and fc_2", "f", 3)), ("down_proj",)),
            Height(mlp, (*around, _of("fc_1", "f"), _of("fc_1's and fc_2's inputs", "h", 2)), MLP),
            Height((*mlp, *norm), (*around, _of("q, k, v and the output", "Q", 4)), (*MLP, "o_proj")),
        ),
        loss=_loss(share),
        norm_backward=(Kept("gradients of the final norm", "temporaries", "h", "fp32", "tokens", 5 if trained else 4),),
        table=2 * run.seq_len * spec.head_dim * share.bytes.compute,
    )


def _of(name: str, width: str, times: float = 1) -> Kept:
    return Kept(f"gradients of {name}", "temporaries", width, "product", "heads", times)


def _norm(name: str, trained: bool) -> tuple[Kept, ...]:
    """Return the lines of RMSNorm, which computes in fp32 and casts its output."""
    return (
        Kept(f"{name}: its input, cast", "norms", "h", "fp32", "tokens"),
        Kept(f"{name}: 1/rms", "norms", "1", "fp32", "tokens"),
        Kept(f"{name}: before its weight", "norms", "h", "fp32", "tokens", trained),
    )


def _loss(share: Share) -> Loss:
    """Return the copies of the logits.

    Fabric casts the logits to fp32, and a variable of fit() refers to the cast. Cross entropy saves its result by
    chunks. With several sequences, the slice without their last positions is a copy (litgpt/utils.py,
    chunked_cross_entropy). Its backward pass computes gradients by chunks and concatenates them, unless the head
    computed chunks.
    """
    # The variable refers to the previous micro-batch's fp32 logits until it refers to these, in 16 bits and cast.
    before = 2.5 if share.backward_passes_done else 0.0
    if share.run.lora:
        part = min(1, CHUNK / share.run.seq_len)
        size = share.run.micro_batch * min(CHUNK, share.run.seq_len) * share.spec.vocab * share.bytes.compute
        half, whole = granted(size), granted(2 * size)
        forward = whole * 2 + (before and half / 2)
        return Loss(forward=(0, forward), gradient=(0, whole * (2 + 2 * part)), head=(1, whole), after=(0, whole))
    computed = 2 + (share.run.micro_batch > 1)
    return Loss(forward=(0, max(computed, before)), gradient=(0, 3), head=(1, 1), after=(0, 1))
