"""Where the bytes of a training step go, and when they peak: closed formulas, a term at a time.

The peak of a step is the largest of a few moments: the loss (all activations and the logits alive), the first block
of the backward pass (all activations, no gradients yet), the last block (all gradients, one block's activations), and
the optimizer. `training_moments` computes each as its parts; `estimate` reports the largest.

Not in a formula: how tensors fall into segments (so `peak_reserved` is None), and the small change of indices, masks
and buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..hardware.gpu import GPU
from ..models.spec import ModelSpec
from ..runs import Training
from ..stages import stage_layers
from .activations import (
    attention_kernel,
    block_saved,
    checkpointed,
    keeps_scores,
    per_device,
    score_backward_bytes,
    scores,
    softmax_bytes,
)
from .precision import PRECISION, Bytes
from .states import States, block_parameters, device_parameters, states


@dataclass(frozen=True)
class Moment:
    """One instant of the step: its phase, what is happening, and the live bytes by part."""

    phase: str
    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def training_moments(
    spec: ModelSpec, run: Training, gpu: GPU | None, cpu: bool = False, stage: int = 0
) -> list[Moment]:
    """Return the moments of one steady step (the states exist) on a device of pipeline stage `stage`; rank 0's is 0.

    In 1F1B stage s keeps the activations of pp - s micro-batches in flight (arXiv 2104.04473, section 2.2); the last
    has the logits.
    """
    b = PRECISION[run.precision]
    if run.quantization:
        b = Bytes(**{**b.__dict__, "residual": 4, "compute": 4})  # the rest is fp32, and each 4-bit linear returns fp32
    held = states(spec, run, stage)
    first, last = stage == 0, stage == run.pp - 1
    layers = stage_layers(spec.layers, run.pp)[stage]
    in_flight = micro_batches_in_flight(run, stage)
    block = per_device(block_saved(spec, run, b, gpu, cpu), run)
    kept = checkpointed(spec, run, b, attention_kernel(spec, run, gpu, cpu)) if run.checkpointing else block
    outer = _outer_activations(spec, run, b, first, last, cpu) * in_flight
    cast = _cast_weights(spec, run, b, layers, last)
    each = sum(kept.values())  # a block and micro-batch
    activations = each * layers * in_flight + outer
    # The block at work is whole again; what selective checkpointing kept of it is not made twice.
    recomputed = sum(block.values()) - kept.get("matmul outputs", 0) if run.checkpointing else 0
    plain = keeps_scores(spec, run, gpu, cpu)
    working = _block_backward(spec, run, b, block, plain)
    # cuBLAS takes a workspace a handle, and the autograd thread has its own handle; both stay after the first step.
    workspace = 2 * (gpu.cublas_workspace or 0) if gpu else 0

    weights = {"weights": held.weights, "optimizer": held.optimizer}
    # Gradients of earlier micro-batches are alive all the time; of a single one, only from backward on.
    earlier = held.gradients if run.accumulation > 1 and not run.offload else 0
    logits = _logits(spec, run, b) if last else (0, 0, 0)
    gathered = held.gathered + _dequantized(spec, run) + _causal_mask(spec, run, b)
    # Autograd sums the gradients of a tied weight's two uses before it stores them: two terms and a sum, for one.
    head_gradient = spec.vocab * spec.hidden * b.gradients // run.tp if spec.tied and not run.lora else 0
    # When the last block's backward begins, its own gradients and the embedding's are still to come.
    unmade = held.gradients // layers
    if not run.lora:
        embedding = 0 if spec.tied or not first else spec.vocab * spec.hidden
        uncut = replace(run, tp=1, ep=1, sequence_parallel=False)
        here = sum(device_parameters(spec, uncut, stage).values())
        unmade = int(held.gradients * (block_parameters(spec) + embedding) / here)
    # peft makes the embedding's output a leaf, so that checkpointing has something to differentiate: it and its
    # gradient outlive backward.
    leaf = 2 * run.tokens * spec.hidden * b.residual if run.lora and run.checkpointing else 0

    buckets = _buckets(run, b, held)

    def moment(phase: str, name: str, **parts: int) -> Moment:
        parts["other"] = parts.get("other", 0) + buckets
        return Moment(phase, name, {key: value for key, value in {**weights, **parts}.items() if value})

    return [
        moment("load", "weights loaded", optimizer=0),
        moment("forward", "attention in the last block", gradients=earlier, activations=activations - outer + cast,
               workspace=workspace, other=gathered + _scores_forward(spec, run, b, plain)),
        moment("forward", "the loss", gradients=earlier, activations=activations + cast, logits=logits[0],
               workspace=workspace, other=gathered - held.ahead),
        moment("backward", "the loss's gradient", gradients=earlier,
               activations=activations + (0 if run.checkpointing else cast), logits=logits[1], workspace=workspace,
               other=gathered - held.ahead),
        moment("backward", "the first block of backward", gradients=max(earlier, head_gradient if last else 0),
               activations=activations + recomputed + (cast // layers if run.checkpointing else cast),
               logits=logits[2], workspace=workspace, other=gathered + working),
        moment("backward", "the last block of backward", gradients=held.gradients - (0 if run.offload else unmade),
               activations=each * (layers * (in_flight - 1) + 1) + recomputed + cast // layers,
               logits=logits[2], workspace=workspace, other=gathered + working),
        moment("backward", "the embedding's gradient", gradients=held.gradients, logits=logits[2],
               workspace=workspace, other=2 * head_gradient),
        moment("optimizer", "the update", gradients=_stepped_gradients(run, b, held), logits=logits[2],
               workspace=workspace, other=leaf + _optimizer_temporaries(spec, run, b, held, cpu)),
    ]  # fmt: skip


def _buckets(run: Training, b: Bytes, held: States) -> int:
    """Return the buckets that torch's DDP copies gradients into: as many bytes, from its construction on
    (gradient_as_bucket_view=False). With ZeRO 1 and a master copy it is DeepSpeed or Megatron-LM, which have none."""
    ddp = run.zero == 0 or (run.zero == 1 and not b.master)
    return held.gradients if run.dp > 1 and ddp else 0


def micro_batches_in_flight(run: Training, stage: int = 0) -> int:
    """Return how many micro-batches' activations a stage holds at most, in 1F1B: pp - stage, if there are as many.

    >>> [micro_batches_in_flight(Training(pp=4, accumulation=8), stage) for stage in range(4)]
    [4, 3, 2, 1]
    """
    return min(run.pp - stage, run.accumulation) if run.pp > 1 else 1


def _outer_activations(spec: ModelSpec, run: Training, b: Bytes, first: bool, last: bool, cpu: bool) -> int:
    """Return what is kept outside the blocks: the final norm, the head's input, the embedding's dropout mask."""
    T = run.micro_batch * run.seq_len // run.cp
    share = run.tp if run.sequence_parallel else 1
    total = T * spec.hidden * (b.compute if cpu else 1) if spec.dropout and first else 0
    if last:
        total += T * (4 * spec.hidden + 8)
        if run.lora is None:
            total += T * spec.hidden * (b.compute + (b.residual if spec.norm == "rmsnorm" else 0))
    return total // share


def _cast_weights(spec: ModelSpec, run: Training, b: Bytes, layers: int, last: bool) -> int:
    """Return the half copies of the linears' weights that autocast makes in forward and backward still needs."""
    if b.residual == b.compute:
        return 0
    linear = sum(x.count * x.inputs * x.outputs for x in spec.linears if x.part != "head")
    head = spec.vocab * spec.hidden if last else 0
    return b.compute * (linear * layers // (run.tp * spec.layers) + head // run.tp)


def _logits(spec: ModelSpec, run: Training, b: Bytes) -> tuple[int, int, int]:
    """Return the bytes around the loss: at the end of forward, while its gradient is made, and after.

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
        return chunk + weight_gradient, weight_gradient, 0  # from then on it is the head's gradient
    upcast = 0 if c == 4 else 4
    # torch's loss_parallel writes log_softmax out in operators, and has one more temporary both ways.
    more = 4 if run.tp > 1 else 0
    return n * (c + upcast + 4 + more) + softcap, n * (c + 12 + more) + softcap, n * c


def _causal_mask(spec: ModelSpec, run: Training, b: Bytes) -> int:
    """Return the bytes of the additive mask that transformers makes for eager attention, one for all layers."""
    return scores(spec, run) // spec.heads * b.compute if run.attention == "eager" else 0


def _dequantized(spec: ModelSpec, run: Training) -> int:
    """Return the bytes of the largest quantized linear, dequantized to half for its product."""
    if run.quantization is None:
        return 0
    return 2 * max(x.inputs * x.outputs for x in spec.linears if x.part not in ("embedding", "head", "router"))


def _scores_forward(spec: ModelSpec, run: Training, b: Bytes, plain: bool) -> int:
    """Return what attention whose scores are written out, `plain`, holds at its softmax beside what it keeps: softmax's
    input, and under checkpointing, which keeps nothing, its output and that output's half copy too."""
    if not plain:
        return 0
    c, p = b.compute, softmax_bytes(spec, b)
    unkept = p + (c if p != c else 0) if run.checkpointing else 0
    return scores(spec, run) * (c + unkept) // run.tp


def _block_backward(spec: ModelSpec, run: Training, b: Bytes, block: dict[str, int], plain: bool) -> int:
    """Return the temporaries of the block whose backward runs: the larger of the MLP's and, later, attention's.

    Backward reaches attention after the MLP, whose kept tensors are gone by then.
    """
    T = run.micro_batch * run.seq_len // run.cp
    c, Q = b.compute, spec.heads * spec.head_dim
    width = spec.experts_per_token * spec.moe_intermediate if spec.experts else spec.intermediate
    mlp = T * c * width * (3 if spec.gated else 2) // run.tp
    attention = T * c * 4 * Q // run.tp
    if plain:
        attention = score_backward_bytes(spec, run, b) // run.tp
    return max(attention - block.get("mlp", 0), mlp)


def _stepped_gradients(run: Training, b: Bytes, held: States) -> int:
    """Return the gradients in the update: a master copy is stepped with fp32 ones, cast one by one from the half
    gradients, which are freed as they are cast, except where ZeRO-1 keeps all of them and casts only its share."""
    if run.offload:
        return 0  # they are with the states
    if not b.master:
        return held.gradients
    return 4 * held.trained + (held.gradients if run.zero == 1 else 0)


def _optimizer_temporaries(spec: ModelSpec, run: Training, b: Bytes, held: States, cpu: bool) -> int:
    """Return what the update itself allocates.

    On a GPU torch's AdamW is foreach: it makes the square roots of all second moments at once
    (torch/optim/adam.py, _multi_tensor_adam: _foreach_sqrt). On the CPU, one parameter at a time, the root and its
    quotient (_single_tensor_adam). With a master copy it is fused, as in DeepSpeed and Megatron-LM, and makes none.
    """
    if run.offload:
        return 0
    state = 4 if run.lora else b.states
    expert_tensor = spec.experts * 2 * spec.moe_intermediate * spec.hidden // run.ep
    largest = min(max(spec.vocab * spec.hidden, expert_tensor) // run.tp, held.trained)
    if run.optimizer == "adamw" and not (b.master and not run.lora):
        return state * (2 * largest if cpu else held.trained)
    return state * largest if run.optimizer == "adafactor" else 0
