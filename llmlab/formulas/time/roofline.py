"""Prefill and decode on a roofline: a kernel takes as long as its FLOP or its bytes do, whichever is longer.

    intensity = FLOP / bytes        ridge = rate / bandwidth, the intensity where the two are equal

(Williams et al. 2009.) A pass is two kinds of kernel: products with weights, which are read once for all tokens, and
attention, which reads each sequence's own cache. Activations are left out: in decode they are thousands of times
smaller than the weights.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from ...specs.model import ModelSpec
from ...specs.run import Inference
from ..inference import kv_cache_bytes, loaded_bytes
from .flops import flops, token_pass

LARGEST_BATCH = 1 << 20  # the largest that `flip_batch` looks at


@dataclass(frozen=True)
class Pass:
    """One forward pass on one device: FLOP of the products with weights and of attention's, and the bytes each read."""

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
    """Return the pass that reads all prompts. It writes the cache; the keys and values it needs are at hand."""
    counted = flops(spec, replace(run, new_tokens=1))
    return _pass(spec, run, counted.by_part, run.prompt_len, 0)


def decode_pass(spec: ModelSpec, run: Inference, context: int | None = None, absorbed: bool = True) -> Pass:
    """Return the pass that reads one token of each sequence, of which it sees `context`, itself among them.

    Default: the middle of the generation, prompt_len + new_tokens / 2. Latent attention is computed on the latents
    themselves, as engines do it; `absorbed` False: expanded to all heads first, as transformers does (`token_pass`).
    """
    context = max(2, run.prompt_len + run.new_tokens // 2 if context is None else context)
    by_part = token_pass(spec, run.batch, context, absorbed)
    return _pass(spec, run, by_part, 1, kv_cache_bytes(spec, run, context))


def _pass(spec: ModelSpec, run: Inference, by_part: dict[str, int], new: int, cache: int) -> Pass:
    scores = by_part["scores"] // run.tp
    return Pass(sum(by_part.values()) // run.tp - scores, scores, weights_read(spec, run, run.batch * new), cache)


def weights_read(spec: ModelSpec, run: Inference, tokens: float) -> int:
    """Return the bytes of weights that a pass over `tokens` tokens reads on one device.

    All but the embedding, of which it looks up `tokens` rows (a tied one is read as the head), and of the routed
    experts those that some token goes to: E · (1 - (1 - k/E)^tokens) of E, if each of the k choices is like any other.
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
    """Return the smallest batch in which decode's products with weights take their FLOP as long as their bytes.

    It is also the number of prompt tokens from which prefill is bound by FLOP. None where no batch up to 2^20 is.
    Attention has no such batch: each sequence brings a cache of its own.
    """

    def bound_by_flop(batch: int) -> bool:
        one = decode_pass(spec, replace(run, batch=batch), context=2)
        return one.products * bandwidth >= one.weights * rate

    batches = range(1, LARGEST_BATCH + 1)
    first = bisect_left(batches, True, key=bound_by_flop)
    return batches[first] if first < len(batches) else None
