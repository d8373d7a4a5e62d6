"""The plain training loop, and functions that count the bytes of weights, gradients, states and activations.

The functions count each storage once, so two tensors that share memory (tied weights, views) count as one.
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
    model.train()
    losses = []
    for ids in batches:
        optimizer.zero_grad()  # .grad is None: free memory until backward
        outputs = model(input_ids=ids, labels=ids)  # outputs.loss and outputs.logits
        after("forward")  # every tensor that backward needs is alive
        outputs.loss.backward()
        after("backward")  # those tensors are freed, and the gradients exist
        optimizer.step()
        after("optimizer")  # the first step also created the optimizer's states
        losses.append(outputs.loss.item())
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
    """Yield a dict {address: bytes} of the storages that autograd saves in the `with` block.

    The model's parameters are left out: autograd saves them too, but they count as weights.
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
