"""Memory of one generation: the weights, the KV cache, and the activations of a pass."""

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
    """Return the bytes of keys and values on one device, for `tokens` (default `seq_len`) of each of `batch` sequences.

    A token has 2 · layers · kv_heads · head_dim elements, or with latent attention (DeepSeek-V2, arXiv 2405.04434,
    section 2.1) one compressed vector per layer. A sliding window limits the tokens, unless `windowed` is False:
    transformers' DynamicCache keeps the whole prompt until the first new token has been read. Otherwise, these are
    exactly the bytes of its StaticCache, and those of its DynamicCache during decode.
    """
    tokens = run.seq_len if tokens is None else tokens
    # Tensor parallelism divides the kv heads. With more ranks than kv heads, each rank has one, and every rank has the
    # whole compressed vector.
    split = 1 if spec.mla else min(run.tp, spec.kv_heads)
    elements = spec.kv_elements_per_token // spec.layers // split  # of one layer and position
    position = elements * KV_BITS[run.kv] // 8
    if run.kv in ("int8", "int4"):
        position += KV_GROUP_BYTES * -(-elements // KV_GROUP)
    window = min(tokens, spec.sliding_window or tokens) if windowed else tokens
    positions = (spec.layers - spec.window_layers) * tokens + spec.window_layers * window
    return run.batch * position * positions


def loaded_bytes(spec: ModelSpec, run: Inference) -> int:
    """Return the bytes of all weights on one device. With nf4 and int8, the embedding, the head, the norms and the
    router stay in 16 bits."""
    if run.weights not in ("nf4", "int8"):
        return weight_bytes(run.weights, spec.parameters, 0) // run.tp
    return stored_bytes(spec, run.weights, spec.parameters, 2) // run.tp


def inference_moments(spec: ModelSpec, run: Inference, gpu: GPU | None) -> list[Moment]:
    """Return the moments of one generation: the weights are loaded, the whole prompt (prefill), the last token
    (decode)."""
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
    if run.new_tokens > 1:  # the model does not read the last new token
        moments.append(moment("decode", "the last token", 1, run.seq_len - 1))
    return moments


def working_bytes(spec: ModelSpec, run: Inference, kernel: str, new: int, cached: int) -> int:
    """Return the bytes of activations of a pass over `new` tokens per sequence, which attend to `cached` tokens,
    including themselves.

    These are the residual and the norm, plus either the branches of the MLP or q, k, v and the output of attention,
    whichever are larger.
    """
    tokens, c = run.batch * new, _compute_bytes(run)
    # In elements per token. A GELU of separate operators has four tensors alive.
    mlp: float = (3 if spec.gated else 2 if spec.activation in FUSED else 4) * spec.token_mlp_width
    attention: float = 2 * spec.query_width + 2 * spec.key_width
    if spec.mla:  # the latents of all cached tokens are projected to keys and values of all heads
        up = spec.heads * (spec.mla.qk_nope_head_dim + spec.mla.v_head_dim + spec.head_dim)
        attention = 2 * spec.query_width + up * cached / new
    scores = run.batch * spec.heads * new * cached
    if run.attention == "eager":
        # The input of softmax, its fp32 output, the copy of this output, and the mask. A variable of the block keeps
        # the attention weights alive while the MLP runs.
        attention += scores * (4 + c + (c if c != 4 else 0) + c / spec.heads) / (tokens * c)
        mlp += scores * (1 + 1 / spec.heads) / tokens
    elif kernel == "math":
        # In fp32: keys and values, both repeated to all heads, and scaled keys; the input and output of softmax, and
        # a mask of one byte per score.
        heads = 2 * spec.kv_heads + 3 * spec.heads
        attention += (4 * heads * spec.head_dim * run.batch * cached + 9 * scores) / (tokens * c)
    return int(tokens * c * (2 * spec.hidden + max(mlp, attention) / run.tp))


def _compute_bytes(run: Inference) -> int:
    return 4 if run.weights == "fp32" else 2
