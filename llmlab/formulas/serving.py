"""Sizing a service: what is left for the KV cache, how many requests that holds, how fast and at what price they run.

The memory is divided as vLLM does it (vllm/v1/worker/gpu_worker.py, determine_available_memory): a fraction of the
card, less weights, less the peak of one pass at the largest size allowed; all the rest is blocks of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

from ..base.errors import SpecError
from ..base.units import show_bytes
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu
from ..hardware.links import Group, node_link
from ..specs.model import ModelLike, ModelSpec
from ..specs.model import model as find_model
from ..specs.run import Inference
from .inference import inference_moments, kv_cache_bytes
from .time.communication import bytes_sent
from .time.efficiency import Efficiency, efficiency
from .time.flops import head_sizes
from .time.roofline import weights_read
from .time.step import peak_dtype, price

FRACTION = 0.92  # gpu_memory_utilization's default, vllm/config/cache.py, read 2026-11-21; 0.9 before 2026
# max_num_batched_tokens and max_num_seqs of vLLM's LLM class on an A100 or a smaller card (vllm/engine/arg_utils.py,
# get_batch_defaults, 2026): a server reads 2048 at once there; on an H100 8192, with up to 1024 requests.
READ_AT_ONCE, MAX_REQUESTS = 8192, 256
BLOCK = 16  # tokens per block of the cache

# Seconds that one all-reduce of a token's activations takes under NVLink, by cards: gpt-fast's README gives
# Llama-2-7B's rate on 1, 2, 4 and 8 A100s; this is how much longer than 1/t of one card's time a token takes, over its
# 64 all-reduces. It is latency, of kernels for small messages: NCCL assumes the same for every generation of NVLink.
ALL_REDUCE = {2: 18.1e-6, 4: 24.3e-6, 8: 29.0e-6}
# What share of the bandwidth kernels reach that unpack weights as they read: 1069 and 863 GB/s against 1397 in the same
# table, for 8 and 4 bits.
UNPACKING = {"int8": 0.765, "nf4": 0.617}


@dataclass(frozen=True)
class Serving:
    """A service on `cards` cards of one kind. Bytes are those on one card, seconds those of one request.

    `budget` = `weights` + `activations` + `other` + `kv_cache` (less than 0 where it does not fit). The cache's
    `blocks` hold `tokens`, those of `requests` at once. `first_token`: of a request that comes alone; `each_token`:
    with `running` at once, others' prompts read in between. Times and prices are None where no rate was measured.
    """

    gpu: str
    cards: int
    budget: int
    weights: int
    activations: int
    other: int
    kv_cache: int
    blocks: int
    tokens: int
    requests: int
    running: int
    first_token: float | None
    each_token: float | None
    tokens_per_second: float | None
    usd_per_million_tokens: float | None

    def __str__(self) -> str:
        if self.kv_cache <= 0:
            needed = f"weights and one forward pass need {show_bytes(self.budget - self.kv_cache)}"
            return f"{needed} on {self.gpu}, which leaves nothing of {show_bytes(self.budget)} for a KV cache"
        cache = f"a KV cache of {show_bytes(self.kv_cache)} on {self.cards} × {self.gpu}"
        text = f"{cache} holds {self.requests:,} requests"
        if self.each_token is None or self.tokens_per_second is None:
            return text
        text += f", and {self.running:,} concurrent requests generate {self.tokens_per_second:,.0f} tokens/s"
        cost = self.usd_per_million_tokens
        return text if cost is None else f"{text}, at ${cost:.2f} per million tokens"


def serving(
    model: ModelLike,
    run: Inference,
    gpu: GPU | str,
    fraction: float = FRACTION,
    read_at_once: int = READ_AT_ONCE,
    max_requests: int = MAX_REQUESTS,
    activations: int | None = None,
    usd_per_hour: float | None = None,
) -> Serving:
    """Return how many requests like `run` fit on `run.tp` cards of kind `gpu`, how fast they run, and at what price.

    `run.batch` is ignored: as many requests run at once as the cache has room for, at most `max_requests`.
    `activations`: the bytes that a pass of `read_at_once` tokens took, if you know them (engines log them at their
    start); else the formula's, which are too few for an engine that compiles or keeps buffers. `usd_per_hour`: of one
    card, else the table's.
    """
    spec, card = find_model(model), find_gpu(gpu)
    if not 0 < fraction <= 1:
        raise SpecError(f"fraction={fraction}: give a share of the GPU's memory, 0 < fraction <= 1")
    if read_at_once < 1 or max_requests < 1:
        raise SpecError(f"read_at_once={read_at_once}, max_requests={max_requests}: give 1 or more of each")
    sizes = divided(spec, run, card, fraction, read_at_once, max_requests, activations)
    one, room = _lone(run), max(sizes["kv_cache"], 0)
    blocks = room // kv_cache_bytes(spec, one, BLOCK)
    requests = room // kv_cache_bytes(spec, one, -(-run.seq_len // BLOCK) * BLOCK)
    running = min(requests, max_requests)
    timed = _times(spec, run, card, running)
    first, each = timed or (None, None)
    rate = running / each if each else None
    paid = price(card, run.tp, usd_per_hour)
    return Serving(
        gpu=card.name,
        cards=run.tp,
        **sizes,
        blocks=blocks,
        tokens=blocks * BLOCK,
        requests=requests,
        running=running,
        first_token=first,
        each_token=each,
        tokens_per_second=rate,
        usd_per_million_tokens=paid / 3600 / rate * 1e6 if paid is not None and rate else None,
    )


def divided(
    spec: ModelSpec,
    run: Inference,
    card: GPU,
    fraction: float,
    read_at_once: int,
    max_requests: int,
    activations: int | None = None,
) -> dict[str, int]:
    """Return the bytes of a card's budget and of what it is divided into."""
    parts = inference_moments(spec, _largest(run, read_at_once), card)[1].parts  # of prefill
    if activations is None:
        logits = parts["logits"] * max_requests  # a row for each request
        activations = parts["activations"] + parts["workspace"] + logits
    budget, other = int(card.memory * fraction), card.context or 0
    return {
        "budget": budget,
        "weights": parts["weights"],
        "activations": activations,
        "other": other,
        "kv_cache": budget - parts["weights"] - activations - other,
    }


@lru_cache(maxsize=64)  # who asks for a run on one card asks for it on others
def _lone(run: Inference) -> Inference:
    return replace(run, batch=1)


@lru_cache(maxsize=64)
def _largest(run: Inference, read_at_once: int) -> Inference:
    """Return the largest pass of an engine, whose attention has kernels of its own that write no scores, whatever the
    card."""
    return replace(run, batch=1, prompt_len=read_at_once, new_tokens=1, attention="flash")


def _times(spec: ModelSpec, run: Inference, card: GPU, running: int) -> tuple[float, float] | None:
    """Return the seconds to a lone request's first token, and from one token to the next with `running` requests.

    While a request writes its `new_tokens`, each place in the batch reads one prompt: that time is everybody's.
    """
    P, N = run.prompt_len, run.new_tokens
    cached = running * (P + N / 2)
    prompt = pass_seconds(spec, run, card, P, 1, P * (P + 1) / 2, 0)
    token = pass_seconds(spec, run, card, running, running, cached, cached)
    if prompt is None or token is None or running < 1:
        return None
    return prompt, token + running * prompt / N


def pass_seconds(
    spec: ModelSpec, run: Inference, card: GPU, tokens: float, sequences: int, pairs: float, cached: float
) -> float | None:
    """Return the seconds of one pass of an engine that starts its kernels as one CUDA graph: the host is left out.

    It reads `tokens` new tokens of `sequences` requests; each looks at those before it, `pairs` in all; `cached`
    tokens lie in the cache. The slower of computing and reading counts: FLOP at the card's measured rate; the weights
    touched and the cache at its measured bandwidth. Between `run.tp` cards two all-reduces per layer wait for the link,
    then send 2 (t − 1) / t of the activations. None where a rate, or an all-reduce's wait, was never measured.
    """
    rates = efficiency(card)
    rate = _rate(rates, run) if rates else None
    wait = _all_reduce(spec, run, card, tokens)
    if rates is None or rate is None or wait is None:
        return None
    a_token, a_row = _flops(spec)
    computed = a_token * tokens + a_row * sequences + _attention(spec, pairs, cached)
    weights = run.tp * weights_read(spec, run, tokens) / UNPACKING.get(run.weights, 1.0)
    read = weights + run.tp * _cache_bytes(spec, run) * cached
    return max(computed / rate, read / rates.bandwidth) / run.tp + 2 * spec.layers * wait


def _rate(rates: Efficiency, run: Inference) -> float | None:
    rate = rates.matmul.get(peak_dtype(run))
    # Quantized weights are unpacked to whichever half precision the card has.
    return rates.matmul.get("fp16") if rate is None and run.weights in UNPACKING else rate


def _all_reduce(spec: ModelSpec, run: Inference, card: GPU, tokens: float) -> float | None:
    """Return the seconds of one all-reduce of the activations of `tokens` tokens between `run.tp` cards."""
    if run.tp == 1:
        return 0.0
    if run.tp not in ALL_REDUCE or card.nvlink is None:
        return None
    group = Group(run.tp, run.tp, node_link(card))
    sent = bytes_sent("all-reduce", int(tokens * spec.hidden * 2), run.tp)
    return ALL_REDUCE[run.tp] + sent / (group.switched or group.bandwidth)


@cache
def _flops(spec: ModelSpec) -> tuple[float, float]:
    """Return the FLOP of a pass's products with weights, for each token and each sequence, whose head reads one."""
    head = sum(2 * x.inputs * x.outputs * x.count for x in spec.linears if x.part == "head")
    body = sum(2 * x.inputs * x.outputs * x.count for x in spec.linears if x.part != "head")
    body += 2 * spec.moe_layers * spec.experts_per_token * 3 * spec.hidden * spec.moe_intermediate
    return body, head


def _attention(spec: ModelSpec, pairs: float, cached: float) -> float:
    """Return the FLOP of scores and sums of values. Of latents in the cache, either all heads' keys and values are made
    again, or each pair is computed on the latent itself (`flops.token_pass`); an engine does what is less: the one for
    prompts, the other for single tokens."""
    a_pair, absorbed = (2 * spec.layers * spec.heads * sum(head_sizes(spec, each)) for each in (False, True))
    if spec.mla is None:
        return a_pair * pairs
    made = 2 * spec.layers * spec.heads * spec.mla.kv_lora_rank * (spec.mla.qk_nope_head_dim + spec.mla.v_head_dim)
    return min(a_pair * pairs + made * cached, absorbed * pairs)


@cache
def _cache_bytes(spec: ModelSpec, run: Inference) -> float:
    """Return the cache's bytes per token on one card, for a sequence of the run's length."""
    return kv_cache_bytes(spec, replace(run, batch=1)) / run.seq_len
