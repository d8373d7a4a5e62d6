"""Seconds of a step from its FLOP and its bytes, at the rates that the card was measured to reach; and its price.

    time = products / their rate + attention / its rate + bytes of everything else / bandwidth

or, where that is less than what the CPU takes to start the kernels, the CPU's time. Communication is taken to hide
behind computation, as it does inside a node; across slow links it does not.
"""

from __future__ import annotations

from dataclasses import replace

from ..hardware.gpu import GPU
from ..models.spec import ModelSpec
from ..runs import Inference, Run, Training
from .activations import FUSED, attention_kernel, block_saved
from .efficiency import Efficiency, efficiency
from .flops import Flops, flops, prefill
from .inference import kv_cache_bytes
from .precision import PRECISION, weight_bytes
from .states import block_parameters, states

# How often each byte that a block keeps for backward is moved by its element-wise operators, forward and backward
# together: counted by the simulator on transformers' classes, one operator at a time (a test repeats the count).
# Llama-like blocks write their norms and rotations out in many operators; a LayerNorm is one.
MOVES = {"rmsnorm": 17.3, "layernorm": 5.2}
MOVES_SAME_DTYPE = {"rmsnorm": 17.3, "layernorm": 3.6}  # without autocast's copies
# A gated MLP keeps 4 tensors: SiLU and the product move 5 forward, and 9 backward.
GATED_MOVES, GATED_RECOMPUTED = 3.5, {None: 1.0, "selective": 1.2, "full": 1.36}
SCORE_MOVES = 11.0  # of eager attention's scores
RECOMPUTED = {None: 1.0, "selective": 1.3, "full": 1.6}
LORA_MOVES, QUANTIZED_MOVES = 1.1, 1.27  # casts to the adapters' fp32, and to and from the products' half precision
LOGITS_MOVES = 10.0  # of the logits in fp32, by the loss
OPERATORS = {"rmsnorm": 110, "layernorm": 50}  # kernels a block starts, forward and backward; adapters add theirs
OPERATORS_ADAPTER = 10
STATE_MOVES = 7  # AdamW reads weight, gradient and two moments, and writes three of them


def step_seconds(spec: ModelSpec, run: Run, card: GPU | None) -> float | None:
    """Return the seconds of one optimizer step, or of a whole generation; None where the card's rates, or one that
    this run needs, were never measured, and for compiled, Liger's, and offloaded steps, of which there is no record."""
    rates = efficiency(card) if card else None
    return seconds_at(spec, run, card, rates) if rates and card else None


def seconds_at(spec: ModelSpec, run: Run, card: GPU, rates: Efficiency) -> float | None:
    """Return what `step_seconds` does, at these rates."""
    if isinstance(run, Inference):
        return _generation_seconds(spec, run, rates)
    if run.compile or run.kernels or run.offload:
        return None
    products = _product_seconds(spec, run, card, rates)
    if products is None:
        return None
    moved = traffic(spec, run, card) / rates.bandwidth
    held = states(spec, run)
    update = held.trained * STATE_MOVES * 4 / rates.bandwidth
    adapters = sum(each.count for each in spec.linears if run.lora and each.name in run.lora.targets)
    operators = OPERATORS[spec.norm] * spec.layers + OPERATORS_ADAPTER * adapters
    # With each operator comes about one view; the half in backward is called without Python.
    each = (rates.dispatch + rates.view) * (1 + rates.backward_dispatch) / 2
    host = run.accumulation * operators * RECOMPUTED[run.checkpointing] * each
    if run.quantization:
        quantized = sum(each.count for each in spec.linears if each.part not in ("head", "router"))
        host += run.accumulation * quantized * (3 if run.checkpointing == "full" else 2) * rates.custom
    bubble = (run.pp - 1) / (run.accumulation + run.pp - 1) if run.pp > 1 else 0.0
    return max(products + moved, host) / (1 - bubble) + update


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
    return run.precision.split("-")[-1]


def training_days(parameters: float, tokens: float, card: GPU, cards: int, utilisation: float) -> float:
    """Return the days that 6ND FLOP take on `cards` cards at this MFU of their bf16 (else fp16) peak."""
    peak = card.peak("bf16") or card.peak("fp16") or card.peak_flops["fp32"]
    return 6 * parameters * tokens / (cards * peak * utilisation) / 86400


def price(card: GPU, card_hours: float, usd_per_hour: float | None = None) -> float | None:
    """Return US dollars for `card_hours`, at your rate or the table's (see the card's sources and date); None without
    either."""
    rate = card.usd_per_hour if usd_per_hour is None else usd_per_hour
    return None if rate is None else card_hours * rate


def _product_seconds(spec: ModelSpec, run: Training, card: GPU, rates: Efficiency) -> float | None:
    """Return the seconds of products and attention on one device."""
    counted: Flops = flops(spec, run, card)
    dtype = peak_dtype(run)
    plain = run.quantization is not None and not run.precision.startswith("autocast")
    wide = "fp32" if plain else dtype  # peft leaves what is not quantized in fp32
    seconds = 0.0
    for part, count in counted.by_part.items():
        kind = dtype
        if part == "head" or part == "scores":
            kind = wide
        elif part == "adapters" and not run.precision.startswith("autocast"):
            kind = "fp32"
        fused = part == "scores" and attention_kernel(spec, run, card, cpu=False) in ("flash", "efficient")
        # A fused kernel leaves out the half that is masked.
        rate = rates.attention.get(kind) if fused else rates.matmul.get(kind)
        if rate is None:
            return None
        seconds += count / (2 if fused else 1) / rate
    return seconds / run.world_size


def traffic(spec: ModelSpec, run: Training, card: GPU | None = None) -> float:
    """Return the bytes that everything but products moves on one device in a step, the update apart."""
    precision = run.precision
    if run.quantization and not precision.startswith("autocast"):
        precision = f"autocast-{precision}"  # an fp32 stream between products in half precision
    whole = replace(run, lora=None, quantization=None, checkpointing=None, precision=precision)
    b = PRECISION[precision]
    kept = {"scores": 0, "mlp": 0, "rest": 0}
    for one in block_saved(spec, whole, b, card):
        kept[one.kind if one.kind in kept and (spec.gated or one.kind != "mlp") else "rest"] += one.bytes
    moves = (MOVES if b.residual != b.compute else MOVES_SAME_DTYPE)[spec.norm]
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
    logits = LOGITS_MOVES * 4 * run.tokens // run.cp * spec.vocab
    return run.accumulation * (spec.layers * (block + casts * block_parameters(spec)) / run.pp + logits) / run.tp


def _generation_seconds(spec: ModelSpec, run: Inference, rates: Efficiency) -> float | None:
    """Return the seconds of prefill, bound by FLOP or by reading the weights, and of decoding, by reading the weights
    and the cache for every token."""
    dtype = peak_dtype(run)
    rate = rates.matmul.get(dtype)
    if rate is None:
        return None
    quantized = run.weights in ("nf4", "int8")
    read = weight_bytes(run.weights if quantized or run.weights != "fp32" else "fp32", spec.active_parameters, 0)
    read -= 0 if spec.tied else 2 * spec.vocab * spec.hidden  # an embedding is looked up, not read
    read /= run.tp
    first = max(prefill(spec, run) / run.tp / rate, read / rates.bandwidth)
    cache = kv_cache_bytes(spec, run) * (run.prompt_len + run.new_tokens / 2) / run.seq_len
    host = OPERATORS[spec.norm] / 2 * spec.layers * (rates.dispatch + rates.view)
    each = max((read + cache) / rates.bandwidth, host)
    return max(first, host) + (run.new_tokens - 1) * each
