"""Serving several requests in processes, each with one thread; the model's memory is shared.

    B  requests     T  tokens of a prompt
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .generate import generate

_mine: dict[str, Any] = {}  # a worker process's model


@contextmanager
def processes(model: nn.Module, count: int) -> Iterator[Executor]:
    """Start `count` processes with `model`; torch passes it on as shared memory, so on a CPU there is one copy."""
    # A forked process would inherit the locks that torch's threads hold, without the threads.
    context = torch.multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, _begin, (model,)) as pool:
        list(pool.map(bool, range(count)))  # wait until all have started
        yield pool


def in_processes(pool: Executor, prompts_BT: Tensor, new_tokens: int) -> Tensor:
    """Return each prompt with its answer, (B, T + new), from the `pool` of `processes`: one at a time in each."""
    return torch.tensor(list(pool.map(_write, prompts_BT.tolist(), [new_tokens] * len(prompts_BT))))


def _begin(model: nn.Module) -> None:
    torch.set_num_threads(1)
    _mine["model"] = model


def _write(prompt: list[int], new_tokens: int) -> list[int]:
    return generate(_mine["model"], torch.tensor(prompt), new_tokens).tolist()
