"""Activation offloading from scratch: the tensors that autograd saves for the backward pass leave the device.

PyTorch has torch.autograd.graph.save_on_cpu. These are the same hooks, which also count bytes and skip the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class OffloadedActivations(saved_tensors_hooks):
    """Context in which each tensor that autograd saves is passed to `store`. `load` returns it in the backward pass.

    Weights are skipped, because they are on the device anyway. `moved` counts the bytes that left and that returned.
    """

    def __init__(self, store: Callable[[Tensor], Any], load: Callable[[Any], Tensor], weights: Iterable[Tensor]):
        self.moved = {"left": 0, "returned": 0}
        skipped = {weight.untyped_storage().data_ptr() for weight in weights}

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() in skipped:
                return tensor
            self.moved["left"] += tensor.nbytes
            return tensor.device, store(tensor)

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            device, stored = packed
            tensor = load(stored).to(device)
            self.moved["returned"] += tensor.nbytes
            return tensor

        super().__init__(pack, unpack)


def on_host(weights: Iterable[Tensor]) -> OffloadedActivations:
    """Store saved tensors in the host's memory."""
    return OffloadedActivations(lambda tensor: tensor.to("cpu", copy=True), lambda stored: stored, weights)


def in_files(folder: Path, weights: Iterable[Tensor]) -> OffloadedActivations:
    """Store each saved tensor in a file of its own."""
    numbers = count()

    def store(tensor: Tensor) -> Path:
        path = folder / f"{next(numbers)}.pt"
        torch.save(tensor.detach().cpu().clone(), path)
        return path

    return OffloadedActivations(store, lambda path: torch.load(path, weights_only=True), weights)
