"""Service: how a model is served: engine, precision, parallelism, limits, and the load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from ..base.errors import SpecError, unknown_name
from ..hardware.gpu import GPU
from ..specs.gguf import MIXES, mix_named

ENGINES = ("vllm", "sglang", "trtllm", "llama.cpp")
WEIGHTS = ("auto", "bf16", "fp16", "fp8", "int8", "awq", "gptq", "mxfp4", "nvfp4")
KV = ("bf16", "fp16", "fp8")
# llama.cpp's, common/arg.cpp, kv_cache_types; 16 bits are its f16
CACHE_TYPES = ("f16", "bf16", "fp16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "f32")
CHOICES = {
    "engine": ENGINES,
    "weights": tuple(dict.fromkeys((*WEIGHTS, *map(str.lower, MIXES)))),
    "kv": tuple(dict.fromkeys((*KV, *CACHE_TYPES))),
}
HELP = {
    "engine": f"Inference engine. One of {', '.join(ENGINES)}.",
    "weights": f"Storage format of the linear layers. One of {', '.join(WEIGHTS)}; with llama.cpp, a GGUF type such as "
    "q4_k_m or q8_0. auto: the format of the published checkpoint, or bf16 if the GPU does not support it.",
    "kv": f"Dtype of the KV cache. One of {', '.join(KV)}; with llama.cpp, one of {', '.join(CACHE_TYPES)}.",
    "tp": "Tensor-parallel GPUs, which share each layer. Default: all GPUs of --gpu, divided by --pp.",
    "pp": "Pipeline stages, each on --tp GPUs.",
    "ep": "Expert-parallel GPUs: 1, or as many as --tp.",
    "dp_attention": "Copies of the attention layers, each of which serves its own requests; must be a divisor of --tp.",
    "gpu_memory_utilization": "Share of each GPU's memory that the engine may use, from 0 to 1; not for llama.cpp.",
    "max_model_len": "Maximum length of a request in tokens. Default: the model's maximum; with llama.cpp, "
    "--prompt-len plus --output-len.",
    "max_num_seqs": "Maximum number of requests in a step. Default: 256 or 1024, depending on the GPU; with llama.cpp, "
    "--concurrency, or 4 with --rate.",
    "max_num_batched_tokens": "Maximum number of tokens in a step. Default: 2048, 8192 or 16384, depending on the "
    "engine and the GPU.",
    "prefill_interval": "Number of decode steps between checks for new requests; with trtllm, how many steps a new "
    "request waits.",
    "draft": "Draft for speculative decoding: mtp, eagle3, eagle3:CHECKPOINT, or the name of a smaller model; needs "
    "--acceptance.",
    "draft_tokens": "Tokens that the draft proposes in each step.",
    "acceptance": "Probability from 0 to 1 that the model accepts a proposed token; needs --draft.",
    "prompt_len": "Tokens per prompt.",
    "output_len": "Tokens per answer.",
    "range_ratio": "Draw each length uniformly between R * L and L, where R is this number (above 0, at most 1) and L "
    "is --prompt-len or --output-len.",
    "prefix_hit": "Share of each prompt that is already in the prefix cache, from 0 to below 1.",
    "concurrency": "Number of users, each of whom waits for an answer before sending the next request. Default: 1, "
    "unless --rate is given.",
    "rate": "Requests per second, which arrive at random times; not with --concurrency.",
    "n_gpu_layers": "Layers that llama.cpp puts on the GPU, the output layer included. Default: as many as fit.",
    "cpu_memory_gb_s": "Bandwidth of the CPU's memory in GB/s, for the layers that llama.cpp puts on the CPU. Two "
    "channels of DDR4-3200 provide 51 GB/s, and two of DDR5-5600 provide 90 GB/s.",
}  # fmt: skip
MOST_USERS = 100_000  # whose ten requests each are replayed in about a minute
# Of whole numbers, where it is not 1: a step has at least a block of tokens.
LEAST = {"n_gpu_layers": 0, "max_num_batched_tokens": 16}
UTILIZATION = 0.92  # gpu_memory_utilization's default, vllm/config/cache.py, read 2026-11-21; 0.9 before 2026


@dataclass(frozen=True)
class Service:
    """A deployment of one model on tp · pp GPUs, and the requests that it gets.

    `engine`: "vllm", "sglang", "trtllm" or "llama.cpp". `weights`: storage format of the linear layers; "auto" is the
    format of the published checkpoint, or bf16 if the GPU has no units for that format; "mxfp4" and "nvfp4" of a
    mixture of experts apply to its experts; with llama.cpp a GGUF type ("q4_k_m"). `kv`: dtype of the KV cache. `tp`:
    degree of tensor parallelism (llama.cpp gives each GPU some of the layers instead). `pp`: pipeline stages, each with
    a share of the layers. `ep`: GPUs over which the experts are divided, tp or 1. `dp_attention`: copies of attention,
    each on tp / dp_attention GPUs with its own requests.

    `gpu_memory_utilization`: share of each GPU's memory that the engine may use. `max_model_len`: tokens of the longest
    request (None: the model's maximum). `max_num_seqs`: requests in a step. `max_num_batched_tokens`: tokens in a step
    (None: the default of vLLM's server on the GPU, see `limits`). `prefill_interval`: decode steps between two checks
    for new requests; with TensorRT-LLM, steps that a new request waits.

    `draft`: source of proposed tokens: "mtp" (the model's own layer for it), "eagle3" (one more layer, whose checkpoint
    may follow a colon), or the name of a smaller model. Each step proposes `draft_tokens`; the model accepts each with
    the probability `acceptance` if it accepted those before.

    `prompt_len` and `output_len`: tokens of a request; with a `range_ratio` below 1 both are drawn uniformly from
    range_ratio · length to length, as load generators do. `prefix_hit`: share of the prompt that the prefix cache
    holds. `concurrency`: users, each of whom waits for an answer before the next request; or `rate`: requests per
    second, which arrive at random times. `n_gpu_layers` (llama.cpp): layers on the GPU, the output layer included
    (None: as many as fit); the others run on the CPU, whose memory has a bandwidth of `cpu_memory_gb_s` · 10^9 bytes/s.
    """

    engine: str = "vllm"
    weights: str = "auto"
    kv: str = "bf16"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp_attention: int = 1
    gpu_memory_utilization: float = UTILIZATION
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefill_interval: int = 1
    draft: str | None = None
    draft_tokens: int = 3
    acceptance: float | None = None
    prompt_len: int = 1024
    output_len: int = 1024
    range_ratio: float = 1.0
    prefix_hit: float = 0.0
    concurrency: int | None = None
    rate: float | None = None
    n_gpu_layers: int | None = None
    cpu_memory_gb_s: float = 50.0

    def __post_init__(self) -> None:
        self._check_formats()
        for name in ("rate", "acceptance", "prefix_hit", "range_ratio", "gpu_memory_utilization", "cpu_memory_gb_s"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise SpecError(f"{name}={value!r}: give a number")
        for name, hint in HINTS.items():
            value, least, optional = getattr(self, name), LEAST.get(name, 1), hint is not int
            if int not in (hint, *get_args(hint)) or (optional and value is None):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                instead = ", or leave it out" if optional else ""
                raise SpecError(f"{name}={value!r}: give a whole number >= {least}{instead}")
        if not 1 <= self.cpu_memory_gb_s <= 10_000:
            raise SpecError(f"cpu_memory_gb_s={self.cpu_memory_gb_s!r}: give 10^9 bytes per second, 1 to 10,000")
        if not 0 < self.gpu_memory_utilization <= 1:
            given = self.gpu_memory_utilization
            raise SpecError(f"gpu_memory_utilization={given!r}: give a share of the GPU's memory, 0 < share <= 1")
        if not 0 <= self.prefix_hit < 1:
            raise SpecError(f"prefix_hit={self.prefix_hit!r}: give a share of the prompt, 0 <= share < 1")
        if not 0 < self.range_ratio <= 1:
            raise SpecError(f"range_ratio={self.range_ratio!r}: give a share of the longest request, 0 < share <= 1")
        if self.concurrency is not None and self.concurrency > MOST_USERS:
            given = self.concurrency
            raise SpecError(f"concurrency={given}: give at most {MOST_USERS:,}, the users of one deployment")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise SpecError(f"rate={self.rate!r}: give requests per second above 0, or None")
        if self.rate is not None and self.concurrency is not None:
            raise SpecError("rate and concurrency are two kinds of load; give one of them")
        if self.ep not in (1, self.tp):
            raise SpecError(f"ep={self.ep}: the tp={self.tp} GPUs divide the experts, or none does; give 1 or tp")
        if self.tp % self.dp_attention:
            raise SpecError(f"dp_attention={self.dp_attention} does not divide tp={self.tp}; give a divisor of tp")
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise SpecError(f"acceptance={self.acceptance!r}: give a share of the proposed tokens, 0 <= share <= 1")
        if (self.draft is None) != (self.acceptance is None):
            pair = f"draft={self.draft!r}, acceptance={self.acceptance!r}"
            raise SpecError(f"{pair}: give both, for example draft='eagle3' and acceptance=0.7, or neither")
        requests, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if self.engine == "vllm" and requests and tokens and requests > tokens:
            pair = f"max_num_seqs={requests} and max_num_batched_tokens={tokens}"
            raise SpecError(f"{pair}: vLLM wants a token or more for each request of a step; raise the second")
        if self.draft and self.pp > 1:
            pair = f"draft={self.draft!r} and pp={self.pp}"
            raise SpecError(f"{pair}: engines do not combine a draft with pipeline stages; give one of them")

    def _check_formats(self) -> None:
        if self.engine not in ENGINES:
            raise SpecError(f"engine={self.engine!r}: give one of {', '.join(map(repr, ENGINES))}")
        if self.engine == "llama.cpp":
            mix_named(self.stored)
            if self.kv not in CACHE_TYPES:
                hint = f"llama.cpp has {', '.join(CACHE_TYPES)}."
                raise unknown_name("cache type", str(self.kv), list(CACHE_TYPES), hint)
            if self.ep > 1 or self.dp_attention > 1:
                raise SpecError("ep and dp_attention are not options of llama.cpp; leave them at 1")
            if self.pp > 1 or self.draft or self.prefill_interval > 1:
                raise SpecError("pp, draft and prefill_interval are not predicted for llama.cpp; leave them out")
            if self.gpu_memory_utilization != UTILIZATION:
                given = self.gpu_memory_utilization
                raise SpecError(f"gpu_memory_utilization={given!r}: llama.cpp takes what it needs; leave it out")
            return
        for name, allowed in (("weights", WEIGHTS), ("kv", KV)):
            if getattr(self, name) not in allowed:
                of_llama_cpp = getattr(self, name) in CHOICES[name]
                words = f"{name}={getattr(self, name)!r}: give one of {', '.join(map(repr, allowed))}"
                raise SpecError(words + (', or engine="llama.cpp"' if of_llama_cpp else ""))
        if self.n_gpu_layers is not None:
            raise SpecError(f'n_gpu_layers={self.n_gpu_layers!r} is an option of engine="llama.cpp"; leave it out')

    @property
    def stored(self) -> str:
        """The weights' format: bf16 for "auto", unless the model and the GPU have decided otherwise."""
        return "bf16" if self.weights == "auto" else self.weights

    @property
    def slots(self) -> int:
        """Requests that llama-server has a cache for (--parallel): those that are asked for, or its default of four."""
        return self.max_num_seqs or self.concurrency or (4 if self.rate else 1)

    def limits(self, gpu: GPU) -> tuple[int, int]:
        """Return the most requests and tokens in a step.

        vLLM's server takes 1,024 and 16,384 on a GPU of 160 GiB or more, 1,024 and 8,192 on one of 70 that is no A100
        and no GB10, else 256 and 2,048 (vllm/engine/arg_utils.py, get_batch_defaults, of 0.33), and no more requests
        than tokens; SGLang and TensorRT-LLM are taken to have 8,192 on large GPUs and to do alike on others. llama.cpp
        takes its slots, and 2,048 tokens (--batch-size).
        """
        if self.engine == "llama.cpp":
            return self.slots, self.max_num_batched_tokens or 2048
        large = gpu.memory >= 70 * 2**30 and not gpu.name.startswith(("A100", "GB10"))
        requests, tokens = (1024, 8192) if large else (256, 2048)
        tokens *= 2 if self.engine == "vllm" and gpu.memory >= 160 * 2**30 else 1
        tokens = self.max_num_batched_tokens or tokens
        return self.max_num_seqs or min(requests, tokens), tokens

    @property
    def prompts_first(self) -> bool:
        """Whether a step either reads prompts or decodes, prompts first: SGLang's scheduler without mixed chunks."""
        return self.engine == "sglang"

    @property
    def preempts(self) -> bool:
        """Whether a request enters with its prompt alone and is preempted if the cache is full later: vLLM, SGLang
        (which calls it retraction). TensorRT-LLM sets all tokens of a request aside (GUARANTEED_NO_EVICT), and
        llama.cpp has slots."""
        return self.engine in ("vllm", "sglang")

    @property
    def patient(self) -> bool:
        """Whether each new request waits `prefill_interval` steps: TensorRT-LLM's batch_wait_timeout_iters."""
        return self.engine == "trtllm"

    @property
    def gpus(self) -> int:
        """GPUs of the deployment."""
        return self.tp * self.pp

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step gives a request: (1 − a^(k+1)) / (1 − a) for k proposed tokens, each accepted with the
        probability a (Leviathan et al. 2022, arXiv 2211.17192, eq. 1); 1 without a draft."""
        if self.acceptance is None:
            return 1.0
        return sum(self.acceptance**number for number in range(self.draft_tokens + 1))


HINTS: dict[str, Any] = get_type_hints(Service)
