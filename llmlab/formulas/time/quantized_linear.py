"""Time of a linear layer with a quantized weight: when quantization is faster, and when not."""

from __future__ import annotations

from typing import Literal, get_args

from ...base.errors import NotAvailable, SpecError
from ...hardware.gpu import GPU
from ...hardware.gpu import gpu as find_gpu

Way = Literal["16-bit", "fused", "unpacked", "w8a8"]


def linear_seconds(
    gpu: GPU | str, tokens: int, rows: int, columns: int, way: Way = "16-bit", bits: float = 4.5, dtype: str = "fp16"
) -> float:
    """Return the least seconds of x Wᵀ, x (tokens, columns), W (rows, columns), at a GPU's data sheet rates.

    The roofline (Williams et al., 2009): the larger of FLOP / peak and bytes / bandwidth.
        "16-bit"    the weight is read in `dtype`
        "fused"     it is read in `bits` per weight and unpacked in registers (Marlin, GPTQ's and AWQ's kernels)
        "unpacked"  one kernel unpacks it to memory, another reads it from there (bitsandbytes beyond few tokens)
        "w8a8"      weight and inputs in 8 bits, multiplied by the int8 units
    Raises NotAvailable for a GPU without the units, SpecError for another way.
    """
    gpu = find_gpu(gpu)
    if way not in get_args(Way):
        raise SpecError(f"way={way!r} is not one of {', '.join(get_args(Way))}")
    peak = gpu.peak("int8" if way == "w8a8" else dtype)
    if peak is None:
        raise NotAvailable(f"{gpu.name} has no units for {'int8' if way == 'w8a8' else dtype}")
    weights = rows * columns
    streams = 2 * tokens * (rows + columns)  # inputs and outputs, in 16 bits
    packed = weights * (8 if way == "w8a8" else bits) / 8
    read = 2 * weights if way in ("16-bit", "unpacked") else packed
    matmul = max(2 * tokens * weights / peak, (read + streams) / gpu.bandwidth)
    unpacking = (packed + 2 * weights) / gpu.bandwidth if way == "unpacked" else 0.0
    return matmul + unpacking
