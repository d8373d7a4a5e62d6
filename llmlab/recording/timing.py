"""Seconds and FLOP of a step, without any profiler."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

# The FLOP of the CPU's attention, from shapes; PyTorch's table has the CUDA kernels alone.
CPU_ATTENTION_FLOPS: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


def median_seconds(step: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median duration of `repeats` calls of `step`: CUDA events on a GPU, the wall clock elsewhere."""
    seconds = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)  # ms
        else:
            start = time.perf_counter()
            step()
            if device.type == "mps":
                torch.mps.synchronize()
            seconds.append(time.perf_counter() - start)
    return median(seconds)


def count_flops(step: Callable[[], object]) -> int:
    """Return the FLOP of matrix products, convolutions and attention that one call of `step` runs.

    PyTorch's FlopCounterMode, with the CPU's attention, which it lacks. It counts what runs: with checkpointing the
    recomputation too, and a causal attention whole, as if nothing were masked.
    """
    mapping = {getattr(torch.ops.aten, name.split("::")[1]): count for name, count in CPU_ATTENTION_FLOPS.items()}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        step()
    return counter.get_total_flops()
