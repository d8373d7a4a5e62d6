"""What a training step allocates and frees in addition to the activations that blocks save: logits and temporaries."""

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
from .precision import NF4_BLOCK
from .scores import backward_scores, score_elements
from .share import Share, adapted, adapter_bytes, unpacked_bytes
from .stacks.blocks import block_of
from .stacks.described import EXPERTS, Block, Height, Kept, by_kind, saved
from .states import States, expert_tensor
from .tower import tower_activations


class LossBytes(NamedTuple):
    """Bytes of logits and their gradients on the rank that has the head, at four moments."""

    forward: int = 0  # at the end of the forward pass, while the loss is computed
    gradient: int = 0  # while the gradient of the logits is computed
    head: int = 0  # while the gradient of the head's weight is computed
    after: int = 0  # from then on until the end of the step
    waiting: int = 0  # of a micro-batch that waits for its backward pass, while another micro-batch's runs


class BlockBackward(NamedTuple):
    """The bytes at the peak of a block's backward pass."""

    temporaries: int
    gradients: int  # of the block's weights that already exist at the peak
    recomputed: int = 0  # activations that are computed again, in addition to those that checkpointing saved


def outer_activations(share: Share) -> int:
    """Return the bytes saved outside the blocks: by the final norm, the head's input, the embedding's dropout mask, and
    the input and output of a pipeline stage, which its backward pass needs."""
    spec, run, b = share.spec, share.run, share.bytes
    if block := block_of(share):
        # torch's stage keeps its output until its backward pass. Its input is a block's input, in a buffer.
        at_ends = (not share.last) - (not share.first) if run.pp > 1 else 0
        return (described_bytes(block.outside, share) if share.last else 0) + at_ends * between_stages(share)
    width = share.mask_bytes * spec.hidden if spec.dropout and share.first else 0
    if share.blocks_compiled and run.checkpointing == "selective":
        width += b.residual * spec.hidden  # the first block's input
    if not share.last:
        width += b.residual * spec.hidden
    if not share.first and spec.norm == "rmsnorm" and b.residual == 2 and not run.checkpointing:
        width += b.residual * spec.hidden  # the norm saves an fp32 copy, so this is a second tensor
    head_input = 0
    if share.last:
        fused = share.fuses or share.compiled
        width += (b.residual if fused else 4) * spec.hidden + 8
        if run.lora is None:
            width += b.residual * spec.hidden if spec.norm == "rmsnorm" and not fused else 0
            head_input = share.tokens * b.compute * spec.hidden  # whole on every rank, as in `activations.per_device`
        if run.objective.loss == "chunked":
            head_input = run.scored * b.residual * spec.hidden
    return share.tokens * width // share.sequence_ranks + head_input + tower_activations(share)


def between_stages(share: Share) -> int:
    """Return the bytes that a pipeline stage sends to the next stage per micro-batch."""
    return share.tokens * share.spec.hidden * share.bytes.residual // share.sequence_ranks


def receive_buffers(share: Share) -> int:
    """Return the bytes of the receive buffers of torch's PipelineStage: for each micro-batch one for its input and one
    for the gradient of its output. They are allocated in the first step and stay
    (torch/distributed/pipelining/stage.py, _setup_forward_recv_info and _create_grad_recv_info)."""
    run = share.run
    if run.pp == 1 or not stack_of(run).torch_stages:
        return 0
    first, last = share.stage == 0, share.stage == run.pp - 1  # the rank's, whichever virtual stage runs
    return run.accumulation * (2 * run.virtual_stages - first - last) * between_stages(share)


def sent_back(share: Share) -> int:
    """Return the bytes of the last gradient that a stage of torch's 1F1B schedule sent. A variable refers to it until
    the next one is sent. Schedules with virtual stages free it once it is sent
    (torch/distributed/pipelining/schedules.py)."""
    run = share.run
    waits = stack_of(run).torch_stages and run.schedule == "1f1b" and run.virtual_stages == 1
    return between_stages(share) if waits and share.backward_passes_done and not share.first and run.pp > 1 else 0


def described_bytes(rows: tuple[Kept, ...], share: Share) -> int:
    """Return the bytes on this rank of rows of a stack's description."""
    return sum(by_kind(saved(rows, share), share.run.tp, share.run.sequence_parallel).values())


def loss_chunk(spec: ModelSpec, tokens: int) -> int:
    """Return the number of tokens in a chunk of Liger's fused linear cross entropy, out of `tokens`: a power of two,
    chosen so that a chunk's logits have about as many elements as the hidden states of all tokens
    (src/liger_kernel/ops/fused_linear_cross_entropy.py)."""
    pieces = -(-spec.vocab // spec.hidden)
    return min(tokens, 1 << (-(-tokens // pieces) - 1).bit_length())


def adds_apart(gpu: GPU | None) -> bool:
    """Return whether Liger's loss accumulates the gradient of the head's weight outside the matmuls: it computes each
    chunk's gradient, casts it to fp32 and adds it. It does so below compute capability 8.0."""
    return gpu is not None and (gpu.compute_capability or (8, 0)) < (8, 0)


def loss_bytes(share: Share) -> LossBytes:
    """Return the bytes around the loss; none on a stage without the head.

    transformers casts 16-bit logits to fp32, and torch's cross_entropy saves the output of log_softmax. The backward
    pass computes the gradients of the negative log-likelihood and of log_softmax, both in fp32. It does not need the
    logits, but they live as long as the model's output object: in the usual loop (`outputs = model(...)`) until the end
    of the step, while `loss = model(...).loss` frees them immediately. flash-attn's loss saves the logits instead.
    """
    spec, run, c = share.spec, share.run, share.bytes.compute
    if not share.last or run.num_labels:  # a classifier's logits are a few numbers
        return LossBytes()
    if of_method := methods.loss_bytes(share):
        return LossBytes(*of_method)
    if run.kernels == "liger":
        return _by_liger(share)
    logits = share.tokens * spec.vocab // share.loss_ranks
    if block := block_of(share):
        forward, gradient, head, after = (int(logits * (c * own + 4 * fp32)) for own, fp32 in block.loss)
        if run.pp == 1 or not stack_of(run).torch_stages:
            return LossBytes(forward, gradient, head, after)
        # A variable of torch's schedule refers to the logits until those of the next micro-batch are computed
        # (schedules.py). Autograd saves the output of log_softmax, or, if the loss is compiled, the logits.
        saved_logits = logits * c
        live_logits = saved_logits if block.loss.gradient[0] < 2 else 0
        waiting = saved_logits + (4 * logits if block.loss.forward[1] else 0)
        return LossBytes(forward, gradient + live_logits, head + saved_logits, after + saved_logits, waiting)
    # The rank's part of the logits, and if the ranks gather them, the output of the all-gather and its copy in the
    # order of the vocabulary (torch/distributed/_functional_collectives.py, all_gather_tensor).
    own = share.tokens * spec.vocab // run.tp * c
    gathering = 2 * logits * c + own if own < logits * c else 0
    if run.kernels == "fused-loss":  # the logits without a cast, and in the backward pass their gradient
        # Under autocast, the head's weight first has a 16-bit gradient.
        half_head = c * spec.vocab * spec.hidden // run.tp if share.autocast and not run.lora else 0
        # A softcap saves the output of tanh, and its backward pass computes one more gradient.
        capped = logits * c * bool(spec.logit_softcap)
        return LossBytes(max(logits * c + capped, gathering), logits * 2 * c + 2 * capped + half_head,
                         logits * c + (0 if share.autocast else own), logits * c, logits * c + capped)  # fmt: skip
    if share.compiled:
        # One kernel casts while it reads, so that only the logits are saved. The gradient is a second tensor, and a
        # third one contains zeros: the gradient of the logits that the model returns, which no loss uses
        # (torch/_functorch/_aot_autograd/runtime_wrappers.py: a compiled function's tangents are tensors). If a row is
        # no multiple of 16 bytes, it is padded for the head's matmuls, and if there are two of these, by a copy
        # (torch/_inductor/fx_passes/pad_mm.py). The input and output of a softcap are saved until the gradient exists.
        padded = share.pads_rows and not run.lora
        capped = logits * c * bool(spec.logit_softcap)
        return LossBytes(logits * c + capped, logits * c * (3 + padded) + capped, logits * c * (2 + padded),
                         logits * c, logits * c + capped)  # fmt: skip
    upcast = 0 if c == 4 else 4
    # torch's loss_parallel computes log_softmax with several operators, and has one more temporary in both passes.
    extra = (4 if share.loss_ranks > 1 else 0) + (c if spec.logit_softcap else 0)
    return LossBytes(
        forward=max(logits * (c + upcast + 4 + extra), gathering),
        gradient=logits * (c + 12 + extra),
        # The logits' gradient exists while the head's is computed. With autocast, the peak is after the cast.
        head=logits * c + (0 if share.autocast else own),
        after=logits * c,
        waiting=logits * (c + 4),
    )


def _by_liger(share: Share) -> LossBytes:
    """Return the bytes around Liger's loss, which never has the logits of all tokens. After it, the gradient of the
    head's weight counts as the head's."""
    spec, run, c = share.spec, share.run, share.bytes.compute
    rows = loss_chunk(spec, share.tokens)
    chunk = rows * spec.vocab * (c + 4) // run.tp
    elements = 0 if run.lora else spec.vocab * spec.hidden // run.tp
    weight_gradient = elements * share.bytes.gradients
    # Autocast caches a cast of the weight, but not that of its transpose, which each chunk's logits need.
    cast_again = c if share.autocast and rows < share.tokens else 0
    chunk += elements * max(cast_again, (c + 4 if c < 4 else 4) if adds_apart(share.gpu) else 0)
    return LossBytes(chunk + weight_gradient, weight_gradient, waiting=weight_gradient)


def dequantized(share: Share) -> int:
    """Return the bytes of the largest quantized weight, dequantized to 16 bits for its matmul. For GPTQ, these are the
    bytes of unpacking in addition to those that autograd saves (`StepMemory.block_cast`)."""
    if share.run.quantization is None:
        return 0
    element = 2 + 4 / NF4_BLOCK * share.run.double_quant  # and its scales
    if share.run.quantization == "gptq":
        element = gptq.highest(*unpacked_bytes(share.run)) - share.bytes.compute
    return int(element * max(linear.inputs * linear.outputs for linear in share.spec.block_linears))


def block_backward(
    share: Share, saved_by_kind: dict[str, int], whole: dict[str, int], first: bool = True
) -> BlockBackward:
    """Return the bytes at the peak of a block's backward pass.

    `saved_by_kind` is what its forward pass saved, and `whole` what it would save without checkpointing. A compiled
    graph expands a mask for all heads once, in its `first` block. With several micro-batches, the block's gradients are
    added to the accumulated ones, unless FSDP2 has only shards of these, or sums in another dtype, or one compiled
    graph returns all gradients at its end.
    """
    spec, run = share.spec, share.run
    in_backward = stack_of(run).steps_in_backward(run)
    # A compiled block returns all its gradients at its end.
    own = not run.lora and not run.offload and (run.compile or not in_backward)
    added = waits(run) and reduced_bytes(run, share.bytes) == share.bytes.gradients
    one_graph = share.blocks_compiled and run.world_size == 1
    own = own and (run.accumulation == 1 or one_graph or (uses_fsdp(run) and not added))
    gradient = share.bytes.gradients if own else 0
    if block := block_of(share):
        saved_bytes = sum(saved_by_kind.values())
        return max((_at(height, block, share, saved_bytes, gradient) for height in block.backward), key=sum)
    counts = spec.parameters_by_component
    gradients = gradient * (counts["mlp"] + counts["experts"] // run.ep) // (run.tp * spec.layers)
    # What selective checkpointing saved is not computed again. The contexts of int8 layers are freed with the graph of
    # the recomputation: see mlp.in_backward.
    recomputed = 0
    if run.checkpointing:
        recomputed = sum(whole.values()) - saved_by_kind.get("matmul outputs", 0) - whole.get("int8 inputs", 0)
        if spec.norm == "layernorm" or share.fuses or share.run.kernels == "fused-norm" or share.bytes.residual == 4:
            recomputed -= saved_by_kind["block inputs"]  # the first norm's own
    # The residual stream is computed again from the outputs of matmuls. Keys and values with adapters, or beside a mask
    # of all heads, are first expanded to all heads, in all blocks, as simulations show. In the second case, the
    # embedding's gradient in fp32 is also allocated first.
    early = 0
    if run.checkpointing and not saved_by_kind["block inputs"]:
        sums = [linear for linear in adapted(spec, run) if linear.name in ("k_proj", "v_proj")]
        beside = first and one_graph and share.remade_masks > 1 and not run.lora
        early = 4 * spec.vocab * spec.hidden * (beside and not spec.tied)
        blocks = share.layers if sums else (share.layers - 1) * beside
        width = 2 * share.bytes.compute * (spec.query_width - spec.key_width)
        width -= adapters_stream(share) * len(sums) * spec.key_width
        recomputed += blocks * share.tokens * max(0, width)
    # What is freed before attention's backward pass begins. In compiled code, only adapters' inputs of the MLP are.
    if share.blocks_compiled:
        gone = whole.get("mlp", 0)
        if run.checkpointing:
            gone += max(0, whole.get("adapters", 0) - share.tokens * adapter_bytes(run) * spec.hidden)
    else:
        gone = sum(per_device(mlp_saved(share), run).values())
    masks = share.remade_masks if first else min(1, share.remade_masks)
    temporaries, gradients = _in_halves(share, gone, gradients, masks)
    return BlockBackward(temporaries + early, gradients, recomputed)


def forward_height(share: Share) -> int:
    """Return the temporaries of a described block's forward pass."""
    block = block_of(share)
    if not block or not block.forward:
        return 0
    return max(described_bytes(height.beside, share) - described_bytes(
        () if share.recomputes_last else tuple(row for row in block.saved if row.operator in height.gone), share)
        for height in block.forward)  # fmt: skip


def _at(height: Height, block: Block, share: Share, saved_bytes: int, gradient: int) -> BlockBackward:
    """Return the bytes of a described block at `height`, with `gradient` bytes per element of its gradients."""
    rows = tuple(row for row in block.saved if row.operator not in height.gone)
    spec = share.spec
    # Elements of the matrices of the experts on this rank.
    experts = spec.moe_layers * spec.experts * spec.hidden * spec.moe_intermediate // share.run.ep
    elements = sum(linear.elements for linear in share.spec.block_linears if linear.name in height.gradients)
    elements += sum(name in EXPERTS for name in height.gradients) * experts
    return BlockBackward(
        temporaries=described_bytes(height.beside, share),
        gradients=gradient * elements // (share.spec.layers * share.run.tp),
        recomputed=described_bytes(rows, share) - saved_bytes,
    )


def _in_halves(share: Share, mlp_kept: int, gradients: int, masks: int) -> tuple[int, int]:
    """Return the temporaries of a block's backward pass, and its gradients, at the moment when both are largest.

    The moments are: in the MLP; at its end, when its `gradients` exist (the experts' first weight has the last one);
    and in attention, when the MLP's `mlp_kept` bytes have also been freed. `masks` is the number of masks, counted in
    heads.
    """
    spec, run, c = share.spec, share.run, share.bytes.compute
    # A compiled backward pass overwrites its inputs, also down_proj's input, which LoRA does not save. A recomputed
    # block first has all of them.
    overwrites = share.compiled and not run.checkpointing
    recomputed = share.blocks_compiled and run.checkpointing is not None
    again = recomputed and run.lora is not None
    adapters = any(linear.part == "mlp" and linear.inputs == spec.hidden for linear in adapted(spec, run))
    widths: float = 1 + (run.lora is not None) if overwrites else 3 if spec.gated else 2
    widths, streams = _beside_adapters(share) if again else (widths, 0)
    mlp = int(share.tokens * share.linear_bytes * (share.mlp_width * widths / run.tp + spec.hidden * streams))
    if run.lora and (eager := mlp_of(share)):
        mlp = in_backward(eager, int8_inputs(share, alone=True) - int8_inputs(share, 3, alone=True))
    written_out = not spec.gated and spec.activation not in FUSED and not share.blocks_compiled
    if written_out and run.lora:  # the gradient of the product with tanh, and those of both factors
        mlp = share.tokens * spec.intermediate * 3 * (4 if share.autocast else share.linear_bytes) // run.tp
    if overwrites and adapters and adapter_bytes(run) == 4:  # the gradients of adapters' inputs, in fp32
        mlp += 4 * share.tokens * (2 * share.mlp_width + spec.hidden)
    if share.writes_scores:
        attention = backward_scores(share) - (0 if recomputed else mlp_kept)
        if recomputed and run.checkpointing == "selective":
            attention += share.tokens * c * (4 * spec.hidden + spec.query_width // run.tp)
    else:
        attention = share.tokens * c * 4 * spec.query_width // run.tp - mlp_kept
        if masks and run.checkpointing == "selective" and not run.lora:  # the kernel's sums of gradients, in fp32
            attention += 4 * share.tokens * spec.query_width // run.tp * (share.remade_masks > 1)
        # In addition to the gradient of the block's output: the inputs of weight gradients, if weights are trained.
        elif again or masks:
            attention += share.tokens * c * (1 if run.lora else 9) * spec.hidden
        attention += score_elements(share) * c * masks // (spec.heads * run.tp)
    at_attention = max(attention, expert_inputs(share) - mlp_kept if spec.experts else attention)
    if at_attention + gradients <= mlp:
        return mlp, 0
    return max(0, at_attention), gradients + min(0, at_attention)


def expert_inputs(share: Share) -> int:
    """Return the bytes of activations and their gradients while the gradient of the experts' first weight is computed:
    the copies of the tokens and their gradient, and the gradient of both branches."""
    widths = 2 * (share.mlp_width + share.received_width)
    return share.tokens * share.expert_bytes * widths // share.run.tp


def _written_out(share: Share) -> bool:
    """Whether norms run as several operators (transformers' LlamaRMSNorm)."""
    written = share.spec.norm == "rmsnorm" and not (share.fuses or share.compiled or share.run.kernels)
    return written and not block_of(share)


def _writes_norm(share: Share) -> bool:
    """Whether the final norm runs as several operators and only adapters are trained."""
    return share.last and share.run.lora is not None and _written_out(share)


def norm_temporaries(share: Share) -> int:
    """Return the temporaries of a norm's backward pass: its input's gradient in fp32, and four more tensors for the
    gradient of the mean of squares."""
    return 5 * 4 * share.tokens * share.spec.hidden // share.sequence_ranks if _written_out(share) else 0


def norm_backward(share: Share) -> int:
    """Return `norm_temporaries` of the final norm if only adapters are trained."""
    return norm_temporaries(share) if _writes_norm(share) else 0


def norm_replaced(share: Share) -> int:
    """Return by how many bytes the gradient of the final norm's input is smaller than the fp32 input that it saved."""
    less = 4 - share.bytes.residual if _writes_norm(share) else 0
    return share.tokens * share.spec.hidden * less // share.sequence_ranks


def behind_scores(share: Share) -> int:
    """Return the saved bytes of a block that are not allocated yet when its scores are."""
    if share.blocks_compiled or block_of(share):
        return 0
    if share.run.checkpointing:
        return int8_inputs(share, 1)
    return int8_inputs(share, 1, alone=True) + sum(per_device(mlp_saved(share), share.run).values())


def forward_mlp(share: Share) -> int:
    """Return the temporaries of the forward pass of a gated MLP in transformers. In compiled code, the outputs of all
    adapters wait for one kernel. A checkpointed block saves none of its intermediate tensors."""
    spec, run, c = share.spec, share.run, share.linear_bytes
    if block_of(share) or spec.experts or not spec.gated or not (run.lora or run.checkpointing):
        return 0
    if eager := mlp_of(share):
        return in_forward(eager, run.checkpointing)
    s, names = adapters_stream(share), [linear.name for linear in adapted(spec, run)]
    inputs = sum(1 + (name == "gate_up_proj") for name in names if name in ("gate_proj", "up_proj", "gate_up_proj"))
    # Selective checkpointing saves the outputs of matmuls.
    width = c + {None: 0, "selective": 0, "full": c}[run.checkpointing]
    width += inputs * s * (run.checkpointing != "selective")
    return share.tokens * width * spec.intermediate // run.tp


def _beside_adapters(share: Share) -> tuple[float, float]:
    """Return the temporaries of the backward pass of a compiled, recomputed MLP in a block with adapters: the number of
    tensors of the MLP's width, and of the residual stream's width. The numbers are counted in simulations of four
    shapes on an A100 and an H100, and agree within one tensor of the MLP's width.

    Adapters in the MLP cast their inputs and gradients, to fp32 unless the adapters are in 16 bits. Inductor keeps all
    of these until it computes the gradients of the adapters' weights, last. If masks are created again, more tensors
    wait. If the outputs of matmuls were saved, the backward pass overwrites them.
    """
    names = [linear.name for linear in adapted(share.spec, share.run) if linear.part == "mlp"]
    count, remade, wide = len(names), share.remade_masks > 0, adapter_bytes(share.run) == 4
    if names == ["down_proj"] and wide and share.run.checkpointing == "full":
        return 5, 2  # on both GPUs: no other adapter's casts wait
    replaced = 2 + count if share.run.checkpointing == "selective" else 0
    return 2 + remade + count * (10 / 3 if wide else 2) - replaced, count * (4 if remade else 8 / 3) * wide


def optimizer_temporaries(share: Share, states: States) -> int:
    """Return the bytes that the optimizer's update allocates.

    On a GPU, torch's AdamW uses foreach operators by default, which allocate the square roots of all second moments
    together (torch/optim/adam.py, _multi_tensor_adam: _foreach_sqrt). On a CPU, it allocates the root and the quotient
    of one parameter at a time (_single_tensor_adam). Fused AdamW allocates none (cuda/FusedAdamWKernel.cu), and with
    master weights the optimizer is fused, as in DeepSpeed and Megatron-LM. FSDP2's fp32 shards are updated like other
    weights. If the ranks then gather the weights through flat copies, the rank's part is one of these, and NCCL copies
    the whole tensor again (ProcessGroupNCCL.cpp, allgather: newLikeFlat).
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
        # While the experts' down is updated, a loop variable refers to gate's and up's update
        # (torch/optim/_adafactor.py).
        return element * min(max(largest, experts * 3 // 2 // run.tp), states.trained)
    stepped = states.trained
    if run.optimizer == "muon":  # updated before AdamW's parameters
        stepped -= newton_schulz.elements(spec, share.layers)
        largest = min(spec.vocab * spec.hidden, stepped)
        gradient = 4 if share.bytes.master else share.bytes.gradients
        return max(newton_schulz.temporaries(spec, gradient), _adamw_roots(share, stepped, largest))
    return _adamw_roots(share, stepped, largest)


def _adamw_roots(share: Share, stepped: int, largest: int) -> int:
    """Return the bytes of the square roots of second moments for `stepped` parameters, of which the largest tensor has
    `largest`."""
    run, element = share.run, adapter_bytes(share.run) if share.run.lora else share.bytes.states
    if share.bytes.master and not uses_fsdp(run):
        return 0
    return element * (2 * largest if share.cpu else stepped)
