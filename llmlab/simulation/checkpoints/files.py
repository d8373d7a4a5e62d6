"""Saving and loading checkpoints (torch.save, torch.load, safetensors) of tensors without values.

Objects that contain simulated tensors are kept in memory, by path, until the block ends. Nothing is written to disk, so
no good checkpoint is overwritten by an empty one. Loading such a path returns the tensors, and allocates GPU memory as
torch.load does. Existing files are really read, and tensors loaded from them to the GPU are simulated.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ...base.compat import FakeTensor, disable_current_modes, has
from ...base.errors import LabWarning
from ..devices import GPU_DEVICE
from ..engine.engine import Engine
from ..values.known import is_followed, know
from .saved_tensors import Pickler, Saved, Unpickler, place_of, plainly, record, with_tensors
from .virtual_files import KeptFile, VirtualFiles

MAGIC = b"llmlab: checkpoint without values, kept in the memory of a simulation: "
SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
NOT_WRITTEN = "tensors on the simulated GPU have no values, so {} is kept in memory, where the code can load it"


class Checkpoints:
    """The checkpoints saved in the block, and the functions that save and load them."""

    def __init__(self, engine: Engine, contents: dict[str, Any]) -> None:
        self.engine = engine
        self.contents = contents  # by path or number of a file object: the pickled content and its tensors, or bytes
        self._numbers = count()
        self.plain = False  # whether new parameters stay real
        self.real_load = torch.load

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Let torch.save and torch.load handle simulated tensors; see `safetensors` for that library."""
        real_save = torch.save

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            # For a storage, pickle calls torch.save, which would call pickle again.
            if isinstance(obj, (torch.TypedStorage, torch.UntypedStorage)) or not self._keep(obj, f):
                with plainly():
                    if not isinstance(f, (str, os.PathLike)):
                        real_save(obj, f, *args, **kwargs)
                        return
                    with open(f, "wb") as file:  # torch's C++ writer ignores where `llmlab run` redirects writes
                        real_save(obj, file, *args, **kwargs)

        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            checkpoint = self._kept(f)
            if checkpoint is None:
                return self._load_real(f, map_location, args, kwargs)
            return self._restore(*checkpoint, map_location)

        def pickled(tensor: Tensor, protocol: Any) -> tuple[Any, ...]:
            buffer = io.BytesIO()
            self._store(tensor, buffer)
            return _loaded, (buffer.getvalue(),)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(FakeTensor, "__reduce_ex__", pickled))
            for module in (torch, torch.serialization):
                stack.enter_context(mock.patch.object(module, "save", save))
                stack.enter_context(mock.patch.object(module, "load", load))
            stack.enter_context(VirtualFiles(self.contents).patched())
            yield

    @contextmanager
    def safetensors(self) -> Iterator[None]:
        """Let safetensors.torch, which must be imported, save and load simulated tensors."""
        import safetensors.torch as library

        flatten = "_flatten_as_ptr" if has("safetensors.torch._flatten_as_ptr") else "_flatten"
        real_flatten = getattr(library, flatten)

        def flattened(tensors: dict[str, Tensor], *args: Any) -> Any:
            fake = any(isinstance(tensor, FakeTensor) for tensor in tensors.values())
            return tensors if fake else real_flatten(tensors, *args)

        def write(tensors: dict[str, Any], filename: Any, *args: Any, **kwargs: Any) -> None:
            if not self._keep(tensors, filename):
                with open(filename, "wb") as file:  # see `save`
                    file.write(library.serialize(tensors, *args, **kwargs))

        with (
            mock.patch.object(library, flatten, flattened),
            mock.patch.object(library, "serialize_file", write),
            self.safe_open("safetensors.torch"),
        ):
            yield

    def safe_open(self, module: str) -> AbstractContextManager[Any]:
        """Let safe_open, as imported by `module`, open checkpoints that were saved in the block."""
        real = sys.modules[module].safe_open

        def opened(filename: Any, framework: str, device: Any = "cpu", **options: Any) -> Any:
            if (checkpoint := self._kept(filename)) is None:
                with open(filename, "rb") as file:
                    return real(file.name, framework, device=device, **options)
            return _Opened(self._restore(*checkpoint, device))

        return mock.patch.object(sys.modules[module], "safe_open", opened)

    # ---- simulated

    def _keep(self, content: Any, f: Any) -> bool:
        """Keep `content` and warn if it contains simulated tensors; return whether it does."""
        simulated = self._store(content, f)
        if simulated and not isinstance(getattr(f, "raw", f), KeptFile):  # whose writer warns itself
            name = f if isinstance(f, (str, os.PathLike)) else "a checkpoint"
            warnings.warn(NOT_WRITTEN.format(name), LabWarning, stacklevel=4)
        return simulated

    def _store(self, content: Any, f: Any) -> bool:
        buffer = io.BytesIO()
        pickler = Pickler(buffer)
        try:
            pickler.dump(content)
        except (pickle.PicklingError, AttributeError, TypeError):
            if pickler.simulated:
                raise
            return False  # torch.save will raise the error
        if not pickler.simulated:
            return False
        if isinstance(f, (str, os.PathLike)):
            self.contents.pop(os.path.abspath(f), None)  # so that the latest is last
            self.contents[os.path.abspath(f)] = buffer.getvalue(), pickler.records
        else:
            number = str(next(self._numbers))
            self.contents[number] = buffer.getvalue(), pickler.records
            f.write(MAGIC + number.encode())
        return True

    def _kept(self, f: Any) -> tuple[bytes, list[Saved]] | None:
        if isinstance(f, (str, os.PathLike)):
            return self.contents.get(os.path.abspath(f))
        position = f.tell()
        start = f.read(len(MAGIC))
        if start == MAGIC:
            return self.contents.get(f.read().decode())
        f.seek(position)
        return None

    def _restore(self, content: bytes, records: list[Saved], map_location: Any) -> Any:
        bases: dict[tuple[int, str], Tensor] = {}

        def tensor(index: int) -> Tensor:
            return self._tensor(records[index], place_of(map_location, records[index].place), bases)

        return Unpickler(io.BytesIO(content), tensor).load()

    def _tensor(self, saved: Saved, place: str, bases: dict[tuple[int, str], Tensor]) -> Tensor:
        """Return the tensor of a record, on the GPU or on the host; tensors of one storage share it again."""
        if place == "cpu" and saved.value is not None:
            tensor = saved.value.clone()
        else:
            base = bases.get((saved.storage, place))
            if base is None:
                count = saved.nbytes // saved.dtype.itemsize
                if place == "cuda":
                    base = torch.empty(count, dtype=saved.dtype, device=GPU_DEVICE)
                else:
                    with disable_current_modes(), self.engine.fake:
                        base = torch.empty(count, dtype=saved.dtype, device="cpu")
                bases[saved.storage, place] = base
            tensor = base.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
            if saved.value is not None and is_followed(saved.value):
                know(tensor, saved.value)
        if saved.parameter:
            return nn.Parameter(tensor, saved.requires_grad)
        return tensor.requires_grad_() if saved.requires_grad else tensor

    # ---- files

    def _load_real(self, f: Any, map_location: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        on_gpu: set[int] = set()

        def note_device(storage: Any, tag: str) -> Any:
            if place_of(map_location, tag) == "cuda":
                on_gpu.add(storage.data_ptr())
            return storage

        self.plain = True
        try:
            with plainly():
                content = self.real_load(f, note_device, *args, **kwargs)
        finally:
            self.plain = False
        bases: dict[tuple[int, str], Tensor] = {}

        def move(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() in on_gpu:
                return self._tensor(record(tensor), "cuda", bases)
            return tensor

        return with_tensors(content, move) if on_gpu else content


def _loaded(content: bytes) -> Any:
    """Return the simulated tensor that was pickled while the block is open."""
    return torch.load(io.BytesIO(content), weights_only=True)


class _Opened:
    """The result of safe_open for a file that was saved in the block."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *raised: Any) -> None: ...

    def metadata(self) -> dict[str, str]:
        return {"format": "pt"}

    def get_tensors(self) -> dict[str, Tensor]:
        return self.tensors

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self.tensors[name])


class _Slice:
    """The result of get_slice of safe_open, which is read when it is indexed."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return SAFETENSORS_DTYPES[self.tensor.dtype]
