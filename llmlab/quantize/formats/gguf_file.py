"""Reading and writing .gguf files. Writing uses the `gguf` package; reading does not, so that each error is explained.

Layout (ggml/include/gguf.h, version 3), little-endian: "GGUF", version u32, tensors u64, metadata pairs u64; the pairs
(key, type u32, value); for each tensor its name, dimensions (fastest first), kind u32 and offset u64; then, from the
next multiple of the alignment on, the tensors' blocks. For whole models see gguf_model.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base.errors import NotAvailable, SpecError
from ..checks import as_array
from . import gguf as formats
from .sizes import ALIGNMENT, BLOCKS, SMALLER_BLOCKS

if TYPE_CHECKING:
    import torch

STRING, ARRAY = 8, 9  # values of gguf_type
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # struct's codes
# ggml_type of the kinds that `gguf.decode` and numpy can read
KINDS = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 12: "Q4_K", 14: "Q6_K", 39: "MXFP4"}
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
    written. Raises NotAvailable without the `gguf` package, SpecError for other metadata, and as `gguf.encode` does.
    """
    try:
        import gguf
    except ImportError:
        raise NotAvailable("writing .gguf files needs the gguf package: pip install gguf") from None
    kinds = dict.fromkeys(tensors, kind) if isinstance(kind, str) else kind
    stored = {name: _stored(as_array(tensor, name), kinds.get(name, "F32")) for name, tensor in tensors.items()}
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    for name, tensor in stored.items():
        raw = np.frombuffer(tensor.data, np.uint8)
        if tensor.kind in PLAIN:
            writer.add_tensor(name, raw.view(PLAIN[tensor.kind]).reshape(tensor.shape))
        else:
            rows = raw.reshape(*tensor.shape[:-1], -1)
            writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[tensor.kind])
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


def _stored(array: np.ndarray, kind: str) -> Tensor:
    if array.ndim < 2:
        kind = "F32"
    for smaller in (SMALLER_BLOCKS.get(kind, kind), "F16"):
        if kind in BLOCKS and array.shape[-1] % BLOCKS[kind][0]:
            kind = smaller
    if kind in PLAIN:
        return Tensor(kind, array.shape, array.astype(PLAIN[kind]).tobytes())
    return Tensor(kind, array.shape, formats.encode(kind, array))


def read(path: str | os.PathLike) -> File:
    """Return the metadata and the tensors of a .gguf file; raises SpecError if it is truncated or corrupt."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}; give a .gguf file") from None
    if data[:4] != b"GGUF":
        raise SpecError(f"{path} begins with {data[:4]!r}, not b'GGUF': it is not a .gguf file")
    cursor = _Cursor(str(path), data, 4)
    version, count, pairs = cursor.take("I"), cursor.take("Q"), cursor.take("Q")
    if version not in (2, 3):
        raise SpecError(f"{path} has version {version}; only versions 2 and 3 can be read, and only little-endian")
    metadata = {}
    for _ in range(pairs):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.take("I"))
    infos = [_info(cursor) for _ in range(count)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.corrupt(f"general.alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in infos:
        weights, size = BLOCKS[kind]
        if name in tensors or shape[-1] % weights:
            raise cursor.corrupt(
                f"tensor {name!r} occurs twice, or its rows of {shape[-1]} are not whole blocks of {kind}"
            )
        end = start + offset + math.prod(shape) // weights * size
        if end > len(data):
            raise SpecError(
                f"{path} ends after {len(data)} bytes, in tensor {name!r}, which ends at {end}: the file is truncated; "
                "get it again"
            )
        tensors[name] = Tensor(kind, shape, data[start + offset : end])
    return File(metadata, tensors)


def _info(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int]:
    name, dimensions = cursor.string(), cursor.take("I")
    if not 1 <= dimensions <= 4:  # GGML_MAX_DIMS
        raise cursor.corrupt(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(reversed([cursor.take("Q") for _ in range(dimensions)]))
    kind, offset = cursor.take("I"), cursor.take("Q")
    if 0 in shape:
        raise cursor.corrupt(f"tensor {name!r} of shape {shape} is empty")
    if kind not in KINDS:
        raise SpecError(
            f"{cursor.path}: tensor {name!r} has ggml type {kind}; only {', '.join(KINDS.values())} can be read"
        )
    return name, shape, KINDS[kind], offset


@dataclass
class _Cursor:
    """The position of the reader in `data`; every step checks that it does not go beyond the end."""

    path: str
    data: bytes
    at: int

    def corrupt(self, what: str) -> SpecError:
        return SpecError(f"{self.path} is truncated or corrupt near byte {self.at}: {what}; get the file again")

    def bytes(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise self.corrupt(f"{count} bytes should follow, {len(self.data) - self.at} do")
        self.at += count
        return self.data[self.at - count : self.at]

    def take(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self.bytes(struct.calcsize("<" + letter)))[0]

    def string(self) -> str:
        text = self.bytes(self.take("Q"))
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            raise self.corrupt(f"{text[:20]!r} is not UTF-8") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY and depth < 4:
            item, count = self.take("I"), self.take("Q")
            return [self.value(item, depth + 1) for _ in range(count)]
        if kind not in SCALARS:
            raise self.corrupt(f"a value of type {kind}")
        return self.take(SCALARS[kind])
