"""torchtitan's Llama 3 and Qwen 3 block, tensor by tensor, as its release 0.2.2 has it."""

from __future__ import annotations

from ....base.errors import NotAvailable
from ....specs.stacks import Torchtitan
from ..fsdp import own_unit
from ..share import Share
from . import torchtitan_experts as experts
from .described import EXPERTS, Block, Cut, Height, Kept, Loss

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
# fp32, and log_softmax keeps its result. With tensor parallelism torch's loss_parallel writes log_softmax out in
# operators, and has one more temporary both ways.
LOSS = Loss(forward=(1, 2), gradient=(0, 3), head=(1, 0), after=(0, 0))
PARALLEL_LOSS = Loss(forward=(1, 3), gradient=(0, 4), head=(1, 0), after=(0, 0))

LLAMA = Block(
    source="https://github.com/pytorch/torchtitan/blob/v0.2.2/torchtitan/models/llama3/model/model.py",
    saved=SAVED,
    selective=SELECTIVE,
    outside=(
        Kept("norm: its input", "norms", "h", "stream", "tokens"),
        Kept("norm: 1/rms", "norms", "1", "fp32", "tokens"),
        Kept("output: its input", "linear inputs", "h", "product", "whole"),
    ),
    backward=(),
    loss=LOSS,
)

# Backward comes to a block with the gradient of what it returned, which the sum with its input passes on.
STREAM = Kept("gradient of the block's output", "gradients", "h", "stream", "tokens")
MLP_SAVED = tuple(row.operator for row in SAVED[11:])
NORM_SAVED = (*(row.operator for row in SAVED[8:11]), "ffn_norm: its input, normalized")
MLP_WEIGHTS = ("gate_proj", "up_proj", "down_proj")


def _of(name: str, width: str, times: float = 1, cut: Cut = "heads") -> Kept:
    return Kept(f"gradients of {name}", "temporaries", width, "product", cut, times)


# autograd frees what an operator saved when its backward is over.
HEIGHTS = (
    Height(("w2: its input",), (STREAM, _of("w2's input, silu and w3", "f", 3)), ("down_proj",)),
    Height(MLP_SAVED, (STREAM, _of("w1", "f"), _of("w1's and w3's inputs", "h", 2, "whole")), MLP_WEIGHTS),
    Height(
        (*MLP_SAVED, *NORM_SAVED),
        (STREAM, _of("q and inner_attention's output", "Q", 2), _of("k and v", "K", 2)),
        (*MLP_WEIGHTS, "o_proj"),
    ),
)
# With tensor parallelism w2's gradient is gathered from all ranks, of their tokens. Checkpointing makes the block again
# after that, w2's sum over the ranks included: what is laid out for it, and what each rank gets of it.
GATHERED = Kept("gradient of the block's output, gathered", "temporaries", "h", "product", "whole")
CUT_UP = (
    Height((), (STREAM, GATHERED, GATHERED)),
    Height((), (STREAM, GATHERED, _of("w2's input", "f")), ("down_proj",)),
)
AGAIN = Height(
    (),
    (
        STREAM,
        GATHERED,
        Kept("w2: its output", "made again", "h", "product", "whole", 2),
        Kept("reduce_scatter, ffn_norm: their outputs", "made again", "h", "product", "tokens", 2),
    ),
)


# In fp32 attention is written out (aten/src/ATen/native/transformers/attention.cpp,
# _scaled_dot_product_attention_math): keys and values are copied to all heads, queries and keys multiplied by the root
# of the scale, and selective checkpointing knows none of its operators.
MATH = (
    Kept("inner_attention: q, scaled", "q, k, v", "Q", "product", "heads"),
    Kept("inner_attention: k of all heads, scaled", "q, k, v", "Q", "product", "heads"),
    Kept("inner_attention: v of all heads", "q, k, v", "Q", "product", "heads"),
    Kept("inner_attention: softmax", "scores", "S", "fp32", "heads"),
    Kept("wo: its input", "attention output", "Q", "product", "heads"),
)
# Softmax's gradient, that times softmax, and the result (cuda/SoftMax.cu), when wo's input is gone.
MATH_HEIGHT = Height(
    (*MLP_SAVED, *NORM_SAVED, "wo: its input", "inner_attention: v of all heads"),
    (STREAM, _of("v", "Q"), Kept("gradients of softmax", "temporaries", "S", "fp32", "heads", 3)),
    (*MLP_WEIGHTS, "o_proj"),
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
NOT_KEPT = ("mul: silu's output", "mm 7: w2", "reduce_scatter: w2")
# As the MLP's backward runs, selective checkpointing has not yet made again what is attention's.
UNMADE = (
    "wq, wk, wv: their input", "q_norm: its input", "k_norm: its input",
    "inner_attention: q, rotated", "inner_attention: k, rotated",
    "rotation: the table at the positions", "rotation: cosines and sines at the rank's own positions",
)  # fmt: skip
# Inductor orders what backward computes so that the most is least, weights' gradients last where these are large.
COMPILED_BACKWARD = {
    None: Height(("w2: its input",), (STREAM, _of("w1 and w3", "f", 2)), ("down_proj",)),
    "full": Height((), (STREAM, _of("w2's input, w1 and w3", "f", 3))),
    "selective": Height(UNMADE, (STREAM, SELECTIVE[0], _of("w2's input, w1 and w3", "f", 3))),
}
# In fp8 (torchao/float8/float8_linear.py) what the products of backward read is cast again, from what the norms and the
# activation read; weights that FSDP2 gathered in fp8 are kept as they were laid out for backward.
CAST_AGAIN = ("wq, wk, wv: their input", "w1, w3: their input", "w2: its input")
# In an MLP's backward, in widths of half precision: the gradient of w2's input; casts to fp8 of three tensors, two of
# them in two layouts. By rows the casts are made one after the other, from copies, one of which is in fp32.
FP8_BACKWARD = {"tensorwise": 3.5, "rowwise": 5.0}
FP8_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
FP8_GONE = {
    None: ("w2: its weight, cast",),
    "full": ("inner_attention: output, wo's input",),
    "selective": ("inner_attention: k, rotated",),  # for q, rotated, there is wq's output
}
# With tensor parallelism a block's backward ends with the gradients of what each rank gathered, in half precision.
TO_ONE = Height(
    (*MLP_SAVED, *NORM_SAVED, *CAST_AGAIN, *(f"{name}, cast" for name in CAST_AGAIN),
     *(f"{name}: its weight, cast" for name in FP8_NAMES.values()), "inner_attention: output, wo's input"),
    (STREAM, GATHERED, _of("wq's, wk's and wv's input", "h", 3, "whole")),
    (*MLP_WEIGHTS, "o_proj"),
)  # fmt: skip
COMPILED_LOSS = Loss(forward=(1, 0), gradient=(2, 0), head=(1, 0), after=(0, 0))
# Over the ranks of tensor parallelism it keeps log_softmax's result, which the ranks' sums are in the midst of.
COMPILED_PARALLEL_LOSS = Loss(forward=(1, 2), gradient=(1, 1), head=(1, 0), after=(0, 0))


# On one device, under autocast, each linear casts its input anew.
COPIES = {"wq, wk, wv: their input": 3, "w1, w3: their input": 2}


# With context parallelism each token brings its position (distributed/context_parallel.py), and each block reads the
# table there: a complex number for each pair of a head's elements. Attention over the ring keeps what it keeps alone.
AT_POSITIONS = (Kept("rotation: the table at the positions", "q, k, v", "D", "fp32", "whole"),)
# What the ring returns lies as attention wants it: wo reads a copy.
COPIED = Kept("wo: its input, copied", "attention output", "Q", "product", "heads")


# Compiled, keys and values are kept as the ring gathered them, by selective checkpointing too, and with those rotated
# keys in the place of a product's output.
ALL_RANKS = "inner_attention: k and v of all ranks"
ROTATED = Kept("inner_attention: k, rotated", "matmul outputs", "K", "product", "heads")


def _ring(share: Share) -> Height:
    """Return what attention's backward takes over the ring (torch/distributed/tensor/experimental/_context_parallel/
    _attention.py, _templated_ring_attention_backward), as its second call runs, of half the queries: gradients of both
    calls, and their sums in fp32; keys and values of all ranks; and the sums of the gradients of keys and values,
    before and after they are passed on. Heads of more than 128 elements cuDNN's kernel does not take (aten/src/ATen/
    native/transformers/cuda/sdp_utils.cpp): FlashAttention sums the queries' gradient in fp32, and has those of keys
    and values for all heads (flash_attn/flash_api.cpp, mha_bwd)."""
    spec, run = share.spec, share.run
    flash = spec.head_dim > 128 or run.attention == "flash"
    kernel = (1 + 2 * (spec.kv_heads != spec.heads)) * flash
    of_keys = _of("k and v, and these of all ranks", "K", 18 + 2 * run.cp)
    around = (_of("the output, and of q", "Q", 4.5 + kernel), of_keys)
    return Height((*MLP_SAVED, *NORM_SAVED, COPIED.operator), (STREAM, *around), (*MLP_WEIGHTS, "o_proj"))


def block(share: Share) -> Block:
    """Return the description of the block that torchtitan trains. Raises NotAvailable for a mixture of experts that is
    not described."""
    stack, run, mixed = Torchtitan.of(share.run), share.run, share.spec.experts > 0
    if mixed:
        _check_experts(share)
    saved: tuple[Kept, ...] = SAVED[:10] + experts.saved(share) if mixed else SAVED
    selective: tuple[Kept, ...] = SELECTIVE[:4] + experts.SELECTIVE if mixed else SELECTIVE
    if not stack.keeps_attention:
        selective = tuple(row for row in selective if not row.operator.startswith("inner_attention"))
    if run.tp > 1:
        selective += REDUCED
    if share.kernel == "math":
        saved = saved[:3] + MATH + saved[8:]
        selective = tuple(row for row in selective if not row.operator.startswith("inner_attention"))
    arguments: tuple[Kept, ...] = ()
    if share.autocast and not run.compile:
        saved = tuple(row._replace(times=COPIES.get(row.operator, row.times)) for row in saved)
    if share.spec.qk_norm:  # Qwen 3; autocast widens what a norm is given (aten/src/ATen/autocast_mode.h)
        widened = share.autocast and not run.compile
        saved += tuple(row._replace(dtype="fp32") for row in QK_NORM) if widened else QK_NORM
        if share.bytes.master:  # FSDP2 casts what a block is given
            arguments += (_table("all", 2 * run.cp / run.micro_batch),)
            saved += (*arguments, _table("the rank's own", 2)) if run.cp > 1 else arguments
    elif run.cp > 1:
        saved += AT_POSITIONS
    if run.cp > 1:
        saved += (COPIED,)
    backward: tuple[Height, ...] = HEIGHTS
    if share.kernel == "math":
        backward = (*backward[:2], MATH_HEIGHT)
    if share.spec.experts:
        gone = (*NORM_SAVED[:2], *(row.operator for row in experts.saved(share)))
        attention = HEIGHTS[2]._replace(gone=gone, gradients=(*EXPERTS, "o_proj"))
        if own_unit(run):
            beside = (*attention.beside, experts.reduced(share))
            attention = attention._replace(beside=beside, gradients=("o_proj",))
        backward = (*experts.backward(share, STREAM), attention)
    if run.tp > 1:
        backward += (*CUT_UP, AGAIN) if run.checkpointing else CUT_UP
    if run.cp > 1:
        backward += (_ring(share),)
    around = LLAMA
    if stack.norm_type == "rmsnorm" and not run.compile:
        saved, backward = _written_out(saved), (*backward, WRITTEN_OUT)
        around = LLAMA._replace(outside=_written_out(LLAMA.outside), norm_backward=(IN_FP32,))
    qwen = share.spec.family != "llama"
    # A complex number for each position and pair of a head's elements; of Qwen 3 cosine and sine of each element. Each
    # virtual stage has its own.
    table = (8 if qwen else 4) * run.seq_len * share.spec.head_dim * run.virtual_stages
    losses = (COMPILED_LOSS, COMPILED_PARALLEL_LOSS) if run.compile and stack.compile_loss else (LOSS, PARALLEL_LOSS)
    result = around._replace(saved=saved, selective=selective, backward=backward, arguments=arguments, table=table,
                            loss=losses[run.tp > 1],
                            forward=experts.forward(share) if share.spec.experts else ())  # fmt: skip
    return _compiled(result, share) if run.compile else result


# As a norm's backward ends: gradients by way of the product and of the mean, the square's derivative, and a product.
IN_FP32 = Kept("gradients of a norm's input", "temporaries", "h", "fp32", "tokens", 4)
WRITTEN_OUT = Height((*MLP_SAVED, "w1, w3: their input"), (STREAM, IN_FP32), MLP_WEIGHTS)


def _written_out(rows: tuple[Kept, ...]) -> tuple[Kept, ...]:
    """Return what blocks keep whose norms are written out (torchtitan/models/norms.py at 9dec370, RMSNorm): the input
    in fp32, and what the weight multiplies."""
    found: list[Kept] = []
    for row in rows:
        norm = row.operator.endswith("norm: its input")
        found += [row._replace(dtype="fp32"), row._replace(operator=f"{row.operator}, normalized")] if norm else [row]
    return tuple(found)


def _check_experts(share: Share) -> None:
    spec, run = share.spec, share.run
    asked = {
        f"compile=True, tp={run.tp}": run.compile and run.tp > 1,
        f"compile=True, cp={run.cp}": run.compile and run.cp > 1,
        f"fp8={run.fp8!r}": run.fp8,
        # The experts' products take halves; where FSDP2 does not cast weights, the experts do.
        f"precision={run.precision!r}": run.precision != "mixed-bf16",
        f"{spec.dense_layers} dense layers": spec.dense_layers > 0,
    }
    for what, value in asked.items():
        if value:
            raise NotAvailable(f"{what} is not supported for torchtitan's mixtures of experts, such as {spec.name}; "
                               "give dp=2 or more, precision='mixed-bf16', tp=1 and cp=1 to compile, no fp8, or "
                               "stack='transformers'")  # fmt: skip


def _table(positions: str, times: float) -> Kept:
    return Kept(f"rotation: cosines and sines at {positions} positions", "q, k, v", "D", "product", "whole", times)


def _compiled(eager: Block, share: Share) -> Block:
    """Return the description of the block where it is compiled."""
    run = share.run
    gone: tuple[str, ...] = (*NOT_KEPT, *CAST_AGAIN) if run.fp8 else NOT_KEPT
    saved = eager.saved
    if share.spec.experts:  # each module and the experts' function by itself, whose products selective does not see
        return eager._replace(
            saved=tuple(row for row in saved if row.operator not in gone),
            selective=tuple(row for row in eager.selective if row.operator.startswith("inner_attention")),
        )
    # Of wo the ranks' sum is kept, with tensor parallelism, and its input not made again before attention's backward.
    selective = eager.selective
    unmade: tuple[str, ...] = (*UNMADE, COPIED.operator) if run.tp > 1 else UNMADE
    if run.cp > 1:
        gathered = Kept(ALL_RANKS, "q, k, v", "K", "product", "heads", 2 * run.cp)
        saved, selective = (*saved, gathered), (*selective, gathered, ROTATED)
        unmade = tuple(name for name in unmade if name != ROTATED.operator)
    # Of blocks one of which is recomputed the last is, which backward begins with.
    every = Torchtitan.of(run).recomputes_one_in
    recomputes = "full" if every else run.checkpointing
    highest = COMPILED_BACKWARD[recomputes]
    if recomputes == "selective":
        highest = highest._replace(gone=unmade)
    # Several sequences are another graph to Inductor; over ranks of tensor parallelism, as simulations show, where
    # their part of the MLP is narrower than h.
    several = run.micro_batch > 1
    narrow = several and share.spec.intermediate < run.tp * share.spec.hidden
    if run.fp8:
        # Of a block that is recomputed whole and cast by rows one cast is gone.
        less = 0.5 * (several and recomputes == "full" and run.fp8 == "rowwise")
        made = _of("w2's input, w1 and w3, and their casts", "f", FP8_BACKWARD[run.fp8] - less)
        # Weights that came in half are cast as the block is made again, and two of the MLP's are there still.
        weights = 2 * share.spec.hidden * share.spec.intermediate / share.tokens if recomputes else 0
        cast = Kept("weights, cast", "temporaries", "1", "byte", "heads", weights * (not run.gathers_float8))
        # Beside weights gathered in fp8 the block's gradient is cast too, of several sequences in two layouts.
        again = bool(recomputes) and run.gathers_float8
        twice = narrow if run.tp > 1 else several
        layouts = _of("the block's output, cast", "h", again * (1 + twice), "whole")._replace(dtype="byte")
        highest = Height(FP8_GONE[recomputes], (STREAM, made, cast, layouts))
        whole = not run.checkpointing or every
        if whole and (run.gathers_float8 or run.tp > 1):
            cast_weights = [(FP8_NAMES[linear.name], linear.elements / share.spec.layers / share.tokens)
                            for linear in share.spec.block_linears if linear.part == "mlp"]  # fmt: skip
            rows = tuple(Kept(f"{name}: its weight, cast", "linear weights", "1", "byte", "heads", width)
                         for name, width in cast_weights)  # fmt: skip
            saved += rows
            if every:  # the last block, which is recomputed, makes them again
                highest = highest._replace(gone=(*highest.gone, *(row.operator for row in rows)))
        if not run.checkpointing and run.tp > 1:
            saved += tuple(row._replace(operator=f"{row.operator}, cast", dtype="byte") for row in saved
                           if row.operator in CAST_AGAIN[:2])  # fmt: skip
    if run.tp > 1 and (recomputes or run.fp8):
        # Of several sequences a rank's tokens are laid out before they are gathered, and again after that.
        both = narrow and run.fp8 == "tensorwise"
        gathered = GATHERED if recomputes else GATHERED._replace(dtype="byte", times=1 + both)
        highest = highest._replace(beside=(*highest.beside, gathered, STREAM._replace(times=both)))
    saved = tuple(row for row in saved if row.operator not in gone)
    # It ends with the gradients of all weights: where these are large beside the tokens, that is the most.
    end = Height(tuple(row.operator for row in saved), (STREAM, _of("w1 or w3", "f")),
                 (*MLP_WEIGHTS, "q_proj", "k_proj", "v_proj", "o_proj"))  # fmt: skip
    return eager._replace(
        saved=saved,
        selective=tuple(row for row in selective if row.operator not in gone),
        backward=(highest, end, TO_ONE) if run.tp > 1 else (highest, end),
    )
