"""Seconds of small models on this machine: decoding with each kind of cache, and the two phases of a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from ...specs.model import ModelSpec
from ...specs.run import Inference
from ..architectures.llama import Llama
from ..inference import generate

SMALL = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip


def clock(device: str) -> float:
    """Return a time in seconds. On a CPU, it is the CPU time of this process, which excludes other programs."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def fastest(run: Callable[[], object], device: str, times: int = 2) -> float:
    """Return the seconds of the fastest of `times` runs."""
    least = float("inf")
    for _ in range(times):
        start = clock(device)
        run()
        least = min(least, clock(device) - start)
    return least


def cache_seconds(model: nn.Module, text: Tensor, kinds: Sequence[str], new: int) -> dict[str, float]:
    """Return the seconds in which `model` generates the last `new` tokens of a text as long as `text`, by cache."""
    seconds = {}
    for kind in kinds:
        generate(model, text[:8], 2, cache=kind)  # warm up
        seconds[kind] = fastest(partial(generate, model, text[:-new], new, cache=kind), text.device.type, 1)
    return seconds


def rates_here(device: str) -> tuple[float, float]:
    """Return this machine's FLOP/s in a large matmul, and its bytes/s in a matrix-vector product."""
    dtype, size = (torch.float16, 4096) if device == "cuda" else (torch.float32, 512)
    square = torch.randn(size, size, device=device, dtype=dtype)
    tall = torch.randn(32 * 1024, 1024, device=device, dtype=dtype)
    rate = 2 * size**3 / fastest(lambda: square @ square, device)
    return rate, tall.nbytes / fastest(lambda: tall @ tall[0], device)


def request_here(text: Tensor, new: int = 8) -> tuple[ModelSpec, Inference, float, float]:
    """Return a model with random weights, a request for it, and its seconds to the first and between tokens here."""
    device = text.device.type
    dtype: Literal["fp16", "fp32"] = "fp16" if device == "cuda" else "fp32"
    model = Llama.from_spec(SMALL).to(text.device, torch.float16 if device == "cuda" else torch.float32).eval()
    first = fastest(lambda: generate(model, text, 1, cache="static"), device)
    total = fastest(lambda: generate(model, text, 1 + new, cache="static"), device)
    run = Inference(prompt_len=len(text), new_tokens=1 + new, weights=dtype, kv=dtype)
    return model.spec, run, first, (total - first) / new
