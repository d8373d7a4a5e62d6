"""What a training step takes under Megatron-LM: its GPT block, tensor by tensor, and the moments of its schedule.

`BLOCK` lies beside megatron/core/transformer/transformer_layer.py (megatron-core 0.16) as the layer runs: a line per
tensor that an operator keeps for backward. Of the dense block with biases and dropout it adds up to Korthikanti et
al.'s 34sbh + 5as²b (arXiv 2205.05198). Sources are files of megatron/core, or of Transformer Engine (TE).

    T  tokens on this rank: micro_batch × seq_len / cp     h  hidden     f  MLP width     V  padded vocabulary
    Q  heads × head_dim      K  kv_heads × head_dim        S  scores: micro_batch × heads × seq_len² / cp
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...specs.megatron import Megatron
from ...specs.run import Training
from .moments import Moment, micro_batches_in_flight
from .scores import score_elements
from .share import Share
from .states import device_parameters

SEQUENCE, TENSOR = "sequence", "tensor"  # over which ranks a tensor is cut: sequence parallelism's, or always tp
MiB = 1 << 20
HALF, FP32, STATISTICS = 2, 4, 4  # bytes


class Kept(NamedTuple):
    """A tensor that an operator of a block keeps for backward: its bytes before `cut` divides them among ranks.

    `module` is the one of --recompute-modules that makes it again instead."""

    operator: str
    tensor: str
    bytes: Callable[[Share, Megatron], int]
    cut: str
    source: str
    module: str | None = None


def _hidden(share: Share, _: Megatron) -> int:
    return share.tokens * share.spec.hidden * HALF


def _norm_statistics(share: Share, _: Megatron) -> int:
    return share.tokens * STATISTICS * (2 if share.spec.norm == "layernorm" else 1)


def _dropout_mask(share: Share, _: Megatron) -> int:
    return share.tokens * share.spec.hidden if share.spec.dropout else 0


def _qkv(share: Share, options: Megatron) -> int:
    """TE wants queries, keys and values packed as the product returned them, or copies of all three that are
    contiguous. Megatron's own attention takes views: of keys and values where queries were copied (several to a key) or
    rotated, so that the product's output stays beside them; its products over scores copy keys and values to all heads.
    """
    spec = share.spec
    Q, K, grouped = spec.query_width, spec.key_width, spec.kv_heads != spec.heads
    rotated = not spec.learned_positions
    if grouped and share.run.attention == "eager":
        width = 3 * Q
    elif options.transformer_engine:
        width = Q + 2 * K
    else:
        width = Q + 2 * K + (Q + K if rotated else Q if grouped else 0)
    return share.tokens * HALF * width


def _core_attention(share: Share, options: Megatron) -> int:
    """FlashAttention and cuDNN keep a log-sum-exp in fp32 per row. Unfused: softmax's output, and, with dropout, its
    mask and its output; softmax's in fp32 has a half copy where nothing else stays."""
    if share.run.attention != "eager":
        return FP32 * share.tokens * share.spec.heads
    dropped = 1 + HALF if share.spec.attention_dropout else 0
    if options.masked_softmax_fusion or options.transformer_engine:
        return score_elements(share) * (HALF + dropped)
    return score_elements(share) * (FP32 + (dropped or HALF))


def _attention_output(share: Share, _: Megatron) -> int:
    return share.tokens * HALF * share.spec.query_width


def _mlp_inner(share: Share, _: Megatron) -> int:
    return share.tokens * HALF * share.spec.intermediate


def _mlp_product(share: Share, options: Megatron) -> int:
    return _mlp_inner(share, options) * (2 if share.spec.gated else 1)


BLOCK = (
    Kept("input_layernorm", "input", _hidden, SEQUENCE, "transformer_layer.py; TE module/layernorm_linear.py"),
    Kept("input_layernorm", "statistics", _norm_statistics, SEQUENCE, "TE module/layernorm_linear.py: mu, rsigma"),
    # With sequence parallelism the shard is kept, and gathered again in backward (LinearWithGradAccumulation...).
    Kept("linear_qkv", "input", _hidden, SEQUENCE, "tensor_parallel/layers.py; TE module/layernorm_linear.py: ln_out"),
    Kept("core_attention", "queries, keys, values", _qkv, TENSOR,
         "transformer/attention.py, get_query_key_value_tensors; TE dot_product_attention/utils.py, get_qkv_layout"),
    Kept("core_attention", "scores or log-sum-exp", _core_attention, TENSOR,
         "transformer/dot_product_attention.py; fusions/fused_softmax.py", "core_attn"),
    Kept("linear_proj", "input", _attention_output, TENSOR, "tensor_parallel/layers.py"),
    Kept("self_attn_bda", "dropout mask", _dropout_mask, SEQUENCE, "fusions/fused_bias_dropout.py"),
    Kept("pre_mlp_layernorm", "input", _hidden, SEQUENCE, "transformer_layer.py; TE module/layernorm_linear.py"),
    Kept("pre_mlp_layernorm", "statistics", _norm_statistics, SEQUENCE, "TE module/layernorm_linear.py: mu, rsigma"),
    Kept("linear_fc1", "input", _hidden, SEQUENCE, "tensor_parallel/layers.py; TE module/layernorm_linear.py: ln_out"),
    Kept("activation", "input", _mlp_product, TENSOR, "fusions/fused_bias_gelu.py, fused_bias_swiglu.py",
         "mlp"),
    Kept("linear_fc2", "input", _mlp_inner, TENSOR, "tensor_parallel/layers.py", "mlp"),
    Kept("mlp_bda", "dropout mask", _dropout_mask, SEQUENCE, "fusions/fused_bias_dropout.py"),
)  # fmt: skip


def block_bytes(share: Share, options: Megatron, without: tuple[str, ...] = ()) -> int:
    """Return what one block keeps on one rank of one micro-batch, `without` what these modules make again."""
    cuts = {SEQUENCE: share.sequence_ranks, TENSOR: share.run.tp}
    return sum(kept.bytes(share, options) // cuts[kept.cut] for kept in BLOCK if kept.module not in without)


def layers_in_flight(run: Training, stage: int, layers: int, chunks: int = 1) -> int:
    """Return of how many layers a stage keeps activations at most, of all its micro-batches: in 1F1B of pp - stage;
    interleaved, warm-up runs 2 (pp - stage - 1) + (chunks - 1) · pp chunks ahead (pipeline_parallel/schedules.py,
    get_pp_rank_microbatches), and one more before the first backward.

    >>> layers_in_flight(Training(pp=4, accumulation=4), 3, 8, chunks=8)
    29
    """
    if chunks == 1:
        return micro_batches_in_flight(run, stage) * layers
    ahead = 2 * (run.pp - stage - 1) + (chunks - 1) * run.pp + 1
    return min(ahead, run.accumulation * chunks) * layers // chunks


class MegatronMemory:
    """The bytes on one rank that the moments of Megatron-LM's step are sums of."""

    def __init__(self, share: Share, options: Megatron) -> None:
        spec, run, gpu = share.spec, share.run, share.gpu
        self.share, self.options = share, options
        padding = options.make_vocab_size_divisible_by * run.tp
        self.vocab = -(-spec.vocab // padding) * padding // run.tp  # V of one rank
        counts = device_parameters(spec, run.pp, share.stage, run.tp)
        table = self.vocab * spec.hidden
        self.parameters = sum(
            table * (count > 0) if part in ("embedding", "head") else count for part, count in counts.items()
        )
        half_grads = run.compute_dtype == "fp16"
        in_fp32 = options.accumulate_allreduce_grads_in_fp32
        self.wide = not half_grads if in_fp32 is None else in_fp32
        shards = run.dp * run.cp if run.zero else 1
        self.weights = HALF * self.parameters
        self.gradients = (FP32 if self.wide else HALF) * self.parameters
        self.main, self.moments_ = FP32 * self.parameters // shards, 2 * FP32 * self.parameters // shards
        # Halves that were accumulated are cast before the update, and stay until the next step's zero_grad.
        self.main_gradients = 0 if self.wide else FP32 * self.parameters // shards
        handles = 2 * (gpu.cublas_workspace or 0) if gpu else 0
        self.workspace = handles + (_engine_workspace(share) if options.transformer_engine else _buffer(share))
        # The input of a chunk, and its gradient, stay in the module after the step (TransformerBlock.set_input_tensor):
        # of every chunk that receives one, and so of all but the first stage's first.
        self.selected = options.recompute_modules if options.recompute == "selective" else ()
        received = options.virtual_pipeline - share.first if run.pp > 1 else 0
        self.hidden = _hidden(share, options) // share.sequence_ranks
        self.held = 2 * received * self.hidden

    @property
    def activations(self) -> int:
        """Bytes that blocks keep of all micro-batches in flight, recomputation counted in."""
        share, options, full = self.share, self.options, self.options.recompute == "full"
        chunks = options.virtual_pipeline
        layers = layers_in_flight(share.run, share.stage, share.layers, chunks)
        if not full:
            return layers * block_bytes(share, options, self.selected)
        of_chunk = share.layers // chunks
        number = min(options.recompute_num_layers, of_chunk)
        passes = layers // of_chunk
        if options.recompute_method == "block":
            whole = (of_chunk - number) * block_bytes(share, options)
            return passes * (number * self.hidden + whole)
        return passes * -(-of_chunk // number) * self.hidden

    @property
    def recomputed(self) -> int:
        """Bytes that backward makes again of what it works on: nothing without recomputation."""
        share, options = self.share, self.options
        whole = block_bytes(share, options)
        if options.recompute == "selective":
            # One module at a time; with it comes its output, which backward begins at.
            return max(whole - block_bytes(share, options, (module,)) for module in self.selected) + self.hidden
        number, of_chunk = options.recompute_num_layers, share.layers // options.virtual_pipeline
        # Backward begins with the last layers, which "block" recomputes only where it recomputes all.
        if options.recompute != "full" or (options.recompute_method == "block" and number < of_chunk):
            return 0
        again = 1 if options.recompute_method == "block" else min(number, of_chunk)
        return again * whole - self.hidden  # whose input was kept

    @property
    def outside(self) -> int:
        """Bytes kept outside of blocks: the embedding's dropout mask of each micro-batch in flight, the last norm's
        input and output."""
        share, run = self.share, self.share.run
        in_flight = layers_in_flight(run, share.stage, share.layers, self.options.virtual_pipeline) / share.layers
        masks = _dropout_mask(share, self.options) // share.sequence_ranks if share.first else 0
        return round(masks * in_flight) + (2 * self.hidden if share.last else 0)

    def moments(self) -> list[Moment]:
        """Return the moments of one steady step, in order."""
        share, T = self.share, self.share.tokens
        logits = T * self.vocab if share.last else 0
        kept = self.activations + self.outside
        # The logits and their fp32 copy, which softmax is computed in place of, and which becomes its own gradient
        # (tensor_parallel/cross_entropy.py); backward casts that to half.
        loss = (HALF + FP32) * logits
        head = HALF * logits + HALF * self.vocab * share.spec.hidden * (logits > 0) + self.hidden
        backward = self.recomputed + self._block_backward()
        first = kept - (2 * self.hidden if share.last else 0)
        # Of the micro-batch before: what was received, and its gradient, as both are exchanged in one call.
        exchanged = 2 * self.hidden if share.run.pp > 1 and not share.first else 0
        return [
            self._moment("load", "model and optimizer made", moments=0, held=0, workspace=0),
            self._moment("forward", "the loss", activations=kept, logits=loss, other=exchanged),
            self._moment("backward", "the head's gradient", activations=kept, logits=head),
            self._moment("backward", "the first block of backward", activations=first, other=backward),
            self._moment("optimizer", "the update", other=self.held, gradients=self.gradients + self.main_gradients),
        ]

    def _block_backward(self) -> int:
        """Return the most that a block's backward holds beside what forward kept: as it computes the activation's
        gradient, as it sums that over all tokens for a bias (torch's parts of that sum, cuda/Reduce.cuh), or as it
        computes that of the scores."""
        share, spec = self.share, self.share.spec
        inner = _mlp_inner(share, self.options) // share.run.tp
        multiprocessors = share.gpu.sms if share.gpu else 0
        bias = min(4 * inner, multiprocessors * MiB) if spec.mlp_bias else 0
        return max(inner * (2 if spec.gated else 1), bias, self._scores_backward()) + 2 * self.hidden

    def _scores_backward(self) -> int:
        """Unfused: the gradients of what multiplied the values and of dropout's input, in half; softmax's is written in
        place of the latter by the fused kernel. PyTorch's in fp32 takes three, when what multiplied the values is gone.
        What the MLP kept is free by then.
        """
        share, options = self.share, self.options
        if share.run.attention != "eager":
            return 0
        element = HALF
        if not (options.masked_softmax_fusion or options.transformer_engine):
            element = 3 * FP32 - HALF - (share.spec.attention_dropout > 0)
        freed = _mlp_product(share, options) + _mlp_inner(share, options)
        return (score_elements(share) * element - freed) // share.run.tp

    def _moment(self, phase: str, name: str, **given: int) -> Moment:
        parts = {
            "weights": self.weights,
            "gradients": given.get("gradients", self.gradients),
            "optimizer": self.main + given.get("moments", self.moments_),
            "activations": given.get("activations", 0),
            "logits": given.get("logits", 0),
            "workspace": given.get("workspace", self.workspace),
            "other": given.get("other", 0),
        }
        return Moment(phase, name, parts)


def _engine_workspace(share: Share) -> int:
    """TE's own for cuBLASLt: 32 MiB from Hopper on, else 4 (module/base.py, get_cublas_workspace_size_bytes)."""
    capability = share.gpu.compute_capability if share.gpu else None
    return 32 * MiB if capability and capability >= (9, 0) else 4 * MiB


def _buffer(share: Share) -> int:
    """Megatron's global memory buffer, which stays: the scores' product (transformer/dot_product_attention.py), or what
    sequence parallelism gathers (tensor_parallel/layers.py)."""
    run = share.run
    scores = score_elements(share) * HALF // run.tp if run.attention == "eager" else 0
    gathered = share.tokens * HALF * share.spec.hidden if run.sequence_parallel else 0
    return max(scores, gathered)
