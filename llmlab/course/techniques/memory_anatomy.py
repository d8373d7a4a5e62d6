"""The plain training loop, and functions that count the bytes of weights, gradients, states and activations.

All of them count storages, each once: two tensors that share memory (tied weights, views) count as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Tensor],
    after: Callable[[str], None] = lambda phase: None,
) -> list[float]:
    """Take one optimizer step per batch and return the losses.

    `batches`: token ids (micro_batch, seq_len), which are the labels too: the model
    shifts them by one. `after` is called at the end of each phase.
    """
    model.train()  # dropout on
    losses = []
    for ids in batches:
        optimizer.zero_grad()  # .grad is None: free memory until backward
        loss = model(input_ids=ids, labels=ids).loss
        after("forward")  # every tensor that backward needs is alive
        loss.backward()
        after("backward")  # those tensors are freed, and the gradients exist
        optimizer.step()
        after("optimizer")  # the first step also created the optimizer's states
        losses.append(loss.item())
    return losses


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the tensors' storages, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def model_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer states, which do not depend on the batch."""
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return {
        "weights": storage_bytes(model.parameters()),
        "gradients": storage_bytes(p.grad for p in model.parameters()),
        "optimizer": storage_bytes(states),
    }


@contextmanager
def saved_for_backward(model: nn.Module):
    """Yield a dict that collects {address: bytes} of every storage that autograd saves.

    It does so inside the `with` block. Autograd saves the model's parameters too, but
    they are left out, because they count as weights.
    """
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
