"""Reading and writing .gguf files with the `gguf` package.

Layout (ggml/include/gguf.h, version 3), little-endian: "GGUF", version u32, tensors u64, metadata pairs u64; the pairs
(key, type u32, value); for each tensor its name, dimensions (fastest first), kind u32 and offset u64; then, from the
next multiple of the alignment on, the tensors' blocks. For whole models see gguf_model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ....base.errors import SpecError
from ....specs.gguf import fitting
from ..checks import as_floats
from . import gguf as formats
from .gguf import package

if TYPE_CHECKING:
    import torch

PLAIN: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


@dataclass(frozen=True)
class Tensor:
    """One tensor with its bytes in the file; `shape` is numpy's, rows first."""

    kind: str
    shape: tuple[int, ...]
    data: bytes

    def decode(self) -> np.ndarray:
        """Return it as float32."""
        if self.kind in PLAIN:
            return np.frombuffer(self.data, PLAIN[self.kind]).reshape(self.shape).astype(np.float32)
        return formats.decode(self.kind, self.data, self.shape)


@dataclass(frozen=True)
class File:
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def write(
    path: str | os.PathLike,
    tensors: Mapping[str, np.ndarray | torch.Tensor],
    kind: str | Mapping[str, str],
    arch: str,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write `tensors` as a .gguf file: matrices in `kind` (one for all, or a dict by name), all vectors in F32.

    If rows are not whole blocks, another kind is used, as in llama.cpp: Q5_0 for Q4_K, Q8_0 for Q6_K, then F16.
    `metadata` may have integers, floats, strings, bools, and lists of one of these types; numbers are stored in 32 bits
    if they fit, as llama.cpp expects. `arch` is general.architecture. If a tensor cannot be encoded, no file is
    written. Raises SpecError for other metadata, and as `gguf.encode` does.
    """
    kinds = dict.fromkeys(tensors, kind) if isinstance(kind, str) else kind
    stored = {name: _stored(as_floats(tensor, name), kinds.get(name, "F32")) for name, tensor in tensors.items()}
    writer = package.GGUFWriter(path, arch)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    for name, tensor in stored.items():
        rows = np.frombuffer(tensor.data, np.uint8).reshape(*tensor.shape[:-1], -1)
        writer.add_tensor(name, rows, raw_dtype=package.GGMLQuantizationType[tensor.kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    """Add one pair of metadata to a GGUFWriter; a bool does not count as an int."""
    whole = writer.add_uint32 if isinstance(value, int) and 0 <= value < 2**32 else writer.add_int64
    add = {bool: writer.add_bool, int: whole, float: writer.add_float32, str: writer.add_string}
    kinds = {type(item) for item in value} if isinstance(value, list) else {type(value)}
    if len(kinds) != 1 or not kinds <= set(add):
        raise SpecError(
            f"metadata {key}={str(value)[:40]!r} is a {type(value).__name__}; give int, float, str, bool, or a list of "
            "one of them"
        )
    (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)


def _stored(floats: torch.Tensor, kind: str) -> Tensor:
    array = floats.numpy()
    kind = "F32" if array.ndim < 2 else fitting(kind, array.shape[-1])
    if kind in PLAIN:
        return Tensor(kind, array.shape, array.astype(PLAIN[kind]).tobytes())
    return Tensor(kind, array.shape, formats.encode(kind, array))


class _Reader(package.GGUFReader):
    """Without this check a corrupt length of an array makes the package's reader loop past the end for ever."""

    def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **options: Any) -> np.ndarray:
        numbers = super()._get(offset, dtype, count, *order, **options)
        if len(numbers) < count:
            raise ValueError(f"{count} numbers of {np.dtype(dtype)} should follow at byte {offset}, {len(numbers)} do")
        return numbers


def read(path: str | os.PathLike) -> File:
    """Return the metadata and the tensors of a .gguf file; raises SpecError if it is truncated or corrupt."""
    try:
        with Path(path).open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}; give a .gguf file") from None
    if magic != b"GGUF":
        raise SpecError(f"{path} begins with {magic!r}, not b'GGUF': it is not a .gguf file")
    try:
        reader = _Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # what numpy raises past the file's end
        raise SpecError(f"{path} is truncated or corrupt ({error}); get the file again") from None
    tensors = {}
    for tensor in reader.tensors:
        shape = tuple(reversed(tensor.shape.tolist()))
        tensors[tensor.name] = Tensor(tensor.tensor_type.name, shape, tensor.data.tobytes())
    return File(metadata, tensors)
