"""What comes and goes in a training step, outside of what blocks keep: logits, casts, temporaries of operators."""

from __future__ import annotations

from ...specs.model import ModelSpec
from ...specs.run import Training
from .activations import score_backward_bytes, score_widths, scores, softmax_bytes
from .fsdp import uses_fsdp
from .precision import Bytes
from .states import States

PLAIN = ("eager", "math")  # ways of attention that write their scores out


def outer_activations(spec: ModelSpec, run: Training, b: Bytes, first: bool, last: bool, cpu: bool) -> int:
    """Return what is kept outside the blocks: the final norm, the head's input, the embedding's dropout mask, and what
    a pipeline's stage received and sent, which its backward starts from and ends at."""
    T = run.micro_batch * run.seq_len // run.cp
    share = run.tp if run.sequence_parallel else 1
    total = T * spec.hidden * (b.compute if cpu else 1) if spec.dropout and first else 0
    if not last:
        total += T * b.residual * spec.hidden
    if not first and spec.norm == "rmsnorm" and b.residual == 2 and not run.checkpointing:
        total += T * b.residual * spec.hidden  # beside the norm's fp32 copy; else it is the first block's own input
    whole = 0
    if last:
        total += T * (4 * spec.hidden + 8)
        if run.lora is None:
            total += T * spec.hidden * (b.residual if spec.norm == "rmsnorm" else 0)
            whole = T * spec.hidden * b.compute  # the head's input: gathered whole, as `activations.per_device` says
    return total // share + whole


def cast_weights(spec: ModelSpec, run: Training, b: Bytes) -> int:
    """Return the half copies of a block's linear weights that autocast makes in forward and backward still needs."""
    if b.residual == b.compute:
        return 0
    linear = sum(x.count * x.inputs * x.outputs for x in spec.linears if x.part != "head")
    return b.compute * linear // (run.tp * spec.layers)


def logits_bytes(spec: ModelSpec, run: Training, b: Bytes) -> tuple[int, int, int, int]:
    """Return the bytes around the loss: at the end of forward, while its gradient is made, the head's, and after.

    transformers upcasts half logits to fp32, then torch's cross_entropy keeps log_softmax's output; backward makes
    the gradient of the negative log-likelihood and of log_softmax, both fp32. The logits themselves stay for as long
    as the output object does, in the usual loop (`outputs = model(...)`) until the step is over; backward does not
    need them, and `loss = model(...).loss` frees them at once.
    """
    T = run.micro_batch * run.seq_len // run.cp
    n = T * spec.vocab // run.tp
    c = b.compute
    softcap = c * n if spec.logit_softcap else 0
    if run.kernels == "liger":
        # Never whole: Liger's fused linear cross entropy works through chunks of about T · h / V tokens.
        chunk = max(1, T * spec.hidden // spec.vocab) * spec.vocab * (c + 4) // run.tp
        weight_gradient = 0 if run.lora else spec.vocab * spec.hidden * b.gradients // run.tp
        return chunk + weight_gradient, weight_gradient, 0, 0  # from then on it is the head's gradient
    upcast = 0 if c == 4 else 4
    # torch's loss_parallel writes log_softmax out in operators, and has one more temporary both ways.
    more = 4 if run.tp > 1 else 0
    # The logits' gradient is there for the head's; under autocast that is greatest when it has been cast, later.
    with_head = n * c * (2 if b.residual == c else 1)
    return n * (c + upcast + 4 + more) + softcap, n * (c + 12 + more) + softcap, with_head, n * c


def causal_mask(spec: ModelSpec, run: Training, b: Bytes) -> int:
    """Return the bytes of the additive mask that transformers makes for eager attention, one for all layers."""
    return scores(spec, run) // spec.heads * b.compute if run.attention == "eager" else 0


def dequantized(spec: ModelSpec, run: Training) -> int:
    """Return the bytes of the largest quantized linear, dequantized to half for its product."""
    if run.quantization is None:
        return 0
    return 2 * max(x.inputs * x.outputs for x in spec.linears if x.part not in ("embedding", "head", "router"))


def scores_forward(spec: ModelSpec, run: Training, b: Bytes, kernel: str) -> int:
    """Return what attention whose scores are written out ("eager", "math") holds at its softmax beside what it keeps:
    softmax's input, and under checkpointing, which keeps nothing, its output and that output's half copy too.

    "math" also marks which elements are -inf, and has the causal mask, fp32 copies of halves, and keys before their
    scale."""
    if kernel not in PLAIN:
        return 0
    halves = b.compute < 4
    b = score_widths(b, kernel)
    c, p = b.compute, softmax_bytes(spec, b)
    unkept = p + (c if p != c else 0) if run.checkpointing else 0
    held = scores(spec, run) * (c + unkept)
    if kernel == "math":
        Q, K = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        width = Q + (Q + 2 * K if halves else 0) + (2 * Q if run.checkpointing else 0)
        held += scores(spec, run) + c * run.seq_len**2 // run.cp * run.tp + c * run.tokens // run.cp * width
    return held // run.tp


def block_backward(spec: ModelSpec, run: Training, b: Bytes, block: dict[str, int], kernel: str) -> tuple[int, int]:
    """Return the temporaries of the block whose backward runs, and its gradients by then: the MLP's or attention's.

    Backward reaches attention after the MLP, whose kept tensors are gone by then, and whose gradients are there. (Of
    several micro-batches they are added to the earlier ones, except where FSDP2 has only shards of those.)
    """
    T = run.micro_batch * run.seq_len // run.cp
    c, Q = b.compute, spec.heads * spec.head_dim
    width = spec.experts_per_token * spec.moe_intermediate if spec.experts else spec.intermediate
    mlp = T * c * width * (3 if spec.gated else 2) // run.tp
    attention = T * c * 4 * Q // run.tp
    if kernel in PLAIN:
        attention = score_backward_bytes(spec, run, score_widths(b, kernel)) // run.tp
    made = 0
    if not run.lora and not run.offload and (run.accumulation == 1 or uses_fsdp(run)):
        by = spec.parameters_by_component
        made = b.gradients * (by["mlp"] + by["experts"] // run.ep) // (run.tp * spec.layers)
    attention -= block.get("mlp", 0)
    if attention + made <= mlp:
        return mlp, 0
    return max(0, attention), made + min(0, attention)


def optimizer_temporaries(spec: ModelSpec, run: Training, b: Bytes, held: States, cpu: bool) -> int:
    """Return what the update itself allocates.

    On a GPU torch's AdamW is foreach: it makes the square roots of all second moments at once
    (torch/optim/adam.py, _multi_tensor_adam: _foreach_sqrt). On the CPU, one parameter at a time, the root and its
    quotient (_single_tensor_adam). With a master copy it is fused, as in DeepSpeed and Megatron-LM, and makes none; the
    fp32 shards of FSDP2's policy are stepped as any others.
    """
    if run.offload:
        return 0
    state = 4 if run.lora else b.states
    expert_tensor = spec.experts * 2 * spec.moe_intermediate * spec.hidden // run.ep
    largest = min(max(spec.vocab * spec.hidden, expert_tensor) // run.tp, held.trained)
    fused = b.master and not run.lora and not uses_fsdp(run)
    if run.optimizer == "adamw" and not fused:
        return state * (2 * largest if cpu else held.trained)
    if run.optimizer != "adafactor":
        return 0
    # As the experts' down is updated, the loop's variable still holds gate's and up's (torch/optim/_adafactor.py).
    return state * min(max(largest, expert_tensor * 3 // 2 // run.tp), held.trained)
