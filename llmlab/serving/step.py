"""The seconds of one step of an engine: its kernels, layer by layer, as vLLM, SGLang and TensorRT-LLM fuse them.

All three run query, key and value as one matmul, gate and up as another; a norm takes the residual's addition with it,
the activation the product of gate and up; each layer ends its mixer and its MLP with an all-reduce. The kernels of a
step with single tokens alone are started as one CUDA graph, so that between them no time passes but LAUNCH.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ..hardware.gpu import GPU
from ..specs.model import ModelSpec
from . import llamacpp
from .kernels import EngineKernels, engine_kernels
from .layers import Attention, DenseMLP, Experts, LatentAttention, Layer, Layers, Recurrence, draft_of, layers_of
from .service import Service

PARTS = ("matmuls", "attention", "experts", "communication", "other kernels", "draft", "host")
# Small kernels of a mixer: two norms with the residual (one is the MLP's), rotary embedding, writing to the cache.
MIXER_KERNELS, MLP_KERNELS, EXPERT_KERNELS = 3, 2, 4
# Seconds of a step that the GPU waits for the host; fitted, as START_HOST and ROW_HOST, by benchmarks/serving/fit.py.
STEP_HOST = {"vllm": 0.62e-3, "sglang": 1.4e-3, "trtllm": 0.29e-3}
# Steps with prompts run without a CUDA graph, or with pieces of one: the host starts about so many kernels per layer,
# each in START_HOST seconds, and the step lasts as long as the kernels or their starts, whichever takes longer.
STARTS = {Attention: 6, LatentAttention: 16, Recurrence: 16, DenseMLP: 4, Experts: 14, type(None): 0}
START_HOST = {"vllm": 5e-6, "sglang": 56e-6, "trtllm": 65e-6}
ROW_HOST = 15e-6  # and per sequence: its token is sampled, sent and scheduled


@dataclass(frozen=True)
class Step:
    """What a step runs: `queries` new tokens of each of `sequences` with `context` tokens cached (more than one where a
    draft proposed them), and `tokens` of `prompts` prompts, each after `cached` others."""

    sequences: int
    context: int
    tokens: int = 0
    cached: int = 0
    prompts: int = 1
    queries: int = 1

    @property
    def rows(self) -> int:
        """New tokens of all requests."""
        return self.sequences * self.queries + self.tokens


def step_seconds(spec: ModelSpec, service: Service, gpu: GPU, step: Step) -> dict[str, float]:
    """Return the seconds of a step by PARTS, or by llama.cpp's; their sum is the step's.

    With pipeline stages each stage runs a part of the requests while the others run theirs, so that a step of all of
    them takes as long as the whole model for one part: with fewer requests than stages some stages are idle (bubbles).
    """
    if service.engine == "llama.cpp":
        return llamacpp.step_seconds(
            spec, service, gpu, step.sequences, step.context, step.tokens, step.cached, step.prompts
        )
    return dict(_step_seconds(spec, service, gpu, step))


def token_seconds(spec: ModelSpec, service: Service, gpu: GPU, step: Step) -> float:
    """Return the seconds from one token of a request to its next: of a step, by the tokens that it gives each."""
    return sum(step_seconds(spec, service, gpu, step).values()) / service.tokens_per_step


@lru_cache(maxsize=1 << 12)
def _step_seconds(spec: ModelSpec, service: Service, gpu: GPU, step: Step) -> dict[str, float]:
    kernels, layers = engine_kernels(gpu), layers_of(spec)
    step = _divided(step, service.pp)
    if service.draft and step.sequences:
        step = replace(step, queries=service.draft_tokens + 1)
    parts = _layers_seconds(kernels, service, layers, step)
    if service.pp > 1:
        parts["communication"] += (service.pp - 1) * kernels.sent(2 * _own(service, step).rows * layers.hidden)
    if service.draft and step.sequences:
        proposing = Step(step.sequences, step.context)
        once = _layers_seconds(kernels, service, draft_of(spec, service.draft), proposing)
        parts["draft"] = service.draft_tokens * sum(once.values())
    starts = sum(count * (STARTS[type(layer.mixer)] + STARTS[type(layer.mlp)]) for layer, count in layers.kinds)
    starting = starts * START_HOST[service.engine] if step.tokens else 0.0
    waited = max(0.0, starting - sum(parts.values()))
    parts["host"] = STEP_HOST[service.engine] + ROW_HOST * step.sequences + waited
    return parts


def _layers_seconds(kernels: EngineKernels, service: Service, layers: Layers, step: Step) -> dict[str, float]:
    """Return the seconds of all layers, the head and sampling by part."""
    parts = dict.fromkeys(PARTS, 0.0)
    for layer, count in layers.kinds:
        for part, seconds in _layer(kernels, service, layers.hidden, layer, step).items():
            parts[part] += count * seconds
    own = _own(service, step)
    rows = own.sequences * own.queries + (own.prompts if own.tokens else 0)
    parts["matmuls"] += kernels.matmul(max(1, rows), -(-layers.vocab // _heads_split(service)), layers.hidden, "bf16")
    parts["other kernels"] += kernels.moved(rows * layers.vocab * 4 * 3)  # sampling reads logits in fp32
    return parts


def _own(service: Service, step: Step) -> Step:
    """Return the step of the copy of attention that has most to do."""
    return _divided(step, service.dp_attention)


def _divided(step: Step, ways: int) -> Step:
    """Return the largest of `ways` parts of a step; a prompt is in one of them."""
    tokens = -(-step.tokens // min(ways, step.prompts))
    parts = {"sequences": -(-step.sequences // ways), "tokens": tokens, "prompts": -(-step.prompts // ways)}
    return replace(step, **parts)


def _heads_split(service: Service) -> int:
    return service.tp // service.dp_attention


def _layer(kernels: EngineKernels, service: Service, hidden: int, layer: Layer, step: Step) -> dict[str, float]:
    """Return the seconds of one layer by part."""
    own = _own(service, step)
    parts = dict.fromkeys(PARTS, 0.0)
    own_tokens, tokens = own.rows, step.rows
    dtype = _linear_dtype(service, layer)
    if layer.mixer is not None:
        _mixer(parts, kernels, service, hidden, layer.mixer, own, dtype)
        parts["other kernels"] += MIXER_KERNELS * kernels.moved(own_tokens * hidden * 4)
        if service.dp_attention == 1:
            parts["communication"] += kernels.all_reduce(service.engine, service.tp, 2 * own_tokens * hidden)
    if isinstance(layer.mlp, DenseMLP):
        _dense(parts, kernels, hidden, layer.mlp.width, layer.mlp.gated, service.tp, tokens, dtype)
    elif isinstance(layer.mlp, Experts):
        _experts(parts, kernels, service, hidden, layer.mlp, tokens, dtype)
    if layer.mlp is not None:
        if service.dp_attention > 1:  # tokens of all copies are gathered, the results scattered
            for operation in ("all-gather", "reduce-scatter"):
                parts["communication"] += kernels.gather(operation, service.tp, 2 * tokens * hidden)
        else:
            parts["communication"] += kernels.all_reduce(service.engine, service.tp, 2 * tokens * hidden)
    return parts


def _linear_dtype(service: Service, layer: Layer) -> str:
    """Return what the matmuls outside of the experts are in: checkpoints in mxfp4 and int4 of mixtures keep bf16."""
    if service.stored in ("awq", "gptq"):
        return "bf16" if isinstance(layer.mlp, Experts) else "int4"
    return "bf16" if service.stored in ("mxfp4", "fp16") else service.stored


def _mixer(
    parts: dict[str, float], kernels: EngineKernels, service: Service, hidden: int, mixer: object, own: Step, dtype: str
) -> None:
    split, tokens = _heads_split(service), own.rows
    if isinstance(mixer, Attention):
        heads, kv = -(-mixer.heads // split), -(-mixer.kv_heads // split)
        query = heads * mixer.head_dim
        columns = query * (2 if mixer.gated else 1) + 2 * kv * mixer.head_dim
        parts["matmuls"] += kernels.matmul(tokens, columns, hidden, dtype)
        parts["matmuls"] += kernels.matmul(tokens, hidden, query, dtype)
        seen = min(own.context, mixer.window or own.context)
        if own.sequences:
            parts["attention"] += kernels.decode(mixer.head_dim, own.sequences * kv, max(1, seen), service.kv)
        if own.tokens:
            before = min(own.cached, mixer.window or own.cached)
            each = -(-own.tokens // own.prompts)
            seconds = kernels.prefill(heads, mixer.head_dim, each, before, own.prompts)
            if mixer.window and each > mixer.window:  # of a long chunk each token sees the window alone
                seconds *= min(1.0, 2 * mixer.window / each)
            parts["attention"] += seconds
    elif isinstance(mixer, LatentAttention):
        _latent(parts, kernels, service, hidden, mixer, own, dtype)
    elif isinstance(mixer, Recurrence):
        parts["matmuls"] += kernels.matmul(tokens, -(-mixer.projected // split), hidden, dtype)
        parts["matmuls"] += kernels.matmul(tokens, hidden, -(-mixer.inner // split), dtype)
        state = (2 * 4 * mixer.state + 4 * mixer.window) / split  # read and written
        chunks = own.sequences * own.queries + -(-own.tokens // 64)
        parts["attention"] += 2 * kernels.moved(0) + kernels.moved(chunks * state)


def _latent(
    parts: dict[str, float], kernels: EngineKernels, service: Service, hidden: int, mixer: LatentAttention, own: Step,
    dtype: str,
) -> None:  # fmt: skip
    heads, tokens = -(-mixer.heads // _heads_split(service)), own.rows
    query = heads * (mixer.nope_dim + mixer.rope_dim)
    latent = mixer.kv_rank + mixer.rope_dim
    for columns, inputs in ((mixer.q_rank + latent, hidden), (query, mixer.q_rank), (hidden, heads * mixer.value_dim)):
        parts["matmuls"] += kernels.matmul(tokens, columns, inputs, dtype)
    if own.sequences:  # queries onto the latent and values out of it, a batched matmul each
        absorbed = heads * mixer.kv_rank * (mixer.nope_dim + mixer.value_dim)
        flops = kernels.computed(2 * own.sequences * own.queries * absorbed, "bf16")
        parts["matmuls"] += 2 * max(kernels.moved(2 * absorbed / 2), flops / 2)
        seen = min(own.context, mixer.selected or own.context)
        queries = own.sequences * own.queries
        parts["attention"] += kernels.latent_attention(heads, queries, max(1, seen), latent, service.kv)
        if mixer.selected:  # the indexer reads its keys of all tokens
            parts["attention"] += 2 * kernels.moved(own.sequences * own.context * mixer.index_dim)
    if own.tokens:
        parts["matmuls"] += kernels.matmul(own.tokens, heads * (mixer.nope_dim + mixer.value_dim), mixer.kv_rank, dtype)
        head = (mixer.nope_dim + mixer.rope_dim + mixer.value_dim) // 2
        each = -(-own.tokens // own.prompts)
        parts["attention"] += own.prompts * kernels.latent_prompt(heads, each, own.cached, head)


def _dense(
    parts: dict[str, float], kernels: EngineKernels, hidden: int, width: int, gated: bool, split: int, tokens: int,
    dtype: str,
) -> None:  # fmt: skip
    inner, branches = -(-width // split), 2 if gated else 1
    parts["matmuls"] += kernels.matmul(tokens, branches * inner, hidden, dtype)
    parts["matmuls"] += kernels.matmul(tokens, hidden, inner, dtype)
    parts["other kernels"] += MLP_KERNELS * kernels.moved(tokens * inner * (branches + 1))


def _experts(
    parts: dict[str, float], kernels: EngineKernels, service: Service, hidden: int, mlp: Experts, tokens: int,
    dtype: str,
) -> None:  # fmt: skip
    tp, ep = (1, service.ep) if service.ep > 1 else (service.tp, 1)
    shape = (hidden, mlp.width, mlp.per_token, mlp.count, tp, ep)
    stored = "int4" if service.stored in ("awq", "gptq") else service.stored
    parts["experts"] += kernels.routed_experts(service.engine, stored, shape, tokens, mlp.gated)
    parts["matmuls"] += kernels.matmul(tokens, mlp.count, hidden, "bf16")  # the router
    parts["other kernels"] += EXPERT_KERNELS * kernels.moved(2 * tokens * hidden)
    if mlp.shared:
        _dense(parts, kernels, hidden, mlp.shared, mlp.gated, tp if ep == 1 else 1, tokens, dtype)
