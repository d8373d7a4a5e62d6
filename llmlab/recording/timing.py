"""Seconds and FLOP of a step, without any profiler."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

Shape = tuple[int, ...]


def _attention_flops(q: Shape, k: Shape, v: Shape, *_: object, **__: object) -> int:
    return sdpa_flop_count(q, _repeated(k, q), _repeated(v, q))


def _attention_backward_flops(grad: Shape, q: Shape, k: Shape, v: Shape, *_: object, **__: object) -> int:
    return sdpa_backward_flop_count(grad, q, _repeated(k, q), _repeated(v, q))


def _repeated(keys: Shape, q: Shape) -> Shape:
    """Return the shape (B, H, T, D) of keys or values with the queries' heads, by which kernels repeat grouped ones."""
    return (keys[0], q[1], *keys[2:])


# By shapes, for all kernels that scaled_dot_product_attention may take: PyTorch's table lacks the CPU's, and before
# 2.12 its counts of the others raise AssertionError where keys are grouped (Llama 3, Qwen).
ATTENTION_FLOPS: dict[str, Callable[..., int]] = {
    f"aten::_scaled_dot_product_{kernel}": count
    for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    for kernel, count in ((name, _attention_flops), (f"{name}_backward", _attention_backward_flops))
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

    PyTorch's FlopCounterMode, with counts of attention from here. It counts what runs: with checkpointing the
    recomputation too, and a causal attention whole, as if nothing were masked.
    """
    mapping = {getattr(torch.ops.aten, name.split("::")[1]): count for name, count in ATTENTION_FLOPS.items()}
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    vars(counter).update(mod_tracker=_Whole())
    with counter:
        step()
    return counter.get_total_flops()


class _Whole(nullcontext):
    """In the place of FlopCounterMode's tracker of modules, whose hooks keep what checkpointing frees: three times the
    memory of a step of eight blocks."""

    parents = frozenset(("Global",))
