"""llama.cpp: its buffers on the GPU and in the CPU's memory, and the time of its steps.

A model's last layers are on the GPU, as many as `n_gpu_layers` says, and the others on the CPU, where they run too. The
cache is allocated when the server starts: for each slot, the tokens of the longest request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil

from ..base.errors import SpecError
from ..base.units import show_bytes
from ..hardware.gpu import GPU
from ..specs.gguf import BLOCKS, Stored, mix_named, stored
from ..specs.model import ModelSpec
from .kernels import BANDWIDTH, LAUNCH, engine_kernels
from .layers import Attention, DenseMLP, Experts, LatentAttention, Layer, layers_of
from .service import Service

UBATCH = 512  # --ubatch-size's default: tokens that one pass over the weights reads (common/common.h, read 2026-11-29)
PADDING = 256  # a slot's cache is a multiple of so many tokens (src/llama-context.cpp)
MARGIN = 2**30  # bytes of a GPU that --fit leaves free (--fit-target's default)
OFFLOADED_ROWS = 32  # with so many rows, layers of the CPU run on the GPU: ggml-cuda.cu, offload_op
# Kernels of a layer, counted in ggml-cuda.cu: norms, quantized inputs, matmuls, rotary embedding, writing the cache,
# attention, adding the residual; and those that choose experts.
LAYER_KERNELS, EXPERT_KERNELS = 22, 6
# FLOP/s of matmuls with quantized weights, in units of the fp32 peak: the int8 sums of a block's 32 weights are scaled
# in fp32, which takes longer than the sums. Of many rows (mmq.cu): the median of prompts of 512 tokens of Llama-2-7B in
# Q4_0 on eleven GPUs in llama.cpp's discussion 15013, 1.9 to 2.6, and 3.7 on an A100. Of up to VECTOR_ROWS rows
# (mmvq.cu): 8 rows of Llama-3-8B in Q4_0 take an RTX 3090 14 ms (pull request 15802). Of experts: prompts of 2,048
# tokens of gpt-oss-20b, 8,022 tokens/s on an RTX 4090 and 9,848 on a 5090 (discussion 15396).
MATMUL, MATMUL_EXPERTS, VECTOR, VECTOR_ROWS = 2.3, 0.53, 0.27, 8
# Seconds in which the CPU samples a token. With 64 users Qwen2.5-7B in Q4_K_M gives 2,391 tokens/s on an RTX 4090
# (computingforgeeks.com/ollama-vs-vllm-vs-llama-cpp), 17 ms per step more than the GPU needs.
SAMPLING = 0.27e-3
PCIE = 15.75e9  # bytes/s of a GPU whose link is not known: generation 3 with 16 lanes
# Bytes that the CUDA context and pools take outside of the buffers: 297 MiB with two A40, by the driver less the log
CONTEXT = 300 * 2**20


@dataclass(frozen=True)
class Buffers:
    """Bytes of llama.cpp's buffers on the GPUs together and in the CPU's memory, by its own names.

    `offloaded` of `layers` (the output layer is one) are on the GPU, of which `free` bytes are left by the CUDA
    context. Each of `slots` has a cache of `cells` tokens.
    """

    free: int
    outside: int
    offloaded: int
    layers: int
    slots: int
    cells: int
    model: tuple[int, int]
    kv: tuple[int, int]
    compute: tuple[int, int]

    graphs = 0  # this and the names below are those of memory.Memory

    @property
    def needed(self) -> int:
        """Bytes of the GPUs that are needed in addition to the CUDA context."""
        return self.model[0] + self.kv[0] + self.compute[0]

    @property
    def missing(self) -> int:
        """Bytes by which the GPUs are too small; below 0 if they are not."""
        return self.needed - self.free

    @property
    def weights(self) -> int:
        """Bytes of the model on the GPUs."""
        return self.model[0]

    @property
    def activations(self) -> int:
        """Bytes of the compute buffers on the GPUs."""
        return self.compute[0]

    @property
    def cache(self) -> int:
        """Bytes of the cache on the GPUs."""
        return self.kv[0]

    @property
    def tokens(self) -> int:
        """Tokens that the caches of all slots hold."""
        return self.slots * self.cells

    @property
    def requests(self) -> int:
        """Requests that run together: the slots, or none where the GPU is too small."""
        return self.slots if self.missing <= 0 else 0

    def shown(self) -> list[str]:
        """Return the lines of a report."""
        lines = [f"{'':20}{'GPU':>13}{'CPU':>13}"]
        for name, sizes in (("model buffer", self.model), ("KV buffer", self.kv), ("compute buffer", self.compute)):
            lines.append(f"{name:20}" + "".join(f"{show_bytes(size):>13}" for size in sizes))
        lines.append(f"{'CUDA context':20}{show_bytes(self.outside):>13}")
        lines.append(f"{'layers offloaded':20}{f'{self.offloaded}/{self.layers}':>13}")
        return lines


def buffers(spec: ModelSpec, service: Service, gpu: GPU) -> Buffers:
    """Return the buffers of `service`; without `n_gpu_layers`, with as many layers on the GPU as --fit puts there.

    Raises SpecError for more layers than the model has.
    """
    most = spec.layers + 1
    if service.n_gpu_layers is not None:
        if service.n_gpu_layers > most:
            raise SpecError(f"n_gpu_layers={service.n_gpu_layers}: {spec.name} has {spec.layers} layers and the output "
                            f"layer; give 0 to {most}, or None for as many as fit")  # fmt: skip
        return _buffers(spec, service, gpu, service.n_gpu_layers)
    fits = (_buffers(spec, service, gpu, count) for count in range(most, -1, -1))
    return next((one for one in fits if one.missing + MARGIN * service.gpus <= 0), _buffers(spec, service, gpu, 0))


@lru_cache(maxsize=1 << 10)
def _buffers(spec: ModelSpec, service: Service, gpu: GPU, offloaded: int) -> Buffers:
    on_gpu, on_cpu = _weights(spec, service.stored, offloaded)
    cells = slot_tokens(service)
    kv = service.slots * cache_bytes(spec, service, cells)
    kv_gpu = kv * on_gpu.layers // spec.layers
    inputs, layer, outputs = compute_bytes(spec, service)
    layer += on_cpu.largest  # of a prompt, layers of the CPU run on the GPU, a weight at a time
    return Buffers(
        free=service.gpus * (gpu.memory - CONTEXT),
        outside=service.gpus * CONTEXT,
        offloaded=offloaded,
        layers=spec.layers + 1,
        slots=service.slots,
        cells=cells,
        model=(on_gpu.bytes, on_cpu.bytes),
        kv=(kv_gpu, kv - kv_gpu),
        compute=(service.gpus * max(layer, outputs), inputs),
    )


def slot_tokens(service: Service) -> int:
    """Return the tokens of a slot's cache: those of the longest request, in whole paddings."""
    return ceil((service.max_model_len or service.prompt_len + service.output_len) / PADDING) * PADDING


def cache_bytes(spec: ModelSpec, service: Service, tokens: int) -> int:
    """Return the bytes of the cache of one slot with so many tokens; layers with a window keep it and a ubatch."""
    total = 0
    for layer, count in layers_of(spec).kinds:
        mixer = layer.mixer
        if isinstance(mixer, Attention):
            total += count * _cells(mixer, tokens) * 2 * _row(service.kv, mixer.kv_heads * mixer.head_dim)
        elif isinstance(mixer, LatentAttention):
            total += count * tokens * _row(service.kv, mixer.kv_rank + mixer.rope_dim)
    return total


def _cells(mixer: Attention | LatentAttention, tokens: int) -> int:
    """Return the cells of a layer's cache for so many tokens (src/llama-kv-cache-iswa.cpp)."""
    window = mixer.window if isinstance(mixer, Attention) else None
    return min(tokens, ceil((window + UBATCH) / PADDING) * PADDING) if window else tokens


def _row(kv: str, elements: int) -> int:
    weights, size = BLOCKS[cache_type(kv).upper()]
    return elements // weights * size


def cache_type(kv: str) -> str:
    """Return llama.cpp's name of a cache's type: 16 bits are its f16."""
    return "f16" if kv in ("bf16", "fp16") else kv


@dataclass(frozen=True)
class _Weights:
    """The tensors of one device: the matrices of `layers` layers, the output layer of `head` bytes, `rest` others."""

    matrices: tuple[Stored, ...]
    layers: int
    head: int
    rest: int

    @cached_property
    def bytes(self) -> int:
        """All of them."""
        return self.head + self.rest + sum(tensor.bytes for tensor in self.matrices)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest matrix."""
        return max((tensor.bytes for tensor in self.matrices), default=0)

    @cached_property
    def dense(self) -> tuple[int, int]:
        """Bytes and elements of what every row is multiplied with."""
        return self._sums(False)

    @cached_property
    def experts(self) -> tuple[int, int]:
        """Bytes and elements of the experts."""
        return self._sums(True)

    def _sums(self, experts: bool) -> tuple[int, int]:
        chosen = [tensor for tensor in self.matrices if tensor.name.endswith("_exps") == experts]
        return sum(tensor.bytes for tensor in chosen), sum(tensor.rows * tensor.columns for tensor in chosen)


@lru_cache(maxsize=256)
def _weights(spec: ModelSpec, weights: str, offloaded: int) -> tuple[_Weights, _Weights]:
    """Return the tensors of the GPU and of the CPU. The embedding is on the CPU; one that is the output layer too is
    there once more."""
    tensors = {tensor.name: tensor for tensor in stored(spec, mix_named(weights))}
    head = tensors.pop("output").bytes
    embedding = tensors.pop("token_embd").bytes if "token_embd" in tensors else head if offloaded else 0
    matrices = [tensor for tensor in tensors.values() if tensor.layer is not None]
    vectors = sum(tensor.bytes for tensor in tensors.values() if tensor.layer is None)
    first, count = spec.layers + 1 - offloaded, max(0, offloaded - 1)
    above = round(vectors * count / spec.layers)
    gpu, cpu = (
        tuple(tensor for tensor in matrices if (int(tensor.layer or 0) >= first) == on_gpu) for on_gpu in (True, False)
    )
    return (
        _Weights(gpu, count, head if offloaded else 0, above),
        _Weights(cpu, spec.layers - count, 0 if offloaded else head, embedding + vectors - above),
    )


def compute_bytes(spec: ModelSpec, service: Service) -> tuple[int, int, int]:
    """Return the bytes of a step's inputs, of its widest layer, and of its outputs, in fp32.

    A step has a ubatch of tokens, and an output for each slot (src/llama-context.cpp, sched_reserve). The sums are
    those of sched_reserve for eight Llamas and Qwen3 (mixtures within 5 %), on the CPU and on another device. Without a
    GPU, the buffer has the widest layer and its tokens' residual once more.
    """
    layers, cells = layers_of(spec), slot_tokens(service)
    tokens, hidden = min(UBATCH, service.slots * cells), layers.hidden
    mixers = [layer.mixer for layer, _ in layers.kinds if isinstance(layer.mixer, (Attention, LatentAttention))]
    mask = 2 * tokens * sum({_cells(mixer, cells) for mixer in mixers})  # in fp16, one of each kind of cache
    widest = max(_width(layer, hidden) for layer, _ in layers.kinds)
    outputs = 4 * service.slots * (hidden + layers.vocab)
    return mask + 8 * tokens * hidden, mask + 4 * tokens * widest, outputs


def _width(layer: Layer, hidden: int) -> int:
    """Return the numbers of a token that are alive at once. The room of the queries is used again by what fits it."""
    mixer, mlp = layer.mixer, layer.mlp
    query = attention = 0
    if isinstance(mixer, Attention):
        query = mixer.heads * mixer.head_dim
        attention = 2 * query + mixer.kv_heads * mixer.head_dim
    elif isinstance(mixer, LatentAttention):
        query = mixer.heads * (mixer.kv_rank + mixer.rope_dim)
        attention = 2 * query + mixer.kv_rank + mixer.rope_dim
    widths = [attention + 2 * hidden]
    if isinstance(mlp, DenseMLP):
        widths.append((3 if mlp.gated else 1) * mlp.width + 2 * hidden + (query if mlp.width > query else 0))
    elif isinstance(mlp, Experts):
        inner, outer = mlp.per_token * mlp.width, mlp.per_token * hidden
        widths.append((3 if mlp.gated else 1) * inner + 2 * hidden + (query if inner > query else 0))
        widths.append(2 * outer + query + (inner if inner > query else hidden))
    return max(widths)


def step_seconds(
    spec: ModelSpec, service: Service, gpu: GPU, sequences: int, context: int, tokens: int, cached: int, prompts: int
) -> dict[str, float]:
    """Return the seconds of a step by parts; for the sizes see `step.Step`.

    A pass reads the weights of each device once for up to UBATCH rows. Rows of prompts that meet layers of the CPU run
    on the GPU, to which the weights are sent.
    """
    memory = buffers(spec, service, gpu)
    on_gpu, on_cpu = _weights(spec, service.stored, memory.offloaded)
    rows = max(1, sequences + tokens)
    passes = ceil(rows / UBATCH)
    each = rows / passes
    kernels = engine_kernels(gpu)
    fast, slow = BANDWIDTH * gpu.bandwidth, BANDWIDTH * service.cpu_memory_gb_s * 1e9
    experts = 1 - (1 - spec.experts_per_token / spec.experts) ** each if spec.experts else 0.0
    active = spec.experts_per_token / spec.experts if spec.experts else 0.0

    def computed(weights: _Weights) -> float:
        dense, routed = 2 * each * weights.dense[1], 2 * each * active * weights.experts[1]
        peak = gpu.peak("fp32")
        if peak is None or service.stored in ("f16", "fp16", "bf16", "f32"):
            return kernels.computed(dense + routed, "bf16")
        if each <= VECTOR_ROWS:
            return (dense + routed) / (VECTOR * peak)
        return dense / (MATMUL * peak) + routed / (MATMUL_EXPERTS * peak)

    read = [weights.dense[0] + experts * weights.experts[0] for weights in (on_gpu, on_cpu)]
    parts = {"layers on the GPU": passes * max(read[0] / fast, computed(on_gpu))}
    if each < OFFLOADED_ROWS:
        parts["layers on the CPU"] = passes * read[1] / slow
    else:
        parts["layers on the CPU"] = passes * max(read[1] / (BANDWIDTH * (gpu.pcie or PCIE)), computed(on_cpu))
    parts["output layer"] = on_gpu.head / fast + on_cpu.head / slow
    share = on_gpu.layers / spec.layers
    seen = sequences * cache_bytes(spec, service, context)
    parts["attention"] = seen * (share / fast + (1 - share) / slow) + _prompt_attention(
        spec, gpu, tokens, cached, prompts
    )
    count = LAYER_KERNELS + (EXPERT_KERNELS if spec.experts else 0)
    parts["sampling"] = SAMPLING * (sequences + (prompts if tokens else 0))
    parts["small kernels"] = passes * LAUNCH * count * (on_gpu.layers + (each >= OFFLOADED_ROWS) * on_cpu.layers)
    return parts


def _prompt_attention(spec: ModelSpec, gpu: GPU, tokens: int, cached: int, prompts: int) -> float:
    each = tokens / max(1, prompts)
    flops = 0.0
    for layer, count in layers_of(spec).kinds:
        mixer = layer.mixer
        if isinstance(mixer, Attention):
            seen = min(cached + each / 2, mixer.window or cached + each / 2)
            flops += count * 4 * mixer.heads * mixer.head_dim * tokens * seen
        elif isinstance(mixer, LatentAttention):
            flops += count * 2 * mixer.heads * (2 * mixer.kv_rank + mixer.rope_dim) * tokens * (cached + each / 2)
    return engine_kernels(gpu).computed(flops, "bf16")


def longest_context(spec: ModelSpec, service: Service, gpu: GPU, users: int) -> int:
    """Return the tokens that each of `users` can have with all layers, or `n_gpu_layers`, on the GPU; 0: none."""
    layers = spec.layers + 1 if service.n_gpu_layers is None else service.n_gpu_layers
    low, high = 0, spec.max_positions // PADDING
    while low < high:
        middle = (low + high + 1) // 2
        one = replace(service, max_num_seqs=users, max_model_len=middle * PADDING, n_gpu_layers=layers)
        low, high = (middle, high) if buffers(spec, one, gpu).requests else (low, middle - 1)
    return low * PADDING
