"""Seconds of a step on one device, from its kernels' times and its bytes, and its price.

    time = matmuls + attention + bytes of everything else / bandwidth

If the CPU needs longer to launch the kernels, its time counts instead. The optimizer's update, which the CPU launches
too, comes after that. `kernels` has the times of matmuls and attention on a GPU. A compiled step fuses the operators
between matmuls.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ...base.errors import NotAvailable
from ...hardware.gpu import GPU, clocks
from ...hardware.nodes import to_host
from ...specs.model import ModelSpec
from ...specs.run import Inference, Run, Training, stack_of
from .. import gptq, newton_schulz
from ..again import attentions_again
from ..memory.float8 import CONVERTED
from ..memory.fsdp import uses_fsdp
from ..memory.methods import offloaded, other_models, value_run
from ..memory.precision import PRECISION
from ..memory.share import (
    adapter_bytes,
    attention_kernel,
    by_bitsandbytes,
    bytes_of,
    expert_bytes,
    masked_layers,
    unpacked_bytes,
)
from ..memory.states import States, states
from ..memory.temporaries import loss_chunk
from .efficiency import Efficiency, efficiency
from .elementwise import OWN_LOGITS, moved
from .flops import flops, head_sizes
from .host import generation_host_seconds, host_seconds, small_kernels, started, update_host_seconds
from .kernels import HOST, Kernels, kernels
from .offload import waiting
from .products import Product, gradients_of_first_block, multiplied_wide, products
from .roofline import decode_pass, prefill_pass
from .stacks.megatron import window_share

# torch/optim/adam.py, _multi_tensor_adam: 21 reads and writes of a list of tensors (mul 2, lerp 3, mul 2, addcmul 4,
# sqrt 2, div 2, add 2, addcdiv 4). A fused kernel needs 7.
FOREACH = 3
# Its 8 operators on lists launch a kernel per 320 blocks of 64 Ki elements, if torch is built for CUDA 12; built for
# CUDA 13, it launches one per 2,240 blocks (aten/src/ATen/native/cuda/MultiTensorApply.cuh).
FOREACH_OPERATORS, FOREACH_ELEMENTS = 8, 320 * 65536
# torch/optim/_adafactor.py, _single_tensor_adafactor: norms of the weight, of the gradient's rows and columns, and of
# the update (4), the product of the row and column factors (1), div (2), clamp (2), rsqrt (2), mul (3), add (3).
ADAFACTOR = 17
# Seconds per parameter of bitsandbytes' blockwise 8-bit AdamW on one multiprocessor. It looks states up in a table, and
# these lookups limit it, not bandwidth: 8.03e9 parameters took 220 ms on the 132 multiprocessors of an H200
# (kOptimizerStatic8bit2StateBlockwise, bitsandbytes 0.50.2, torch 2.11, 2026-11-26), nine times as long as their bytes.
EIGHT_BIT = 132 * 0.2204 / 8.03e9
EIGHT_BIT_UPDATE = "bitsandbytes::optimizer_update_8bit_blockwise"  # the operator
# How many times as long matmuls take if a row is no multiple of 16 bytes, by compute capability. No such matrix is in
# the measured grids. With a vocabulary of 50,257, the head's matmuls on an A100 took almost 3 times as long as with
# 50,304 (PyTorch's blog, Accelerating Large Language Models, 2023-04: 113 ms per step, then 87). Hopper has no kernels
# of its own for such rows and runs those of the A100. Its multiprocessors and clocks make these 1.5 times as fast, but
# its own kernels are 2.6 times as fast, so such rows take 5 times as long. A small matmul with rows of 588 took 3.5
# times as long as with 592 (m87-labs/kestrel, pull request 143), and steps of nanotron with a head of 50,257 tokens
# took a little longer than a factor of 5 predicts (benchmarks/time/throughputs.toml, nanotron-old-bench). The factor is
# 1.4 on an RTX 4090 (pytorch/pytorch, issue 181718), and can be 1.2 with CUDA 13 (ml-explore/mlx, issue 2712). Inductor
# pads such rows since torch 2.1 (torch._inductor.config.shape_padding), and Megatron-LM pads its vocabulary. On other
# chips, the factor may be as large as on the first.
ALIGNED, UNALIGNED = 8, {(8, 0): 3.0, (9, 0): 5.0}
Sized = tuple[tuple[int, int, int, str], int]  # (m, n, k, dtype) of a matmul, and its count
UNPACKED = 2.5  # bytes moved per packed weight before each matmul: 4 bits read and 16 bits written


class Passes(NamedTuple):
    """Seconds of all forward and backward passes of a step on one device.

    `products` has matmuls by part, as `Flops.by_part` without "scores", which is `attention`. `host` is the time until
    the CPU has launched all kernels, including its waits for the GPU.
    """

    products: dict[str, float]
    attention: float
    elementwise: float
    loss: float
    host: float

    @property
    def gpu(self) -> float:
        """Seconds of the GPU, if it never waits for the CPU."""
        return sum(self.products.values()) + self.attention + self.elementwise + self.loss

    @property
    def seconds(self) -> float:
        """The seconds of the GPU or of the CPU, whichever is longer."""
        return max(self.gpu, self.host)


class Outside(NamedTuple):
    """Seconds of matmuls that differ from the measured ones.

    `extrapolated_s`: matmuls larger or smaller than any measured. `misaligned_s`: 16-bit matmuls with rows that are no
    multiple of 16 bytes. On chips for which `UNALIGNED` has a factor, the latter include this factor, and may take
    `maybe_less_s` less. On other chips they may take `maybe_more_s` more.
    """

    extrapolated_s: float
    misaligned_s: float
    maybe_less_s: float
    maybe_more_s: float


class Backward(NamedTuple):
    """Seconds of the two matmuls in a layer's backward pass: the gradients of its input and of its weight."""

    input: float
    weight: float


class Traced(NamedTuple):
    """Seconds of a step whose kernels were traced one by one (`simulate`), which replace those of the formulas.
    `attention` is the attention kernel, named as in `share.attention_kernel`. The GPU waits `waited` seconds in the
    passes for the CPU to launch these kernels."""

    passes: Passes
    update: float
    attention: str
    waited: float = 0.0


def step_seconds(spec: ModelSpec, run: Run, gpu: GPU | None) -> float | None:
    """Return the seconds of one device's optimizer step, or of a whole generation.

    Return None if a rate that the run needs is unknown: for a generation on a GPU that was never measured, for
    offloading over a link that is not in the table, and for a dtype that the GPU has no units for.
    """
    if gpu is None:
        return None
    if isinstance(run, Inference):
        rates = efficiency(gpu)
        seconds = token_seconds(spec, run, rates) if rates else None
        return None if seconds is None else seconds[0] + (run.new_tokens - 1) * seconds[1]
    computed = passes(spec, run, gpu)
    try:
        return None if computed is None else computed.seconds + update_after(spec, run, kernels(gpu), computed)
    except NotAvailable:
        return None


def passes(spec: ModelSpec, run: Training, gpu: GPU) -> Passes | None:
    """Return the seconds of a step's forward and backward passes by kind of work, or None if the GPU has no units for
    the run's dtype."""
    gpu_kernels = kernels(gpu)
    multiplied = product_seconds(spec, run, gpu_kernels)
    attention = attention_seconds(spec, run, gpu_kernels)
    if multiplied is None or attention is None:
        return None
    sent, rates = moved(spec, run, gpu), gpu_kernels.operators
    slower = sent.strided * (1 / rates.strided - 1 / rates.bandwidth)
    blocks = sent.blocks / gpu_kernels.bandwidth + slower + small_kernels(spec, run) * rates.launch
    host = host_seconds(spec, run, gpu_kernels.host)
    for other in other_models(spec, run):  # a forward pass costs as much as full recomputation adds
        again, once = (replace(run.update, lora=None, checkpointing=kind) for kind in ("full", None))
        both = [moved(other.spec, each, gpu).blocks / gpu_kernels.bandwidth for each in (again, once)]
        blocks += other.passes * (both[0] - both[1])
        both = [started(other.spec, each).seconds(gpu_kernels.host) for each in (again, once)]
        host += other.passes * (both[0] - both[1])
    if run.reference_model == "offloaded":  # to the GPU and back by Module.to, whose host memory is pageable
        blocks += 2 * offloaded(spec, run) / to_host(gpu, pinned=False)
    if run.objective.critic:
        value = value_run(run)
        blocks += moved(spec, value, gpu).blocks / gpu_kernels.bandwidth
        host += host_seconds(spec, value, gpu_kernels.host)
    loss = sent.loss + (sent.again if rates.exceeds_cache(sent.row) else 0.0)
    made = Passes(multiplied, attention, blocks, loss / gpu_kernels.bandwidth, host)
    return made._replace(host=made.host + host_waits(run, made))


def update_after(
    spec: ModelSpec, run: Training, gpu_kernels: Kernels, computed: Passes, update: float | None = None
) -> float:
    """Return the seconds that one device's step continues after its passes, until the update has ended.

    `update` is the GPU's time for it, by default that of `update_seconds`. The CPU launches the update after it has
    launched the passes, and may be slower than the GPU. With offloading, the CPU computes the update itself
    (`offload.waiting`).
    """
    if run.offload:
        return waiting(spec, run, gpu_kernels.gpu, computed.seconds).seconds
    update = update_seconds(spec, run, gpu_kernels) if update is None else update
    ahead = 0.0 if stack_of(run).checks_gradients else computed.seconds - computed.host
    return max(update, update_host_seconds(spec, run, gpu_kernels.host) - ahead)


def host_waits(run: Training, computed: Passes) -> float:
    """Return the seconds that the CPU waits for the GPU during a step's passes, in addition to its own work."""
    waits = stack_of(run).cuda_launch_blocking
    return computed.gpu if waits else loss_waits(run, computed.products.get("head", 0.0), computed.loss)


def loss_waits(run: Training, head: float, loss: float) -> float:
    """Return how many of these seconds of the head and the loss the CPU waits for the GPU: all of them if it waits for
    each kernel, and those of the forward pass if it checks each micro-batch's loss before the backward pass."""
    stack = stack_of(run)
    if stack.cuda_launch_blocking:
        return head + loss
    if not stack.checks_losses:
        return 0.0
    forward, backward = OWN_LOGITS[stack.name][stack.cross_entropy_fusion_impl]
    return head / (2 if run.lora else 3) + forward / (forward + backward) * loss  # a frozen head has no weight gradient


def update_seconds(spec: ModelSpec, run: Training, gpu_kernels: Kernels) -> float:
    """Return the seconds of the optimizer's update on one device.

    The update reads the weight (or its fp32 master copy), the gradient and the states, and writes all of them except
    the gradient. torch's AdamW moves these bytes `FOREACH` times, unless it is fused. A master copy needs an fp32
    gradient, and is then cast into the weights.
    """
    b, sizes = PRECISION[run.precision], states(spec, run)
    weight, gradient, state = 3 * (adapter_bytes(run),) if run.lora else (b.master or b.weights, b.gradients, b.states)
    moments = {"adamw": 2 * state, "adamw-fused": 2 * state, "adamw-8bit": 2, "lion": 4,
               "muon": state}.get(run.optimizer, 0)  # fmt: skip
    copies = 0
    if b.master and not run.lora:
        if not uses_fsdp(run):  # FSDP2's shards and reduced gradients are already fp32
            copies = b.master + b.weights + (gradient + b.master if gradient < b.master else 0)
        gradient = b.master
    orthogonal = _orthogonal_seconds(spec, run, gpu_kernels) if run.optimizer == "muon" else 0.0
    times = FOREACH if foreach_adamw(run) else 1
    passes = ADAFACTOR * weight if run.optimizer == "adafactor" else times * (2 * weight + gradient + 2 * moments)
    models = 2 if run.objective.critic else 1
    moved = models * sizes.trained * (passes + copies) / gpu_kernels.bandwidth
    if run.optimizer == "adamw-8bit":
        moved = max(moved, EIGHT_BIT * sizes.trained / gpu_kernels.operators.sms)
    if foreach_adamw(run):
        moved += FOREACH_OPERATORS * sizes.trained / FOREACH_ELEMENTS * gpu_kernels.operators.launch
    return moved + orthogonal + _paged_seconds(run, sizes, gpu_kernels.gpu)


def foreach_adamw(run: Training) -> bool:
    """Whether the optimizer is torch's AdamW on lists of tensors (foreach), the default. Some stacks use a fused AdamW,
    and engines update master copies with a fused kernel."""
    masters = PRECISION[run.precision].master and not uses_fsdp(run)
    return run.optimizer == "adamw" and not stack_of(run).fused_adamw and not masters


def _paged_seconds(run: Training, sizes: States, gpu: GPU) -> float:
    """Return the seconds in which the driver pages optimizer states in and out, if they do not fit on the device.

    All states move in both directions, because the driver evicts the least recently used pages, and every update visits
    the states in the same order. bitsandbytes prefetches the states of a tensor before it updates it
    (bitsandbytes/optim/optimizer.py, prefetch_state). PCIe carries both directions at the same time: the only published
    run, on an RTX 4090, took half as long as one direction after the other would.
    """
    if not stack_of(run).paged(run):
        return 0.0
    paged = 2 * sizes.trained
    fits = sizes.weights + paged <= gpu.memory
    return 0.0 if fits else paged / to_host(gpu)


def _orthogonal_seconds(spec: ModelSpec, run: Training, gpu_kernels: Kernels) -> float:
    """Return the seconds of Muon's matmuls on a device with an equal share of all layers. Every data-parallel rank
    computes all of them."""
    total = 0.0
    for rows, columns, count in newton_schulz.matrices(spec):
        for m, n, k in newton_schulz.products(rows, columns):
            total += count * (gpu_kernels.matmul(m, n, k, "bf16") or gpu_kernels.matmul(m, n, k, "fp32") or 0.0)
    return newton_schulz.ITERATIONS * total / run.pp


def tokens_of(run: Run) -> int:
    """Return the number of tokens that all devices together train on in a step, or generate."""
    if isinstance(run, Training):
        return run.global_batch * run.seq_len
    return run.batch * run.new_tokens


def mfu(spec: ModelSpec, run: Run, gpu: GPU, seconds: float) -> float | None:
    """Return model FLOPs utilisation, or None if the data sheet has no peak.

    It is the FLOP that the model needs, without recomputation (PaLM, arXiv 2204.02311, appendix B), divided by the FLOP
    that all GPUs could compute in `seconds` at their peak. As in that paper, attention counts without its mask. Causal
    kernels skip half of it, so with long sequences the result can exceed 100 %.
    """
    return utilisation(flops(spec, run, gpu).model, run, gpu, seconds)


def hfu(spec: ModelSpec, run: Run, gpu: GPU, seconds: float) -> float | None:
    """Return hardware FLOPs utilisation: like `mfu`, but counting all computed FLOP, including recomputation."""
    return utilisation(flops(spec, run, gpu).total, run, gpu, seconds)


def utilisation(count: int, run: Run, gpu: GPU, seconds: float) -> float | None:
    """Return `count` FLOP divided by the FLOP that all GPUs could compute in `seconds` at the peak of the data sheet,
    also under a power limit, or None if the data sheet has no peak."""
    peak = gpu.peak(peak_dtype(run))
    return count / run.world_size / seconds / peak * clocks(gpu) if peak else None


def peak_dtype(run: Run) -> str:
    """Return the dtype of a run's matmuls, whose peak is the reference for utilisation."""
    if isinstance(run, Inference):
        return run.weights if run.weights in ("fp32", "fp16", "bf16") else "bf16"
    return run.compute_dtype


def price(gpu: GPU, gpu_hours: float, usd_per_hour: float | None = None) -> float | None:
    """Return the US dollars for `gpu_hours` hours of one GPU at `usd_per_hour`, by default the table's rate (its
    source and date are in the GPU's entry), or None if both are missing."""
    rate = gpu.usd_per_hour if usd_per_hour is None else usd_per_hour
    return None if rate is None else gpu_hours * rate


def product_seconds(spec: ModelSpec, run: Training, gpu_kernels: Kernels) -> dict[str, float] | None:
    """Return the seconds of matmuls with weights by part, on a device with an equal share of all layers, or None if the
    GPU has no units for a dtype."""
    seconds = _timed(spec, run, gpu_kernels)[0]
    return None if seconds is None else dict(seconds)


def outside(spec: ModelSpec, run: Training, gpu_kernels: Kernels) -> Outside:
    """Return the seconds of those matmuls in `product_seconds` whose shapes were not measured."""
    return _timed(spec, run, gpu_kernels)[1]


@lru_cache(maxsize=64)  # an estimate uses both results
def _timed(spec: ModelSpec, run: Training, gpu_kernels: Kernels) -> tuple[dict[str, float] | None, Outside]:
    seconds: dict[str, float] = {}
    extrapolated_s = misaligned_s = 0.0
    share, counted, times = run.accumulation / run.pp, *misaligned_factor(gpu_kernels.gpu)
    packed = ("attention", "mlp") if run.quantization else ()
    for matmul, kind, sizes in _multiplied(spec, run):
        _, n, k, _ = sizes[0][0]
        total, extrapolated = gpu_kernels.summed(sizes)
        if total is None:
            return None, Outside(0.0, 0.0, 0.0, 0.0)
        extrapolated_s += extrapolated * share
        if (n % ALIGNED or k % ALIGNED) and _is_misaligned(matmul.part, kind, run, gpu_kernels):
            misaligned_s += total * share
            total *= times if counted else 1.0
        if matmul.part == "experts":  # one grouped matmul, which reads the weights of all experts
            passes = matmul.forward + matmul.again + matmul.input_gradient + matmul.weight_gradient
            read = (1 if kind in ("fp8", "mxfp8") else 2) * n * k * spec.experts / run.ep
            total = max(total, passes * read / gpu_kernels.bandwidth)
        if matmul.part in packed and by_bitsandbytes(run):
            times_unpacked = matmul.forward + matmul.again + matmul.input_gradient
            total += times_unpacked * UNPACKED * n * k / gpu_kernels.bandwidth
        elif matmul.part in packed:
            total += _unpacking_seconds(matmul, run, gpu_kernels)
        seconds[matmul.part] = seconds.get(matmul.part, 0.0) + total * share
    more = (times - 1) * misaligned_s
    if counted:
        return seconds, Outside(extrapolated_s, misaligned_s + more, more, 0.0)
    return seconds, Outside(extrapolated_s, misaligned_s, 0.0, more)


def misaligned_factor(gpu: GPU) -> tuple[bool, float]:
    """Return whether `UNALIGNED` has a factor for the GPU's chip, and this factor, or else the smallest one: matmuls
    whose rows are no multiple of 16 bytes take, or may take, this many times as long."""
    chip = gpu.compute_capability or (0, 0)
    return chip in UNALIGNED, UNALIGNED.get(chip, min(UNALIGNED.values()))


def _unpacking_seconds(matmul: Product, run: Training, gpu_kernels: Kernels) -> float:
    """Return the seconds per micro-batch in which GPTQ's weights are unpacked: in the forward pass, and again with any
    checkpointing, even if it saves the outputs of matmuls. The backward pass reads the unpacked weights."""
    shifts, other_bytes = gptq.moved(matmul.inputs, matmul.outputs, *unpacked_bytes(run))
    once = shifts / gpu_kernels.operators.strided + other_bytes / gpu_kernels.bandwidth
    return matmul.forward * (2 if run.checkpointing else 1) * once


def columns_backward(spec: ModelSpec, run: Training, gpu_kernels: Kernels) -> tuple[Backward, ...]:
    """Return the seconds per micro-batch of the matmuls in the backward pass of a block's column-parallel layers, first
    those of attention, then those of the MLP, averaged over the blocks."""
    seconds = dict.fromkeys(("attention", "mlp"), Backward(0.0, 0.0))
    for matmul, _, sizes in _multiplied(spec, run):
        if matmul.cut == "outputs" and matmul.part in seconds:
            matmuls = (sizes[1][0], matmul.input_gradient), (sizes[-1][0], matmul.weight_gradient)
            input, weight = (times * (gpu_kernels.matmul(*size) or 0.0) / spec.layers for size, times in matmuls)
            before = seconds[matmul.part]
            seconds[matmul.part] = Backward(before.input + input, before.weight + weight)
    return tuple(seconds.values())


def _is_misaligned(part: str, kind: str, run: Training, gpu_kernels: Kernels) -> bool:
    """Whether misaligned rows slow down the matmuls of `part` in dtype `kind`: those in 16 bits, unless the rows are
    padded. Adapters' matmuls are limited by bandwidth anyway."""
    padded = run.compile or stack_of(run).pads_vocabulary or part == "adapters"
    return not padded and kind in ("fp16", "bf16") and gpu_kernels.measured(kind)


@lru_cache(maxsize=256)
def _multiplied(spec: ModelSpec, run: Training) -> tuple[tuple[Product, str, tuple[Sized, ...]], ...]:
    """Return the matmuls of each linear layer on one device, as (layer, dtype, sizes).

    `sizes` has the (m, n, k, dtype) of the forward matmul, of the input's gradient and of the weight's gradient, if
    there is one, in this order, each with its count per micro-batch.
    """
    dtype, rows = peak_dtype(run), run.tokens // run.cp
    narrow = "mxfp8" if run.fp8_recipe == "mxfp8" else "fp8"
    # torchao skips experts.
    narrow_parts = (*CONVERTED, "mtp", *["experts"] * (run.fp8 is None)) if run.fp8_recipe else ()
    in_fp32 = {"adapters"} if multiplied_wide(run) else set()
    if bytes_of(run).compute == 4:  # peft casts the weights that are not quantized to fp32
        in_fp32 |= {"head"}
    if expert_bytes(run) == 4:
        in_fp32 |= {"experts"}
    matmuls = []
    for matmul in products(spec, run):
        m, n, k = rows * matmul.copies, matmul.outputs, matmul.inputs
        if matmul.part == "head":
            m = run.scored // run.cp
        cut = run.tp
        if matmul.part == "experts":
            cut = run.expert_tp
            m = round(m * run.expert_imbalance) * cut // run.tp  # of the busiest rank
        if matmul.cut == "outputs":
            n = n // cut or 1
        elif matmul.cut == "inputs":
            k = k // cut or 1
        kind = "fp32" if matmul.part in in_fp32 else narrow if matmul.part in narrow_parts else dtype
        times = 1
        if run.kernels == "liger" and matmul.part == "head":
            m = loss_chunk(spec, m)
            times = -(-rows // m)
        forward = (m, n, k, kind), times * (matmul.forward + matmul.again)
        sizes = forward, ((m, k, n, kind), times * matmul.input_gradient)
        weight = (((n, k, m, kind), times * matmul.weight_gradient),) if matmul.weight_gradient else ()
        matmuls.append((matmul, kind, (*sizes, *weight)))
    return tuple(matmuls)


def attention_seconds(spec: ModelSpec, run: Training, gpu_kernels: Kernels) -> float | None:
    """Return the seconds of the attention kernels, or of the matmuls of eager attention, on a device with an equal
    share of all layers, or None if the GPU has no units for the dtype."""
    kernel = attention_kernel(spec, run, gpu_kernels.gpu)
    qk, v = head_sizes(spec)
    heads, length = max(1, spec.heads // run.tp), run.seq_len
    first = gradients_of_first_block(spec, run)
    without = 1 if first and not any(first[f"scores {name}"] for name in "qkv") else 0
    fused = kernel in ("flash", "efficient")
    again = attentions_again(spec, run, fused)
    # The flash-attn package does not support fp32, so transformers first casts queries, keys and values to the 16-bit
    # dtype of the weights (modeling_flash_attention_utils.py, fa_peft_integration_check).
    wide = kernel == "math" or (bytes_of(run).compute == 4 and run.attention != "flash")
    dtype = "fp32" if wide else peak_dtype(run)
    if fused:
        name, masked = fastest_kernel(spec, run, kernel, gpu_kernels.gpu), masked_layers(spec, run) / spec.layers
        whole = name if name == "cudnn" else "efficient"  # FlashAttention accepts no mask; with one, all scores count
        total, head_size = 0.0, (qk + v) // 2
        for kernel_, times in ((name, 1 - masked), (whole, 2 * masked)):
            forward = gpu_kernels.attention(run.sequences, heads, length, head_size, kernel_, dtype)
            back = (spec.layers - without) * gpu_kernels.backward(kernel_, head_size)
            total += times * forward * (spec.layers + again + back)
        if stack_of(run).own_kernels:
            total *= window_share(spec, run.seq_len)
        if run.objective.critic:
            total += attention_seconds(spec, value_run(run), gpu_kernels) or 0.0
        for other in other_models(spec, run):
            total += other.passes * other.spec.layers * gpu_kernels.attention(
                run.sequences, other.spec.heads, length, sum(head_sizes(other.spec)) // 2, name, dtype
            )
    else:
        rows = run.sequences * heads * length
        scores, values = gpu_kernels.matmul(rows, length, qk, dtype), gpu_kernels.matmul(rows, v, length, dtype)
        if scores is None or values is None:
            return None
        total = (scores + values) * (spec.layers + again + 2 * (spec.layers - without))
    return total * run.accumulation / run.pp / run.cp


def fastest_kernel(spec: ModelSpec, run: Run, kernel: str, gpu: GPU) -> str:
    """Return the kernel that runs. This is `kernel`, except that two others may replace "flash".

    "cudnn" runs where SDPA prefers cuDNN's attention, if torch comes with a cuDNN newer than 9.15, as its wheels for
    CUDA 13 do. torchtitan requests it (torchtitan/models/attention.py), and Transformer Engine includes it, with any
    dropout. On AMD's
    GPUs, "ck" runs with Transformer Engine, and if flash-attn is called without SDPA.
    """
    if kernel != "flash":
        return kernel
    if gpu.vendor == "AMD":
        own = stack_of(run).own_kernels or (run.attention == "flash" and not stack_of(run).lists_kernels)
        return "ck" if own else kernel
    drops = isinstance(run, Training) and not stack_of(run).own_kernels
    preferred = gpu.prefers_cudnn_attention(*head_sizes(spec), spec.attention_dropout if drops else 0.0)
    return "cudnn" if run.attention == "sdpa" and preferred else kernel


def token_seconds(spec: ModelSpec, run: Inference, rates: Efficiency, eager: bool = True) -> tuple[float, float] | None:
    """Return the seconds to the first token (prefill) and from one to the next (decode, in the generation's middle).

    Each pass takes as long as the roofline of these rates says or, if `eager`, as long as the CPU needs to launch its
    kernels, whichever is longer; `eager` also expands latents as transformers does. False is for an engine that
    launches kernels from a CUDA graph. Returns None if the rate of the run's dtype was never measured.
    """
    rate = rates.matmul.get(peak_dtype(run))
    if rate is None:
        return None
    launching = rates if rates.dispatch else efficiency(HOST)
    host = generation_host_seconds(spec, launching) if eager and launching else 0.0
    passes = prefill_pass(spec, run), decode_pass(spec, run, absorbed=not eager)
    first, token = (one.seconds(rate, rates.bandwidth) for one in passes)
    return max(first, host), max(token, host)
