"""torchtune's Llama block, tensor by tensor, as its release 0.6.1 has it, trained whole or by LoRA."""

from __future__ import annotations

from ....specs.run import Training, stack_of
from ....specs.stacks import Torchtune
from ..segments import granted
from ..share import Share, adapted
from .described import Block, Height, Kept, Loss, read

MLP = ("gate_proj", "up_proj", "down_proj")
# Bytes for each element of a quantized weight that torchao's operators make as they dequantize it: indices of eight
# bytes, their values, those times their scales, and both halves of these in one (dtypes/nf4tensor.py,
# get_original_weight).
DEQUANTIZING = 8 + 2 + 2 + 2
CHUNK = 1 << 20  # elements whose nearest codes are found at once (the same, quantize_tensor_nearest)


def block(share: Share) -> Block:
    """Return the description of the block that torchtune trains."""
    spec, run, stack = share.spec, share.run, Torchtune.of(share.run)
    trained = run.lora is None
    names = {linear.name for linear in adapted(spec, run)}
    fused = run.compile  # training/_compile.py, compile_model: block by block, NF4Tensor's operators with it
    dropout = run.lora is not None and run.lora.dropout > 0
    rank = 0 if trained or run.lora is None else run.lora.rank * len(names)
    sizes = {linear.name: linear.inputs * linear.outputs for linear in spec.block_linears}

    def weights(*linears: str) -> tuple[Kept, ...]:
        """A graph has LinearNF4's operators of both ways, those that dequantize once: what backward's product reads is
        kept, and not made again (torch/_functorch/partitioners.py, fx_graph_cse and should_ban_recomputation)."""
        times = sum(sizes[name] for name in linears) / share.tokens
        name = f"{', '.join(linears)}: dequantized"
        return (Kept(name, "linear weights", "1", "product", "whole", times),) if fused and run.quantization else ()

    saved = (
        *_norm("sa_norm", trained, fused),
        *weights("q_proj", "k_proj", "v_proj"),
        *read(share, "q_proj, k_proj, v_proj: their input", "linear inputs", "h", "q_proj", "k_proj", "v_proj"),
        Kept("pos_embeddings: the table at the packed positions", "q, k, v", "D", "fp32", "heads", 2 * stack.packed),
        # modules/attention.py: keys and values are copied to all heads.
        Kept("attention: q, rotated", "q, k, v", "Q", "product", "heads"),
        Kept("attention: k and v of all heads", "q, k, v", "Q" if spec.kv_heads != spec.heads else "K", "product",
             "heads", 2),
        Kept("attention: output, output_proj's input", "attention output", "Q", "product", "heads"),
        *(read(share, "output_proj: what its adapter reads", "attention output", "Q", "o_proj") if dropout else ()),
        Kept("attention: log-sum-exp", "attention output", "H", "fp32", "heads"),
        *weights("o_proj"),
        *_norm("mlp_norm", trained, fused),
        *weights("gate_proj", "up_proj"),
        *read(share, "w1, w3: their input", "linear inputs", "h", "gate_proj", "up_proj"),
        Kept("activation: w1's output", "mlp", "f", "product", "heads"),
        Kept("mul: the activation's output", "mlp", "f", "product", "heads", not fused),
        Kept("mul: w3's output", "mlp", "f", "product", "heads"),
        *weights("down_proj"),
        *read(share, "w2: its input", "mlp", "f", "down_proj"),
        Kept("lora_b: its input", "adapters", "1", "product", "heads", rank),  # modules/peft/lora.py
    )  # fmt: skip
    stream = Kept("gradient of the block's output", "gradients", "h", "product", "tokens")
    # Checkpointing keeps what the block was given, sa_norm a cast of it.
    around = (stream, Kept("the block's input", "block inputs", "h", "product", "tokens", bool(run.checkpointing)))
    down, mlp, product, norm = (
        tuple(row.operator for row in saved if row.operator.startswith(starts))
        for starts in ("w2: ", ("activation: ", "mul: ", "w2: "), ("mul: ", "w2: "), ("mlp_norm", "w1, w3"))
    )

    # A quantized weight is dequantized as w2 is computed, beside what the layer's and the MLP's forward have names for,
    # and, where that is again, what w2's adapter made of the block's gradient before; and after an adapter's backward,
    # which leaves a gradient of their input.
    mlp_adapters = "gate_proj" in names
    named = (Kept("attn_out, h, the MLP's input", "temporaries", "h", "product", "tokens",
                  3 - (mlp_adapters and not dropout)),
             Kept("w2's input", "temporaries", "f", "product", "heads"))  # fmt: skip
    scaled = Kept("w2's adapter: its gradient, scaled", "gradients", "h", "product", "tokens", mlp_adapters)
    # With dropout an adapter of w2 reads another tensor, beside its input and what w2 returned.
    returned = Kept("w2's output", "temporaries", "h", "product", "tokens")
    wet = mlp_adapters and dropout
    again = [Height((), (*around, *named, scaled, returned))] if wet and run.checkpointing else []
    moments = (
        (down, "down_proj", (*named, scaled) if run.checkpointing else (_of("w2's input", "f", mlp_adapters),)),
        (product, "up_proj", (_of("the activation and w3", "f", 2), _of("w3's input", "h", mlp_adapters))),
        (mlp, "gate_proj", (_of("w1", "f"), _of("w3's and w1's inputs", "h", 1 + mlp_adapters))),
    )
    quantized = [
        Height(gone, (*around, *beside, Kept(f"{name}: dequantized", "temporaries", "1", "byte", "whole",
                                             DEQUANTIZING * sizes[name] / share.tokens)))
        for gone, name, beside in moments if run.quantization
    ]  # fmt: skip
    # A graph returns what backward will read, beside the block's input, and checkpointing drops it then, or backward
    # begins. Before it dequantizes w2's weight, the results of w1's and w3's adapters wait for one kernel, which drops
    # out too.
    ends = (*[returned] * (1 + mlp_adapters), *named[1:] * (wet or not (trained or mlp_adapters)))
    inside = tuple(row for row in saved[1:] if row.operator != "down_proj: dequantized")
    waiting = Kept("the adapters of w1 and w3", "temporaries", "f", "product", "heads", mlp_adapters * (2 + dropout))
    whole = (Height((), (*saved[1:], *ends)), Height((), (*inside, waiting)))
    compiled = _compiled(stream, mlp_adapters, dropout)
    if run.checkpointing:
        compiled = (Height((), (stream, *ends)), *compiled)
    return Block(
        source="https://github.com/pytorch/torchtune/blob/v0.6.1/torchtune/modules/transformer.py",
        saved=saved,
        selective=(),
        outside=(
            *_norm("norm", trained),
            Kept("output: its input", "linear inputs", "h", "product", "whole", trained),
        ),
        backward=compiled if fused else (
            *quantized,
            *again,
            Height(down, (*around, _of("w2's input, the activation and w3", "f", 3)), ("down_proj",)),
            Height(mlp, (*around, _of("w1", "f"), _of("w1's and w3's inputs", "h", 2)), MLP),
            Height((*mlp, *norm), (*around, _of("q, k, v and the output", "Q", 4)), (*MLP, "o_proj")),
        ),
        # An adapter's result is scaled, and added to the layer's.
        forward=(*[Height(down, named)] * (run.quantization is not None and not fused),
                 *[Height((), (*named, *[returned] * 3))] * wet,
                 *whole * (fused and run.checkpointing is not None)),
        loss=_loss(share, stack.num_output_chunks),
        # Three gradients in fp32; the sum over tokens of the weight's is taken by many blocks of threads, which write
        # theirs side by side (aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig), or pow's backward makes two more.
        norm_backward=(Kept("gradients of the final norm", "temporaries", "h", "fp32", "tokens", 5),),
        # A cosine and a sine in fp32 for each position and pair of a head's elements
        # (models/llama3_1/_position_embeddings.py).
        table=4 * max(run.seq_len, spec.config.get("max_position_embeddings", 0)) * spec.head_dim,
    )


def nf4tensor(size: int) -> tuple[int, ...]:
    """Return what an NF4Tensor of `size` elements takes as it is made, as `segments.beyond` has it: the weight, its
    magnitudes, what is divided by the scales, and the codes of all; differences to the 16 values and their magnitudes;
    halves of the packed codes, and these (dtypes/nf4tensor.py, from_tensor, convert_to_norm_float_weight)."""
    chunk = min(size, CHUNK)
    return (2 * size, 2 * size, -2, 2 * size, size, 32 * chunk, 32 * chunk, -5, 2 * chunk, 8 * chunk, -7, -6, -8,
            size // 2, size // 2, -9, -4, -3, -1)  # fmt: skip


def in_chunks(run: Training) -> bool:
    """Whether the head is called once for each of several chunks of its input."""
    return stack_of(run).num_output_chunks > 1


def _of(name: str, width: str, times: float = 1) -> Kept:
    return Kept(f"gradients of {name}", "temporaries", width, "product", "heads", times)


def _compiled(stream: Kept, adapted: bool, dropout: bool) -> tuple[Height, ...]:
    """Return the highest moments of a compiled block's backward, as its simulation counts them: an adapter's gradients
    are summed with those of the layer beside it. What w2 was dequantized to is gone by then; of few tokens it is more
    than they are. With dropout one gradient is written over what the forward kept."""
    read = ("w2: its input", "w2: its input, dropped out")
    adapter_input = _of("w2's input, of the layer and of its adapter", "f", 1 + adapted)
    made = _of("w2's input, w1 and w3, of the layers and of their adapters", "f", 6 - dropout if adapted else 2)
    return (Height(read, (stream, adapter_input), ("down_proj",)),
            Height((*read, "down_proj: dequantized"), (stream, made), ("down_proj",)))  # fmt: skip


def _norm(name: str, trained: bool, compiled: bool = False) -> tuple[Kept, ...]:
    """torchtune/modules/rms_norm.py casts to fp32 and back; a half weight makes torch write the norm as operators."""
    statistics = Kept(f"{name}: 1/rms", "norms", "1", "fp32", "tokens")
    if compiled:  # one kernel, and what it makes of its input is made again
        return (Kept(f"{name}: its input", "norms", "h", "product", "tokens"), statistics)
    return (
        Kept(f"{name}: its input, cast", "norms", "h", "fp32", "tokens"),
        statistics,
        Kept(f"{name}: before its weight", "norms", "h", "fp32", "tokens", trained),
    )


def _loss(share: Share, chunks: int) -> Loss:
    """modules/loss/ce_chunked_output_loss.py casts one chunk of the logits at a time, and log_softmax keeps its result;
    the recipes drop the logits before backward. Compiled it casts as it reads, and keeps the logits. Without chunks the
    model returns them in fp32, and the recipes drop the loss that they compile (training/_compile.py, compile_loss)."""
    if not chunks:
        return Loss(forward=(0, 2), gradient=(0, 3), head=(1, 0), after=(0, 0))
    size = share.tokens * share.spec.vocab * share.bytes.compute // chunks
    half, whole = granted(size), granted(4 * size // share.bytes.compute)
    # As the second chunk's gradient of the weight is added to the first's; a frozen one has none.
    head = (half * (1 if share.run.lora else max(0, 1 - 2 / chunks)), 0)
    if share.run.compile:  # and backward writes gradients over them
        return Loss(forward=(half, 0), gradient=(half * (1 + 1 / chunks), 0), head=head, after=(0, 0))
    cast = whole * (1 + 1 / chunks)
    return Loss(forward=(half, cast), gradient=(0, cast + whole / chunks), head=head, after=(0, 0))
