"""What earlier releases of the libraries did differently, as far as it changes a card's memory.

A simulation runs the installed libraries. For rows that were measured with other releases, benchmarks enter these
contexts around `lab.simulate`.
"""

from __future__ import annotations

import heapq
import importlib
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import Any
from unittest import mock

import torch
from torch import Tensor

WORKERS = 4  # transformers/core_model_loading.py, GLOBAL_WORKERS
READ, TAKE = 0.2, 0.3  # assumed times, where a read's 10^6 elements take 1: of each read besides, and of taking in
FAMILIES = ("llama", "mistral", "qwen2")


@contextmanager
def rotary_products() -> Iterator[None]:
    """Compute rotary angles by a matrix product, as transformers 5.0 to 5.17 did; 5.20 multiplies element by element.

    The product is the model's first, so cuBLAS allocates its workspace before the first block and not inside it
    (models/llama/modeling_llama.py, LlamaRotaryEmbedding.forward).
    """
    with ExitStack() as stack:
        for family in FAMILIES:
            modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            owner = getattr(modeling, f"{family.capitalize()}RotaryEmbedding")
            stack.enter_context(mock.patch.object(owner, "forward", _angles_by_product))
        yield


@torch.no_grad()
def _angles_by_product(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, (B, T, head size), of the angles of `position_ids`, (B, T)."""
    frequencies = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1).to(x.device)
    half = (frequencies @ position_ids[:, None, :].float()).transpose(1, 2)
    angles = torch.cat((half, half), dim=-1)
    cosine, sine = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
    return cosine.to(x.dtype), sine.to(x.dtype)


@contextmanager
def cache_kept_by_peft() -> Iterator[None]:
    """Prepare quantized models as peft did before 0.20, which kept the cached segments (peft/utils/other.py)."""
    import peft

    prepare = peft.prepare_model_for_kbit_training
    if "auto_clear_cache" in signature(prepare).parameters:  # since 0.20
        prepare = partial(prepare, auto_clear_cache=False)
    with mock.patch.object(peft, "prepare_model_for_kbit_training", prepare):
        yield


def read_ahead(sizes: list[int], seed: int) -> Iterator[tuple[int, bool]]:
    """Yield a load order, like `one_at_a_time`, but as transformers 5.0 to 5.3 loaded.

    `WORKERS` threads read tensors in order, while one other thread takes them into the model in order. A tensor's
    memory is requested when its thread begins to read it; the times are drawn with `seed`.
    """
    draw, waiting, arrived = random.Random(seed), list(range(len(sizes)))[::-1], set()
    queue: list[tuple[float, int, bool]] = []  # when, which tensor, and whether it has been taken in (else read)
    taken, busy = 0, False

    def read(now: float) -> Iterator[tuple[int, bool]]:
        if waiting:
            index = waiting.pop()
            heapq.heappush(queue, (now + READ + sizes[index] / 1e6 * draw.uniform(0.7, 1.4), index, False))
            yield index, False

    for _ in range(WORKERS):
        yield from read(0.0)
    while queue:
        now, index, done = heapq.heappop(queue)
        if done:
            yield index, True
            taken, busy = index + 1, False
        else:
            arrived.add(index)
            yield from read(now)
        if not busy and taken in arrived:
            busy = True
            heapq.heappush(queue, (now + TAKE * draw.uniform(0.5, 2.0), taken, True))
