"""Seconds of a step from its FLOP and its bytes, at the rates that the card was measured to reach; and its price.

    time = products / their rate + attention / its rate + bytes of everything else / bandwidth

or, where that is less than what the CPU takes to start the kernels, the CPU's time. Communication is assumed to
hide behind computation, as it does inside a node; across slow links it does not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...base.errors import NotAvailable
from ...hardware.gpu import GPU
from ...specs.model import ModelSpec
from ...specs.run import Inference, Precision, Run, Training
from ..memory.activations import FUSED, block_saved
from ..memory.share import adapted, share_of
from ..memory.states import block_parameters, states
from .efficiency import Efficiency, efficiency
from .flops import flops
from .offload import offloaded_step
from .roofline import decode_pass, prefill_pass

# How often element-wise operators move each byte that a block keeps for backward, forward and backward together:
# counted by the simulator on transformers' classes, one operator at a time (a test repeats the count).
# Llama-like blocks write their norms and rotations out in many operators; a LayerNorm is one.
MOVES = {"rmsnorm": 17.3, "layernorm": 5.2}
MOVES_SAME_DTYPE = {"rmsnorm": 17.3, "layernorm": 3.6}  # without autocast's copies
# A gated MLP keeps 4 tensors: SiLU and the product move 5 forward, and 9 backward.
GATED_MOVES, GATED_RECOMPUTED = 3.5, {None: 1.0, "selective": 1.2, "full": 1.36}
SCORE_MOVES = 11.0  # of eager attention's scores
RECOMPUTED = {None: 1.0, "selective": 1.3, "full": 1.6}
LORA_MOVES, QUANTIZED_MOVES = 1.1, 1.27  # casts to the adapters' fp32, and to and from the products' half precision
LOGITS_MOVES = 10.0  # of the logits in fp32, by the loss
OPERATORS = {"rmsnorm": 110, "layernorm": 50}  # kernels per block, forward and backward; adapters add theirs
OPERATORS_ADAPTER = 10
STATE_MOVES = 7  # AdamW reads weight, gradient and two moments, and writes three of them


def step_seconds(spec: ModelSpec, run: Run, card: GPU | None) -> float | None:
    """Return the seconds of one device's optimizer step, or of a whole generation; None where the card's rates, or one
    that this run needs, were never measured, and for compiled and Liger's steps, of which there is no record. An
    offloaded step's seconds are those on the host the card is sold with (`offload.offloaded_step`)."""
    rates = efficiency(card) if card else None
    return seconds_at(spec, run, card, rates) if rates and card else None


def seconds_at(spec: ModelSpec, run: Run, card: GPU, rates: Efficiency) -> float | None:
    """Return what `step_seconds` does, at these rates."""
    if isinstance(run, Inference):
        found = token_seconds(spec, run, rates)
        return None if found is None else found[0] + (run.new_tokens - 1) * found[1]
    computed = passes_seconds(spec, run, card, rates)
    if computed is None:
        return None
    if run.offload:
        try:
            return offloaded_step(spec, run, card, computed).seconds
        except NotAvailable:  # a card that no host in the table has
            return None
    return computed + update_seconds(spec, run, rates)


def passes_seconds(spec: ModelSpec, run: Training, card: GPU, rates: Efficiency) -> float | None:
    """Return the seconds of all forward and backward passes of a step on one device; None as `step_seconds`."""
    products = None if run.compile or run.kernels else product_seconds(spec, run, card, rates)
    if products is None:
        return None
    computed = sum(products.values()) + sum(moved(spec, run, card)) / rates.bandwidth
    return max(computed, host_seconds(spec, run, rates))


def update_seconds(spec: ModelSpec, run: Training, rates: Efficiency) -> float:
    """Return the seconds of the optimizer's update on one device."""
    return states(spec, run).trained * STATE_MOVES * 4 / rates.bandwidth


def host_seconds(spec: ModelSpec, run: Training, rates: Efficiency) -> float:
    """Return the seconds the CPU takes to start the kernels of one device's forward and backward passes."""
    adapters = sum(linear.count for linear in adapted(spec, run))
    operators = (OPERATORS[spec.norm] * spec.layers + OPERATORS_ADAPTER * adapters) / run.pp
    # About one view comes with each operator; the half of them in backward is called without Python.
    each = (rates.dispatch + rates.view) * (1 + rates.backward_dispatch) / 2
    host = run.accumulation * operators * RECOMPUTED[run.checkpointing] * each
    if run.quantization:
        quantized = sum(linear.count for linear in spec.block_linears)
        host += run.accumulation * quantized * (3 if run.checkpointing == "full" else 2) * rates.custom
    return host


def tokens_of(run: Run) -> int:
    """Return the tokens of a step over all devices: trained on, or generated."""
    if isinstance(run, Training):
        return run.global_batch * run.seq_len
    return run.batch * run.new_tokens


def mfu(spec: ModelSpec, run: Run, card: GPU, seconds: float) -> float | None:
    """Return model FLOPs utilisation: the FLOP that the model needs (recomputation is not counted: PaLM, arXiv
    2204.02311, appendix B) over what the card could do at its data sheet's peak; None where it has none."""
    return _utilisation(flops(spec, run, card).model, run, card, seconds)


def hfu(spec: ModelSpec, run: Run, card: GPU, seconds: float) -> float | None:
    """Return hardware FLOPs utilisation: like `mfu`, with all that is computed, recomputation too."""
    return _utilisation(flops(spec, run, card).total, run, card, seconds)


def _utilisation(count: int, run: Run, card: GPU, seconds: float) -> float | None:
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


def product_seconds(spec: ModelSpec, run: Training, card: GPU, rates: Efficiency) -> dict[str, float] | None:
    """Return the seconds of products and attention by part (as `Flops.by_part`), on a device with an equal share of
    all; None where a rate they need was never measured."""
    share, dtype = share_of(spec, run, card), peak_dtype(run)
    in_fp32 = {"adapters"} if not run.precision.startswith("autocast") else set()
    if share.bytes.compute == 4:  # peft leaves what is not quantized in fp32
        in_fp32 |= {"head", "scores"}
    elif share.kernel == "math":
        in_fp32 |= {"scores"}
    seconds = {}
    for part, count in flops(spec, run, card).by_part.items():
        fused = part == "scores" and share.fused
        rate = (rates.attention if fused else rates.matmul).get("fp32" if part in in_fp32 else dtype)
        if rate is None:
            return None
        # A fused kernel leaves out the half that is masked.
        seconds[part] = count / (2 if fused else 1) / rate / run.world_size
    return seconds


AUTOCAST: dict[str, Precision] = {"fp16": "autocast-fp16", "bf16": "autocast-bf16"}


class Moved(NamedTuple):
    """Bytes of a step's element-wise operators: in blocks, and in the loss, which only the last pipeline stage has."""

    blocks: float
    loss: float


def moved(spec: ModelSpec, run: Training, card: GPU | None = None) -> Moved:
    """Return the bytes that everything but products and the update moves on one device in a step, by where.

    Norms and dropout between tensor-parallel products are divided by sequence parallelism only (arXiv 2205.05198,
    section 4.2).
    """
    precision = run.precision
    if run.quantization:  # an fp32 stream between products in half precision
        precision = AUTOCAST.get(run.compute_dtype, precision)
    share = share_of(spec, replace(run, lora=None, quantization=None, checkpointing=None, precision=precision), card)
    b = share.bytes
    kept = {"scores": 0.0, "mlp": 0.0, "rest": 0.0}
    for one in block_saved(share):
        divided = run.tp if one.split or run.sequence_parallel else 1
        kept[one.kind if one.kind in kept and (spec.gated or one.kind != "mlp") else "rest"] += one.bytes / divided
    moves = (MOVES if share.autocast else MOVES_SAME_DTYPE)[spec.norm]
    if spec.norm == "layernorm" and spec.activation not in FUSED:
        moves *= 1.2  # GELU's formula written out
    wider = QUANTIZED_MOVES if run.quantization else 1.0
    # Autocast casts each weight down for every pass (6 bytes moved), and its gradient up.
    casts = 0 if run.quantization or b.weights == b.compute else 6 if run.lora else 12
    block = (
        kept["rest"] * moves * RECOMPUTED[run.checkpointing] * (LORA_MOVES if run.lora else 1.0) * wider
        + kept["mlp"] * GATED_MOVES * GATED_RECOMPUTED[run.checkpointing] * wider
        + kept["scores"] * SCORE_MOVES * wider
    )
    logits = LOGITS_MOVES * 4 * share.tokens * spec.vocab / run.tp
    blocks = spec.layers / run.pp * (block + casts * block_parameters(spec) / run.tp)
    return Moved(run.accumulation * blocks, run.accumulation * logits)


def token_seconds(spec: ModelSpec, run: Inference, rates: Efficiency, eager: bool = True) -> tuple[float, float] | None:
    """Return the seconds to the first token (prefill) and from one to the next (decode, in the generation's middle).

    Each pass is on the roofline of these rates or, `eager`, takes as long as the CPU does to start its kernels, and
    expands latents as transformers does; False is for an engine that starts kernels from a CUDA graph. None where the
    rate of the run's dtype was never measured.
    """
    rate = rates.matmul.get(peak_dtype(run))
    if rate is None:
        return None
    host = OPERATORS[spec.norm] / 2 * spec.layers * (rates.dispatch + rates.view) if eager else 0.0
    passes = prefill_pass(spec, run), decode_pass(spec, run, absorbed=not eager)
    first, each = (one.seconds(rate, rates.bandwidth) for one in passes)
    return max(first, host), max(each, host)
