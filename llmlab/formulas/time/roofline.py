"""Prefill and decode on a roofline: a kernel takes as long as its FLOP or its bytes, whichever take longer.

    intensity = FLOP / bytes        ridge = rate / bandwidth, the intensity where the two are equal

(Williams et al. 2009.) A pass consists of two kinds of kernels: matmuls with weights, which are read once for all
tokens, and attention, which reads each sequence's own cache. Activations are left out, because in decode they are
thousands of times smaller than the weights.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from ...specs.model import ModelSpec
from ...specs.run import Inference
from ..inference import kv_cache_bytes, loaded_bytes
from .flops import flops, token_pass

LARGEST_BATCH = 1 << 20  # the largest that `flip_batch` tries


@dataclass(frozen=True)
class Pass:
    """One forward pass on one device: the FLOP of matmuls with weights (`products`) and of attention (`scores`), and
    the bytes that each of them reads (`weights`, `cache`)."""

    products: int
    scores: int
    weights: int
    cache: int

    @property
    def flops(self) -> int:
        return self.products + self.scores

    @property
    def bytes(self) -> int:
        return self.weights + self.cache

    def seconds(self, rate: float, bandwidth: float) -> float:
        """Return the seconds at `rate` FLOP/s and `bandwidth` bytes/s: the roofline's lower bound."""
        weights = max(self.products / rate, self.weights / bandwidth)
        return weights + max(self.scores / rate, self.cache / bandwidth)


def prefill_pass(spec: ModelSpec, run: Inference) -> Pass:
    """Return the pass that reads all prompts. It reads no cache, because it has just computed all keys and values."""
    counted = flops(spec, replace(run, new_tokens=1))
    return _pass(spec, run, counted.by_part, run.prompt_len, 0)


def decode_pass(spec: ModelSpec, run: Inference, context: int | None = None, absorbed: bool = True) -> Pass:
    """Return the pass that reads one token of each sequence, which attends to `context` tokens, including itself.

    By default, this is the middle of the generation, prompt_len + new_tokens / 2. Latent attention runs on the latents
    themselves, as in engines. If `absorbed` is False, they are first expanded to all heads, as in transformers
    (`token_pass`).
    """
    context = max(2, run.prompt_len + run.new_tokens // 2 if context is None else context)
    by_part = token_pass(spec, run.batch, context, absorbed)
    return _pass(spec, run, by_part, 1, kv_cache_bytes(spec, run, context))


def _pass(spec: ModelSpec, run: Inference, by_part: dict[str, int], new: int, cache: int) -> Pass:
    scores = by_part["scores"] // run.tp
    return Pass(sum(by_part.values()) // run.tp - scores, scores, weights_read(spec, run, run.batch * new), cache)


def weights_read(spec: ModelSpec, run: Inference, tokens: float) -> int:
    """Return the bytes of weights that a pass over `tokens` tokens reads on one device.

    It reads all weights except the embedding, whose few rows are left out (a tied embedding is read as the head), and
    except the routed experts that no token chooses. If all experts are equally likely, it reads
    E · (1 - (1 - k/E)^tokens) of the E experts, for k choices per token.
    """
    parts = spec.parameters_by_component
    lookups = (0 if spec.tied else parts["embedding"]) + parts.get("positions", 0)
    wide = 4 if run.weights == "fp32" else 2
    read = loaded_bytes(spec, run) - wide * lookups / run.tp
    if spec.experts:
        untouched = (1 - spec.experts_per_token / spec.experts) ** tokens
        count = parts["experts"] / spec.parameters
        read -= loaded_bytes(spec, run) * count * untouched
    return int(read)


def flip_batch(spec: ModelSpec, run: Inference, rate: float, bandwidth: float) -> int | None:
    """Return the smallest batch for which the FLOP of decode's matmuls with weights take as long as their bytes.

    With at least as many prompt tokens, prefill is limited by FLOP, too. Return None if no batch up to 2^20 is large
    enough. Attention has no such batch, because each sequence reads a cache of its own.
    """

    def bound_by_flop(batch: int) -> bool:
        one = decode_pass(spec, replace(run, batch=batch), context=2)
        return one.products * bandwidth >= one.weights * rate

    batches = range(1, LARGEST_BATCH + 1)
    first = bisect_left(batches, True, key=bound_by_flop)
    return batches[first] if first < len(batches) else None
