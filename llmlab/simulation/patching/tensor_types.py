"""Legacy tensor types, torch.cuda.FloatTensor and its like, which name dtype and device at once."""

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
    """A type without instances of its own: tensors on the card of one dtype are its instances."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor) and instance.is_cuda and instance.dtype == cls.dtype

    def __call__(cls, *given: Any) -> Tensor:
        if len(given) == 1 and not isinstance(given[0], (int, torch.Size)):
            return torch.tensor(given[0], dtype=cls.dtype, device="cuda")
        shape = given[0] if given and isinstance(given[0], torch.Size) else given or (0,)
        return torch.empty(*shape, dtype=cls.dtype, device="cuda")


LEGACY_TYPES = {f"{name}Tensor": _Legacy(f"{name}Tensor", (), {"dtype": dtype}) for name, dtype in DTYPES.items()}


def legacy_type(dtype: Any) -> torch.dtype | None:
    """Return the dtype of a type of torch.cuda, given as such or by name, None for anything else."""
    if isinstance(dtype, _Legacy):
        return dtype.dtype
    if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
        legacy = LEGACY_TYPES.get(dtype.removeprefix("torch.cuda."))
        return legacy.dtype if legacy else None
    return None
