"""Memory of one generation: weights, the KV cache, and the working set of a pass."""

from __future__ import annotations

from ..hardware.gpu import GPU
from ..specs.model import ModelSpec
from ..specs.run import Inference
from .memory.activations import FUSED
from .memory.moments import Moment
from .memory.precision import weight_bytes
from .memory.share import attention_kernel
from .memory.states import stored_bytes

KV_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}
# Elements that share a scale and a zero point, 2 bytes each, in int8 and int4 (FlexGen, arXiv 2303.06865, section 4;
# transformers' QuantizedCache by default). fp8 has one scale per tensor, 8 bytes per layer, left out.
KV_GROUP = 64
KV_GROUP_BYTES = 4


def kv_cache_bytes(spec: ModelSpec, run: Inference, tokens: int | None = None, windowed: bool = True) -> int:
    """Return the bytes of keys and values on one device, of `tokens` (default `seq_len`) of each of `batch` sequences.

    2 · layers · kv_heads · head_dim elements per token; with latent attention (DeepSeek-V2, arXiv 2405.04434, section
    2.1) the compressed vector instead. A sliding window bounds the tokens, unless `windowed` is False: transformers'
    DynamicCache keeps the whole prompt until the first new token has been read. Otherwise these are the bytes of its
    StaticCache, to the byte, and those under its DynamicCache while it decodes.
    """
    tokens = run.seq_len if tokens is None else tokens
    # Tensor parallelism divides the kv heads; the compressed vector, and what is left of the heads, is on every rank.
    split = 1 if spec.mla else min(run.tp, spec.kv_heads)
    elements = spec.kv_elements_per_token // spec.layers // split  # of one layer and position
    position = elements * KV_BITS[run.kv] // 8
    if run.kv in ("int8", "int4"):
        position += KV_GROUP_BYTES * -(-elements // KV_GROUP)
    window = min(tokens, spec.sliding_window or tokens) if windowed else tokens
    positions = (spec.layers - spec.window_layers) * tokens + spec.window_layers * window
    return run.batch * position * positions


def loaded_bytes(spec: ModelSpec, run: Inference) -> int:
    """Return the bytes of all weights on one device; nf4 and int8 leave embedding, head, norms and router in 16 bit."""
    if run.weights not in ("nf4", "int8"):
        return weight_bytes(run.weights, spec.parameters, 0) // run.tp
    return stored_bytes(spec, run.weights, spec.parameters, 2) // run.tp


def inference_moments(spec: ModelSpec, run: Inference, gpu: GPU | None) -> list[Moment]:
    """Return the moments of one generation: weights, the prompt at once (prefill), the last token (decode)."""
    weights = loaded_bytes(spec, run)
    kernel = attention_kernel(spec, run, gpu) if gpu else run.attention

    def moment(phase: str, name: str, new: int, cached: int) -> Moment:
        parts = {
            "weights": weights,
            "kv_cache": kv_cache_bytes(spec, run, cached, windowed=phase == "decode"),
            "activations": working_bytes(spec, run, kernel, new, cached),
            "logits": run.batch * spec.vocab * (_compute_bytes(run) + 4),
            "workspace": (gpu.cublas_workspace or 0) if gpu else 0,
        }
        return Moment(phase, name, parts)

    moments = [
        Moment("load", "weights loaded", {"weights": weights}),
        moment("prefill", "the prompt", run.prompt_len, run.prompt_len),
    ]
    if run.new_tokens > 1:  # the last one goes through no model
        moments.append(moment("decode", "the last token", 1, run.seq_len - 1))
    return moments


def working_bytes(spec: ModelSpec, run: Inference, kernel: str, new: int, cached: int) -> int:
    """Return the activations of a pass over `new` tokens of each sequence, which sees `cached`, themselves among them:
    residual and norm, then the wider of the MLP's branches and attention's q, k, v and output."""
    tokens, c = run.batch * new, _compute_bytes(run)
    # In elements per token; a GELU written out has four tensors alive.
    mlp: float = (3 if spec.gated else 2 if spec.activation in FUSED else 4) * spec.token_mlp_width
    attention: float = 2 * spec.query_width + 2 * spec.key_width
    if spec.mla:  # the latent is projected up to every head's key and value, for every token in the cache
        up = spec.heads * (spec.mla.qk_nope_head_dim + spec.mla.v_head_dim + spec.head_dim)
        attention = 2 * spec.query_width + up * cached / new
    scores = run.batch * spec.heads * new * cached
    if run.attention == "eager":
        # Softmax's input, its fp32 output and that output's copy; the mask. The block's frame keeps the attention
        # weights alive while the MLP runs.
        attention += scores * (4 + c + (c if c != 4 else 0) + c / spec.heads) / (tokens * c)
        mlp += scores * (1 + 1 / spec.heads) / tokens
    elif kernel == "math":
        # In fp32: keys and values, both repeated to all heads, keys scaled; softmax's input, output and marks.
        heads = 2 * spec.kv_heads + 3 * spec.heads
        attention += (4 * heads * spec.head_dim * run.batch * cached + 9 * scores) / (tokens * c)
    return int(tokens * c * (2 * spec.hidden + max(mlp, attention) / run.tp))


def _compute_bytes(run: Inference) -> int:
    return 4 if run.weights == "fp32" else 2
