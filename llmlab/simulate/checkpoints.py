"""torch.save, torch.load and safetensors where tensors have no values.

What holds simulated tensors is kept in memory, by path, until the block ends: nothing is written, so no good checkpoint
is replaced by an empty one. Loading that path gives the tensors back, and takes the card's memory as torch.load does.
Files that are there are read for real, and what goes to the card from them is simulated.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from .engine import GPU_DEVICE, INTEGERS, SMALL
from .sized import known

if TYPE_CHECKING:
    from .engine import Engine

MAGIC = b"llmlab: checkpoint without values, kept in the memory of a simulation: "
NOT_WRITTEN = "tensors on the simulated card have no values, so {} is not written; the block can load it"


class Saved(NamedTuple):
    """A tensor without its values: how it lies in its storage, and where that was ("cpu" or "cuda:0")."""

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


class Place:
    """What a function given as map_location gets in the place of a storage."""

    def __init__(self, device: str) -> None:
        self.device = device

    def cuda(self, device: Any = None, **options: Any) -> Place:
        return Place("cuda")

    def cpu(self) -> Place:
        return Place("cpu")


class Checkpoints:
    """What was saved in the block, and the functions that save and load."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.kept: dict[str, tuple[bytes, list[Saved]]] = {}
        self.plain = False  # whether parameters that are made stay real
        self.real_load = torch.load

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Let torch.save and torch.load know of simulated tensors; see `safetensors` for that library."""
        real_save = torch.save

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if not self._keep(obj, f):
                with _plainly():
                    real_save(obj, f, *args, **kwargs)

        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            kept = self._kept(f)
            if kept is None:
                return self._load_real(f, map_location, args, kwargs)
            return self._restore(*kept, map_location)

        with ExitStack() as stack:
            for module in (torch, torch.serialization):
                stack.enter_context(mock.patch.object(module, "save", save))
                stack.enter_context(mock.patch.object(module, "load", load))
            yield

    @contextmanager
    def safetensors(self) -> Iterator[None]:
        """Let safetensors.torch, which must be imported, save and load simulated tensors."""
        import safetensors.torch as library

        flatten = next(name for name in ("_flatten_as_ptr", "_flatten") if hasattr(library, name))
        real_flatten, real_write, real_open = getattr(library, flatten), library.serialize_file, library.safe_open

        def flattened(tensors: dict[str, Tensor], *args: Any) -> Any:
            return tensors if any(map(_is_fake, tensors.values())) else real_flatten(tensors, *args)

        def write(tensors: dict[str, Any], filename: Any, *args: Any, **kwargs: Any) -> None:
            if not self._keep(tensors, filename):
                real_write(tensors, filename, *args, **kwargs)

        def opened(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
            kept = self._kept(filename)
            if kept is None:
                return real_open(filename, framework, device=device, **options)
            return _Opened(lambda: self._restore(*kept, device))

        with (
            mock.patch.object(library, flatten, flattened),
            mock.patch.object(library, "serialize_file", write),
            mock.patch.object(library, "safe_open", opened),
        ):
            yield

    # ---- simulated

    def _keep(self, content: Any, f: Any) -> bool:
        """Keep `content` if simulated tensors are in it; return whether they are."""
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        try:
            pickler.dump(content)
        except (pickle.PicklingError, AttributeError, TypeError):
            if pickler.simulated:
                raise
            return False  # torch.save says what is wrong
        if not pickler.simulated:
            return False
        if isinstance(f, (str, os.PathLike)):
            self.kept[os.path.abspath(f)] = buffer.getvalue(), pickler.records
        else:
            self.kept[str(len(self.kept))] = buffer.getvalue(), pickler.records
            f.write(MAGIC + str(len(self.kept) - 1).encode())
        warnings.warn(NOT_WRITTEN.format(f if isinstance(f, (str, os.PathLike)) else "a checkpoint"), stacklevel=4)
        return True

    def _kept(self, f: Any) -> tuple[bytes, list[Saved]] | None:
        if isinstance(f, (str, os.PathLike)):
            return self.kept.get(os.path.abspath(f))
        position = f.tell()
        start = f.read(len(MAGIC))
        if start == MAGIC:
            return self.kept.get(f.read().decode())
        f.seek(position)
        return None

    def _restore(self, content: bytes, records: list[Saved], map_location: Any) -> Any:
        bases: dict[tuple[int, str], Tensor] = {}

        def tensor(index: int) -> Tensor:
            return self._tensor(records[index], _place(map_location, records[index].place), bases)

        return _Unpickler(io.BytesIO(content), tensor).load()

    def _tensor(self, saved: Saved, place: str, bases: dict[tuple[int, str], Tensor]) -> Tensor:
        """Return the tensor of a record, on the card or on the host; those of one storage share it again."""
        if place == "cpu" and saved.value is not None:
            made = saved.value.clone()
        else:
            base = bases.get((saved.storage, place))
            if base is None:
                device = GPU_DEVICE if place == "cuda" else torch.device("cpu")
                count = saved.nbytes // saved.dtype.itemsize
                if place == "cuda":
                    base = torch.empty(count, dtype=saved.dtype, device=device)
                else:
                    with _disable_current_modes(), self.engine.fake:
                        base = torch.empty(count, dtype=saved.dtype, device=device)
                bases[saved.storage, place] = base
            made = base.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
            if saved.value is not None and (saved.dtype in INTEGERS or saved.value.numel() <= SMALL):
                made.simulated_value = saved.value
        if saved.parameter:
            return nn.Parameter(made, saved.requires_grad)
        return made.requires_grad_() if saved.requires_grad else made

    # ---- files

    def _load_real(self, f: Any, map_location: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        on_card: set[int] = set()

        def noted(storage: Any, tag: str) -> Any:
            if _place(map_location, tag) == "cuda":
                on_card.add(storage.data_ptr())
            return storage

        self.plain = True
        try:
            with _plainly():
                content = self.real_load(f, noted, *args, **kwargs)
        finally:
            self.plain = False
        bases: dict[tuple[int, str], Tensor] = {}

        def moved(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() in on_card:
                return self._tensor(_record(tensor), "cuda", bases)
            return tensor

        return _with_tensors(content, moved) if on_card else content


class _Pickler(pickle.Pickler):
    """Pickles all but tensors, of which it makes `records`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.records: list[Saved] = []
        self.simulated = False

    def persistent_id(self, each: Any) -> int | None:
        if not isinstance(each, Tensor):
            return None
        self.simulated |= _is_fake(each)
        self.records.append(_record(each))
        return len(self.records) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensor: Callable[[int], Tensor]) -> None:
        super().__init__(file)
        self.tensor = tensor

    def persistent_load(self, index: int) -> Tensor:
        return self.tensor(index)


class _Opened:
    """safe_open of a file that was saved in the block."""

    def __init__(self, load: Callable[[], dict[str, Tensor]]) -> None:
        self.load = load

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *raised: Any) -> None: ...

    def get_tensors(self) -> dict[str, Tensor]:
        return self.load()

    def keys(self) -> list[str]:
        return list(self.load())

    def get_tensor(self, name: str) -> Tensor:
        return self.load()[name]


@contextmanager
def _plainly() -> Iterator[None]:
    """Run what is inside as outside of the block."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


def _record(tensor: Tensor) -> Saved:
    with _plainly():
        storage = tensor.untyped_storage()
        value = known(tensor)
        place = "cuda" if _is_fake(tensor) and tensor.fake_device == GPU_DEVICE else "cpu"
        return Saved(
            storage._cdata, storage.nbytes(), tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset(),
            place, tensor.requires_grad, isinstance(tensor, nn.Parameter) or getattr(tensor, "_is_param", False),
            None if value is None else value.detach().clone(),
        )  # fmt: skip


def _place(map_location: Any, tag: str) -> str:
    """Return "cuda" or "cpu" for what was saved at `tag`: torch.load's map_location."""
    if isinstance(map_location, dict):
        tag = map_location.get(tag, tag)
    elif callable(map_location):
        tag = getattr(map_location(Place(tag), tag), "device", tag)
    elif map_location is not None:
        tag = map_location
    if isinstance(tag, int):
        return "cuda"
    return "cuda" if str(tag).startswith("cuda") or tag == GPU_DEVICE else "cpu"


def _with_tensors(content: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `content` with its tensors changed; dictionaries, lists and modules are changed in place."""
    if isinstance(content, Tensor):
        return change(content)
    if isinstance(content, dict):
        for key, value in content.items():
            content[key] = _with_tensors(value, change)
    elif isinstance(content, list):
        content[:] = [_with_tensors(each, change) for each in content]
    elif type(content) is tuple:
        return tuple(_with_tensors(each, change) for each in content)
    elif isinstance(content, nn.Module):
        for module in content.modules():
            _with_tensors(module._parameters, change)
            _with_tensors(module._buffers, change)
    return content
