"""Text generation from scratch: prefill and decode, four KV caches, sampling, speculative decoding, batching.

It is there to teach and to predict. To serve users, take vLLM, SGLang or llama.cpp, which do the same with their own
kernels.
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
