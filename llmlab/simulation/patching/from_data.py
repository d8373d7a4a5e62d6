"""Monkeypatch of torch.tensor: made on the host and copied, as on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..devices import GPU_DEVICE


@contextmanager
def tensors_from_data() -> Iterator[None]:
    """Let torch.tensor make tensors on the simulated card; torch itself takes "cpu:0" for the host there."""
    real = torch.tensor

    def tensor(data: Any, *, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device) != GPU_DEVICE:
            return real(data, device=device, requires_grad=requires_grad, **kwargs)
        made = real(data, **kwargs)
        # A fake tensor without elements stays where it is when it is moved.
        made = made.to(GPU_DEVICE) if made.numel() else torch.empty(made.shape, dtype=made.dtype, device=GPU_DEVICE)
        return made.requires_grad_(requires_grad)

    with mock.patch.object(torch, "tensor", tensor):
        yield
