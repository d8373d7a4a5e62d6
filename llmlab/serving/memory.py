"""The memory of one GPU as an engine divides it: weights, everything outside of torch, the peak of a step, CUDA graphs,
and what is left for the KV cache.

vLLM profiles a step of `max_num_batched_tokens` tokens at its start (vllm/v1/worker/gpu_worker.py,
determine_available_memory): a share of the GPU, less weights, less what that step took, less what NCCL and the CUDA
context hold outside of torch; all the rest is blocks of the cache.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil

from ..base.units import show_bytes
from ..hardware.gpu import GPU
from ..specs.model import ModelSpec
from .kernels import BITS
from .layers import Attention, DenseMLP, Experts, LatentAttention, Layer, Layers, Recurrence, draft_of, layers_of
from .llamacpp import Buffers, buffers
from .service import Service

BLOCK = 16  # tokens per block of the cache
# What libraries take outside of torch while vLLM starts: 0.13 GiB, as 0.11 logged for gpt-oss-20b on an H100. The CUDA
# context and NCCL's buffers are there before vLLM looks at the memory (gpu_worker.py, init_device) and are not counted:
# the part of the GPU that it leaves free has them. ALL_REDUCE is what else several GPUs take: the logs of Llama-3.3-70B
# and Qwen3-32B on two H100s have 0.55 and 0.54 GiB where those of one have 0.13 and 0.14.
OUTSIDE = int(0.13 * 2**30)
ALL_REDUCE = int(0.41 * 2**30)
# Bytes per logit while the profiled step samples with top-p: in 16 bit and fp32, sorted with their indices, the sort's
# buffers. vLLM 0.11 logged 5.6 GiB for Qwen3-32B and 7.38 for gpt-oss-20b with 1,024 requests: 38.6 and 38.5. 0.33 does
# not sort (v1/sample/ops/topk_topp_triton.py): by its source about 14, so that more is left; we have no log of it.
SAMPLING = 38.5
STORED = {"awq": "int4", "gptq": "int4"}
HOPPER = (9, 0)  # compute capability


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU: `budget` = `weights` + `outside` + `activations` + `graphs` + `cache` (below 0: does not fit).

    `per_token`: bytes of the cache for one more token of a long request; `per_request`: bytes of a whole request;
    `per_longest`: of one of max_model_len tokens; `tokens` that the cache holds in `blocks`, `requests` of the
    service's length, `longest` ones (vLLM's log: "Maximum concurrency for max_model_len tokens per request").
    """

    budget: int
    weights: int
    outside: int
    activations: int
    graphs: int
    cache: int
    per_token: int
    per_request: int
    per_longest: int

    @property
    def blocks(self) -> int:
        """Blocks of the cache, of BLOCK tokens each."""
        return max(0, self.cache) // max(1, self.per_token * BLOCK)

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.blocks * BLOCK

    @property
    def requests(self) -> int:
        """Requests of the service's length that the cache holds together."""
        return max(0, self.cache) // max(1, self.per_request)

    @property
    def longest(self) -> float:
        """Requests of max_model_len tokens that the cache holds together."""
        return max(0, self.cache) / max(1, self.per_longest)

    @property
    def missing(self) -> int:
        """Bytes by which the cache is too small for one request; below 0 if it is not."""
        return self.per_request - self.cache

    def shown(self) -> list[str]:
        """Return the lines of a report."""
        sizes = (
            ("budget", self.budget), ("weights", self.weights), ("outside PyTorch", self.outside),
            ("peak activations", self.activations), ("CUDA graphs", self.graphs), ("KV cache", self.cache),
        )  # fmt: skip
        lines = [f"{name:20}{show_bytes(size) if size >= 0 else 'none':>12}" for name, size in sizes]
        return ["memory per GPU", *lines]


def divided_memory(spec: ModelSpec, service: Service, gpu: GPU) -> Memory | Buffers:
    """Return how `service` divides the memory of each of its GPUs, or llama.cpp's buffers."""
    if service.engine == "llama.cpp":
        return buffers(spec, service, gpu)
    length = service.prompt_len + service.output_len
    outside = OUTSIDE + (ALL_REDUCE if service.gpus > 1 else 0)
    budget = int(gpu.memory * service.gpu_memory_utilization)
    weights, activations = weight_bytes(spec, service, gpu), activation_bytes(spec, service, gpu)
    graphs = graph_bytes(spec, service, gpu)
    cache = budget - weights - outside - activations - graphs
    token = cache_bytes(spec, service, 2**20) - cache_bytes(spec, service, 2**20 - 1)
    # If all layers have windows, a long request needs no more for another token: then count inside of the window.
    token = token or (cache_bytes(spec, service, 2 * BLOCK) - cache_bytes(spec, service, BLOCK)) // BLOCK
    return Memory(
        budget, weights, outside, activations, graphs, cache, token, cache_bytes(spec, service, _rounded(length)),
        longest_bytes(spec, service, gpu, service.max_model_len or spec.max_positions),
    )


def longest_bytes(spec: ModelSpec, service: Service, gpu: GPU, tokens: int) -> int:
    """Return the cache bytes that vLLM requires at its start for one request of `tokens` tokens. In layers with a
    window it adds the tokens of a whole step and one block (v1/kv_cache_interface.py, SlidingWindowSpec)."""
    ahead = service.limits(gpu)[1] - 1 + BLOCK if service.engine == "vllm" else 0
    return cache_bytes(spec, service, _rounded(tokens), ahead)


def necessary_limit(spec: ModelSpec, service: Service, gpu: GPU) -> int | None:
    """Return the largest max_model_len with which vLLM starts, if it does not start with the service's own; else None.

    It does not start if the cache is smaller than one request of max_model_len tokens.
    """
    memory = divided_memory(spec, service, gpu)
    if service.engine != "vllm" or isinstance(memory, Buffers) or memory.longest >= 1:
        return None
    blocks = range(BLOCK, spec.max_positions + 1, BLOCK)
    fitting = bisect_right(blocks, memory.cache, key=lambda count: longest_bytes(spec, service, gpu, count))
    return BLOCK * fitting or None


def _rounded(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK


def weight_bytes(spec: ModelSpec, service: Service, gpu: GPU) -> int:
    """Return the bytes of the weights on the GPU that has most. Embedding, head, norms and routers stay in 16 bit."""
    layers = layers_of(spec)
    split = service.tp // service.dp_attention
    ends = 1 if spec.tied or service.pp > 1 else 2  # of a pipeline each end has one of embedding and head
    total = ends * layers.vocab * layers.hidden * 2 / split
    total += _layers_bytes(layers, service, gpu) * _share(spec, service)
    if service.draft:
        draft = draft_of(spec, service.draft)
        own = draft.vocab * draft.hidden * 2 / split if draft.hidden != layers.hidden else 3 * 2 * layers.hidden**2
        total += _layers_bytes(draft, service, gpu) + own
    return int(total)


def _share(spec: ModelSpec, service: Service) -> float:
    """Return the largest share of the layers that a pipeline stage has."""
    return -(-spec.layers // service.pp) / spec.layers


def _layers_bytes(layers: Layers, service: Service, gpu: GPU) -> float:
    split, total = service.tp // service.dp_attention, 0.0
    for layer, count in layers.kinds:
        total += count * (_mixer_elements(layers.hidden, layer, split) * _bits(service, layer) / 8)
        if isinstance(layer.mlp, DenseMLP):
            matrices = 3 if layer.mlp.gated else 2
            total += count * matrices * layers.hidden * layer.mlp.width * _bits(service, layer) / 8 / service.tp
        elif isinstance(layer.mlp, Experts):
            matrices = 3 if layer.mlp.gated else 2
            routed = layer.mlp.count * matrices * _expert_elements(layers.hidden, layer.mlp.width, service, gpu)
            shared = matrices * layers.hidden * layer.mlp.shared / (service.tp if service.ep == 1 else 1)
            stored = BITS[STORED.get(service.stored, service.stored)]
            total += count * (routed * stored / 8 + shared * _bits(service, layer) / 8)
            total += count * layer.mlp.count * layers.hidden * 2
    return total


def _expert_elements(hidden: int, width: int, service: Service, gpu: GPU) -> float:
    """Return the elements of one matrix of a routed expert, divided by the GPUs that share the experts.

    In mxfp4 they are padded as vLLM's kernels need it, hidden size to 256 and a GPU's part of the width to 128 channels
    (vllm/model_executor/layers/fused_moe/oracle/mxfp4.py, read 2026-11-30), but not for Hopper's.
    """
    if service.stored != "mxfp4" or gpu.compute_capability in (None, HOPPER):
        return hidden * width / service.tp
    ways = service.tp // service.ep  # that divide the width
    return 256 * ceil(hidden / 256) * 128 * ceil(width / ways / 128) / service.ep


def _bits(service: Service, layer: Layer) -> float:
    """Return the bits of a weight outside of the routed experts."""
    if service.stored == "mxfp4" or (service.stored in STORED and isinstance(layer.mlp, Experts)):
        return 16
    return BITS[STORED.get(service.stored, service.stored)]


def _mixer_elements(hidden: int, layer: Layer, split: int) -> float:
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        kv = max(1.0, mixer.kv_heads / split)
        query = mixer.heads / split * mixer.head_dim
        return hidden * (query * (3 if mixer.gated else 2) + 2 * kv * mixer.head_dim)
    if isinstance(mixer, LatentAttention):
        heads, latent = mixer.heads / split, mixer.kv_rank + mixer.rope_dim
        query = heads * (mixer.nope_dim + mixer.rope_dim)
        index = mixer.index_heads * mixer.index_dim * mixer.q_rank + hidden * (mixer.index_dim + mixer.index_heads)
        queries = hidden * mixer.q_rank + mixer.q_rank * query if mixer.q_rank else hidden * query
        values = mixer.kv_rank * heads * (mixer.nope_dim + mixer.value_dim) + heads * mixer.value_dim * hidden
        return queries + hidden * latent + values + index
    if isinstance(mixer, Recurrence):
        return hidden * (mixer.projected + mixer.inner) / split
    return 0.0


def cache_bytes(spec: ModelSpec, service: Service, tokens: int, ahead: int = 0) -> int:
    """Return the bytes that one request of `tokens` tokens has in the caches of one GPU, with room for `ahead` tokens
    more than the window in layers that have one."""
    total = _cache_bytes(layers_of(spec), service, tokens, ahead) * _share(spec, service)
    if service.draft:
        total += _cache_bytes(draft_of(spec, service.draft), service, tokens, ahead)
    return int(total)


def _cache_bytes(layers: Layers, service: Service, tokens: int, ahead: int) -> float:
    split = service.tp // service.dp_attention
    total = 0.0
    for layer, count in layers.kinds:
        mixer = layer.mixer
        if isinstance(mixer, Attention):
            seen = min(tokens, mixer.window + ahead if mixer.window else tokens)
            total += count * seen * 2 * max(1, -(-mixer.kv_heads // split)) * mixer.head_dim * BITS[service.kv] / 8
        elif isinstance(mixer, LatentAttention):
            total += count * tokens * (mixer.kv_rank + mixer.rope_dim) * BITS[service.kv] / 8
            total += count * tokens * mixer.index_dim  # the indexer's keys, in fp8
        elif isinstance(mixer, Recurrence):
            total += count * (4 * mixer.state + 2 * mixer.window) / split
    return total


def activation_bytes(spec: ModelSpec, service: Service, gpu: GPU) -> int:
    """Return the peak of the largest step: the widest layer of all its tokens, or sampling for all its requests."""
    layers, (requests, tokens) = layers_of(spec), service.limits(gpu)
    split = service.tp // service.dp_attention
    widest = 0.0
    for layer, _ in layers.kinds:
        mlp, mixer = layer.mlp, layer.mixer
        if isinstance(mlp, DenseMLP):
            widest = max(widest, mlp.width * (3 if mlp.gated else 2) / service.tp)
        elif isinstance(mlp, Experts):  # a row for each choice: gate and up, their product, and the output
            width = mlp.width / (1 if service.ep > 1 else service.tp)
            widest = max(widest, mlp.per_token * (3 * width + layers.hidden))
        if isinstance(mixer, Attention):
            heads = (mixer.heads * (2 if mixer.gated else 1) + 2 * mixer.kv_heads) / split
            widest = max(widest, heads * mixer.head_dim + mixer.heads / split * mixer.head_dim)
    residual = 2 * tokens * layers.hidden
    sampling = min(requests, tokens) * layers.vocab * SAMPLING
    return int(residual + max(2 * tokens * (2 * layers.hidden + widest), sampling))


def graph_bytes(spec: ModelSpec, service: Service, gpu: GPU) -> int:
    """Return what the CUDA graphs of decoding keep: their inputs and outputs, and a pool for each kind of step."""
    return 2**20 * (150 + 8 * len(layers_of(spec).kinds)) + 4 * min(512, service.limits(gpu)[0]) * spec.hidden
