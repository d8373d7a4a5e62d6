"""What comes and goes in a training step beside what blocks keep: logits, and operators' temporaries."""

from __future__ import annotations

from typing import NamedTuple

from ...hardware.gpu import GPU
from ...specs.model import ModelSpec
from ...specs.run import stack_of
from .. import gptq, newton_schulz
from . import methods
from .activations import FUSED, adapters_stream, int8_inputs, mlp_saved, per_device
from .fsdp import reduced_bytes, uses_fsdp, waits
from .mlp import in_backward, in_forward, mlp_of
from .scores import backward_scores, score_elements
from .share import Share, adapted, adapter_bytes, unpacked_bytes
from .stacks.blocks import block_of
from .stacks.described import EXPERTS, Block, Height, Kept, by_kind, saved
from .states import States, expert_tensor
from .tower import tower_activations


class LossBytes(NamedTuple):
    """Bytes of logits and their gradients on the rank that has the head, at four moments."""

    forward: int = 0  # at the end of forward, when the loss is computed
    gradient: int = 0  # while the gradient of the logits is made
    head: int = 0  # while the gradient of the head's weight is made
    after: int = 0  # from then on until the step is over
    waiting: int = 0  # of a micro-batch whose backward has not begun, while others' runs


class BlockBackward(NamedTuple):
    """What a block takes whose backward runs, at its highest."""

    temporaries: int
    gradients: int  # of its own weights, those that exist by then
    recomputed: int = 0  # of what is saved, beyond what checkpointing kept


def outer_activations(share: Share) -> int:
    """Return the bytes kept outside the blocks: the final norm, the head's input, the embedding's dropout mask, and
    what a pipeline's stage received and sent, which its backward starts from and ends at."""
    spec, run, b = share.spec, share.run, share.bytes
    if block := block_of(share):
        # torch's stage keeps what it sent until its backward; what it received is a block's input, and in a buffer.
        at_ends = (not share.last) - (not share.first) if run.pp > 1 else 0
        return (described_bytes(block.outside, share) if share.last else 0) + at_ends * between_stages(share)
    width = share.mask_bytes * spec.hidden if spec.dropout and share.first else 0
    if share.blocks_compiled and run.checkpointing == "selective":
        width += b.residual * spec.hidden  # the first block's input
    if not share.last:
        width += b.residual * spec.hidden
    if not share.first and spec.norm == "rmsnorm" and b.residual == 2 and not run.checkpointing:
        width += b.residual * spec.hidden  # beside the norm's fp32 copy; else it is the first block's own input
    head_input = 0
    if share.last:
        fused = share.fuses or share.compiled
        width += (b.residual if fused else 4) * spec.hidden + 8
        if run.lora is None:
            width += b.residual * spec.hidden if spec.norm == "rmsnorm" and not fused else 0
            head_input = share.tokens * b.compute * spec.hidden  # gathered whole, as `activations.per_device` says
        if run.objective.loss == "chunked":
            head_input = run.scored * b.residual * spec.hidden
    return share.tokens * width // share.sequence_ranks + head_input + tower_activations(share)


def between_stages(share: Share) -> int:
    """Return the bytes of what a pipeline's stage sends of a micro-batch."""
    return share.tokens * share.spec.hidden * share.bytes.residual // share.sequence_ranks


def receive_buffers(share: Share) -> int:
    """Return the bytes that torch's PipelineStage receives into: a buffer for each micro-batch's input and one for its
    output's gradient, made in the first step and kept (torch/distributed/pipelining/stage.py,
    _setup_forward_recv_info and _create_grad_recv_info)."""
    run = share.run
    if run.pp == 1 or not stack_of(run).torch_stages:
        return 0
    first, last = share.stage == 0, share.stage == run.pp - 1  # of the rank's, whichever runs
    return run.accumulation * (2 * run.virtual_stages - first - last) * between_stages(share)


def sent_back(share: Share) -> int:
    """Return the bytes of the gradient that a stage of torch's 1F1B sent last, which a variable has until the next is
    sent; the schedule of virtual stages has it until it is sent (torch/distributed/pipelining/schedules.py)."""
    run = share.run
    held = stack_of(run).torch_stages and run.schedule == "1f1b" and run.virtual_stages == 1
    return between_stages(share) if held and share.over and not share.first and run.pp > 1 else 0


def described_bytes(rows: tuple[Kept, ...], share: Share) -> int:
    """Return the bytes of lines of a stack's description on this rank."""
    return sum(by_kind(saved(rows, share), share.run.tp, share.run.sequence_parallel).values())


def loss_chunk(spec: ModelSpec, tokens: int) -> int:
    """Return of how many of `tokens` Liger's fused linear cross entropy makes the logits at once: a power of two, for
    about as many elements as `tokens` have (src/liger_kernel/ops/fused_linear_cross_entropy.py)."""
    pieces = -(-spec.vocab // spec.hidden)
    return min(tokens, 1 << (-(-tokens // pieces) - 1).bit_length())


def adds_apart(gpu: GPU | None) -> bool:
    """Return whether Liger's loss adds up the gradients of the head's weight outside of the matmuls: each chunk's is
    made, converted to fp32 and added. It does so before compute capability 8.0."""
    return gpu is not None and (gpu.compute_capability or (8, 0)) < (8, 0)


def loss_bytes(share: Share) -> LossBytes:
    """Return the bytes around the loss; none on a stage without the head.

    transformers upcasts half logits to fp32, then torch's cross_entropy keeps log_softmax's output; backward makes
    the gradient of the negative log-likelihood and of log_softmax, both fp32. The logits themselves stay for as long
    as the output object does, in the usual loop (`outputs = model(...)`) until the step is over; backward does not
    need them, and `loss = model(...).loss` frees them at once. flash-attn's loss keeps the logits instead.
    """
    spec, run, c = share.spec, share.run, share.bytes.compute
    if not share.last or run.num_labels:  # a classifier's logits are a few numbers
        return LossBytes()
    if of_method := methods.loss_bytes(share):
        return LossBytes(*of_method)
    if run.kernels == "liger":
        chunk = loss_chunk(spec, share.tokens) * spec.vocab * (c + 4) // run.tp  # never whole
        elements = 0 if run.lora else spec.vocab * spec.hidden // run.tp
        weight_gradient = elements * share.bytes.gradients
        if adds_apart(share.gpu):
            chunk += elements * (c + 4 if c < 4 else 4)
        # From then on it is the head's gradient.
        return LossBytes(chunk + weight_gradient, weight_gradient, waiting=weight_gradient)
    logits = share.tokens * spec.vocab // share.loss_ranks
    if block := block_of(share):
        forward, gradient, head, after = (int(logits * (c * own + 4 * fp32)) for own, fp32 in block.loss)
        if run.pp == 1 or not stack_of(run).torch_stages:
            return LossBytes(forward, gradient, head, after)
        # torch's schedule has the logits in a variable until the next micro-batch's (schedules.py); what autograd keeps
        # is log_softmax's result, or where the loss is compiled the logits again.
        kept = logits * c
        held = kept if block.loss.gradient[0] < 2 else 0
        waiting = kept + (4 * logits if block.loss.forward[1] else 0)
        return LossBytes(forward, gradient + held, head + kept, after + kept, waiting)
    # The head's own part of them, and where ranks gather it, what all sent and that in the order of words
    # (torch/distributed/_functional_collectives.py, all_gather_tensor).
    own = share.tokens * spec.vocab // run.tp * c
    gathering = 2 * logits * c + own if own < logits * c else 0
    if run.kernels == "fused-loss":  # the logits as they are, and the gradient that backward writes beside them
        # Under autocast the head's weight has a half gradient before it has its own.
        half_head = c * spec.vocab * spec.hidden // run.tp if share.autocast and not run.lora else 0
        # A cap keeps tanh's output, and backward makes another gradient for the product behind it.
        capped = logits * c * bool(spec.logit_softcap)
        return LossBytes(max(logits * c + capped, gathering), logits * 2 * c + 2 * capped + half_head,
                         logits * c + (0 if share.autocast else own), logits * c, logits * c + capped)  # fmt: skip
    if share.compiled and run.kernels != "fused-loss":
        # One kernel casts as it reads, and nothing but the logits is kept. The gradient is written beside them and
        # zeros, the gradient of the logits that the model returns and no loss reads (torch/_functorch/_aot_autograd/
        # runtime_wrappers.py: a compiled function's tangents are tensors). Rows of no whole 16 bytes are padded for
        # the head's products, by a copy where there are two of them (torch/_inductor/fx_passes/pad_mm.py). Of a cap
        # both its sides are kept, until the gradient is made.
        padded = share.pads_rows and not run.lora
        capped = logits * c * bool(spec.logit_softcap)
        return LossBytes(logits * c + capped, logits * c * (3 + padded) + capped, logits * c * (2 + padded),
                         logits * c, logits * c + capped)  # fmt: skip
    upcast = 0 if c == 4 else 4
    # torch's loss_parallel writes log_softmax out in operators, and has one more temporary both ways.
    extra = (4 if share.loss_ranks > 1 else 0) + (c if spec.logit_softcap else 0)
    return LossBytes(
        forward=max(logits * (c + upcast + 4 + extra), gathering),
        gradient=logits * (c + 12 + extra),
        # The logits' gradient exists while the head's is made; with autocast that moment is highest after the cast.
        head=logits * c + (0 if share.autocast else own),
        after=logits * c,
        waiting=logits * (c + 4),
    )


def dequantized(share: Share) -> int:
    """Return the bytes of the largest quantized linear, dequantized to half for its product; of GPTQ's what unpacking
    takes besides what autograd keeps of a block's (`StepMemory.block_cast`)."""
    if share.run.quantization is None:
        return 0
    element = 2
    if share.run.quantization == "gptq":
        element = gptq.highest(*unpacked_bytes(share.run)) - share.bytes.compute
    return element * max(linear.inputs * linear.outputs for linear in share.spec.block_linears)


def block_backward(share: Share, kept: dict[str, int], whole: dict[str, int], first: bool = True) -> BlockBackward:
    """Return what the block takes whose backward runs, of which forward kept `kept` bytes by kind, and keeps `whole`
    where nothing is recomputed. A compiled graph writes a mask out for all heads once, in its `first` block. Its own
    gradients, of several micro-batches, are added to the earlier ones, except where FSDP2 has only shards of those, or
    sums of another dtype."""
    spec, run = share.spec, share.run
    in_backward = stack_of(run).steps_in_backward(run)  # and gone at once
    # A compiled block's come together, when it is over.
    own = not run.lora and not run.offload and (run.compile or not in_backward)
    added = waits(run) and reduced_bytes(run, share.bytes) == share.bytes.gradients
    own = own and (run.accumulation == 1 or (uses_fsdp(run) and not added))
    gradient = share.bytes.gradients if own else 0
    if block := block_of(share):
        return max((_at(height, block, share, sum(kept.values()), gradient) for height in block.backward), key=sum)
    counts = spec.parameters_by_component
    gradients = gradient * (counts["mlp"] + counts["experts"] // run.ep) // (run.tp * spec.layers)
    # What selective checkpointing kept is not made twice.
    # int8's contexts are gone with the graph of what is recomputed: see mlp.in_backward.
    recomputed = 0
    if run.checkpointing:
        recomputed = sum(whole.values()) - kept.get("matmul outputs", 0) - whole.get("int8 inputs", 0)
        if spec.norm == "layernorm" or share.fuses or share.run.kernels == "fused-norm" or share.bytes.residual == 4:
            recomputed -= kept["block inputs"]  # the first norm's own
    # What blocks were given is summed again over what products returned. Keys and values that adapters add to are made
    # for all heads first, in all blocks, as simulations show.
    sums = [each for each in adapted(spec, run) if each.name in ("k_proj", "v_proj")]
    if sums and run.checkpointing and not kept["block inputs"]:
        width = 2 * share.bytes.compute * (spec.query_width - spec.key_width)
        width -= adapters_stream(share) * len(sums) * spec.key_width
        recomputed += share.layers * share.tokens * max(0, width)
    # When attention's backward begins; compiled, of what lies around the MLP only adapters' inputs.
    if share.blocks_compiled:
        gone = whole.get("mlp", 0)
        if run.checkpointing:
            gone += max(0, whole.get("adapters", 0) - share.tokens * adapter_bytes(run) * spec.hidden)
    else:
        gone = sum(per_device(mlp_saved(share), run).values())
    masks = share.remade_masks if first else min(1, share.remade_masks)
    return BlockBackward(*_in_halves(share, gone, gradients, masks), recomputed)


def forward_height(share: Share) -> int:
    """Return what a described block's forward holds beside what it keeps, as the description says."""
    block = block_of(share)
    if not block or not block.forward:
        return 0
    return max(described_bytes(each.beside, share) - described_bytes(
        () if share.recomputes_last else tuple(row for row in block.saved if row.operator in each.gone), share)
        for each in block.forward)  # fmt: skip


def _at(height: Height, block: Block, share: Share, kept: int, gradient: int) -> BlockBackward:
    """Return what a described block takes at `height`, with `gradient` bytes for an element of its gradients."""
    rows = tuple(row for row in block.saved if row.operator not in height.gone)
    spec = share.spec
    one = spec.moe_layers * spec.experts * spec.hidden * spec.moe_intermediate // share.run.ep  # of experts' matrices
    elements = sum(linear.elements for linear in share.spec.block_linears if linear.name in height.gradients)
    elements += sum(name in EXPERTS for name in height.gradients) * one
    return BlockBackward(
        temporaries=described_bytes(height.beside, share),
        gradients=gradient * elements // (share.spec.layers * share.run.tp),
        recomputed=described_bytes(rows, share) - kept,
    )


def _in_halves(share: Share, mlp_kept: int, gradients: int, masks: int) -> tuple[int, int]:
    """Return the temporaries of a block's backward and its own gradients by then, at the higher of two moments: in its
    MLP or in its attention, which comes after the MLP, whose `mlp_kept` bytes are free by then, and whose `gradients`
    exist; with `masks` heads' masks."""
    spec, run, c = share.spec, share.run, share.bytes.compute
    # Compiled, backward writes over what it has read: down_proj's input too, which LoRA does not keep. Of a recomputed
    # block all is there first.
    over = share.compiled and not run.checkpointing
    recomputed = share.blocks_compiled and run.checkpointing is not None
    again = recomputed and run.lora is not None
    adapters = any(linear.part == "mlp" and linear.inputs == spec.hidden for linear in adapted(spec, run))
    widths: float = 1 + (run.lora is not None) if over else 3 if spec.gated else 2
    widths, streams = _beside_adapters(share) if again else (widths, 0)
    mlp = int(share.tokens * share.linear_bytes * (spec.token_mlp_width * widths / run.tp + spec.hidden * streams))
    if run.lora and (eager := mlp_of(share)):
        mlp = in_backward(eager, int8_inputs(share, alone=True) - int8_inputs(share, 3, alone=True))
    written_out = not spec.gated and spec.activation not in FUSED and not share.blocks_compiled
    if written_out and run.lora:  # what goes to the product with tanh, and to both of its sides
        mlp = share.tokens * spec.intermediate * 3 * (4 if share.autocast else share.linear_bytes) // run.tp
    if over and adapters and adapter_bytes(run) == 4:  # the gradients of adapters' inputs, in fp32
        mlp += 4 * share.tokens * (2 * spec.token_mlp_width + spec.hidden)
    if share.writes_scores:
        attention = backward_scores(share) - (0 if recomputed else mlp_kept)
    else:
        attention = share.tokens * c * 4 * spec.query_width // run.tp - mlp_kept
        # Beside the gradient of the block's output: where weights are trained, what their gradients read.
        if again or masks:
            attention += share.tokens * c * (1 if run.lora else 9) * spec.hidden
        attention += score_elements(share) * c * masks // (spec.heads * run.tp)
    if attention + gradients <= mlp:
        return mlp, 0
    return max(0, attention), gradients + min(0, attention)


def _writes_norm(share: Share) -> bool:
    """Whether adapters alone are trained and the final norm is written in Python (transformers' LlamaRMSNorm)."""
    written = share.spec.norm == "rmsnorm" and not (share.fuses or share.compiled or share.run.kernels)
    return share.last and share.run.lora is not None and written and not block_of(share)


def norm_backward(share: Share) -> int:
    """Return what the final norm's backward takes: in fp32 what goes to its input, and what comes of its mean of
    squares, in four steps."""
    return 5 * 4 * share.tokens * share.spec.hidden // share.sequence_ranks if _writes_norm(share) else 0


def norm_replaced(share: Share) -> int:
    """Return by what the gradient that leaves the final norm is less than the fp32 input that it kept."""
    less = 4 - share.bytes.residual if _writes_norm(share) else 0
    return share.tokens * share.spec.hidden * less // share.sequence_ranks


def behind_scores(share: Share) -> int:
    """Return what of a block's kept bytes is not there yet when its scores are."""
    if share.blocks_compiled or block_of(share):
        return 0
    if share.run.checkpointing:
        return int8_inputs(share, 1)
    return int8_inputs(share, 1, alone=True) + sum(per_device(mlp_saved(share), share.run).values())


def forward_mlp(share: Share) -> int:
    """Return what a gated MLP of transformers holds in forward beside what is kept when the block is over. Compiled,
    the results of all adapters wait for one kernel. A block that is recomputed keeps none of what it computes."""
    spec, run, c = share.spec, share.run, share.linear_bytes
    if block_of(share) or spec.experts or not spec.gated or not (run.lora or run.checkpointing):
        return 0
    if eager := mlp_of(share):
        return in_forward(eager, run.checkpointing)
    s, names = adapters_stream(share), [linear.name for linear in adapted(spec, run)]
    inputs = sum(1 + (name == "gate_up_proj") for name in names if name in ("gate_proj", "up_proj", "gate_up_proj"))
    # Selective checkpointing keeps what products returned.
    width = c + {None: 0, "selective": 0, "full": c}[run.checkpointing]
    width += inputs * s * (run.checkpointing != "selective")
    return share.tokens * width * spec.intermediate // run.tp


def _beside_adapters(share: Share) -> tuple[float, float]:
    """Return the temporaries of the backward of a compiled MLP that is recomputed, in a block with adapters: how many
    tensors of the MLP's width, and of the stream's. As simulations of four shapes count them on an A100 and an H100,
    within one tensor of the MLP's width.

    Adapters in the MLP cast what they read and its gradients, to fp32 unless they are half, and Inductor's order leaves
    all of that until the gradients of the adapters' weights, which come last. Where masks are made again, more waits;
    where products were kept, backward writes over them.
    """
    names = [linear.name for linear in adapted(share.spec, share.run) if linear.part == "mlp"]
    count, remade, wide = len(names), share.remade_masks > 0, adapter_bytes(share.run) == 4
    if names == ["down_proj"] and wide and share.run.checkpointing == "full":
        return 5, 2  # on either card: no other adapter's casts wait with it
    over = 2 + count if share.run.checkpointing == "selective" else 0
    return 2 + remade + count * (10 / 3 if wide else 2) - over, count * (4 if remade else 8 / 3) * wide


def optimizer_temporaries(share: Share, states: States) -> int:
    """Return what the update itself allocates.

    On a GPU torch's AdamW is foreach: it makes the square roots of all second moments at once
    (torch/optim/adam.py, _multi_tensor_adam: _foreach_sqrt). On the CPU it makes the root and its quotient of one
    parameter at a time (_single_tensor_adam). Fused it makes none (cuda/FusedAdamWKernel.cu), and with a master copy
    it is fused, as in DeepSpeed and Megatron-LM; the fp32 shards of FSDP2's policy are stepped like any others. Where
    ranks then gather the weights through flat copies, the rank's part is one of these, and NCCL copies the whole again
    (ProcessGroupNCCL.cpp, allgather: newLikeFlat).
    """
    spec, run = share.spec, share.run
    if stack_of(run).copies_gathered and run.zero == 1:
        return 2 * states.weights + states.weights // run.dp
    if run.offload or run.optimizer not in ("adamw", "adafactor", "muon"):
        return 0
    if stack_of(run).fused_adamw:
        return 0
    element = 4 if run.lora else share.bytes.states
    experts = expert_tensor(spec, run)
    largest = min(max(spec.vocab * spec.hidden, experts) // run.tp, states.trained)
    if run.optimizer == "adafactor":
        # As the experts' down is updated, the loop's variable still holds gate's and up's (torch/optim/_adafactor.py).
        return element * min(max(largest, experts * 3 // 2 // run.tp), states.trained)
    stepped = states.trained
    if run.optimizer == "muon":  # which is stepped before AdamW
        stepped -= newton_schulz.elements(spec, share.layers)
        largest = min(spec.vocab * spec.hidden, stepped)
        gradient = 4 if share.bytes.master else share.bytes.gradients
        return max(newton_schulz.temporaries(spec, gradient), _adamw_roots(share, stepped, largest))
    return _adamw_roots(share, stepped, largest)


def _adamw_roots(share: Share, stepped: int, largest: int) -> int:
    """Return the roots of second moments that AdamW makes of `stepped` parameters, the largest tensor `largest`."""
    run, element = share.run, adapter_bytes(share.run) if share.run.lora else share.bytes.states
    if share.bytes.master and not uses_fsdp(run):
        return 0
    return element * (2 * largest if share.cpu else stepped)
