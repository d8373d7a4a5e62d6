"""The moments of Megatron-LM's step: its buffers, its schedule with virtual stages, and its recomputation.

Sources are files of megatron/core (megatron-core 0.16), or of Transformer Engine (TE).

The last stage needs more memory than its share of layers. With V the padded vocabulary and n the tokens of a
micro-batch, it has in addition to the stage before it

    (6 + 12 / shards) V h / tp   bytes of weights, gradients in fp32 and optimizer states of the head; a tied head is a
                                 copy of the first stage's embedding, with its own states
    (2 + 4) V n / tp             bytes of logits at the loss: the head's 16-bit output, and a copy in fp32, which
                                 softmax and the gradient overwrite (tensor_parallel/cross_entropy.py)

and it saves activations of one micro-batch less, or, interleaved, of two passes less, each through one chunk.
All-reducing a tied head's gradient with the embedding's (distributed/finalize_model_grads.py) allocates nothing,
because it is in place. After the step, a stage still refers to the input of each chunk and to its gradient, 4 n h bytes
per chunk, except for the model's first chunk. tests/simulation/test_megatron.py compares this with
megatron-core's own code.
"""

from __future__ import annotations

from math import inf

from ...specs.stacks import Megatron
from ...specs.stages import layers_of
from .float8 import weights_in_fp8
from .fsdp import own_ranks
from .moments import Moment, layers_in_flight, micro_batches_in_flight, passes_in_flight
from .scores import score_elements
from .share import Share
from .stacks.described import Kept, by_kind, saved
from .stacks.megatron import MODULES, after_attention, block, fused_softmax
from .states import adapter_parameters, device_parameters

MiB = 1 << 20
HALF, FP32 = 2, 4  # bytes


class MegatronMemory:
    """The sizes on one rank from which the moments of Megatron-LM's step are summed."""

    def __init__(self, share: Share) -> None:
        spec, run, gpu = share.spec, share.run, share.gpu
        self.share, self.stack = share, Megatron.of(run)
        stack = self.stack
        padding = stack.make_vocab_size_divisible_by * run.tp
        self.vocab = -(-spec.vocab // padding) * padding // run.tp  # of one rank
        table = self.vocab * spec.hidden
        counts = device_parameters(spec, layers_of(spec, run), share.stage, run.tp, run.expert_tp * run.ep)
        self.parameters = sum(
            table * (count > 0) if part in ("embedding", "head") else count for part, count in counts.items()
        )
        # Tensor parallelism divides both matrices of Megatron-Bridge's adapters (peft/utils.py, ParallelLinearAdapter).
        adapters = adapter_parameters(spec, run) * share.layers // (spec.layers * run.tp) if run.lora else 0
        self.trained = adapters if run.lora else self.parameters
        self.wide = stack.accumulates_in_fp32(run.compute_dtype)
        # Ranks among which the distributed optimizer divides a parameter: for an expert, as many as there are expert
        # groups.
        shards, copies = (run.dp * run.cp, own_ranks(run)) if run.zero else (1, 1)
        experts = 0 if run.lora else counts["experts"]
        self.stepped = (self.trained - experts) // shards + experts // copies  # parameters that this rank updates
        self.hidden = share.tokens * spec.hidden * HALF // share.sequence_ranks  # bytes of a tensor between blocks
        self.block = block(share)
        self.whole = by_kind(saved(self.block.saved, share), run.tp, run.sequence_parallel)
        self.in_flight = layers_in_flight(run, share.stage, share.layers)
        # The input of a chunk, and its gradient, stay in the module after the step (TransformerBlock.set_input_tensor).
        # All chunks except the model's first one receive an input.
        self.received = stack.virtual_pipeline - share.first if run.pp > 1 else 0
        handles = 2 * (gpu.cublas_workspace or 0) if gpu else 0
        main, moments = _states(stack)
        # Megatron's optimizer allocates moments in the first step, Apex's when it is created.
        self.loaded = self.stepped * (main + moments if stack.distributed_fused_adam else main)
        # Apex's optimizer sums the gradients of the embedding, and of a last stage's copy of it, in fp32 even if the
        # others are summed in 16 bits.
        embedding = table * (counts["embedding"] > 0) + counts["positions"]
        wider = (FP32 - HALF) * embedding if stack.distributed_fused_adam and not self.wide else 0
        self.resident = {
            "weights": HALF * (self.parameters + adapters) + weights_in_fp8(spec, run, share.layers, gpu),
            "gradients": (FP32 if self.wide else HALF) * self.trained + wider,
            "optimizer": (main + moments) * self.stepped,
            "workspace": handles + (_engine_workspace(share) if stack.transformer_engine else _buffer(share)),
        }

    def moments(self) -> list[Moment]:
        """Return the moments of one steady step, in order."""
        share, spec, loss = self.share, self.share.spec, self.block.loss
        elements = share.tokens * self.vocab if share.last else 0
        logits = lambda copies: elements * (HALF * copies[0] + FP32 * copies[1])  # noqa: E731
        table = 0 if share.run.lora else HALF * self.vocab * spec.hidden  # a gradient
        of_head = table if share.last else 0
        # If one stage has both, a tied head's gradient waits for the embedding's and is added to it.
        waiting = table if share.last and share.first and spec.tied else 0
        blocks = sum(self.activations_by_kind.values())
        saved_bytes = blocks + self._outside()
        # From the previous pass: the input that was received, and its gradient, because one call exchanges both. In the
        # backward pass, another chunk than the running one still refers to them.
        exchanged = 2 * self.hidden if self.received else 0
        of_other = exchanged if self.stack.virtual_pipeline > 1 else 0
        of_last = self._bytes(self.block.outside) if share.last else 0
        # Accumulated 16-bit gradients are cast to fp32 for the update, and the casts stay until the next step's
        # zero_grad.
        cast = not (self.wide or self.stack.distributed_fused_adam or self.stack.keeps_remainders)
        gradients = self.resident["gradients"] + (FP32 * self.stepped if cast else 0)
        stays = 2 * self.received * self.hidden
        made = {"optimizer": self.loaded, "workspace": 0}
        forward, again = self._attention()
        before_last = blocks - blocks * (self.share.layers // self.stack.virtual_pipeline) // self.in_flight
        mask = self.mask if share.last else 0
        saved_bytes += self._deferred()
        return [
            Moment("load", "model and optimizer made", {**self.resident, **made}),
            self._moment("forward", "attention in the last block", saved_bytes - of_last, other=forward + exchanged),
            self._moment("forward", "the loss", saved_bytes, logits=logits(loss.forward), other=exchanged + mask),
            self._moment("backward", "the gradient of the logits", saved_bytes, logits=logits(loss.gradient),
                         other=exchanged),
            self._moment("backward", "the head's gradient", saved_bytes, logits=logits(loss.head),
                         other=of_head + self.hidden),
            self._moment("backward", "the first block of backward", saved_bytes - of_last,
                         other=waiting + of_other + max(again, self.recomputed() + self._block_backward())),
            self._moment("backward", "the embedding's gradient", before_last,
                         other=waiting + (table + self.hidden if share.first else 0)),
            self._moment("optimizer", "the roots of second moments", other=stays + self._roots(), gradients=gradients),
            self._moment("optimizer", "the update", other=stays, gradients=gradients),
        ]  # fmt: skip

    def _moment(self, phase: str, name: str, activations: int = 0, **parts: int) -> Moment:
        return Moment(phase, name, {**self.resident, "activations": activations, **parts})

    @property
    def mask(self) -> int:
        """Bytes of the causal mask of a micro-batch, one for all heads, which the data set creates (get_batch)."""
        run = self.share.run
        return run.micro_batch * run.seq_len**2 if run.attention == "eager" else 0

    @property
    def activations_by_kind(self) -> dict[str, int]:
        """Bytes that blocks save for all micro-batches in flight, with the run's recomputation."""
        saved_by_kind = {kind: size for kind, size in self.whole.items() if kind not in self._selected()}
        if self.share.run.checkpointing != "full":
            return {kind: size * self.in_flight for kind, size in saved_by_kind.items()}
        of_chunk, number = self._chunk()
        passes = self.in_flight // of_chunk
        if self.stack.recompute_method == "block":
            left = {kind: size * passes * (of_chunk - number) for kind, size in saved_by_kind.items()}
            return {**left, "block inputs": passes * number * self.hidden}
        return {"block inputs": passes * -(-of_chunk // number) * self.hidden}

    def _deferred(self) -> int:
        """Return the bytes that the last stage saves to compute the gradient of the head's weight later: the head's
        input and the logits' gradient of earlier micro-batches (models/gpt/gpt_model.py)."""
        run, stack = self.share.run, self.stack
        if not self.share.last or not stack.defer_embedding_wgrad_compute:
            return 0
        before = min(stack.wgrad_deferral_limit or inf, run.accumulation - 1)
        return int(before) * (self.hidden + HALF * self.share.tokens * self.vocab)

    def _selected(self) -> tuple[str, ...]:
        modules = self.stack.recompute_modules if self.share.run.checkpointing == "selective" else ()
        return tuple(MODULES[module] for module in modules)

    def _chunk(self) -> tuple[int, int]:
        """Return the number of layers of a chunk, and how many of them are recomputed together, or with "block" one by
        one."""
        layers = self.share.layers // self.stack.virtual_pipeline
        return layers, min(self.stack.recompute_num_layers, layers)

    def recomputed(self) -> int:
        """Return the bytes of recomputed activations that the backward pass of one unit needs."""
        if selected := self._selected():  # one module at a time, and its output, at which its backward pass begins
            return max(self.whole.get(kind, 0) for kind in selected) + self.hidden
        if self.share.run.checkpointing != "full":
            return 0
        of_chunk, number = self._chunk()
        if self.stack.recompute_method == "block":
            if number < of_chunk:
                return 0  # the backward pass begins with the last layers, which are not recomputed
            number = 1
        return number * sum(self.whole.values()) - self.hidden  # the input was saved

    def _attention(self) -> tuple[int, int]:
        """Return the bytes that Megatron's own unfused attention allocates in the last block: in the forward pass, and
        in its recomputation. Both are in addition to the tensors that all blocks have saved at the end of the forward
        pass, and 0 means that fewer bytes are allocated than at that time.

        Until attention returns, it refers to the scores and to its output before that is made contiguous. With grouped
        heads, it also refers to the split tensors, and to queries and keys before they were copied. PyTorch's softmax
        has its input in fp32, its output and a 16-bit copy of that at the same time, and it keeps the mask.
        """
        share, spec, run = self.share, self.share.spec, self.share.run
        if run.attention != "eager" or self.stack.transformer_engine:
            return 0, 0
        scores = score_elements(share) // run.tp
        queries, keys = (HALF * share.tokens * width // run.tp for width in (spec.query_width, spec.key_width))
        copied = 2 * queries + 3 * keys if spec.kv_heads != spec.heads else 0
        live = HALF * scores + queries + copied + self.mask
        if not fused_softmax(share):
            live = max(live, scores * (2 * HALF + 2 * FP32) - self.whole["scores"] + copied + self.mask)
        after = self._bytes(after_attention(self.block.saved))
        selected = sum(self.whole.get(kind, 0) for kind in self._selected())
        if run.checkpointing != "full":
            dropped = self.whole["mlp"] if "mlp" in self._selected() else 0  # part of `later`, not saved
            forward = live + selected - after
            again = self.whole["scores"] + queries + 2 * self.hidden if "scores" in self._selected() else 0
            return forward, (live + again - after + dropped if again else 0)
        of_chunk, number = self._chunk()
        again = self.recomputed() + live - after + 2 * self.hidden
        if self.stack.recompute_method != "block":
            return 0, again
        return (live - after, 0) if number < of_chunk else (0, again)

    def _roots(self) -> int:
        """Return the bytes that the update allocates. Without Apex, AdamW is torch's, which computes the roots of all
        second moments."""
        return 0 if self.stack.apex else FP32 * self.stepped

    def _masks(self) -> int:
        """Return the bytes of causal masks that are saved by a checkpoint of attention, or by PyTorch's softmax. Of a
        rank's passes in flight, these are the passes through the model's first and last chunk, which receive a mask
        from the data set. In other chunks, PyTorch's softmax creates one in each layer (transformer/utils.py,
        get_default_causal_mask)."""
        share, run = self.share, self.share.run
        attends = run.checkpointing == "full" or "scores" in self._selected()
        if self.stack.transformer_engine or not self.mask or (fused_softmax(share) and not attends):
            return 0
        ends = micro_batches_in_flight(run, share.stage) if share.first else 0
        if share.last and (run.virtual_stages > 1 or not share.first):
            ends += micro_batches_in_flight(run, share.stage, last=True)
        middle = 0
        if not attends:
            layers = share.layers // run.virtual_stages
            middle = run.seq_len**2 * layers * max(0, passes_in_flight(run, share.stage) - ends)
        return self.mask * ends + middle

    def _outside(self) -> int:
        """Return the bytes that are saved outside the blocks: the embedding's dropout mask of each micro-batch in
        flight, causal masks, and the inputs of the last norm and the head."""
        share = self.share
        mask = self.hidden // HALF if share.first and share.spec.dropout else 0
        masks = mask * micro_batches_in_flight(share.run, share.stage)
        return masks + self._masks() + (self._bytes(self.block.outside) if share.last else 0)

    def _bytes(self, rows: tuple[Kept, ...]) -> int:
        run = self.share.run
        return sum(by_kind(saved(rows, self.share), run.tp, run.sequence_parallel).values())

    def _block_backward(self) -> int:
        """Return the most that a block's backward pass allocates in addition to saved tensors. It peaks when it
        computes the gradient of the activation, when it sums that over all tokens for a bias (in partial sums of torch,
        cuda/Reduce.cuh), or when it computes the gradient of the scores after the MLP's saved tensors have been
        freed."""
        share, spec = self.share, self.share.spec
        inner = share.tokens * HALF * spec.intermediate // share.run.tp
        multiprocessors = share.gpu.sms if share.gpu else 0
        bias = min(4 * inner, multiprocessors * MiB) if spec.mlp_bias else 0
        scores = self._scores_backward() - self.whole["mlp"]
        return max(self._bytes(self.block.backward[0].beside), bias, scores) + 2 * self.hidden

    def _scores_backward(self) -> int:
        """Return the temporaries of the unfused scores' backward pass, less the saved tensors that have been freed.

        They are the 16-bit gradients of the values' factor and of dropout's input, and the fused kernel overwrites the
        latter with the gradient of softmax. PyTorch's softmax has three tensors in fp32 after the values' factor has
        been freed.
        """
        share = self.share
        if share.run.attention != "eager":
            return 0
        element = HALF
        if not fused_softmax(share):
            element = 3 * FP32 - HALF - (share.spec.attention_dropout > 0)
        return score_elements(share) * element // share.run.tp


def _states(stack: Megatron) -> tuple[int, int]:
    """Return the bytes of the main weight and of both moments, per parameter that a rank updates."""
    dtype = stack.distributed_fused_adam
    if dtype is None:
        return HALF if stack.keeps_remainders else FP32, 2 * FP32
    width = FP32 if dtype == "fp32" else HALF
    return width if stack.fp8_param_gather else width - HALF, 2 * width


def _engine_workspace(share: Share) -> int:
    """Return the bytes of TE's own cuBLASLt workspace: 32 MiB from Hopper on, else 4 (module/base.py,
    get_cublas_workspace_size_bytes)."""
    capability = share.gpu.compute_capability if share.gpu else None
    return 32 * MiB if capability and capability >= (9, 0) else 4 * MiB


def _buffer(share: Share) -> int:
    """Return the bytes of Megatron's global memory buffer, which stays: the scores before softmax
    (transformer/dot_product_attention.py), or the tokens that sequence parallelism gathers
    (tensor_parallel/layers.py)."""
    run = share.run
    scores = score_elements(share) * HALF // run.tp if run.attention == "eager" else 0
    gathered = share.tokens * HALF * share.spec.hidden if run.sequence_parallel else 0
    return max(scores, gathered)
