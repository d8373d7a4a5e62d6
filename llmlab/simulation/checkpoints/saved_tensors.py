"""Pickling of tensors without values: how checkpoints of a simulated GPU store them, and where they are loaded."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...base.compat import DisableTorchFunction, FakeTensor, disable_current_modes
from ..devices import GPU_DEVICE
from ..values.known import known


class Saved(NamedTuple):
    """A tensor without its values: its layout in its storage, and the device of that ("cpu" or "cuda")."""

    storage: int
    nbytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    place: str
    requires_grad: bool
    parameter: bool
    value: Tensor | None


class Location:
    """A stand-in for a storage, passed to a function that is given as map_location."""

    def __init__(self, device: str) -> None:
        self.device = device

    def cuda(self, device: Any = None, **options: Any) -> Location:
        return Location("cuda")

    def cpu(self) -> Location:
        return Location("cpu")


class Pickler(pickle.Pickler):
    """Pickles everything but tensors, which it adds to `records`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.records: list[Saved] = []
        self.simulated = False

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        self.simulated |= isinstance(obj, FakeTensor)
        self.records.append(record(obj))
        return len(self.records) - 1


class Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensor: Callable[[int], Tensor]) -> None:
        super().__init__(file)
        self.tensor = tensor

    def persistent_load(self, index: int) -> Tensor:
        return self.tensor(index)


@contextmanager
def plainly() -> Iterator[None]:
    """Run the block as if no simulator were open."""
    with DisableTorchFunction(), disable_current_modes():
        yield


def record(tensor: Tensor) -> Saved:
    """Return everything about `tensor` but unknown values."""
    with plainly():
        storage = tensor.untyped_storage()
        value, offset = known(tensor), int(tensor.storage_offset())
        place = "cuda" if isinstance(tensor, FakeTensor) and tensor.fake_device == GPU_DEVICE else "cpu"
        return Saved(
            storage._cdata, storage.nbytes(), tensor.dtype, tensor.size(), tensor.stride(), offset,
            place, tensor.requires_grad, isinstance(tensor, nn.Parameter) or getattr(tensor, "_is_param", False),
            None if value is None else value.detach().clone(),
        )  # fmt: skip


def place_of(map_location: Any, tag: str) -> str:
    """Return "cuda" or "cpu", the device to which torch.load's map_location moves a tensor saved at `tag`."""
    if isinstance(map_location, dict):
        tag = map_location.get(tag, tag)
    elif callable(map_location):
        tag = getattr(map_location(Location(tag), tag), "device", tag)
    elif map_location is not None:
        tag = map_location
    if isinstance(tag, int):
        return "cuda"
    return "cuda" if str(tag).startswith("cuda") or tag == GPU_DEVICE else "cpu"


def with_tensors(content: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `content` with `change` applied to its tensors; dictionaries, lists and modules change in place."""
    if isinstance(content, Tensor):
        return change(content)
    if isinstance(content, dict):
        for key, value in content.items():
            content[key] = with_tensors(value, change)
    elif isinstance(content, list):
        content[:] = [with_tensors(item, change) for item in content]
    elif type(content) is tuple:
        return tuple(with_tensors(item, change) for item in content)
    elif isinstance(content, nn.Module):
        for module in content.modules():
            with_tensors(module._parameters, change)
            with_tensors(module._buffers, change)
    return content
