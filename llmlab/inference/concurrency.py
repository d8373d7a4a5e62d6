"""Serving several requests in four ways: one after the other, in threads, in processes, in one batch.

All write the same tokens. Threads share one model; each process has its own, or maps the same memory; a batch reads
every weight once for all requests.

    B  requests     T  tokens of a prompt
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .generate import generate

__all__ = ["in_batch", "in_processes", "in_threads", "in_turn", "processes"]

_mine: dict[str, Any] = {}  # a worker process's model


def in_turn(model: nn.Module, prompts_BT: Tensor, new_tokens: int) -> Tensor:
    """Return each prompt with its answer, (B, T + new), generated one after the other."""
    return torch.stack([generate(model, prompt, new_tokens) for prompt in prompts_BT])


def in_threads(model: nn.Module, prompts_BT: Tensor, new_tokens: int) -> Tensor:
    """Return the same, with one thread per request; Python runs one thread at a time."""
    with ThreadPoolExecutor(len(prompts_BT)) as pool:
        texts = pool.map(lambda prompt: generate(model, prompt, new_tokens), prompts_BT)
        return torch.stack(list(texts))


@contextmanager
def processes(model: nn.Module, count: int) -> Iterator[Executor]:
    """Start `count` processes with `model`; torch passes it on as shared memory, so on a CPU there is one copy."""
    # A forked process would inherit the locks that torch's threads hold, without the threads.
    context = torch.multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _begin, (model,)) as pool:
        list(pool.map(_ready, range(count)))
        yield pool


def in_processes(pool: Executor, prompts_BT: Tensor, new_tokens: int) -> Tensor:
    """Return the same from the `pool` that `processes` started: one request per process at a time."""
    return torch.tensor(list(pool.map(_write, prompts_BT.tolist(), [new_tokens] * len(prompts_BT))))


def in_batch(model: nn.Module, prompts_BT: Tensor, new_tokens: int) -> Tensor:
    """Return the same, generated as one batch."""
    return generate(model, prompts_BT, new_tokens)


def _begin(model: nn.Module) -> None:
    torch.set_num_threads(1)
    _mine["model"] = model


def _ready(_: int) -> bool:
    return "model" in _mine


def _write(prompt: list[int], new_tokens: int) -> list[int]:
    return generate(_mine["model"], torch.tensor(prompt), new_tokens).tolist()
