"""torchtitan's Llama 3 and Qwen 3 block, tensor by tensor, as its release 0.2.2 has it."""

from __future__ import annotations

from ....base.errors import NotAvailable
from ....specs.stacks import Torchtitan
from ..float8 import converted
from ..share import Share
from .described import Block, Kept, Loss

# torchtitan/models/llama3/model/model.py. RMSNorm is one operator of torch; rotation (apply_rotary_emb) is a product
# with a constant, in fp32, and keeps nothing; scaled_dot_product_attention takes grouped heads as they are.
SAVED = (
    Kept("attention_norm: its input", "norms", "h", "stream", "tokens"),
    Kept("attention_norm: 1/rms", "norms", "1", "fp32", "tokens"),
    Kept("wq, wk, wv: their input", "linear inputs", "h", "product", "whole"),
    Kept("inner_attention: q, rotated", "q, k, v", "Q", "product", "heads"),
    Kept("inner_attention: k, rotated", "q, k, v", "K", "product", "heads"),
    Kept("inner_attention: v", "q, k, v", "K", "product", "heads"),
    Kept("inner_attention: output, wo's input", "attention output", "Q", "product", "heads"),
    Kept("inner_attention: log-sum-exp", "attention output", "H", "fp32", "heads"),
    Kept("ffn_norm: its input", "norms", "h", "stream", "tokens"),
    Kept("ffn_norm: 1/rms", "norms", "1", "fp32", "tokens"),
    Kept("w1, w3: their input", "linear inputs", "h", "product", "whole"),
    Kept("silu: w1's output", "mlp", "f", "product", "heads"),
    Kept("mul: silu's output", "mlp", "f", "product", "heads"),
    Kept("mul: w3's output", "mlp", "f", "product", "heads"),
    Kept("w2: its input", "mlp", "f", "product", "heads"),
)

# torchtitan/distributed/activation_checkpoint.py, _apply_op_sac: "all compute ops, except every second mm". In order:
# wq (kept), wk, wv (kept), wo, w1 (kept), w3, w2 (kept), and attention. "made again" is what autograd does not take
# as it is: backward makes the tensor that it needs from it, or needs none.
SELECTIVE = (
    Kept("mm 1: wq", "made again", "Q", "product", "heads"),
    Kept("mm 3: wv", "matmul outputs", "K", "product", "heads"),
    Kept("inner_attention: output", "matmul outputs", "Q", "product", "heads"),
    Kept("inner_attention: log-sum-exp", "matmul outputs", "H", "fp32", "heads"),
    Kept("mm 5: w1", "matmul outputs", "f", "product", "heads"),
    Kept("mm 7: w2", "made again", "h", "product", "whole"),
)

# models/llama3/infra/parallelize.py, _op_sac_save_list: what reduce_scatter returned is kept too.
REDUCED = tuple(Kept(f"reduce_scatter: {name}", "made again", "h", "product", "tokens") for name in ("wo", "w2"))

# torchtitan/train.py, forward_backward_step: the logits are deleted before backward; components/loss.py casts them to
# fp32, and log_softmax keeps its result.
LOSS = Loss(forward=(1, 2), gradient=(0, 3), head=(1, 0), after=(0, 0))

LLAMA = Block(
    source="https://github.com/pytorch/torchtitan/blob/v0.2.2/torchtitan/models/llama3/model/model.py",
    saved=SAVED,
    selective=SELECTIVE,
    outside=(
        Kept("norm: its input", "norms", "h", "stream", "tokens"),
        Kept("norm: 1/rms", "norms", "1", "fp32", "tokens"),
        Kept("output: its input", "linear inputs", "h", "product", "whole"),
    ),
    mlp_backward=(Kept("gradients of w2's input, silu and w3", "temporaries", "f", "product", "heads", 3),),
    attention_backward=(Kept("gradients of q, k, v and the output", "temporaries", "Q", "product", "heads", 4),),
    loss=LOSS,
)


# models/qwen3/model/model.py: queries and keys of each head are normalized before they are rotated.
QK_NORM = (
    Kept("q_norm: its input", "norms", "Q", "product", "heads"),
    Kept("q_norm: 1/rms", "norms", "H", "fp32", "heads"),
    Kept("k_norm: its input", "norms", "K", "product", "heads"),
    Kept("k_norm: 1/rms", "norms", "G", "fp32", "heads"),
)


# Compiled, block by block (infra/parallelize.py, apply_compile), the partitioner of torch makes silu's output again,
# and backward needs no result of w2 (torch/_functorch/partitioners.py). The compiled loss casts as it reads, keeps the
# logits, and writes their gradient beside them.
NOT_KEPT = ("mul: silu's output", "mm 7: w2")
# Selective checkpointing then makes again what the MLP's backward needs, and what attention's needs only after that.
MADE_AGAIN = (
    Kept("ffn_norm: its input", "norms", "h", "stream", "tokens"),
    Kept("mul: w3's output", "mlp", "f", "product", "heads"),
    Kept("w2: its input", "mlp", "f", "product", "heads"),
)
# In fp8 (torchao/float8/float8_linear.py) what the products of backward read is cast again, from what the norms and the
# activation read; weights that FSDP2 gathered in fp8 are kept as they were laid out for backward.
CAST_AGAIN = ("wq, wk, wv: their input", "w1, w3: their input", "w2: its input")
# In an MLP's backward, in widths of half precision: the gradient of w2's input; casts to fp8 of three tensors, two of
# them in two layouts. By rows the casts are made one after the other, from copies, one of which is in fp32.
FP8_BACKWARD = {"tensorwise": 3.5, "rowwise": 5.0}
COMPILED_LOSS = Loss(forward=(1, 0), gradient=(2, 0), head=(1, 0), after=(0, 0))


# With context parallelism each token brings its position (distributed/context_parallel.py), and each block reads the
# table there: a complex number for each pair of a head's elements. Attention over the ring keeps what it keeps alone.
AT_POSITIONS = (Kept("rotation: the table at the positions", "q, k, v", "D", "fp32", "whole"),)


def block(share: Share) -> Block:
    """Return the description of the block that torchtitan trains. Raises NotAvailable for a mixture of experts."""
    if share.spec.experts:
        raise NotAvailable(f"torchtitan's mixtures of experts, as {share.spec.name}, are not described; lab.simulate "
                           "runs them, and stack='transformers' estimates another")  # fmt: skip
    selective: tuple[Kept, ...] = SELECTIVE
    stack, run = share.run.stack, share.run
    if isinstance(stack, Torchtitan) and not stack.keeps_attention:
        selective = tuple(row for row in selective if not row.operator.startswith("inner_attention"))
    if run.tp > 1:
        selective += REDUCED
    saved: tuple[Kept, ...] = SAVED
    if share.spec.qk_norm:  # Qwen 3
        saved += QK_NORM
        if share.bytes.master:  # FSDP2 casts what a block is given
            # All positions', and with context parallelism the rank's own for each of its tokens beside them.
            times = 2 * run.cp / run.micro_batch + (2 if run.cp > 1 else 0)
            table = Kept("rotation: cosines and sines", "q, k, v", "D", "product", "whole", times)
            saved, selective = (*saved, table), (*selective, table)
    elif run.cp > 1:
        saved += AT_POSITIONS
    found = LLAMA._replace(saved=saved, selective=selective)
    return _compiled(found, share) if run.compile else found


def _compiled(eager: Block, share: Share) -> Block:
    """Return the description of the block where it is compiled."""
    run = share.run
    gone: tuple[str, ...] = NOT_KEPT
    again: tuple[Kept, ...] = MADE_AGAIN
    times = 3.0 if run.checkpointing else 1.0
    saved = eager.saved
    if run.fp8:
        gone, again, times = (*NOT_KEPT, *CAST_AGAIN), MADE_AGAIN[:2], FP8_BACKWARD[run.fp8]
        if run.gathers_float8 and not run.checkpointing:
            weights = sum(linear.elements for linear in converted(share.spec, run)) / share.spec.layers
            saved += (Kept("weights, cast", "linear weights", "1", "byte", "heads", weights / share.tokens),)
    return eager._replace(
        saved=tuple(row for row in saved if row.operator not in gone),
        selective=tuple(row for row in eager.selective if row.operator not in gone),
        mlp_backward=tuple(row._replace(times=times) for row in eager.mlp_backward),
        loss=COMPILED_LOSS if getattr(run.stack, "compile_loss", True) else eager.loss,
        made_again=again,
    )
