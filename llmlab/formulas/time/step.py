"""Seconds of a step from its kernels' times and its bytes, on one device; and its price.

    time = products + attention + bytes of everything else / bandwidth

or, where that is less than what the CPU takes to start the kernels, the CPU's time; then the update, which the CPU
starts too. `kernels` says how long a product and attention take on a card. A compiled step fuses what lies between
products.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ...base.errors import NotAvailable
from ...hardware.gpu import GPU
from ...hardware.nodes import to_host
from ...specs.model import ModelSpec
from ...specs.run import Inference, Run, Training, stack_of
from .. import gptq, newton_schulz
from ..again import attentions_again
from ..memory.float8 import CONVERTED
from ..memory.fsdp import uses_fsdp
from ..memory.methods import offloaded, others, value_run
from ..memory.precision import PRECISION
from ..memory.share import (
    adapter_bytes,
    attention_kernel,
    by_bitsandbytes,
    bytes_of,
    masked_layers,
    unpacked_bytes,
)
from ..memory.states import States, states
from ..memory.temporaries import loss_chunk
from .efficiency import Efficiency, efficiency
from .elementwise import OWN_LOGITS, moved
from .flops import flops, head_sizes
from .host import generation_host_seconds, host_seconds, small_kernels, started, update_host_seconds
from .kernels import Kernels, kernels
from .offload import waiting
from .products import Product, gradients_of_first_block, multiplied_wide, products
from .roofline import decode_pass, prefill_pass

# torch/optim/adam.py, _multi_tensor_adam: 21 reads and writes of a list of tensors (mul 2, lerp 3, mul 2, addcmul 4,
# sqrt 2, div 2, add 2, addcdiv 4), where one kernel has 7.
FOREACH = 3
# torch/optim/_adafactor.py, _single_tensor_adafactor: norms of the weight, of the gradient's rows and columns, and of
# the update (4), the product of the row and column factors (1), div (2), clamp (2), rsqrt (2), mul (3), add (3).
ADAFACTOR = 17
# Seconds that bitsandbytes' blockwise 8-bit AdamW takes per parameter on one multiprocessor, which looks states up in a
# table and waits for that, not for bytes: 220 ms for 8.03e9 parameters on the 132 of an H200
# (kOptimizerStatic8bit2StateBlockwise, bitsandbytes 0.50.2, torch 2.11, 2026-11-26), nine times what the bytes take.
EIGHT_BIT = 132 * 0.2204 / 8.03e9
EIGHT_BIT_UPDATE = "bitsandbytes::optimizer_update_8bit_blockwise"  # the operator
# All measured matrices have rows of whole 16 bytes. With a vocabulary of 50,257 an A100's products took almost 3 times
# as long as with 50,304 (PyTorch's blog, Accelerating Large Language Models, 2023-04: 113 ms per step, then 87). Hopper
# has no kernels of its own for such rows: an A100's run there, faster by multiprocessors and clocks, 1.5 times, where
# its own multiply 2.6 times as fast: 5 times as long. A small product of rows of 588 took 3.5 times as long as of 592
# (m87-labs/kestrel, pull request 143), steps of nanotron with a head of 50,257 words a little longer than 5 says
# (benchmarks/time/throughputs.toml, nanotron-old-bench). On an RTX 4090 it is 1.4 times (pytorch/pytorch, issue
# 181718), with CUDA 13 it can be 1.2 (ml-explore/mlx, issue 2712). A compiler pads from torch 2.1 on
# (torch._inductor.config.shape_padding), Megatron-LM its vocabulary. By chip; on others it may be as on the first.
ALIGNED, UNALIGNED = 8, {(8, 0): 3.0, (9, 0): 5.0}
Sized = tuple[tuple[int, int, int, str], int]  # (m, n, k) of a product and its dtype, and how often
UNPACKED = 2.5  # bytes moved per packed weight, 4 bits read and 16 written, each time that it is multiplied


class Passes(NamedTuple):
    """Seconds of all forward and backward passes of a step on one device; `host` is what the CPU takes to start their
    kernels. Products are by part (as `Flops.by_part`, without "scores", which is `attention`)."""

    products: dict[str, float]
    attention: float
    elementwise: float
    loss: float
    host: float

    @property
    def card(self) -> float:
        """Seconds of the card, if it never waits."""
        return sum(self.products.values()) + self.attention + self.elementwise + self.loss

    @property
    def seconds(self) -> float:
        """The slower of card and host."""
        return max(self.card, self.host)


class Outside(NamedTuple):
    """Seconds of products that are larger, or smaller, than those that were measured, and of those in half precision
    whose rows are not whole 16 bytes. These count `UNALIGNED` times on the chips where that was measured, and may take
    less by `maybe_less_s`; on others they may take more by `maybe_more_s`."""

    extrapolated_s: float
    misaligned_s: float
    maybe_less_s: float
    maybe_more_s: float


class Backward(NamedTuple):
    """Seconds of the two products of a layer's backward pass: the gradients of its input and of its weight."""

    input: float
    weight: float


class Traced(NamedTuple):
    """Seconds of a step whose kernels were traced one by one (`simulate`), in the place of what formulas count, and
    the kernel that computed attention, as `share.attention_kernel` names them."""

    passes: Passes
    update: float
    attention: str


def step_seconds(spec: ModelSpec, run: Run, card: GPU | None) -> float | None:
    """Return the seconds of one device's optimizer step, or of a whole generation; None where no rate is known that the
    run needs: of a generation, on cards that were never measured, and of what is offloaded by a link that is not in the
    table."""
    if card is None:
        return None
    if isinstance(run, Inference):
        rates = efficiency(card)
        seconds = token_seconds(spec, run, rates) if rates else None
        return None if seconds is None else seconds[0] + (run.new_tokens - 1) * seconds[1]
    computed = passes(spec, run, card)
    try:
        return None if computed is None else computed.seconds + update_after(spec, run, kernels(card), computed)
    except NotAvailable:
        return None


def passes(spec: ModelSpec, run: Training, card: GPU) -> Passes | None:
    """Return the seconds of a step's passes by what takes them; None for a dtype that the card has no units for."""
    gpu_kernels = kernels(card)
    multiplied = product_seconds(spec, run, gpu_kernels)
    attention = attention_seconds(spec, run, gpu_kernels)
    if multiplied is None or attention is None:
        return None
    sent, rates = moved(spec, run, card), gpu_kernels.operators
    slower = sent.strided * (1 / rates.strided - 1 / rates.bandwidth)
    blocks = sent.blocks / gpu_kernels.bandwidth + slower + small_kernels(spec, run) * rates.launch
    host = host_seconds(spec, run, gpu_kernels.host)
    for other in others(spec, run):  # without gradients, as a recomputation
        again, once = (replace(run.update, lora=None, checkpointing=kind) for kind in ("full", None))
        both = [moved(other.spec, each, card).blocks / gpu_kernels.bandwidth for each in (again, once)]
        blocks += other.passes * (both[0] - both[1])
        both = [started(other.spec, each).seconds(gpu_kernels.host) for each in (again, once)]
        host += other.passes * (both[0] - both[1])
    if run.reference_model == "offloaded":  # to the GPU and back by Module.to, whose host memory is pageable
        blocks += 2 * offloaded(spec, run) / to_host(card, pinned=False)
    if run.objective.critic:
        value = value_run(run)
        blocks += moved(spec, value, card).blocks / gpu_kernels.bandwidth
        host += host_seconds(spec, value, gpu_kernels.host)
    made = Passes(multiplied, attention, blocks, sent.loss / gpu_kernels.bandwidth, host)
    return made._replace(host=made.host + host_waits(run, made))


def update_after(
    spec: ModelSpec, run: Training, gpu_kernels: Kernels, computed: Passes, update: float | None = None
) -> float:
    """Return the seconds that one device's step goes on after its passes, for an update of so many (None: as
    `update_seconds` has it): the host, which starts it when it has started them, may be the slower one; and makes it
    itself where states are offloaded (`offload.waiting`)."""
    if run.offload:
        return waiting(spec, run, gpu_kernels.card, computed.seconds).seconds
    update = update_seconds(spec, run, gpu_kernels) if update is None else update
    ahead = 0.0 if stack_of(run).checks_gradients else computed.seconds - computed.host
    return max(update, update_host_seconds(spec, run, gpu_kernels.host) - ahead)


def host_waits(run: Training, computed: Passes) -> float:
    """Return for how many seconds the host, besides what it takes itself, waits for the card in a step's passes."""
    waits = stack_of(run).cuda_launch_blocking
    return computed.card if waits else loss_waits(run, computed.products.get("head", 0.0), computed.loss)


def loss_waits(run: Training, head: float, loss: float) -> float:
    """Return for how much of these seconds of the head and the loss the host waits: all where it waits for each kernel,
    and what forward has of them where it looks at a micro-batch's loss before it starts backward."""
    stack = stack_of(run)
    if stack.cuda_launch_blocking:
        return head + loss
    if not stack.checks_losses:
        return 0.0
    forward, backward = OWN_LOGITS[stack.name][stack.cross_entropy_fusion_impl]
    return head / (2 if run.lora else 3) + forward / (forward + backward) * loss  # a frozen head has no gradient


def update_seconds(spec: ModelSpec, run: Training, gpu_kernels: Kernels) -> float:
    """Return the seconds of the optimizer's update on one device: it reads weight (or its fp32 copy), gradient and
    states, and writes all but the gradient; torch's AdamW does so in `FOREACH` passes, unless it is fused. A master
    copy takes the gradient in fp32, and is copied to the weights."""
    b, sizes = PRECISION[run.precision], states(spec, run)
    weight, gradient, state = 3 * (adapter_bytes(run),) if run.lora else (b.master or b.weights, b.gradients, b.states)
    moments = {"adamw": 2 * state, "adamw-fused": 2 * state, "adamw-8bit": 2, "lion": 4,
               "muon": state}.get(run.optimizer, 0)  # fmt: skip
    copies = 0
    if b.master and not run.lora:
        if not uses_fsdp(run):  # whose shards are fp32, and so are gradients that it has reduced
            copies = b.master + b.weights + (gradient + b.master if gradient < b.master else 0)
        gradient = b.master
    orthogonal = _orthogonal_seconds(spec, run, gpu_kernels) if run.optimizer == "muon" else 0.0
    times = FOREACH if foreach_adamw(run) else 1
    passes = ADAFACTOR * weight if run.optimizer == "adafactor" else times * (2 * weight + gradient + 2 * moments)
    models = 2 if run.objective.critic else 1
    moved = models * sizes.trained * (passes + copies) / gpu_kernels.bandwidth
    if run.optimizer == "adamw-8bit":
        moved = max(moved, EIGHT_BIT * sizes.trained / gpu_kernels.operators.sms)
    return moved + orthogonal + _paged_seconds(run, sizes, gpu_kernels.card)


def foreach_adamw(run: Training) -> bool:
    """Whether AdamW is torch's own on lists of tensors: its default, but of a stack that has another, and of master
    copies, which engines step by a fused kernel."""
    masters = PRECISION[run.precision].master and not uses_fsdp(run)
    return run.optimizer == "adamw" and not stack_of(run).fused_adamw and not masters


def _paged_seconds(run: Training, sizes: States, card: GPU) -> float:
    """Return the seconds in which the driver pages states that a device has no room for: all of them in, and out again,
    because the pages that were used longest ago go first, and the update goes through them in a circle. bitsandbytes
    asks for a tensor's before it updates it (bitsandbytes/optim/optimizer.py, prefetch_state), and PCIe carries both
    directions at once: the one run that published this, on an RTX 4090, took half of what one after the other would."""
    if not stack_of(run).paged(run):
        return 0.0
    paged = 2 * sizes.trained
    fits = sizes.weights + paged <= card.memory
    return 0.0 if fits else paged / to_host(card)


def _orthogonal_seconds(spec: ModelSpec, run: Training, gpu_kernels: Kernels) -> float:
    """Return the seconds of Muon's products, on a device with an equal share of all layers; every copy makes them."""
    total = 0.0
    for rows, columns, count in newton_schulz.matrices(spec):
        for m, n, k in newton_schulz.products(rows, columns):
            total += count * (gpu_kernels.product(m, n, k, "bf16") or gpu_kernels.product(m, n, k, "fp32") or 0.0)
    return newton_schulz.ITERATIONS * total / run.pp


def tokens_of(run: Run) -> int:
    """Return the tokens of a step over all devices: trained on, or generated."""
    if isinstance(run, Training):
        return run.global_batch * run.seq_len
    return run.batch * run.new_tokens


def mfu(spec: ModelSpec, run: Run, card: GPU, seconds: float) -> float | None:
    """Return model FLOPs utilisation: the FLOP that the model needs (recomputation is not counted: PaLM, arXiv
    2204.02311, appendix B) over what the card could do at its data sheet's peak; None where it has none. As there,
    attention counts without its mask: with long sequences, of which causal kernels skip half, it can pass 100 %."""
    return utilisation(flops(spec, run, card).model, run, card, seconds)


def hfu(spec: ModelSpec, run: Run, card: GPU, seconds: float) -> float | None:
    """Return hardware FLOPs utilisation: like `mfu`, with all that is computed, recomputation too."""
    return utilisation(flops(spec, run, card).total, run, card, seconds)


def utilisation(count: int, run: Run, card: GPU, seconds: float) -> float | None:
    """Return `count` FLOP over what all cards could do in `seconds`; None where the data sheet has no peak."""
    peak = card.peak(peak_dtype(run))
    return count / run.world_size / seconds / peak if peak else None


def peak_dtype(run: Run) -> str:
    """Return the dtype of a run's products, whose peak utilisation is measured against."""
    if isinstance(run, Inference):
        return run.weights if run.weights in ("fp32", "fp16", "bf16") else "bf16"
    return run.compute_dtype


def training_days(parameters: float, tokens: float, card: GPU, cards: int, utilisation: float) -> float:
    """Return the days that 6ND FLOP take on `cards` cards at this MFU of their bf16 (else fp16) peak."""
    peak = card.peak("bf16") or card.peak("fp16") or card.peak_flops["fp32"]
    return 6 * parameters * tokens / (cards * peak * utilisation) / 86400


def price(card: GPU, card_hours: float, usd_per_hour: float | None = None) -> float | None:
    """Return US dollars for `card_hours`, at your rate or the table's (see the card's sources and date); None without
    either."""
    rate = card.usd_per_hour if usd_per_hour is None else usd_per_hour
    return None if rate is None else card_hours * rate


def product_seconds(spec: ModelSpec, run: Training, gpu_kernels: Kernels) -> dict[str, float] | None:
    """Return the seconds of products with weights by part, on a device with an equal share of all layers; None for a
    dtype that the card has no units for."""
    seconds = _timed(spec, run, gpu_kernels)[0]
    return None if seconds is None else dict(seconds)


def outside(spec: ModelSpec, run: Training, gpu_kernels: Kernels) -> Outside:
    """Return the seconds of those products of `product_seconds` whose shapes are outside of what was measured."""
    return _timed(spec, run, gpu_kernels)[1]


@lru_cache(maxsize=64)  # both are asked for in an estimate
def _timed(spec: ModelSpec, run: Training, gpu_kernels: Kernels) -> tuple[dict[str, float] | None, Outside]:
    seconds: dict[str, float] = {}
    extrapolated_s = misaligned_s = 0.0
    share, counted, times = run.accumulation / run.pp, *misaligned_factor(gpu_kernels.card)
    packed = ("attention", "mlp") if run.quantization else ()
    for product, kind, sizes in _multiplied(spec, run):
        _, n, k, _ = sizes[0][0]
        total, extrapolated = gpu_kernels.summed(sizes)
        if total is None:
            return None, Outside(0.0, 0.0, 0.0, 0.0)
        extrapolated_s += extrapolated * share
        if (n % ALIGNED or k % ALIGNED) and _is_misaligned(product.part, kind, run, gpu_kernels):
            misaligned_s += total * share
            total *= times if counted else 1.0
        if product.part == "experts":  # one grouped product, which reads all experts' weights
            passes = product.forward + product.again + product.input_gradient + product.weight_gradient
            total = max(total, passes * 2 * n * k * spec.experts / run.ep / gpu_kernels.bandwidth)
        if product.part in packed and by_bitsandbytes(run):
            times_unpacked = product.forward + product.again + product.input_gradient
            total += times_unpacked * UNPACKED * n * k / gpu_kernels.bandwidth
        elif product.part in packed:
            total += _unpacking_seconds(product, run, gpu_kernels)
        seconds[product.part] = seconds.get(product.part, 0.0) + total * share
    more = (times - 1) * misaligned_s
    if counted:
        return seconds, Outside(extrapolated_s, misaligned_s + more, more, 0.0)
    return seconds, Outside(extrapolated_s, misaligned_s, 0.0, more)


def misaligned_factor(card: GPU) -> tuple[bool, float]:
    """Return whether rows that are not whole 16 bytes were timed on the card's chip, and how much longer products of
    them take, or may take."""
    chip = card.compute_capability or (0, 0)
    return chip in UNALIGNED, UNALIGNED.get(chip, min(UNALIGNED.values()))


def _unpacking_seconds(product: Product, run: Training, gpu_kernels: Kernels) -> float:
    """Return the seconds per micro-batch in which GPTQ's weights are unpacked: in forward, and where a block is
    recomputed, whatever is kept of products. Backward reads what was made."""
    shifts, others = gptq.moved(product.inputs, product.outputs, *unpacked_bytes(run))
    once = shifts / gpu_kernels.operators.strided + others / gpu_kernels.bandwidth
    return product.forward * (2 if run.checkpointing else 1) * once


def columns_backward(spec: ModelSpec, run: Training, gpu_kernels: Kernels) -> tuple[Backward, ...]:
    """Return the seconds per micro-batch of backward's products of a block's column-parallel layers, of attention and
    of the MLP, averaged over the layers."""
    seconds = dict.fromkeys(("attention", "mlp"), Backward(0.0, 0.0))
    for product, _, sizes in _multiplied(spec, run):
        if product.cut == "outputs" and product.part in seconds:
            matmuls = (sizes[1][0], product.input_gradient), (sizes[-1][0], product.weight_gradient)
            input, weight = (times * (gpu_kernels.product(*size) or 0.0) / spec.layers for size, times in matmuls)
            before = seconds[product.part]
            seconds[product.part] = Backward(before.input + input, before.weight + weight)
    return tuple(seconds.values())


def _is_misaligned(part: str, kind: str, run: Training, gpu_kernels: Kernels) -> bool:
    """Return whether matrices in half precision are slower for rows that are not whole 16 bytes: nobody pads them.
    Adapters' products are bound by bytes."""
    padded = run.compile or stack_of(run).pads_vocabulary or part == "adapters"
    return not padded and kind in ("fp16", "bf16") and gpu_kernels.measured(kind)


@lru_cache(maxsize=256)
def _multiplied(spec: ModelSpec, run: Training) -> tuple[tuple[Product, str, tuple[Sized, ...]], ...]:
    """Return each layer's products on one device: the layer, their dtype, and (m, n, k) of the forward product, which
    comes first, of its input's gradient and of its weight's, each with how often a micro-batch has it."""
    dtype, rows = peak_dtype(run), run.tokens // run.cp
    narrow = "mxfp8" if run.fp8_recipe == "mxfp8" else "fp8"
    in_fp32 = {"adapters"} if multiplied_wide(run) else set()
    if bytes_of(run).compute == 4:  # peft leaves what is not quantized in fp32
        in_fp32 |= {"head"}
    found = []
    for product in products(spec, run):
        m, n, k = rows * product.copies, product.outputs, product.inputs
        if product.part == "head":
            m = run.scored // run.cp
        if product.cut == "outputs":
            n = n // run.tp or 1
        elif product.cut == "inputs":
            k = k // run.tp or 1
        kind = "fp32" if product.part in in_fp32 else narrow if run.fp8_recipe and product.part in CONVERTED else dtype
        times = 1
        if run.kernels == "liger" and product.part == "head":
            m = loss_chunk(spec, m)
            times = -(-rows // m)
        forward = (m, n, k, kind), times * (product.forward + product.again)
        sizes = forward, ((m, k, n, kind), times * product.input_gradient)
        weight = (((n, k, m, kind), times * product.weight_gradient),) if product.weight_gradient else ()
        found.append((product, kind, (*sizes, *weight)))
    return tuple(found)


def attention_seconds(spec: ModelSpec, run: Training, gpu_kernels: Kernels) -> float | None:
    """Return the seconds of attention's kernels, on a device with an equal share of all layers; of eager attention
    those of its products. None for a dtype that the card has no units for."""
    kernel = attention_kernel(spec, run, gpu_kernels.card)
    qk, v = head_sizes(spec)
    heads, length = max(1, spec.heads // run.tp), run.seq_len
    first = gradients_of_first_block(spec, run)
    without = 1 if first and not any(first[f"scores {name}"] for name in "qkv") else 0
    fused = kernel in ("flash", "efficient")
    again = attentions_again(spec, run, fused)
    # The package flash-attn has no fp32: transformers casts queries, keys and values to the weights' half before it
    # (modeling_flash_attention_utils.py, fa_peft_integration_check).
    wide = kernel == "math" or (bytes_of(run).compute == 4 and run.attention != "flash")
    dtype = "fp32" if wide else peak_dtype(run)
    if fused:
        name, masked = fastest_kernel(run, kernel, gpu_kernels.card), masked_layers(spec, run) / spec.layers
        whole = name if name == "cudnn" else "efficient"  # FlashAttention takes no mask; under one all scores count
        total, head_size = 0.0, (qk + v) // 2
        for kernel_, times in ((name, 1 - masked), (whole, 2 * masked)):
            forward = gpu_kernels.attention(run.sequences, heads, length, head_size, kernel_, dtype)
            back = (spec.layers - without) * gpu_kernels.backward(kernel_, head_size)
            total += times * forward * (spec.layers + again + back)
        if run.objective.critic:
            total += attention_seconds(spec, value_run(run), gpu_kernels) or 0.0
        for other in others(spec, run):
            total += other.passes * other.spec.layers * gpu_kernels.attention(
                run.sequences, other.spec.heads, length, sum(head_sizes(other.spec)) // 2, name, dtype
            )
    else:
        rows = run.sequences * heads * length
        scores, values = gpu_kernels.product(rows, length, qk, dtype), gpu_kernels.product(rows, v, length, dtype)
        if scores is None or values is None:
            return None
        total = (scores + values) * (spec.layers + again + 2 * (spec.layers - without))
    return total * run.accumulation / run.pp / run.cp


def fastest_kernel(run: Run, kernel: str, card: GPU) -> str:
    """Return `kernel`, or whose is taken where it is FlashAttention's: "cudnn" where SDPA takes cuDNN's attention
    first, if torch brings one newer than 9.15, as its wheels for CUDA 13 do.
    torchtitan asks for it (torchtitan/models/attention.py), and Transformer Engine has it. On AMD's cards "ck" of
    Transformer Engine, and where no SDPA is between."""
    if kernel != "flash":
        return kernel
    if card.vendor == "AMD":
        own = stack_of(run).own_kernels or (run.attention == "flash" and not stack_of(run).lists_kernels)
        return "ck" if own else kernel
    return "cudnn" if run.attention == "sdpa" and card.prefers_cudnn_attention else kernel


def token_seconds(spec: ModelSpec, run: Inference, rates: Efficiency, eager: bool = True) -> tuple[float, float] | None:
    """Return the seconds to the first token (prefill) and from one to the next (decode, in the generation's middle).

    Each pass takes as long as the roofline of these rates says or, if `eager`, as long as the CPU needs to launch its
    kernels, whichever is longer; `eager` also expands latents as transformers does. False is for an engine that
    launches kernels from a CUDA graph. Returns None if the rate of the run's dtype was never measured.
    """
    rate = rates.matmul.get(peak_dtype(run))
    if rate is None:
        return None
    host = generation_host_seconds(spec, rates) if eager else 0.0
    passes = prefill_pass(spec, run), decode_pass(spec, run, absorbed=not eager)
    first, token = (one.seconds(rate, rates.bandwidth) for one in passes)
    return max(first, host), max(token, host)
