"""Record files: JSON with one record per line. Unreadable ones are refused by name; none is left half written.

A file holds {"schema": 1, "kind": "reports" | "chapters" | "figures" | "operators", "records": [...]}. Files lie in
folders named for the GPU, in the package and in the user's own folder. The kind in the file says what it is, not its
name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..base.errors import LabWarning, SpecError
from ..base.files import write_whole

SCHEMA = 1
PACKAGE = Path(__file__).parent
KINDS = ("reports", "chapters", "figures", "operators")

Record = TypeVar("Record")


class RecordWarning(LabWarning):
    """Says which record file, or which record in one, was left out, and why."""


@dataclass(frozen=True)
class Refused:
    """A record that was not loaded: its file, its place there (0 is the first; None is the whole file), the reason."""

    path: Path
    entry: int | None
    reason: str

    def __str__(self) -> str:
        which = "" if self.entry is None else f", record {self.entry}"
        return f"record file {self.path}{which} refused: {self.reason}"


# ---- where


def user_folder() -> Path:
    """Return the folder of this user's own records: LLMLAB_RECORDS, or the user's data folder."""
    if folder := os.environ.get("LLMLAB_RECORDS"):
        return Path(folder)
    from platformdirs import user_data_dir

    return Path(user_data_dir("llmlab")) / "records"


def output_folder() -> Path:
    """Return the folder for new records: in a checkout the package's, to contribute them, else `user_folder()`."""
    root = PACKAGE.parent.parent
    checkout = (root / "pyproject.toml").is_file() and (root / "book").is_dir()
    return PACKAGE if checkout and "LLMLAB_RECORDS" not in os.environ else user_folder()


def folders() -> tuple[Path, ...]:
    """Return the folders that are read: the package's records and the user's."""
    return tuple(dict.fromkeys((PACKAGE, user_folder().absolute())))


def slug(name: str) -> str:
    """Return the folder name of a GPU.

    >>> slug("A100-80GB"), slug("NVIDIA GeForce RTX 4090")
    ('a100-80gb', 'nvidia-geforce-rtx-4090')
    """
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "unknown"


# ---- read


def files(folder: Path) -> list[Path]:
    """Return the record files under `folder`, in reading order; none if there is no such folder."""
    return sorted(folder.rglob("*.json")) if folder.is_dir() else []


def read(kind: str, build: Callable[[dict[str, Any]], Record], folder: Path) -> tuple[list[Record], list[Refused]]:
    """Return `build(record)` for every record of `kind` under `folder`, and the refused ones.

    `build` raises SpecError (or KeyError, TypeError, ValueError) for a record that it cannot read; the others still
    load. A missing folder has no records.
    """
    records: list[Record] = []
    refused: list[Refused] = []
    for path in files(folder):
        try:
            content = _content(path)
        except SpecError as error:
            refused.append(Refused(path, None, str(error)))
            continue
        if content["kind"] != kind:
            continue
        for entry, (record, reason) in enumerate(_built(content, build)):
            if reason is None:
                records.append(record)
            else:
                refused.append(Refused(path, entry, reason))
    return records, refused


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise SpecError(f"not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise SpecError(f"a record file is a JSON object; this is a {type(content).__name__}")
    if (schema := content.get("schema")) != SCHEMA:
        raise SpecError(f"schema {schema!r}; this version of llmlab reads schema {SCHEMA}")
    if content.get("kind") not in KINDS:
        raise SpecError(f"kind {content.get('kind')!r} is not one of {', '.join(KINDS)}")
    if not isinstance(content.get("records"), list):
        raise SpecError("it has no list 'records'")
    return content


def _built(content: dict[str, Any], build: Callable[[dict[str, Any]], Record]) -> Iterator[tuple[Any, str | None]]:
    shared = {key: value for key, value in content.items() if key not in ("schema", "kind", "records")}
    for data in content["records"]:
        if not isinstance(data, dict):
            yield None, f"a record is a JSON object; this is a {type(data).__name__}"
            continue
        try:
            yield build({**shared, **data}), None
        except (SpecError, KeyError, TypeError, ValueError, AttributeError) as error:
            yield None, f"{type(error).__name__}: {error}" if not isinstance(error, SpecError) else str(error)


# ---- write


def merge(path: Path, kind: str, records: Iterable[dict[str, Any]], key: Callable[[dict[str, Any]], Any]) -> None:
    """Add `records` to the file at `path`; one whose `key` is already there replaces the old one.

    The file is replaced whole or not at all. Records that this version cannot read stay as they are. Raises SpecError
    where the file itself cannot be read, rather than overwrite somebody's measurements.
    """
    path = Path(path)
    content: dict[str, Any] = {"schema": SCHEMA, "kind": kind, "records": []}
    if path.exists():
        try:
            content = _content(path)
        except SpecError as error:
            raise SpecError(f"{Refused(path, None, str(error))}; nothing written: mend it or move it away") from None
        if content["kind"] != kind:
            raise SpecError(f"record file {path} holds {content['kind']}, not {kind}; nothing written")
    lines = list(content["records"])
    places = {known: place for place, data in enumerate(lines) if (known := _key_or_none(key, data)) is not None}
    for data in records:
        place = places.setdefault(key(data), len(lines))
        lines[place:place + 1] = [data]
    write_whole(path, to_text({**content, "records": lines}))


def _key_or_none(key: Callable[[dict[str, Any]], Any], data: Any) -> Any:
    try:
        return key(data)
    except (SpecError, KeyError, TypeError, ValueError, AttributeError):
        return None  # not a record of ours to replace


def to_text(content: dict[str, Any]) -> str:
    """Return a record file's text: one record per line, so that a diff shows which record changed."""
    head = json.dumps({key: value for key, value in content.items() if key != "records"}, ensure_ascii=False)
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in content["records"])
    return f'{head[:-1]}, "records": [\n{lines}\n]}}\n'
