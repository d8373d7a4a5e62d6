"""Activation offloading from scratch: tensors that autograd saves for backward are kept on the host or in files.

torch has torch.autograd.graph.save_on_cpu; these are the same hooks, which also count bytes and skip weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Elsewhere(saved_tensors_hooks):
    """Context in which tensors that autograd saves go through `keep`, and come back through `restore` in backward.

    Weights stay, because they are on the device anyway. `moved`: bytes that left and that came back.
    """

    def __init__(self, keep: Callable[[Tensor], Any], restore: Callable[[Any], Tensor], weights: Iterable[Tensor]):
        self.moved = {"left": 0, "came back": 0}
        staying = {weight.untyped_storage().data_ptr() for weight in weights}

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() in staying:
                return tensor
            self.moved["left"] += tensor.nbytes
            return tensor.device, keep(tensor)

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            device, kept = packed
            tensor = restore(kept).to(device)
            self.moved["came back"] += tensor.nbytes
            return tensor

        super().__init__(pack, unpack)


def on_host(weights: Iterable[Tensor]) -> Elsewhere:
    """Keep saved tensors in the host's memory. save_on_cpu(pin_memory=True) copies without making the CPU wait."""
    return Elsewhere(lambda tensor: tensor.to("cpu", copy=True), lambda kept: kept, weights)


def in_files(folder: Path, weights: Iterable[Tensor]) -> Elsewhere:
    """Keep saved tensors in files, one per tensor."""
    numbers = count()

    def keep(tensor: Tensor) -> Path:
        path = folder / f"{next(numbers)}.pt"
        torch.save(tensor.detach().cpu().clone(), path)
        return path

    return Elsewhere(keep, lambda path: torch.load(path, weights_only=True), weights)
