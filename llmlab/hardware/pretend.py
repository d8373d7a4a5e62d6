"""Emulates a small GPU on a big one: LLMLAB_AS=t4 limits a bigger GPU to a T4's memory and hides missing features.

So anyone with a GPU can check that a chapter fits Colab. The memory that torch's allocator may reserve is capped, and
bf16 and FlashAttention are hidden (`Host.supports_bf16`, `sdpa_backends`). Speed, the choice of kernels, the cuBLAS
workspace and the CUDA context are those of the real GPU, so a time measured this way says nothing about the T4.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..base.errors import NotAvailable, UnknownName
from ..base.units import show_bytes
from .gpu import BF16_CAPABILITY, GPU, gpu

if TYPE_CHECKING:
    from torch.nn.attention import SDPBackend

VARIABLE = "LLMLAB_AS"


def pretended() -> GPU | None:
    """Return the GPU that LLMLAB_AS names, or None if it is unset or empty; an unknown name raises UnknownName."""
    name = os.environ.get(VARIABLE, "").strip()
    if not name:
        return None
    try:
        return gpu(name)
    except UnknownName as error:
        raise UnknownName(f"{VARIABLE}={name}: {error}") from None


def cap(device: GPU, total: int | None, capability: tuple[int, int] | None) -> int:
    """Return the bytes that torch's allocator may reserve on a device of `total` bytes that emulates `device`.

    The result is device.memory − device.context, because on the real GPU the context uses memory outside the allocator.
    If the table has no context for the GPU, it counts as 0, which allows 100 to 500 MB too much. `total=None` means a
    machine without CUDA. Raises NotAvailable for a real GPU with too little memory, or without bf16 if `device` has it.
    """
    undo = f"unset {VARIABLE} to use the machine as it is"
    if total is None:
        raise NotAvailable(f"{VARIABLE}={device.name} needs a CUDA GPU with at least as much memory, and there is none "
                           f"here; {undo}")  # fmt: skip
    allowed = device.room()
    if total < allowed:
        raise NotAvailable(
            f"{VARIABLE}={device.name} has {show_bytes(device.memory)}, the GPU here {show_bytes(total)}: "
            f"name a smaller GPU, or {undo}"
        )
    if device.supports_bf16 and capability is not None and capability < BF16_CAPABILITY:
        raise NotAvailable(f"{VARIABLE}={device.name} has bf16, and the GPU here does not; name T4 or V100-16GB, or "
                           f"{undo}")  # fmt: skip
    return allowed


def apply() -> GPU | None:
    """Cap torch's allocator to the GPU that LLMLAB_AS names, and return that GPU; None and no cap if it is unset.

    set_per_process_memory_fraction limits reserved bytes to fraction · total_memory (c10/cuda/CUDACachingAllocator.cpp,
    setMemoryFraction); the fraction here is cap / total. Call it before the first allocation, as often as you like.
    Raises NotAvailable without torch or CUDA, or if the real GPU is the smaller of the two.
    """
    device = pretended()
    if device is None:
        return None
    try:
        import torch
    except ImportError:
        raise NotAvailable(f"{VARIABLE}={device.name} needs torch, which is not installed: pip install torch") from None
    if not torch.cuda.is_available():
        cap(device, None, None)
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    allowed = cap(device, total, torch.cuda.get_device_capability())
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    return device


def sdpa_backends() -> list[SDPBackend] | None:
    """Return the backends that scaled_dot_product_attention may use on the emulated GPU; None means no restriction.

    Below compute capability 8.0 torch has neither the flash nor the cuDNN backend (aten/native/transformers/cuda/
    sdp_utils.cpp). A real T4 refuses them by itself; a big GPU that emulates it needs torch.nn.attention.sdpa_kernel(
    sdpa_backends()).
    """
    device = pretended()
    if device is None or device.supports_flash_attention_2:
        return None
    from torch.nn.attention import SDPBackend

    return [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
