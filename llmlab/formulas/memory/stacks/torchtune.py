"""torchtune's Llama block, tensor by tensor, in its release 0.6.1, trained whole or by LoRA."""

from __future__ import annotations

from ....specs.run import Training, stack_of
from ....specs.stacks import Torchtune
from ..segments import granted
from ..share import Share, adapted
from .described import Block, Height, Kept, Loss, read

MLP = ("gate_proj", "up_proj", "down_proj")
# Bytes per element of a quantized weight that torchao's operators allocate to dequantize it: indices of eight bytes,
# their values, the values times their scales, and both halves of these concatenated (dtypes/nf4tensor.py,
# get_original_weight).
DEQUANTIZING = 8 + 2 + 2 + 2
CHUNK = 1 << 20  # elements whose nearest codes are computed together (the same, quantize_tensor_nearest)


STREAM = Kept("gradient of the block's output", "gradients", "h", "product", "tokens")
W2_INPUT = Kept("w2's input", "temporaries", "f", "product", "heads")
W2_OUTPUT = Kept("w2's output", "temporaries", "h", "product", "tokens")


def block(share: Share) -> Block:
    """Return the description of the block that torchtune trains."""
    spec, run = share.spec, share.run
    tuned = Tuned(share)
    saved = tuned.saved()
    return Block(
        source="https://github.com/pytorch/torchtune/blob/v0.6.1/torchtune/modules/transformer.py",
        saved=saved,
        selective=(),
        outside=(
            *_norm("norm", tuned.trained),
            Kept("output: its input", "linear inputs", "h", "product", "whole", tuned.trained),
        ),
        backward=tuned.compiled_backward() if run.compile else tuned.eager_backward(saved),
        forward=tuned.forward(saved),
        loss=_loss(share, Torchtune.of(run).num_output_chunks),
        # Three gradients in fp32. Two more are partial sums of the weight's gradient over tokens, which many thread
        # blocks write next to each other (aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig), or temporaries of
        # pow's backward pass.
        norm_backward=(Kept("gradients of the final norm", "temporaries", "h", "fp32", "tokens", 5),),
        # A cosine and a sine in fp32 for each position and pair of a head's elements
        # (models/llama3_1/_position_embeddings.py).
        table=4 * max(run.seq_len, spec.config.get("max_position_embeddings", 0)) * spec.head_dim,
    )


class Tuned:
    """A rank's block: what of it is trained. Compiled blocks include NF4Tensor's operators (training/_compile.py,
    compile_model)."""

    def __init__(self, share: Share) -> None:
        spec, lora = share.spec, share.run.lora
        self.share, self.adapters = share, {linear.name for linear in adapted(spec, share.run)}
        self.trained, self.dropout = lora is None, lora is not None and lora.dropout > 0
        self.mlp_adapters = "gate_proj" in self.adapters
        # An adapter of w2 reads another tensor than w2, while w2's input and output still exist.
        self.wet = self.mlp_adapters and self.dropout
        self.elements = {linear.name: linear.inputs * linear.outputs for linear in spec.block_linears}
        # At the end of the MLP, variables of the layer's and of the MLP's forward() refer to these tensors.
        self.named = (Kept("attn_out, h, the MLP's input", "temporaries", "h", "product", "tokens",
                           3 - (self.mlp_adapters and not self.dropout)), W2_INPUT)  # fmt: skip

    def weights(self, *linears: str) -> tuple[Kept, ...]:
        """Return the lines of dequantized weights. A graph contains LinearNF4's operators of both passes and
        dequantizes once: the weight that the backward pass's matmul reads is saved and not recomputed
        (torch/_functorch/partitioners.py, fx_graph_cse and should_ban_recomputation)."""
        if not (self.share.run.compile and self.share.run.quantization):
            return ()
        times = sum(self.elements[name] for name in linears) / self.share.tokens
        return (Kept(f"{', '.join(linears)}: dequantized", "linear weights", "1", "product", "whole", times),)

    def saved(self) -> tuple[Kept, ...]:
        """Return the lines of the tensors that autograd saves."""
        share, run, weights = self.share, self.share.run, self.weights
        all_heads = "Q" if share.spec.kv_heads != share.spec.heads else "K"
        rank = run.lora.rank * len(self.adapters) if run.lora else 0
        of_adapter = read(share, "output_proj: what its adapter reads", "attention output", "Q", "o_proj")
        return (
            *_norm("sa_norm", self.trained, run.compile),
            *weights("q_proj", "k_proj", "v_proj"),
            *read(share, "q_proj, k_proj, v_proj: their input", "linear inputs", "h", "q_proj", "k_proj", "v_proj"),
            Kept("pos_embeddings: the table at the packed positions", "q, k, v", "D", "fp32", "heads",
                 2 * Torchtune.of(run).packed),
            # modules/attention.py: keys and values are copied to all heads.
            Kept("attention: q, rotated", "q, k, v", "Q", "product", "heads"),
            Kept("attention: k and v of all heads", "q, k, v", all_heads, "product", "heads", 2),
            Kept("attention: output, output_proj's input", "attention output", "Q", "product", "heads"),
            *(of_adapter if self.dropout else ()),
            Kept("attention: log-sum-exp", "attention output", "H", "fp32", "heads"),
            *weights("o_proj"),
            *_norm("mlp_norm", self.trained, run.compile),
            *weights("gate_proj", "up_proj"),
            *read(share, "w1, w3: their input", "linear inputs", "h", "gate_proj", "up_proj"),
            Kept("activation: w1's output", "mlp", "f", "product", "heads"),
            Kept("mul: the activation's output", "mlp", "f", "product", "heads", not run.compile),
            Kept("mul: w3's output", "mlp", "f", "product", "heads"),
            *weights("down_proj"),
            *read(share, "w2: its input", "mlp", "f", "down_proj"),
            Kept("lora_b: its input", "adapters", "1", "product", "heads", rank),  # modules/peft/lora.py
        )  # fmt: skip

    def eager_backward(self, saved: tuple[Kept, ...]) -> tuple[Height, ...]:
        """Return the peaks of an eager block's backward pass.

        w2's quantized weight is dequantized in the forward pass. If this is a recomputation, w2's adapter has already
        scaled the block's gradient. The weight is dequantized again in the backward pass, after that of the adapter,
        which leaves a gradient of their input.
        """
        run, adapters, tokens = self.share.run, self.mlp_adapters, self.share.tokens
        down, multiplied, mlp, norm = (
            tuple(row.operator for row in saved if row.operator.startswith(starts))
            for starts in ("w2: ", ("mul: ", "w2: "), ("activation: ", "mul: ", "w2: "), ("mlp_norm", "w1, w3"))
        )
        # Checkpointing saves the block's input, and sa_norm saves a cast of it.
        around = (STREAM, Kept("the block's input", "block inputs", "h", "product", "tokens", bool(run.checkpointing)))
        scaled = Kept("w2's adapter: its gradient, scaled", "gradients", "h", "product", "tokens", adapters)
        recomputed = (*self.named, scaled)
        dequantizing = (
            (down, "down_proj", recomputed if run.checkpointing else (_of("w2's input", "f", adapters),)),
            (multiplied, "up_proj", (_of("the activation and w3", "f", 2), _of("w3's input", "h", adapters))),
            (mlp, "gate_proj", (_of("w1", "f"), _of("w3's and w1's inputs", "h", 1 + adapters))),
        )
        quantized = [
            Height(gone, (*around, *beside, Kept(f"{name}: dequantized", "temporaries", "1", "byte", "whole",
                                                 DEQUANTIZING * self.elements[name] / tokens)))
            for gone, name, beside in dequantizing if run.quantization
        ]  # fmt: skip
        again = [Height((), (*around, *recomputed, W2_OUTPUT))] if self.wet and run.checkpointing else []
        return (
            *quantized,
            *again,
            Height(down, (*around, _of("w2's input, the activation and w3", "f", 3)), ("down_proj",)),
            Height(mlp, (*around, _of("w1", "f"), _of("w1's and w3's inputs", "h", 2)), MLP),
            Height((*mlp, *norm), (*around, _of("q, k, v and the output", "Q", 4)), (*MLP, "o_proj")),
        )

    def compiled_backward(self) -> tuple[Height, ...]:
        """Return the peaks of a compiled block's backward pass, counted in simulations: an adapter's gradients are
        summed with those of its layer. The dequantized weight of w2 has been freed by then; with few tokens, it is
        larger than these gradients. With dropout, one gradient overwrites a saved tensor."""
        read = ("w2: its input", "w2: its input, dropped out")
        adapter_input = _of("w2's input, of the layer and of its adapter", "f", 1 + self.mlp_adapters)
        of_all = "w2's input, w1 and w3, of the layers and of their adapters"
        peaks = (Height(read, (STREAM, adapter_input), ("down_proj",)),
                 Height((*read, "down_proj: dequantized"),
                        (STREAM, _of(of_all, "f", 6 - self.dropout if self.mlp_adapters else 2)),
                        ("down_proj",)))  # fmt: skip
        return (Height((), (STREAM, *self.returned)), *peaks) if self.share.run.checkpointing else peaks

    @property
    def returned(self) -> tuple[Kept, ...]:
        """The tensors that exist when a graph returns those that the backward pass will read, in addition to the
        block's input. Then checkpointing frees them, or the backward pass begins."""
        w2_inputs = (W2_INPUT,) * (self.wet or not (self.trained or self.mlp_adapters))
        return (*[W2_OUTPUT] * (1 + self.mlp_adapters), *w2_inputs)

    def forward(self, saved: tuple[Kept, ...]) -> tuple[Height, ...]:
        """Return the peaks of the forward pass."""
        run, heights = self.share.run, list[Height]()
        if run.quantization is not None and not run.compile:
            down = tuple(row.operator for row in saved if row.operator.startswith("w2: "))
            heights.append(Height(down, self.named))
        if self.wet:  # an adapter's output is scaled, and added to that of the layer
            heights.append(Height((), (*self.named, *[W2_OUTPUT] * 3)))
        if run.compile and run.checkpointing is not None:
            heights.append(Height((), (*saved[1:], *self.returned)))
            # Before the graph dequantizes w2's weight, the outputs of w1's and w3's adapters wait for one kernel, which
            # also applies dropout.
            inside = tuple(row for row in saved[1:] if row.operator != "down_proj: dequantized")
            times = self.mlp_adapters * (2 + self.dropout)
            waiting = Kept("the adapters of w1 and w3", "temporaries", "f", "product", "heads", times)
            heights.append(Height((), (*inside, waiting)))
        return tuple(heights)


def nf4tensor(size: int) -> tuple[int, ...]:
    """Return the allocations that create an NF4Tensor of `size` elements, in the format of `segments.beyond`: the
    weight, its magnitudes, the quotients by the scales, and the codes of all elements; per chunk, the differences to
    the 16 values and their magnitudes; the halves of the packed codes, and the packed codes (dtypes/nf4tensor.py,
    from_tensor, convert_to_norm_float_weight)."""
    chunk = min(size, CHUNK)
    return (2 * size, 2 * size, -2, 2 * size, size, 32 * chunk, 32 * chunk, -5, 2 * chunk, 8 * chunk, -7, -6, -8,
            size // 2, size // 2, -9, -4, -3, -1)  # fmt: skip


def in_chunks(run: Training) -> bool:
    """Whether the head is called once for each of several chunks of its input."""
    return stack_of(run).num_output_chunks > 1


def _of(name: str, width: str, times: float = 1) -> Kept:
    return Kept(f"gradients of {name}", "temporaries", width, "product", "heads", times)


def _norm(name: str, trained: bool, compiled: bool = False) -> tuple[Kept, ...]:
    """Return the lines of RMSNorm. torchtune/modules/rms_norm.py casts to fp32 and back, and with a 16-bit weight torch
    computes the norm with several operators."""
    statistics = Kept(f"{name}: 1/rms", "norms", "1", "fp32", "tokens")
    if compiled:  # one kernel; the tensors that it computes from its input are recomputed
        return (Kept(f"{name}: its input", "norms", "h", "product", "tokens"), statistics)
    return (
        Kept(f"{name}: its input, cast", "norms", "h", "fp32", "tokens"),
        statistics,
        Kept(f"{name}: before its weight", "norms", "h", "fp32", "tokens", trained),
    )


def _loss(share: Share, chunks: int) -> Loss:
    """Return the copies of the logits.

    modules/loss/ce_chunked_output_loss.py casts one chunk of the logits at a time, and log_softmax saves its result.
    The recipes delete the logits before the backward pass. A compiled loss casts the logits while it reads them, and
    saves them. Without chunks, the model returns the logits in fp32, and the recipes do not use the loss that they
    compile (training/_compile.py, compile_loss).
    """
    if not chunks:
        return Loss(forward=(0, 2), gradient=(0, 3), head=(1, 0), after=(0, 0))
    size = share.tokens * share.spec.vocab * share.bytes.compute // chunks
    half, whole = granted(size), granted(4 * size // share.bytes.compute)
    # When the second chunk's gradient of the weight is added to the first's; a frozen weight has none.
    head = (half * (1 if share.run.lora else max(0, 1 - 2 / chunks)), 0)
    if share.run.compile:  # the backward pass overwrites the logits with gradients
        return Loss(forward=(half, 0), gradient=(half * (1 + 1 / chunks), 0), head=head, after=(0, 0))
    cast = whole * (1 + 1 / chunks)
    return Loss(forward=(half, cast), gradient=(0, cast + whole / chunks), head=head, after=(0, 0))
