"""The two devices of fake tensors. To torch both are a CPU, since a CPU build has no CUDA."""

from __future__ import annotations

import torch

GPU_DEVICE = torch.device("cpu", 0)
HOST = torch.device("cpu")


class Shown:
    """The device that scripts see instead of GPU_DEVICE: the GPU of this process's local rank."""

    device = torch.device("cuda", 0)
