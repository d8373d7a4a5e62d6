"""Text generation from scratch: prefill and decode, four KV caches, sampling, speculative decoding, batching.

This package teaches and predicts. To serve users, use vLLM, SGLang or llama.cpp, which do the same with kernels of
their own.
"""

from .blocks import BlockPool
from .cache import GrowingCache, PagedCache, StaticCache
from .generate import generate
from .quantized_cache import QuantizedCache
from .sampling import probabilities
from .scheduler import Request, Scheduler
from .speculative import Speculation, speculate

__all__ = [
    "BlockPool",
    "GrowingCache",
    "PagedCache",
    "QuantizedCache",
    "Request",
    "Scheduler",
    "Speculation",
    "StaticCache",
    "generate",
    "probabilities",
    "speculate",
]
