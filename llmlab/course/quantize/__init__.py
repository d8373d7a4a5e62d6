"""Quantization: number formats and algorithms, one file each. Importing it imports neither torch nor numpy.

Formats    affine (int2 … int8), nf4, gguf (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q6_K, MXFP4), fp8
Algorithms rtn, gptq, awq, smoothquant, hqq, qat; int8 (products in int8, outlier features in floats), kv (the KV cache)
Sizes      bits_per_weight, file_bytes

    from llmlab import quantize
    data = quantize.gguf.encode("Q4_K", array); quantize.gguf.decode("Q4_K", data, array.shape)
    codes, absmax = quantize.nf4.encode(array); quantize.nf4.decode(codes, absmax, array.shape)
    quantize.gptq(weight, inputs, bits=4, group=128).dequantize()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...specs.gguf import bits_per_weight, file_bytes

if TYPE_CHECKING:
    from .algorithms import hqq, qat, rtn, smoothquant
    from .algorithms.awq import awq
    from .algorithms.gptq import gptq
    from .formats import affine, fp8, gguf, gguf_file, int8, kv, nf4

__all__ = [
    "affine", "awq", "bits_per_weight", "file_bytes", "fp8", "gguf", "gguf_file", "gptq", "hqq", "int8", "kv",
    "nf4", "qat", "rtn", "smoothquant",
]  # fmt: skip

ALGORITHMS = ("awq", "gptq", "hqq", "qat", "rtn", "smoothquant")

if not TYPE_CHECKING:  # type checkers use the imports above instead, so they find a misspelt name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f".{'algorithms' if name in ALGORITHMS else 'formats'}.{name}", __name__)
        return getattr(module, name) if name in ("awq", "gptq") else module
