"""Legacy tensor types such as torch.cuda.FloatTensor, which name a dtype and a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool,
}  # fmt: skip


class _Legacy(type):
    """A type whose instances are the tensors of one dtype on the GPU."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor) and instance.is_cuda and instance.dtype == cls.dtype

    def __call__(cls, *args: Any) -> Tensor:
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            return torch.tensor(args[0], dtype=cls.dtype, device="cuda")
        shape = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
        return torch.empty(*shape, dtype=cls.dtype, device="cuda")


LEGACY_TYPES = {f"{name}Tensor": _Legacy(f"{name}Tensor", (), {"dtype": dtype}) for name, dtype in DTYPES.items()}


def legacy_type(dtype: Any) -> torch.dtype | None:
    """Return the dtype of a legacy type of torch.cuda or of its name; return None for anything else."""
    if isinstance(dtype, _Legacy):
        return dtype.dtype
    if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
        legacy = LEGACY_TYPES.get(dtype.removeprefix("torch.cuda."))
        return legacy.dtype if legacy else None
    return None
