"""torchtitan's Llama 3 and Qwen 3 block, tensor by tensor, in its release 0.2.2."""

from __future__ import annotations

from ....base.errors import NotAvailable
from ....base.terms import FP8
from ....specs.stacks import Torchtitan
from ..fsdp import own_unit
from ..share import Share
from . import torchtitan_experts as experts
from .described import EXPERTS, Block, Cut, Height, Kept, Loss

# torchtitan/models/llama3/model/model.py. RMSNorm is one operator of torch. Rotation (apply_rotary_emb) multiplies by a
# constant in fp32 and saves nothing. scaled_dot_product_attention accepts grouped heads without copies.
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
# wq (saved), wk, wv (saved), wo, w1 (saved), w3, w2 (saved), and attention. The kind "made again" marks outputs that
# autograd would not save: the backward pass computes the tensor that it needs from them, or needs none.
SELECTIVE = (
    Kept("mm 1: wq", "made again", "Q", "product", "heads"),
    Kept("mm 3: wv", "matmul outputs", "K", "product", "heads"),
    Kept("inner_attention: output", "matmul outputs", "Q", "product", "heads"),
    Kept("inner_attention: log-sum-exp", "matmul outputs", "H", "fp32", "heads"),
    Kept("mm 5: w1", "matmul outputs", "f", "product", "heads"),
    Kept("mm 7: w2", "made again", "h", "product", "whole"),
)

# models/llama3/infra/parallelize.py, _op_sac_save_list: the outputs of reduce_scatter are saved, too.
REDUCED = tuple(Kept(f"reduce_scatter: {name}", "made again", "h", "product", "tokens") for name in ("wo", "w2"))

# torchtitan/train.py, forward_backward_step: the logits are deleted before the backward pass. components/loss.py casts
# them to fp32, and log_softmax saves its result. With tensor parallelism, torch's loss_parallel computes log_softmax
# with several operators, which need one more temporary in both passes.
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

# A block's backward pass begins with the gradient of its output, which the residual sum passes on.
STREAM = Kept("gradient of the block's output", "gradients", "h", "stream", "tokens")
MLP_SAVED = tuple(row.operator for row in SAVED[11:])
NORM_SAVED = (*(row.operator for row in SAVED[8:11]), "ffn_norm: its input, normalized")
MLP_WEIGHTS = ("gate_proj", "up_proj", "down_proj")


def _of(name: str, width: str, times: float = 1, cut: Cut = "heads") -> Kept:
    return Kept(f"gradients of {name}", "temporaries", width, "product", cut, times)


# Autograd frees an operator's saved tensors when the backward pass of the operator is over.
HEIGHTS = (
    Height(("w2: its input",), (STREAM, _of("w2's input, silu and w3", "f", 3)), ("down_proj",)),
    Height(MLP_SAVED, (STREAM, _of("w1", "f"), _of("w1's and w3's inputs", "h", 2, "whole")), MLP_WEIGHTS),
    Height(
        (*MLP_SAVED, *NORM_SAVED),
        (STREAM, _of("q and inner_attention's output", "Q", 2), _of("k and v", "K", 2)),
        (*MLP_WEIGHTS, "o_proj"),
    ),
)
# With tensor parallelism, the gradient of w2's output is gathered from all ranks, which divide the tokens.
# Checkpointing recomputes the block after that, including w2's sum over the ranks: a copy in the layout of the
# reduce_scatter, and the rank's part of the result.
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


# In fp32, attention consists of several operators (aten/src/ATen/native/transformers/attention.cpp,
# _scaled_dot_product_attention_math): keys and values are copied to all heads, queries and keys are multiplied by the
# root of the scale, and selective checkpointing does not list any of these operators.
MATH = (
    Kept("inner_attention: q, scaled", "q, k, v", "Q", "product", "heads"),
    Kept("inner_attention: k of all heads, scaled", "q, k, v", "Q", "product", "heads"),
    Kept("inner_attention: v of all heads", "q, k, v", "Q", "product", "heads"),
    Kept("inner_attention: softmax", "scores", "S", "fp32", "heads"),
    Kept("wo: its input", "attention output", "Q", "product", "heads"),
)
# The gradient of softmax's output, its product with softmax, and the result (cuda/SoftMax.cu), after wo's input was
# freed.
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


# If blocks are compiled one by one (infra/parallelize.py, apply_compile), torch's partitioner recomputes silu's output,
# and the backward pass does not need the output of w2 (torch/_functorch/partitioners.py). The compiled loss casts the
# logits while it reads them, saves them in 16 bits, and writes their gradient to another tensor.
NOT_KEPT = ("mul: silu's output", "mm 7: w2", "reduce_scatter: w2")
# During the MLP's backward pass, selective checkpointing has not yet recomputed these tensors of attention.
UNMADE = (
    "wq, wk, wv: their input", "q_norm: its input", "k_norm: its input",
    "inner_attention: q, rotated", "inner_attention: k, rotated",
    "rotation: the table at the positions", "rotation: cosines and sines at the rank's own positions",
)  # fmt: skip
# Inductor orders the operators of the backward pass to minimize peak memory; large gradients of weights come last.
COMPILED_BACKWARD = {
    None: Height(("w2: its input",), (STREAM, _of("w1 and w3", "f", 2)), ("down_proj",)),
    "full": Height((), (STREAM, _of("w2's input, w1 and w3", "f", 3))),
    "selective": Height(UNMADE, (STREAM, SELECTIVE[0], _of("w2's input, w1 and w3", "f", 3))),
}
# In fp8 (torchao/float8/float8_linear.py), the backward pass computes and casts the inputs of its matmuls again, from
# the inputs of the norms and of the activation. Weights that FSDP2 gathered in fp8 are saved in the layout that the
# backward pass needs.
CAST_AGAIN = ("wq, wk, wv: their input", "w1, w3: their input", "w2: its input")
# Temporaries of an MLP's backward pass, in 16-bit tensors of width f: the gradient of w2's input, and fp8 casts of
# three tensors, two of them in two layouts. Rowwise casts are computed one after the other from copies, one of which is
# in fp32.
FP8_BACKWARD = {"tensorwise": 3.5, "rowwise": 5.0}
FP8_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
FP8_GONE = {
    None: ("w2: its weight, cast",),
    "full": ("inner_attention: output, wo's input",),
    "selective": ("inner_attention: k, rotated",),  # instead of q, rotated, wq's output is saved
}
# With tensor parallelism, a block's backward pass ends with the 16-bit gradients of the inputs that each rank gathered.
TO_ONE = Height(
    (*MLP_SAVED, *NORM_SAVED, *CAST_AGAIN, *(f"{name}, cast" for name in CAST_AGAIN),
     *(f"{name}: its weight, cast" for name in FP8_NAMES.values()), "inner_attention: output, wo's input"),
    (STREAM, GATHERED, _of("wq's, wk's and wv's input", "h", 3, "whole")),
    (*MLP_WEIGHTS, "o_proj"),
)  # fmt: skip
COMPILED_LOSS = Loss(forward=(1, 0), gradient=(2, 0), head=(1, 0), after=(0, 0))
# With tensor parallelism, it saves the result of log_softmax, because sums over the ranks interrupt the fused kernel.
COMPILED_PARALLEL_LOSS = Loss(forward=(1, 2), gradient=(1, 1), head=(1, 0), after=(0, 0))


# On one device under autocast, each linear layer casts its input separately.
COPIES = {"wq, wk, wv: their input": 3, "w1, w3: their input": 2}


# With context parallelism, the batch contains each token's position (distributed/context_parallel.py), and each block
# reads the table at these positions: a complex number for each pair of a head's elements. Ring attention saves the same
# tensors as attention on one rank.
AT_POSITIONS = (Kept("rotation: the table at the positions", "q, k, v", "D", "fp32", "whole"),)
# Ring attention returns its output in attention's layout, so wo reads a copy.
COPIED = Kept("wo: its input, copied", "attention output", "Q", "product", "heads")


# In compiled code, the gathered keys and values are saved, also by selective checkpointing. It then also saves the
# rotated keys, which count as a matmul's output.
ALL_RANKS = "inner_attention: k and v of all ranks"
ROTATED = Kept("inner_attention: k, rotated", "matmul outputs", "K", "product", "heads")


def _ring(share: Share) -> Height:
    """Return the peak of ring attention's backward pass.

    It is in the second call of the kernel, with half the queries
    (torch/distributed/tensor/experimental/_context_parallel/_attention.py, _templated_ring_attention_backward):
    gradients of both calls, and their sums in fp32; keys and values of all ranks; and the sums of the gradients of keys
    and values, before and after they are passed on. cuDNN's kernel supports heads of at most 128 elements
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). For larger ones, FlashAttention sums the queries' gradient
    in fp32 and computes the gradients of keys and values for all heads (flash_attn/flash_api.cpp, mha_bwd).
    """
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
    if share.spec.qk_norm:  # Qwen 3; autocast casts the input of a norm to fp32 (aten/src/ATen/autocast_mode.h)
        widened = share.autocast and not run.compile
        saved += tuple(row._replace(dtype="fp32") for row in QK_NORM) if widened else QK_NORM
        if share.bytes.master:  # FSDP2 casts a block's arguments
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
    # A complex number for each position and pair of a head's elements; for Qwen 3 the cosine and the sine of each
    # element. Each virtual stage has its own table.
    table = (8 if qwen else 4) * run.seq_len * share.spec.head_dim * run.virtual_stages
    losses = (COMPILED_LOSS, COMPILED_PARALLEL_LOSS) if run.compile and stack.compile_loss else (LOSS, PARALLEL_LOSS)
    result = around._replace(saved=saved, selective=selective, backward=backward, arguments=arguments, table=table,
                            loss=losses[run.tp > 1],
                            forward=experts.forward(share) if share.spec.experts else ())  # fmt: skip
    return _compiled(result, share) if run.compile else result


# At the end of a norm's backward pass: the gradients through the multiplication and through the mean, the derivative of
# the square, and a product.
IN_FP32 = Kept("gradients of a norm's input", "temporaries", "h", "fp32", "tokens", 4)
WRITTEN_OUT = Height((*MLP_SAVED, "w1, w3: their input"), (STREAM, IN_FP32), MLP_WEIGHTS)


def _written_out(rows: tuple[Kept, ...]) -> tuple[Kept, ...]:
    """Return the lines of a block whose norms consist of several operators (torchtitan/models/norms.py at 9dec370,
    RMSNorm). They save the input in fp32, and the normalized input that the weight multiplies."""
    saved: list[Kept] = []
    for row in rows:
        norm = row.operator.endswith("norm: its input")
        saved += [row._replace(dtype="fp32"), row._replace(operator=f"{row.operator}, normalized")] if norm else [row]
    return tuple(saved)


def _check_experts(share: Share) -> None:
    spec, run = share.spec, share.run
    asked = {
        f"compile=True, tp={run.tp}": run.compile and run.tp > 1,
        f"compile=True, cp={run.cp}": run.compile and run.cp > 1,
        f"fp8={run.fp8!r}": run.fp8,
        # The experts' matmuls need 16-bit inputs. If FSDP2 does not cast weights, the experts do.
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


class Graph:
    """A rank's compiled block."""

    def __init__(self, share: Share) -> None:
        self.share, run = share, share.run
        # If one of several blocks is recomputed, the last one is, with which the backward pass begins.
        self.recomputes = "full" if Torchtitan.of(run).recomputes_one_in else run.checkpointing
        # Inductor compiles another graph for several sequences. With tensor parallelism it does so, as simulations
        # show, if a rank's part of the MLP is narrower than h.
        self.several = run.micro_batch > 1
        self.narrow = self.several and share.spec.intermediate < run.tp * share.spec.hidden

    def fp8_highest(self, recipe: FP8) -> Height:
        """Return the peak of the MLP's backward pass in fp8."""
        spec, run = self.share.spec, self.share.run
        # If a block is recomputed whole and cast by rows, one cast has been freed.
        less = 0.5 * (self.several and self.recomputes == "full" and recipe == "rowwise")
        in_mlp = _of("w2's input, w1 and w3, and their casts", "f", FP8_BACKWARD[recipe] - less)
        # 16-bit weights are cast when the block is recomputed, and the casts of two of the MLP's weights still exist.
        weights = 2 * spec.hidden * spec.intermediate / self.share.tokens if self.recomputes else 0
        cast = Kept("weights, cast", "temporaries", "1", "byte", "heads", weights * (not run.gathers_float8))
        # With weights gathered in fp8, the gradient of the block's output is cast, too; with several sequences in two
        # layouts.
        again = bool(self.recomputes) and run.gathers_float8
        twice = self.narrow if run.tp > 1 else self.several
        layouts = _of("the block's output, cast", "h", again * (1 + twice), "whole")._replace(dtype="byte")
        return Height(FP8_GONE[self.recomputes], (STREAM, in_mlp, cast, layouts))

    def fp8_saved(self, eager: tuple[Kept, ...]) -> tuple[tuple[Kept, ...], tuple[Kept, ...]]:
        """Return the lines of weights and of inputs that are saved in fp8, in addition to the `eager` block's."""
        spec, run = self.share.spec, self.share.run
        weights: tuple[Kept, ...] = ()
        if (not run.checkpointing or Torchtitan.of(run).recomputes_one_in) and (run.gathers_float8 or run.tp > 1):
            weights = tuple(
                Kept(f"{FP8_NAMES[linear.name]}: its weight, cast", "linear weights", "1", "byte", "heads",
                     linear.elements / spec.layers / self.share.tokens)
                for linear in spec.block_linears if linear.part == "mlp"
            )  # fmt: skip
        names = CAST_AGAIN[:2] if run.tp > 1 and not run.checkpointing else ()
        return weights, tuple(row._replace(operator=f"{row.operator}, cast", dtype="byte") for row in eager
                              if row.operator in names)  # fmt: skip


def _compiled(eager: Block, share: Share) -> Block:
    """Return the description of the compiled block."""
    run, graph = share.run, Graph(share)
    gone: tuple[str, ...] = (*NOT_KEPT, *CAST_AGAIN) if run.fp8 else NOT_KEPT
    saved = eager.saved
    if share.spec.experts:  # compiled module by module; selective checkpointing does not see matmuls in them
        return eager._replace(
            saved=tuple(row for row in saved if row.operator not in gone),
            selective=tuple(row for row in eager.selective if row.operator.startswith("inner_attention")),
        )
    # With tensor parallelism, the sum of wo's outputs over the ranks is saved, and wo's input is not recomputed before
    # attention's backward pass.
    selective = eager.selective
    unmade: tuple[str, ...] = (*UNMADE, COPIED.operator) if run.tp > 1 else UNMADE
    if run.cp > 1:
        gathered = Kept(ALL_RANKS, "q, k, v", "K", "product", "heads", 2 * run.cp)
        saved, selective = (*saved, gathered), (*selective, gathered, ROTATED)
        unmade = tuple(name for name in unmade if name != ROTATED.operator)
    highest = COMPILED_BACKWARD[graph.recomputes]
    if graph.recomputes == "selective":
        highest = highest._replace(gone=unmade)
    if run.fp8:
        highest = graph.fp8_highest(run.fp8)
        weights, inputs = graph.fp8_saved(saved)
        saved += weights + inputs
        if graph.recomputes:  # the last block casts the weights again
            highest = highest._replace(gone=(*highest.gone, *(row.operator for row in weights)))
    if run.tp > 1 and (graph.recomputes or run.fp8):
        # With several sequences, a rank's tokens are copied into the right layout before they are gathered, and again
        # after that.
        both = graph.narrow and run.fp8 == "tensorwise"
        gathered = GATHERED if graph.recomputes else GATHERED._replace(dtype="byte", times=1 + both)
        highest = highest._replace(beside=(*highest.beside, gathered, STREAM._replace(times=both)))
    saved = tuple(row for row in saved if row.operator not in gone)
    # The backward pass ends with the gradients of all weights, which is the peak if these are large compared to the
    # tokens' tensors.
    end = Height(tuple(row.operator for row in saved), (STREAM, _of("w1 or w3", "f")),
                 (*MLP_WEIGHTS, "q_proj", "k_proj", "v_proj", "o_proj"))  # fmt: skip
    return eager._replace(
        saved=saved,
        selective=tuple(row for row in selective if row.operator not in gone),
        backward=(highest, end, TO_ONE) if run.tp > 1 else (highest, end),
    )
